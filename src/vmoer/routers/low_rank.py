"""VGLR-LR: correlated experts at the price of a few factors, for models with hundreds of experts (ours).

    q(l | u) = N(l_det + dmu(u), diag(sigma(u)^2) + V(u) V(u)'),    V [N, R],    prior N(l_det, s0^2 I)
    log|Sigma| = log|D| + log|I + V' D^-1 V|

A Cholesky head costs H N^2 / 2 parameters a layer; this one H N (R + 2). Rank 0 is the mean-field router.
"""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from vmoer.numerics.gaussians import Factored
from vmoer.routers._base import RANK, Call, Router, Routing, at_least
from vmoer.routers._gaussian import AmortisedConfig, AmortisedRouter


class LowRankRouter(AmortisedRouter):
    def head_sizes(self) -> list[int]:
        n = self.gate.num_experts
        self.noise_dim = n + self.config.rank
        return [n, n, n * self.config.rank]

    def forward(self, u_TD: Tensor, logits_TN: Tensor, call: Call, weight_ND: Tensor | None) -> Routing:
        (shift_TN, log_sd_TN, factor), told = self.infer(u_TD, call)
        factor_TNR = factor.unflatten(-1, (shift_TN.shape[-1], self.config.rank))
        q = Factored(logits_TN, log_sd_TN, factor_TNR, scale=self.config.prior_scale)
        return self.route(q, logits_TN, call, shift_TN, told)


@dataclass(frozen=True, kw_only=True)
class LowRank(AmortisedConfig):
    """Gaussian logits with a diagonal and a low-rank covariance, for models with hundreds of experts (VGLR-LR).

    Args:
        layers: Indices of the decoder layers to attach to, or "all".
        seed: Decides the method's noise and, where it has a network, its initial weights.
        beta: Weight of the KL in the loss. 0.01 here, 0.001 under the command line's preset "default".
        prior_scale: Standard deviation s0 of the prior over the logits. 1 here, 0.5 under the preset "default".
        samples: Points that are averaged at inference (the paper's S).
        sampling: "fixed" (one set of Sobol points for all tokens), "mc" (fresh noise, the paper's), "delta" (a second-order
            expansion without points), "delta-cv" (the expansion as a control variate for the points).
        mean_start: "prior" (the mean starts at the model's own routing) or "listing" (as PyTorch starts a layer, the paper's).
        rank: Columns R of the factor V. 0 is the mean-field router.
    """

    key: ClassVar[str] = "vglr-lr"
    about: ClassVar[str] = "variational router: Gaussian logits, correlated by a few factors"
    router: ClassVar[type[Router]] = LowRankRouter

    rank: int = at_least(0, 8, RANK)
