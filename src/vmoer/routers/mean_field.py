"""VGLR-MF: a Gaussian over the routing logits with independent experts (paper, section 3, algorithm 1).

    q(l | u) = N(l_det + dmu(u), diag(sigma(u)^2)),    prior N(l_det, s0^2 I)
    KL = 1/2 sum_i (dmu_i^2 + sigma_i^2) / s0^2 - 1 - log(sigma_i^2 / s0^2)
"""

import math
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from vmoer.gaussians import Diagonal
from vmoer.routers._base import Call, Router, Routing
from vmoer.routers._gaussian import AmortisedRouter, GaussianConfig


class MeanFieldRouter(AmortisedRouter):
    def head_sizes(self) -> list[int]:
        self.noise_dim = n = self.gate.num_experts
        return [n, n]

    def forward(self, u_TD: Tensor, logits_TN: Tensor, call: Call, weight_ND: Tensor | None) -> Routing:
        shift_TN, log_sd_TN = self.infer(u_TD)
        q = Diagonal(logits_TN + shift_TN, math.log(self.config.prior_scale) + log_sd_TN)
        return self.route(q, logits_TN, call)


@dataclass(frozen=True, kw_only=True)
class MeanField(GaussianConfig):
    key: ClassVar[str] = "vglr-mf"
    router: ClassVar[type[Router]] = MeanFieldRouter
