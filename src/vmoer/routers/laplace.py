"""Laplace: a Gaussian posterior over W_r in closed form, no training (ours).

    A = damping I + sum over training tokens of u u',    l ~ N(l_det, (u' A^-1 u) B)

The variance grows with the distance of u from what the router was trained on, by construction. B = s^2 I makes this the
posterior predictive of a Bayesian linear model with unit noise and prior variance s^2 / damping; `curvature="softmax"` takes
B = s^2 (mean over tokens of diag(p) - p p' + damping I)^-1, the Kronecker-factored curvature of the routing likelihood.
`vmoer.fit` supplies A and, with it, the novelty signal u' A^-1 u.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from vmoer.gates import Gate
from vmoer.gaussians import Scaled
from vmoer.routers._base import Call, Router, Routing, at_least, choice
from vmoer.routers._gaussian import GaussianConfig, GaussianRouter


class LaplaceRouter(GaussianRouter):
    needs_fit = True

    @property
    def replaces(self) -> bool:
        return self.fitted

    factor_NN: Tensor

    def __init__(self, config: Any, gate: Gate, weight_ND: Tensor | None, layer: int, device: torch.device) -> None:
        super().__init__(config, gate, weight_ND, layer, device)
        self.noise_dim = gate.num_experts
        self.register_buffer("factor_NN", config.prior_scale * torch.eye(gate.num_experts, device=device))
        self.add_points(device)

    def set_curvature(self, curvature_NN: Tensor, damping: float) -> None:
        """B from the tokens' mean diag(p) - p p'."""
        n = self.gate.num_experts
        precision = curvature_NN.double() + damping * torch.eye(n, dtype=torch.float64, device=curvature_NN.device)
        self.factor_NN.copy_(self.config.prior_scale * torch.linalg.cholesky(torch.linalg.inv(precision)))

    def forward(self, u_TD: Tensor, logits_TN: Tensor, call: Call, weight_ND: Tensor | None) -> Routing | None:
        if not self.fitted:
            return None
        q = Scaled(logits_TN, self.novelty(u_TD).clamp_min(1e-30), self.factor_NN.float())
        return self.route(q, logits_TN, call)


@dataclass(frozen=True, kw_only=True)
class Laplace(GaussianConfig):
    key: ClassVar[str] = "laplace"
    router: ClassVar[type[Router]] = LaplaceRouter

    beta: float = at_least(0, 0.0)
    curvature: str = choice("identity", "identity", "softmax")
