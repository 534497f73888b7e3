"""What the kernels are asked for and what they answer. Needs no Triton, so that routers and gates can build it anywhere."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

MANY = 2048
"""Number of tokens from which on a kernel takes them in blocks."""


TOLD = ("gate_entropy", "logit_variance", "mc_logit_variance", "novelty")
"""Signals that kernels for few tokens find on the way: the columns of their `told_TG`. The last is the network's, the others are
those of the average."""


class Choice(NamedTuple):
    """Logits that select and weigh, [T, N]; where K experts were asked for, their weights and indices, [T, K].

    `told` says that the first columns of `told_TG` were written."""

    logits_TN: Tensor
    weights_TK: Tensor | None = None
    indices_TK: Tensor | None = None
    told: bool = False

    @property
    def chosen(self) -> tuple[Tensor, Tensor] | None:
        """Weights and indices, where they were asked for."""
        return None if self.weights_TK is None or self.indices_TK is None else (self.weights_TK, self.indices_TK)


class Ask(NamedTuple):
    """The gate's rule: K experts by softmax score, normalised over the chosen or not, times `scale`."""

    k: int
    normalise: bool = True
    scale: float = 1.0
    dtype: torch.dtype = torch.float32


class Keys(NamedTuple):
    """The noise's keys, in their order: numbers, one number a token, numbers, the position, and last the expert."""

    before: Sequence[int]
    position_T: Tensor
    first_T: Tensor | None = None
    between: Sequence[int] = ()


class Tempered(NamedTuple):
    """VTSR's temperature and logits; where K experts were asked for, their weights and indices, [T, K]."""

    temperature_T: Tensor
    scaled_TN: Tensor
    select_TN: Tensor
    weights_TK: Tensor | None = None
    indices_TK: Tensor | None = None

    @property
    def chosen(self) -> tuple[Tensor, Tensor] | None:
        """Weights and indices, where they were asked for."""
        return None if self.weights_TK is None or self.indices_TK is None else (self.weights_TK, self.indices_TK)


def halves(root_RD: Tensor) -> tuple[Tensor, Tensor]:
    """A float32 matrix as the sum of two in bfloat16, 2^-18 of it lost."""
    high_RD = root_RD.contiguous().bfloat16()
    return high_RD, (root_RD - high_RD).bfloat16().contiguous()
