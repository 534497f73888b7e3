"""Out-of-distribution detection: does a score tell shifted prompts (out, positive) from familiar ones (in)?

    AUROC = P(s_out > s_in) + P(s_out = s_in) / 2        AUPRC = sum_k (R_k - R_{k-1}) P_k (average precision)
    FPR95 = the least share of `in` flagged by a threshold that flags at least 95% of `out`

A higher score means more out-of-distribution. Prompt lengths passed as scores are the null signal: what length alone
gives. A bootstrap draw takes each prompt some number of times, and as many of each side as there are; the data
themselves are the draw that takes each prompt once. So a metric of `Flagged` has one value per draw.

Shapes: D draws, I `in` prompts and O `out` prompts, each from the highest score to the lowest.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from vmoer.metrics._inputs import Floats, Ints, vector
from vmoer.metrics.tally import Counts

MIN_PAIRS = 200


class Flagged(NamedTuple):
    """How many prompts of each side a threshold at each score flags, in every draw."""

    times_DI: npt.NDArray[np.int32]
    """How often each `in` prompt is taken."""
    beaten_DI: Floats
    """`out` prompts with a higher score, plus those with at least the same: twice the wins, ties counted half."""
    times_DO: npt.NDArray[np.int32]
    true_DO: npt.NDArray[np.int32]
    """`out` prompts with at least the score of this one."""
    false_DO: npt.NDArray[np.int32]
    """`in` prompts with at least the score of this one."""


def flagged(scores_in: npt.ArrayLike, scores_out: npt.ArrayLike, counts: Counts | None = None) -> Flagged:
    """Count what thresholds flag; `counts` [D, I + O] says how often each draw takes each prompt, `in` first."""
    scores_in, scores_out = vector("scores_in", scores_in), vector("scores_out", scores_out)
    order_in, order_out = np.argsort(-scores_in, kind="stable"), np.argsort(-scores_out, kind="stable")
    own, shifted = -scores_in[order_in], -scores_out[order_out]
    times = np.ones((1, len(own) + len(shifted)), np.int32) if counts is None else counts.astype(np.int32)
    times_in, times_out = times[:, : len(own)].take(order_in, axis=1), times[:, len(own) :].take(order_out, axis=1)
    # the number of prompts among the k highest scores, k = 0, 1, ...
    up_to_in, up_to_out = (np.pad(t.cumsum(1, dtype=np.int32), ((0, 0), (1, 0))) for t in (times_in, times_out))
    above, at_least = (up_to_out.take(np.searchsorted(shifted, own, side), axis=1) for side in ("left", "right"))
    true = up_to_out.take(np.searchsorted(shifted, shifted, "right"), axis=1)
    false = up_to_in.take(np.searchsorted(own, shifted, "right"), axis=1)
    return Flagged(times_in, (above + at_least).astype(np.float64), times_out, true, false)


def auroc(scores_in: npt.ArrayLike, scores_out: npt.ArrayLike) -> float:
    """P(s_out > s_in), ties counted half."""
    return float(auroc_of(flagged(scores_in, scores_out))[0])


def auroc_of(f: Flagged) -> Floats:
    """`auroc` of each draw, [D]."""
    n_in, n_out = f.times_DI.shape[1], f.times_DO.shape[1]
    return np.asarray((f.times_DI * f.beaten_DI).sum(1) / (2 * n_in * n_out), dtype=np.float64)


def auprc(scores_in: npt.ArrayLike, scores_out: npt.ArrayLike) -> float:
    """Average precision with `out` positive; its chance level is n_out / (n_in + n_out)."""
    return float(auprc_of(flagged(scores_in, scores_out))[0])


def auprc_of(f: Flagged) -> Floats:
    """`auprc` of each draw, [D]."""
    precision_DO = f.times_DO * f.true_DO / np.maximum(f.true_DO + f.false_DO, 1)
    return np.asarray(precision_DO.sum(1) / f.times_DO.shape[1], dtype=np.float64)


def fpr95(scores_in: npt.ArrayLike, scores_out: npt.ArrayLike) -> float:
    """False-positive rate at a true-positive rate of at least 95%; lower is better."""
    return float(fpr95_of(flagged(scores_in, scores_out))[0])


def fpr95_of(f: Flagged) -> Floats:
    """`fpr95` of each draw, [D]."""
    enough_D = (20 * f.true_DO >= 19 * f.times_DO.shape[1]).argmax(1)
    return np.asarray(f.false_DO[np.arange(len(enough_D)), enough_D] / f.times_DI.shape[1], dtype=np.float64)


def length_match(lengths_in: npt.ArrayLike, lengths_out: npt.ArrayLike, seed: int = 0) -> tuple[Ints, Ints]:
    """Index pairs (i, j), one to one and as many as possible, with length_in[i] = length_out[j].

    Which of several equally long prompts are taken is random. The two index arrays may be empty.
    """
    lengths_in, lengths_out = vector("lengths_in", lengths_in), vector("lengths_out", lengths_out)
    rng = np.random.default_rng(seed)
    order_in = np.lexsort((rng.random(len(lengths_in)), lengths_in))
    order_out = np.lexsort((rng.random(len(lengths_out)), lengths_out))
    pairs: list[tuple[int, int]] = []
    i = j = 0
    while i < len(order_in) and j < len(order_out):
        difference = lengths_in[order_in[i]] - lengths_out[order_out[j]]
        if difference == 0:
            pairs.append((order_in[i], order_out[j]))
        # Both move on after a match; otherwise the shorter one has no partner left.
        i, j = i + (difference <= 0), j + (difference >= 0)
    matched = np.array(pairs, dtype=np.int64).reshape(-1, 2)
    return matched[:, 0], matched[:, 1]
