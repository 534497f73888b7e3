"""The signal that every method can carry: how far a token's state lies from those that `vmoer.fit` has seen.

novelty(u) = u' A^-1 u = |W u|^2,    W a root of A^-1 or a sketch of it (vmoer.live.fitting)
"""

from typing import Any

import torch
from torch import Tensor, nn

from vmoer.numerics import kernels


class Novelty(nn.Module):
    """The fitted statistics and what is read from them."""

    novelty_root_RD: Tensor
    novelty_high_RD: Tensor
    novelty_low_RD: Tensor
    _halved: Any = None

    def register_novelty(self, dim: int, device: torch.device) -> None:
        """Room for `vmoer.fit`; empty until fitted. The two parts are what states in bfloat16 are multiplied by."""
        self.register_buffer("novelty_root_RD", torch.zeros(0, dim, device=device))
        for part in ("high", "low"):
            empty = torch.zeros(0, dim, device=device, dtype=torch.bfloat16)
            self.register_buffer(f"novelty_{part}_RD", empty, persistent=False)

    def _apply(self, fn: Any, recurse: bool = True) -> "Novelty":
        """The statistics stay in float32 whatever the model is cast to: what they leave of a state is small against it."""
        kept = self.novelty_root_RD
        super()._apply(fn, recurse)
        if self.novelty_root_RD.dtype != kept.dtype:
            self.novelty_root_RD = kept.to(self.novelty_root_RD.device)
        if self.novelty_high_RD.dtype != torch.bfloat16:
            self._halved, empty = None, torch.zeros_like(self.novelty_high_RD[:0], dtype=torch.bfloat16)
            self.novelty_high_RD = self.novelty_low_RD = empty
        return self

    @property
    def fitted(self) -> bool:
        return self.novelty_root_RD.shape[0] > 0

    def novelty(self, u_TD: Tensor) -> Tensor:
        """[T]"""
        root_RD = self.novelty_root_RD
        if kernels.available(u_TD):
            fused = kernels.novelty(u_TD, root_RD, self.halves() if u_TD.dtype == torch.bfloat16 else None)
            if fused is not None:
                return fused
        return (u_TD.float() @ root_RD.float().mT).square().sum(-1)

    def halves(self) -> tuple[Tensor, Tensor] | None:
        """The root in two parts, found again where it has changed. Compiled code takes them as they are, or finds its own."""
        root_RD = self.novelty_root_RD
        if not torch.compiler.is_compiling():
            if root_RD.is_inference():
                return None
            state = (root_RD.data_ptr(), root_RD._version, root_RD.shape, root_RD.device)
            if self._halved != state:
                self.novelty_high_RD, self.novelty_low_RD = kernels.halves(root_RD)
                self._halved = state
        high_RD = self.novelty_high_RD
        return (high_RD, self.novelty_low_RD) if high_RD.shape[0] == root_RD.shape[0] else None
