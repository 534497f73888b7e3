"""Temp-Scale: one global temperature, experts sampled (paper, appendix B.2).

    z ~ Sample-K(softmax(l / T)),    weights from l itself

Sample-K is the Top-K of l / T + g with Gumbel noise g; T -> 0 gives the model's own routing back, weights included. T has no
gradient: it is chosen on validation.
"""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from vmoer.routers._base import Call, Config, Router, Routing, Sampling, at_least, choice


class TemperatureRouter(Router):
    def forward(self, u_TD: Tensor, logits_TN: Tensor, call: Call, weight_ND: Tensor | None) -> Routing:
        gumbel_TN = call.gumbel(self.config.seed, logits_TN.shape[-1], fresh=self.config.sampling == "mc")
        # l + T g ranks as l / T + g does, and stays finite as T goes to zero
        return Routing(logits_TN + self.config.temperature * gumbel_TN, logits_TN)


@dataclass(frozen=True, kw_only=True)
class Temperature(Config):
    key: ClassVar[str] = "temp-scale"
    router: ClassVar[type[Router]] = TemperatureRouter

    temperature: float = at_least(0, 1.0)
    sampling: Sampling = choice("fixed", "fixed", "mc")
