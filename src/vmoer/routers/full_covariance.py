"""VGLR-FC: a Gaussian over the routing logits with correlated experts (paper, section 3, algorithm 2).

q(l | u) = N(l_det + dmu(u), L(u) L(u)'),    L lower triangular, diag(L) = exp(.),    prior N(l_det, s0^2 I)
KL = 1/2 ((|dmu|^2 + |L|_F^2) / s0^2 - N - 2 sum_i log(L_ii / s0))
"""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from vmoer.numerics.gaussians import Cholesky
from vmoer.routers._base import Call, Router, Routing
from vmoer.routers._gaussian import AmortisedConfig, AmortisedRouter


class FullCovarianceRouter(AmortisedRouter):
    entry_by_entry = True

    def head_sizes(self) -> list[int]:
        self.noise_dim = n = self.gate.num_experts
        return [n, n * (n + 1) // 2]

    def forward(self, u_TD: Tensor, logits_TN: Tensor, call: Call, weight_ND: Tensor | None) -> Routing:
        (shift_TN, raw_TC), told = self.infer(u_TD, call)
        q = Cholesky(logits_TN, raw_TC, scale=self.config.prior_scale)
        return self.route(q, logits_TN, call, shift_TN, told)


@dataclass(frozen=True, kw_only=True)
class FullCovariance(AmortisedConfig):
    """Gaussian logits with correlated experts, by a Cholesky factor (VGLR-FC).

    Args:
        layers: Indices of the decoder layers to attach to, or "all".
        seed: Decides the method's noise and, where it has a network, its initial weights.
        beta: Weight of the KL in the loss. 0.01 here, 0.001 under the command line's preset "default".
        prior_scale: Standard deviation s0 of the prior over the logits. 1 here, 0.5 under the preset "default".
        samples: Points that are averaged at inference (the paper's S).
        sampling: "fixed" (one set of Sobol points for all tokens), "mc" (fresh noise, the paper's), "delta" (a second-order
            expansion without points), "delta-cv" (the expansion as a control variate for the points).
        mean_start: "prior" (the mean starts at the model's own routing) or "listing" (as PyTorch starts a layer, the paper's).
    """

    key: ClassVar[str] = "vglr-fc"
    about: ClassVar[str] = "variational router: Gaussian logits, experts correlated"
    router: ClassVar[type[Router]] = FullCovarianceRouter
