"""SWAG: a Gaussian over the router's weights from the path of its training (Maddox et al. 2019; weight-space baseline).

    Delta ~ N(mean, diag / 2 + D D' / (2 (K - 1))),   mean, diag: moments of the snapshots,   D: their last K deviations
    p_bar = (1/S) sum_s softmax(l + u Delta_s')

Delta is a correction to W_r that starts at zero; `collect()` takes a snapshot. The S weight samples are fixed by the seed.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from vmoer.gates import Gate
from vmoer.numerics import noise
from vmoer.routers._base import RANK, SAMPLES, Call, Router, Routing, Sampling, at_least, choice
from vmoer.routers._weight_space import WeightSpaceConfig, WeightSpaceRouter


class SWAGRouter(WeightSpaceRouter):
    mean_ND: Tensor
    square_ND: Tensor
    deviations_KND: Tensor
    count: Tensor

    def __init__(self, config: Any, gate: Gate, weight_ND: Tensor | None, layer: int, device: torch.device) -> None:
        super().__init__(config, gate, weight_ND, layer, device)
        self.delta = self.new_delta(device)
        zero = torch.zeros_like(self.delta)
        self.register_buffer("mean_ND", zero.clone())
        self.register_buffer("square_ND", zero.clone())
        self.register_buffer("deviations_KND", zero.new_zeros(config.rank, *zero.shape))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64, device=device))
        self._kept: tuple[Any, Tensor] | None = None

    @torch.no_grad()
    def collect(self) -> None:
        """Take a snapshot of Delta: running moments, and its deviation from the running mean."""
        n, delta = self.count, self.delta.detach()
        self.mean_ND.copy_((n * self.mean_ND + delta) / (n + 1))
        self.square_ND.copy_((n * self.square_ND + delta.square()) / (n + 1))
        self.deviations_KND.copy_(self.deviations_KND.roll(-1, 0))
        self.deviations_KND[-1] = delta - self.mean_ND
        self.count += 1

    def weights(self, own: Tensor, shared: Tensor) -> Tensor:
        """mean + sqrt(diag / 2) own + D' shared / sqrt(2 (K - 1)), for noise own [S, N, D] and shared [S, K].

        Before the first snapshot that is Delta itself. K is the number of deviations held; nothing waits for the device.
        """
        used = self.count.clamp(2, max(2, self.config.rank)).float()
        mean_ND = torch.where(self.count > 0, self.mean_ND, self.delta)
        sd_ND = (self.square_ND - self.mean_ND.square()).clamp_min(0).div(2).sqrt()
        low_rank = torch.einsum("sk,knd->snd", shared, self.deviations_KND.float()) / (2 * (used - 1)).sqrt()
        return (mean_ND + sd_ND * own + low_rank).float()

    def noise(self, sample_S: Tensor) -> tuple[Tensor, Tensor]:
        n, d = self.delta.shape
        lane = torch.arange(n * d, device=sample_S.device)
        rank = torch.arange(self.config.rank, device=sample_S.device)
        own = noise.normal(self.config.seed, 6, sample_S.unsqueeze(-1), self.layer, lane).view(-1, n, d)
        return own, noise.normal(self.config.seed, 7, sample_S.unsqueeze(-1), self.layer, rank)

    def fixed_weights(self) -> Tensor:
        """The S samples of the seed, kept until what they are made of changes: a draw hashes S N D numbers."""
        state = (self.delta, self.mean_ND, self.square_ND, self.deviations_KND, self.count)
        made_of = [(id(t), t._version, t.device) for t in state]
        # a fused optimiser changes delta without raising its version: while it is being trained nothing is kept
        if self._kept is None or self._kept[0] != made_of or self.delta.requires_grad:
            samples = torch.arange(self.config.samples, device=self.delta.device)
            self._kept = (made_of, self.weights(*self.noise(samples)).detach())
        return self._kept[1]

    def configure(self, config: Any) -> None:
        super().configure(config)
        self._kept = None

    def settle(self) -> None:
        """The weights are drawn once, not for every token: they are kept where nothing trains."""
        self.requires_grad_(False)
        self.fixed_weights()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_kept": None}

    def forward(self, u_TD: Tensor, logits_TN: Tensor, call: Call, weight_ND: Tensor | None) -> Routing:
        config = self.config
        if call.step is not None:
            return self.single(logits_TN + u_TD.float() @ self.delta.float().mT)
        if call.passes_T is not None:
            passes, which_T = torch.unique(call.passes_T, return_inverse=True)
            moved = torch.einsum("td,pnd->tpn", u_TD.float(), self.weights(*self.noise(passes)))
            chosen_T1N = which_T[:, None, None].expand(-1, 1, moved.shape[-1])
            return self.single(logits_TN + moved.gather(1, chosen_T1N).squeeze(1))
        if config.sampling == "mc":
            own = torch.randn(config.samples, *self.delta.shape, device=u_TD.device)
            shared = torch.randn(config.samples, config.rank, device=u_TD.device)
            return self.average(u_TD, logits_TN, self.weights(own, shared))
        return self.average(u_TD, logits_TN, self.fixed_weights())


@dataclass(frozen=True, kw_only=True)
class SWAG(WeightSpaceConfig):
    """A Gaussian over the router's weights, collected along its training.

    Args:
        layers: Indices of the decoder layers to attach to, or "all".
        seed: Decides the method's noise and, where it has a network, its initial weights.
        rank: Deviations kept for the low-rank part of the covariance.
        samples: Weight samples that are averaged at inference.
        sampling: "fixed" (the same weight samples for all tokens) or "mc" (fresh ones on every call).
    """

    key: ClassVar[str] = "swag"
    about: ClassVar[str] = "Gaussian over the router's weights, from the path of their training"
    router: ClassVar[type[Router]] = SWAGRouter

    rank: int = at_least(1, 20, RANK)
    samples: int = at_least(1, 32, SAMPLES)
    sampling: Sampling = choice("fixed", "fixed", "mc")

    @property
    def snapshots(self) -> int:
        return max(20, self.rank)
