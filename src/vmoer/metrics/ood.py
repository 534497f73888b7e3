"""Out-of-distribution detection: does a score tell shifted prompts (out, positive) from familiar ones (in)?

    AUROC = P(s_out > s_in) + P(s_out = s_in) / 2        AUPRC = sum_k (R_k - R_{k-1}) P_k (average precision)
    FPR95 = the least share of `in` flagged by a threshold that flags at least 95% of `out`

A higher score means more out-of-distribution. Prompt lengths passed as scores are the null signal: what length alone
gives. All three metrics depend only on how many `in` and `out` prompts there are at each distinct score, so they are
computed from these counts, and a bootstrap draw is a new pair of counts: no sorting, ties exact.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from vmoer.errors import InputError
from vmoer.metrics._inputs import Floats, Ints, vector
from vmoer.metrics.resampling import percentiles

MIN_PAIRS = 200


def _levels(scores_in: npt.ArrayLike, scores_out: npt.ArrayLike) -> tuple[Ints, Ints]:
    """The rank of each score among the distinct ones, 0 for the highest."""
    scores_in, scores_out = vector("scores_in", scores_in), vector("scores_out", scores_out)
    level = np.unique(-np.concatenate([scores_in, scores_out]), return_inverse=True)[1]
    return level[: len(scores_in)], level[len(scores_in) :]


def _flagged(level_in: Ints, level_out: Ints) -> tuple[Ints, Ints]:
    """How many of `in` and `out` are flagged by the thresholds at levels 0, 1, ..."""
    size = 1 + max(level_in.max(), level_out.max())
    return np.bincount(level_in, minlength=size).cumsum(), np.bincount(level_out, minlength=size).cumsum()


def _auroc(false: Ints, true: Ints) -> float:
    # The trapezium rule on the ROC curve is the mid-rank treatment of ties.
    area = (np.diff(false, prepend=0) * (true + np.r_[0, true[:-1]])).sum() / 2
    return float(area / (false[-1] * true[-1]))


def _auprc(false: Ints, true: Ints) -> float:
    precision = true / np.maximum(true + false, 1)
    return float((np.diff(true, prepend=0) * precision).sum() / true[-1])


def _fpr95(false: Ints, true: Ints) -> float:
    return float(false[np.argmax(20 * true >= 19 * true[-1])] / false[-1])


_METRICS: dict[str, Callable[[Ints, Ints], float]] = {"auroc": _auroc, "auprc": _auprc, "fpr95": _fpr95}


def auroc(scores_in: npt.ArrayLike, scores_out: npt.ArrayLike) -> float:
    """P(s_out > s_in), ties counted half."""
    return _auroc(*_flagged(*_levels(scores_in, scores_out)))


def auprc(scores_in: npt.ArrayLike, scores_out: npt.ArrayLike) -> float:
    """Average precision with `out` positive; its chance level is n_out / (n_in + n_out)."""
    return _auprc(*_flagged(*_levels(scores_in, scores_out)))


def fpr95(scores_in: npt.ArrayLike, scores_out: npt.ArrayLike) -> float:
    """False-positive rate at a true-positive rate of at least 95%; lower is better."""
    return _fpr95(*_flagged(*_levels(scores_in, scores_out)))


def length_match(
    lengths_in: npt.ArrayLike, lengths_out: npt.ArrayLike, seed: int = 0, tolerance: float = 0
) -> tuple[Ints, Ints]:
    """Index pairs (i, j), one to one and as many as possible, with |length_in[i] - length_out[j]| <= tolerance.

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
        if abs(difference) <= tolerance:
            pairs.append((order_in[i], order_out[j]))
        # Both move on after a match; otherwise the shorter one has no partner left.
        i, j = i + (difference <= tolerance), j + (difference >= -tolerance)
    matched = np.array(pairs, dtype=np.int64).reshape(-1, 2)
    return matched[:, 0], matched[:, 1]


class Detection(NamedTuple):
    """One metric of one signal; value, low and high are None where `reason` says why there is none."""

    metric: str
    length_matched: bool
    n_in: int
    n_out: int
    value: float | None
    low: float | None
    high: float | None
    reason: str | None


def _rows(scores_in: Floats, scores_out: Floats, matched: bool, seed: int, draws: int) -> list[Detection]:
    level_in, level_out = _levels(scores_in, scores_out)
    rng, n_in, n_out = np.random.default_rng(seed), len(level_in), len(level_out)
    resampled: dict[str, list[float]] = {name: [] for name in _METRICS}
    for _ in range(draws):
        pick_in = rng.integers(n_in, size=n_in)
        # Matched prompts are drawn as pairs, which keeps the lengths of both sides equal in every draw.
        pick_out = pick_in if matched else rng.integers(n_out, size=n_out)
        flagged = _flagged(level_in[pick_in], level_out[pick_out])
        for name, metric in _METRICS.items():
            resampled[name].append(metric(*flagged))
    observed = _flagged(level_in, level_out)
    return [
        Detection(name, matched, n_in, n_out, *percentiles(metric(*observed), resampled[name], 0.95), None)
        for name, metric in _METRICS.items()
    ]


def detection(
    scores_in: npt.ArrayLike,
    scores_out: npt.ArrayLike,
    lengths_in: npt.ArrayLike,
    lengths_out: npt.ArrayLike,
    seed: int = 0,
    draws: int = 1000,
) -> list[Detection]:
    """AUROC, AUPRC and FPR95 with 95% bootstrap intervals, on all prompts and on pairs of equally long ones.

    With fewer than 200 pairs the matched rows hold no numbers, and the reason: the data sets are not matchable.
    """
    scores_in, scores_out = vector("scores_in", scores_in), vector("scores_out", scores_out)
    if np.shape(lengths_in) != scores_in.shape or np.shape(lengths_out) != scores_out.shape:
        raise InputError("there must be one length for every score")
    rows = _rows(scores_in, scores_out, False, seed, draws)
    pairs_in, pairs_out = length_match(lengths_in, lengths_out, seed)
    if len(pairs_in) >= MIN_PAIRS:
        return rows + _rows(scores_in[pairs_in], scores_out[pairs_out], True, seed, draws)
    n, reason = len(pairs_in), f"not matchable: {len(pairs_in)} pairs of equally long prompts, {MIN_PAIRS} needed"
    return rows + [Detection(name, True, n, n, None, None, None, reason) for name in _METRICS]
