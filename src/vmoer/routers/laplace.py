"""Laplace: a Gaussian posterior over W_r in closed form, no training (ours).

    A = damping I + sum over training tokens of u u',    l ~ N(l_det, s^2 (u' A^-1 u) I)

The variance grows with the distance of u from what the router was trained on, by construction. This is the posterior predictive
of a Bayesian linear model with unit noise and prior variance s^2 / damping. `vmoer.fit` supplies A and, with it, the novelty
signal u' A^-1 u.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from vmoer.gates import Gate
from vmoer.numerics.gaussians import Scaled
from vmoer.routers._base import Call, Presets, Router, Routing, Trained, at_least
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

    def settle(self) -> None:
        self.novelty_root_RD = self.novelty_root_RD.new_empty(self.gate.hidden_size, self.gate.hidden_size)

    def held(self) -> int:
        """A root of A^-1 and the experts' factor."""
        return self.gate.hidden_size**2 + self.gate.num_experts**2

    def forward(self, u_TD: Tensor, logits_TN: Tensor, call: Call, weight_ND: Tensor | None) -> Routing | None:
        if not self.fitted:
            return None
        q = Scaled(logits_TN, self.novelty(u_TD).clamp_min(1e-30), self.factor_NN.float())
        return self.route(q, logits_TN, call)


@dataclass(frozen=True, kw_only=True)
class Laplace(GaussianConfig):
    """A closed-form posterior over the router's weights; nothing is trained, and `vmoer.fit` is needed.

    Args:
        layers: Indices of the decoder layers to attach to, or "all".
        seed: Decides the method's noise and, where it has a network, its initial weights.
        beta: Not used: nothing is trained.
        prior_scale: Scale s of the logits' standard deviation, s sqrt(u' A^-1 u). 1 here, 0.5 under the command line's preset
            "default".
        samples: Points that are averaged at inference (the paper's S).
        sampling: "fixed" (one set of Sobol points for all tokens), "mc" (fresh noise, the paper's), "delta" (a second-order
            expansion without points), "delta-cv" (the expansion as a control variate for the points).
    """

    key: ClassVar[str] = "laplace"
    about: ClassVar[str] = "closed-form posterior over the router's weights"
    router: ClassVar[type[Router]] = LaplaceRouter

    tempered: ClassVar[bool] = False
    presets: ClassVar[Presets] = {
        "paper": {"samples": 35, "sampling": "mc", "prior_scale": 1.0},
        "default": {"prior_scale": 0.5},
    }

    beta: float = at_least(0, 0.0)

    @property
    def trains(self) -> Trained:
        return None
