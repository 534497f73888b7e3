"""Questions counted by draw: the form in which every metric of confidence and correctness is written.

A bootstrap draw takes each question some number of times, and as many questions as there are. The data themselves are
the draw that takes each question once. So a metric of a `Tally` has one value per draw, and its value on the data is
the case of one draw.

Shapes: D draws, N questions, L distinct confidences from the highest to the lowest.
"""

from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from vmoer.metrics._inputs import Floats, Ints

Counts = npt.NDArray[np.uint8]


class Levels(NamedTuple):
    """What the draws hold at each distinct confidence, from the highest down."""

    size_DL: Floats
    hits_DL: Floats
    """The sum of correctness."""
    seen_DL: npt.NDArray[np.int32]
    """The number of questions at this confidence and above."""
    of_N: Ints
    """The level of each question."""


class Tally:
    """Confidences and correctness of questions, and how often each draw takes each question.

    Args:
        confidence: [N], in [0, 1].
        correct: [N], or [D, N] where each draw has outcomes of its own.
        counts: [D, N]; without it, every question is taken once.
    """

    def __init__(self, confidence: Floats, correct: Floats, counts: Counts | None = None) -> None:
        self.n, self.confidence, self.correct = len(confidence), confidence, correct
        self.times_DN = np.ones((1, self.n)) if counts is None else counts.astype(np.float64)
        self.gap_DN = self.times_DN * correct - self.times_DN * confidence

    @property
    def draws(self) -> int:
        return len(self.gap_DN)

    @cached_property
    def levels(self) -> Levels:
        order = np.argsort(-self.confidence, kind="stable")
        starts = np.diff(self.confidence[order], prepend=2) != 0
        size, hits = self.times_DN[:, order], (self.times_DN * self.correct)[:, order]
        if not starts.all():
            size, hits = (np.add.reduceat(array, np.flatnonzero(starts), axis=1) for array in (size, hits))
        of_N = np.empty(self.n, dtype=np.int64)
        of_N[order] = starts.cumsum() - 1
        return Levels(size, hits, size.astype(np.int32).cumsum(1, dtype=np.int32), of_N)


def sums(index: Ints, bins: int, values: Floats) -> Floats:
    """The sums of values [D, ...] whose index, [...] or [D, ...], is 0, 1, ..., [D, bins]."""
    draws = len(values)
    offset = np.broadcast_to(index + bins * np.arange(draws)[:, None], values.shape)
    summed = np.bincount(offset.ravel(), values.ravel(), bins * draws).reshape(draws, bins)
    return np.asarray(summed, dtype=np.float64)
