"""VGLR-MF: a Gaussian over the routing logits with independent experts (paper, section 3, algorithm 1).

    q(l | u) = N(l_det + dmu(u), diag(sigma(u)^2)),    prior N(l_det, s0^2 I)
    KL = 1/2 sum_i (dmu_i^2 + sigma_i^2) / s0^2 - 1 - log(sigma_i^2 / s0^2)

`learn` makes the controls without which a gain is credited to the wrong cause: "mean" trains dmu and has no variance at all
(mean-only), "nothing" is untrained noise of size s0 (fixed-noise; tuned-noise where validation chooses s0).
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from vmoer.numerics.gaussians import Diagonal
from vmoer.routers._base import Call, Control, Posterior, Router, Routing, Search, Trained, choice
from vmoer.routers._gaussian import AmortisedConfig, AmortisedRouter


@dataclass(frozen=True)
class PointPosterior(Posterior):
    """A mean without variance: the part of the KL that depends on it, |dmu|^2 / (2 s0^2)."""

    per_token: ClassVar[tuple[str, ...]] = ("shift_TN",)
    shift_TN: Tensor
    prior_scale: float

    def divergence(self) -> Tensor:
        return self.shift_TN.float().square().sum(-1) / (2 * self.prior_scale**2)

    def signals(self) -> dict[str, Tensor]:
        return {}


class MeanFieldRouter(AmortisedRouter):
    def head_sizes(self) -> list[int]:
        self.noise_dim = n = self.gate.num_experts
        return {"both": [n, n], "mean": [n, 0], "nothing": [0, 0]}[self.config.learn]

    def forward(self, u_TD: Tensor, logits_TN: Tensor, call: Call, weight_ND: Tensor | None) -> Routing:
        told = None
        if self.config.learn == "nothing":
            shift_TN = log_sd_TN = torch.zeros_like(logits_TN)
        else:
            (shift_TN, log_sd_TN), told = self.infer(u_TD, call)
        if self.config.learn == "mean":
            moved_TN = logits_TN.float() + shift_TN
            return Routing(moved_TN, moved_TN, PointPosterior(shift_TN, self.config.prior_scale))
        q = Diagonal(logits_TN, log_sd_TN, scale=self.config.prior_scale)
        return self.route(q, logits_TN, call, shift_TN, told)


@dataclass(frozen=True, kw_only=True)
class MeanField(AmortisedConfig):
    """Gaussian logits with independent experts (VGLR-MF).

    Args:
        layers: Indices of the decoder layers to attach to, or "all".
        seed: Decides the method's noise and, where it has a network, its initial weights.
        beta: Weight of the KL in the loss. 0.01 here, 0.001 under the command line's preset "default".
        prior_scale: Standard deviation s0 of the prior over the logits. 1 here, 0.5 under the preset "default".
        samples: Points that are averaged at inference (the paper's S).
        sampling: "fixed" (one set of Sobol points for all tokens), "mc" (fresh noise, the paper's), "delta" (a second-order
            expansion without points), "delta-cv" (the expansion as a control variate for the points).
        mean_start: "prior" (the mean starts at the model's own routing) or "listing" (as PyTorch starts a layer, the paper's).
        learn: "both" mean and variance, the "mean" alone (a control without variance), or "nothing" (untrained noise of
            size `prior_scale`).
    """

    key: ClassVar[str] = "vglr-mf"
    about: ClassVar[str] = "variational router: Gaussian logits, experts independent"
    router: ClassVar[type[Router]] = MeanFieldRouter

    learn: str = choice("both", "both", "mean", "nothing")

    @property
    def trains(self) -> Trained:
        return None if self.learn == "nothing" else "network"

    @property
    def draws(self) -> bool:
        return self.learn != "mean"

    @property
    def search(self) -> Search | None:
        """Beta; for untrained noise its size, compared by averaged answers with an output temperature."""
        if self.learn == "nothing":
            return Search("prior_scale", (0.05, 0.1, 0.2, 0.4, 0.8, 1.6), passes=8)
        return super().search

    @classmethod
    def controls(cls) -> dict[str, Control]:
        return {
            "mean-only": Control(
                cls(learn="mean", beta=0.001), "control: a trained shift of the router's logits, without variance"
            ),
            "fixed-noise": Control(
                cls(learn="nothing", prior_scale=2.0),
                "control: untrained noise on the logits, of a fixed size",
                tempered=False,
                search=False,
            ),
            "tuned-noise": Control(
                cls(learn="nothing"),
                "control: untrained noise on the logits, its size chosen on validation",
                search=True,
            ),
        }
