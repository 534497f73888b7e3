"""What the weight-space methods share: logits under S weight samples, averaged in probability inside the router."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from vmoer.routers._base import Config, Posterior, Presets, Router, Routing, Trained


@dataclass(frozen=True, kw_only=True)
class WeightSpaceConfig(Config):
    signal: ClassVar[str] = "mc_logit_variance"
    presets: ClassVar[Presets] = {"paper": {"samples": 35, "sampling": "mc"}}

    @property
    def trains(self) -> Trained:
        return "weights"


@dataclass(frozen=True)
class SampledPosterior(Posterior):
    """Weight-space methods carry no penalty of their own; their signal is the spread of the sampled logits."""

    per_token: ClassVar[tuple[str, ...]] = ("logits_TSN",)
    logits_TSN: Tensor

    def divergence(self) -> Tensor:
        return self.logits_TSN.new_zeros(len(self.logits_TSN))

    def signals(self) -> dict[str, Tensor]:
        if self.logits_TSN.shape[1] == 1:
            return {}
        around_TSN = self.logits_TSN - self.logits_TSN.mean(1, keepdim=True)
        return {"mc_logit_variance": around_TSN.square().sum((1, 2)) / (self.logits_TSN.shape[1] - 1)}


class WeightSpaceRouter(Router):
    def average(self, u_TD: Tensor, logits_TN: Tensor, delta_SND: Tensor) -> Routing:
        """Average over l + u Delta_s' for S weight samples, as one matrix product."""
        s, n, d = delta_SND.shape
        moved = (u_TD @ delta_SND.view(s * n, d).to(u_TD.dtype).mT).float().view(-1, s, n)
        logits_TSN = logits_TN.unsqueeze(1) + moved
        averaged_TN = self.gate.average(logits_TSN, logits_TN)
        return Routing(averaged_TN, averaged_TN, SampledPosterior(logits_TSN))

    def single(self, logits_TN: Tensor) -> Routing:
        return Routing(logits_TN, logits_TN, SampledPosterior(logits_TN.unsqueeze(1)))

    def held(self) -> int:
        """S weight matrices at once, of which the model has one."""
        return (self.config.samples - 1) * self.gate.num_experts * self.gate.hidden_size

    def new_delta(self, device: torch.device) -> torch.nn.Parameter:
        shape = (self.gate.num_experts, self.gate.hidden_size)
        return torch.nn.Parameter(torch.zeros(shape, device=device, dtype=torch.float32))
