"""Temp-Scale: one global temperature, experts sampled (paper, appendix B.2).

    z ~ Sample-K(softmax(l / T)),    weights from l itself

Sample-K is the Top-K of l / T + g with Gumbel noise g; T -> 0 gives the model's own routing back, weights included. T has no
gradient: it is chosen on validation.
"""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from vmoer.routers._base import Call, Config, Presets, Router, Routing, Sampling, Search, Trained, at_least, choice


class TemperatureRouter(Router):
    def forward(self, u_TD: Tensor, logits_TN: Tensor, call: Call, weight_ND: Tensor | None) -> Routing:
        gumbel_TN = call.gumbel(self.config.seed, logits_TN.shape[-1], fresh=self.config.sampling == "mc")
        # l + T g ranks as l / T + g does, and stays finite as T goes to zero
        return Routing(logits_TN + self.config.temperature * gumbel_TN, logits_TN)


@dataclass(frozen=True, kw_only=True)
class Temperature(Config):
    """One global temperature; experts are sampled at it (Temp-Scale).

    Args:
        layers: Indices of the decoder layers to attach to, or "all".
        seed: Decides the method's noise and, where it has a network, its initial weights.
        temperature: T. Towards 0 it is the model's own routing. `vmoer train` chooses it on validation.
        sampling: "fixed" (noise is a function of seed, layer and position) or "mc" (fresh noise on every call).
    """

    key: ClassVar[str] = "temp-scale"
    about: ClassVar[str] = "experts sampled at one temperature for all tokens"
    splits: ClassVar[bool] = True
    router: ClassVar[type[Router]] = TemperatureRouter
    presets: ClassVar[Presets] = {"paper": {"sampling": "mc"}}

    temperature: float = at_least(0, 1.0)
    sampling: Sampling = choice("fixed", "fixed", "mc")

    @property
    def trains(self) -> Trained:
        return None

    @property
    def search(self) -> Search:
        return Search("temperature", (0.01, 0.1, 0.2, 0.3, 0.5, 0.7, 1.0, 1.5, 2.0), always=True)
