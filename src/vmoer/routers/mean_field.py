"""VGLR-MF: a Gaussian over the routing logits with independent experts (paper, section 3, algorithm 1).

    q(l | u) = N(l_det + dmu(u), diag(sigma(u)^2)),    prior N(l_det, s0^2 I)
    KL = 1/2 sum_i (dmu_i^2 + sigma_i^2) / s0^2 - 1 - log(sigma_i^2 / s0^2)

`learn` makes the controls without which a gain is credited to the wrong cause: "mean" trains dmu and has no variance at all
(mean-only), "variance" trains sigma alone, "nothing" is untrained noise of size s0 (fixed-noise).
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from vmoer.gaussians import Diagonal
from vmoer.routers._base import Call, Router, Routing, choice
from vmoer.routers._gaussian import AmortisedRouter, GaussianConfig


@dataclass(frozen=True)
class PointPosterior:
    """A mean without variance: the part of the KL that depends on it, |dmu|^2 / (2 s0^2)."""

    shift_TN: Tensor
    prior_scale: float

    def divergence(self) -> Tensor:
        return self.shift_TN.float().square().sum(-1) / (2 * self.prior_scale**2)

    def signals(self) -> dict[str, Tensor]:
        return {}


class MeanFieldRouter(AmortisedRouter):
    def head_sizes(self) -> list[int]:
        self.noise_dim = n = self.gate.num_experts
        return [n if self.config.learn in learned else 0 for learned in (("both", "mean"), ("both", "variance"))]

    def forward(self, u_TD: Tensor, logits_TN: Tensor, call: Call, weight_ND: Tensor | None) -> Routing:
        shift_TN, log_sd_TN = self.infer(u_TD) if self.config.learn != "nothing" else (None, None)
        if shift_TN is None or shift_TN.shape[-1] == 0:
            shift_TN = torch.zeros_like(logits_TN)
        if self.config.learn == "mean":
            moved_TN = logits_TN.float() + shift_TN
            return Routing(moved_TN, moved_TN, PointPosterior(shift_TN, self.config.prior_scale))
        if log_sd_TN is None:
            log_sd_TN = torch.zeros_like(logits_TN)
        q = Diagonal(logits_TN, log_sd_TN, scale=self.config.prior_scale)
        return self.route(q, logits_TN, call, shift_TN)


@dataclass(frozen=True, kw_only=True)
class MeanField(GaussianConfig):
    key: ClassVar[str] = "vglr-mf"
    router: ClassVar[type[Router]] = MeanFieldRouter

    learn: str = choice("both", "both", "mean", "variance", "nothing")
