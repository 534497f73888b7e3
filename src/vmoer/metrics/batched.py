"""Metrics on bootstrap draws, many at once.

A draw is a vector of multiplicities: how often each question was drawn. All methods and seeds on a task see the same
draws, so one value per (method, seed, metric, draw) is enough for everything that follows:

    an interval              the quantiles of the draws
    over seeds, nested       draw d is the mean over resampled seeds of their d-th draws
    a paired difference      the d-th draw of one method minus the d-th draw of the other

Values come from `vmoer.metrics`; draws from a batched form of the same metrics, which the tests hold equal to them.
"""

from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from scipy.fft import dct, idct

from vmoer import metrics as m
from vmoer.metrics.calibration import BINS
from vmoer.metrics.ood import MIN_PAIRS

MEANS = ("accuracy", "nll", "brier")
"""Averages over questions: resampling leaves them unbiased."""
_CHUNK = 50  # draws at a time: what they need stays in the processor's cache

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


class Estimate(NamedTuple):
    """A metric: its value, and its values on the bootstrap draws."""

    value: float
    draws: Floats

    def __sub__(self, other: "Estimate") -> "Estimate":
        return Estimate(self.value - other.value, self.draws - other.draws)


@lru_cache(maxsize=8)
def multiplicities(sizes: tuple[int, ...], draws: int, seed: int) -> npt.NDArray[np.uint8]:
    """How often each question was drawn, [draws, sum(sizes)]: each of the data sets resampled on its own.

    The stream is that of `metrics.bootstrap_metric` (one data set) and of `metrics.detection` (two). A byte each is
    enough: no question is ever drawn 256 times in as many draws as there are questions.
    """
    rng, counts = np.random.default_rng(seed), np.empty((draws, sum(sizes)), dtype=np.uint8)
    for row in counts:
        row[:] = np.concatenate([np.bincount(rng.integers(n, size=n), minlength=n) for n in sizes])
    return counts


def _smooth_ece(gap: Floats) -> Floats:
    """`metrics.smooth_ece` of residuals summed over a grid on [0, 1], [draws, cells]: bisection, then one secant step."""
    spectrum, frequency = dct(gap, norm="ortho", axis=1), np.pi * np.arange(gap.shape[1])

    def excess(width: Floats) -> Floats:
        damped = spectrum * np.exp(-((width[:, None] * frequency) ** 2) / 2)
        return np.asarray(np.abs(idct(damped, norm="ortho", axis=1)).sum(1) - width)

    low, high = np.zeros(len(gap)), np.ones(len(gap))
    at_low, at_high = excess(low), excess(high)
    for _ in range(8):
        middle = (low + high) / 2
        at_middle = excess(middle)
        above = at_middle > 0
        low, at_low = np.where(above, middle, low), np.where(above, at_middle, at_low)
        high, at_high = np.where(above, high, middle), np.where(above, at_high, at_middle)
    return np.asarray(low + (high - low) * at_low / np.maximum(at_low - at_high, 1e-12), dtype=np.float64)


def calibration(log_probs: Floats, answers: Ints, draws: int, seed: int) -> dict[str, Estimate]:
    """Accuracy, proper scores, calibration errors and selective risks."""
    confidence, correct = m.confidence(log_probs), m.correct_per_question(log_probs, answers)
    nll, brier = (f(log_probs, answers) for f in (m.nll_per_question, m.brier_per_question))
    values = {"accuracy": correct.mean(), "nll": nll.mean(), "brier": brier.mean()}
    values |= {f.__name__: f(confidence, correct) for f in (m.ece, m.mce, m.debiased_ece, m.smooth_ece)}
    values |= {f.__name__: f(confidence, 1 - correct) for f in (m.aurc, m.augrc)}
    means, counts = np.stack([correct, nll, brier], axis=1), multiplicities((len(correct),), draws, seed)
    chunks = [_on_draws(confidence, correct, counts[i : i + _CHUNK]) for i in range(0, draws, _CHUNK)]
    drawn = {name: np.concatenate([chunk[name] for chunk in chunks]) for name in chunks[0]}
    drawn |= dict(zip(MEANS, (counts.astype(np.float64) @ means).T / len(correct), strict=True))
    return {name: Estimate(float(value), drawn[name]) for name, value in values.items()}


def _on_draws(confidence: Floats, correct: Floats, counts: npt.NDArray[np.uint8]) -> dict[str, Floats]:
    """Every metric that depends on confidence, on each draw. Arrays [draws, distinct confidences], falling."""
    n, draws, order = len(confidence), len(counts), np.argsort(-confidence, kind="stable")
    first = np.flatnonzero(np.diff(confidence[order], prepend=2))
    level, count = confidence[order][first], counts.take(order, axis=1).astype(np.float64)
    size, hits, squares = count, count * correct[order], count * ((correct - confidence) ** 2)[order]
    if len(first) < n:
        size, hits, squares = (np.add.reduceat(array, first, axis=1) for array in (size, hits, squares))
    gap = hits - size * level

    def grouped(index: Ints, *sums: Floats) -> list[Floats]:
        start = np.flatnonzero(np.diff(index, prepend=-1))
        return [np.add.reduceat(array, start, axis=1) for array in sums]

    bin_gap, bin_size = grouped(np.searchsorted(np.arange(1, BINS) / BINS, level), gap, size)
    # A grid of 128 is fine enough for the spread of smooth ECE, whose bandwidth is rarely below 0.01.
    cell = np.minimum((level * 128).astype(np.int64), 127)
    grid = np.zeros((draws, 128))
    grid[:, np.unique(cell)[::-1]] = grouped(cell, gap)[0] / n

    # Equal-mass bins, as in metrics.debiased_ece: the rank of a draw's first question of each confidence says which.
    seen = size.astype(np.int32).cumsum(1, dtype=np.int32)
    bins = max(1, min(BINS, n // 2))
    mass = np.minimum((n - seen).astype(np.int64) * bins // n, bins - 1) + bins * np.arange(draws)[:, None]
    total, own, number = (
        np.bincount(mass.ravel(), array.ravel(), bins * draws).reshape(draws, bins) for array in (gap, squares, size)
    )
    squared = ((total**2 - own) / np.maximum(number - 1, 1) * (number > 1)).sum(1) / n

    # Risks at k = before + 1 .. before + size rise linearly in the errors of a tie, so their sums are in closed form.
    steps = np.diff(np.concatenate([[0.0], np.cumsum(1 / np.arange(1, n + 1))])[seen], prepend=0)
    errors, before = size - hits, seen - size
    wrong_before, rate = errors.cumsum(1) - errors, errors / np.maximum(size, 1)
    return {
        "ece": np.abs(bin_gap).sum(1) / n,
        "mce": (np.abs(bin_gap) / np.maximum(bin_size, 1)).max(1),
        "debiased_ece": np.sign(squared) * np.sqrt(np.abs(squared)),
        "smooth_ece": _smooth_ece(grid),
        "aurc": ((wrong_before - before * rate) * steps + errors).sum(1) / n,
        "augrc": ((size * wrong_before + errors * (size + 1) / 2).sum(1) - errors.sum(1) / 2) / n**2,
    }


def _detection_on_draws(scores_in: Floats, scores_out: Floats, counts: npt.NDArray[np.uint8]) -> dict[str, Floats]:
    """AUROC, AUPRC and FPR95 on each draw. Arrays [draws, prompts], by falling score; see `metrics.ood`."""
    n_in, n_out = len(scores_in), len(scores_out)
    order_in, order_out = np.argsort(-scores_in, kind="stable"), np.argsort(-scores_out, kind="stable")
    own, shifted = -scores_in[order_in], -scores_out[order_out]
    # How many scores of the other side, or of the same one, a threshold at each score flags.
    out_above, out_from = (np.searchsorted(shifted, own, side) for side in ("left", "right"))
    in_flagged, out_flagged = np.searchsorted(own, shifted, "right"), np.searchsorted(shifted, shifted, "right")
    parts: dict[str, list[Floats]] = {"auroc": [], "auprc": [], "fpr95": []}
    for start in range(0, len(counts), _CHUNK):
        chunk = counts[start : start + _CHUNK].astype(np.int32)
        count_in, count_out = chunk[:, :n_in].take(order_in, axis=1), chunk[:, n_in:].take(order_out, axis=1)
        up_to_in, up_to_out = (
            np.pad(count.cumsum(1, dtype=np.int32), ((0, 0), (1, 0))) for count in (count_in, count_out)
        )
        beaten = (up_to_out.take(out_above, axis=1) + up_to_out.take(out_from, axis=1)).astype(np.float64)
        true, false = up_to_out.take(out_flagged, axis=1), up_to_in.take(in_flagged, axis=1)
        enough = (20 * true >= 19 * n_out).argmax(1)
        parts["auroc"].append((count_in * beaten).sum(1) / (2 * n_in * n_out))
        parts["auprc"].append((count_out * true / np.maximum(true + false, 1)).sum(1) / n_out)
        parts["fpr95"].append(false[np.arange(len(chunk)), enough] / n_in)
    return {name: np.concatenate(chunks) for name, chunks in parts.items()}


def detection(
    scores: tuple[Floats, Floats], lengths: tuple[Floats, Floats], draws: int, seed: int
) -> tuple[dict[str, Estimate], str | None]:
    """AUROC, AUPRC and FPR95, `_matched` too where there are enough equally long prompts, else the reason."""

    def estimates(own: Floats, shifted: Floats, counts: npt.NDArray[np.uint8], suffix: str) -> dict[str, Estimate]:
        drawn = _detection_on_draws(own, shifted, counts)
        return {f.__name__ + suffix: Estimate(f(own, shifted), drawn[f.__name__]) for f in (m.auroc, m.auprc, m.fpr95)}

    (scores_in, scores_out), sizes = scores, (len(scores[0]), len(scores[1]))
    found = estimates(scores_in, scores_out, multiplicities(sizes, draws, seed), "")
    pairs_in, pairs_out = m.length_match(*lengths, seed)
    if len(pairs_in) < MIN_PAIRS:
        return found, f"not matchable: {len(pairs_in)} pairs of equally long prompts, {MIN_PAIRS} needed"
    # Matched prompts are drawn as pairs, which keeps the lengths of both sides equal in every draw.
    counts = np.tile(multiplicities((len(pairs_in),), draws, seed), 2)
    return found | estimates(scores_in[pairs_in], scores_out[pairs_out], counts, "_matched"), None


def over_seeds(estimates: list[Estimate], seed: int) -> Estimate:
    """The mean over seeds; on each draw, the mean over resampled seeds."""
    if len(estimates) == 1:
        return estimates[0]
    table = np.stack([estimate.draws for estimate in estimates])
    seeds, draws = table.shape
    picked = np.random.default_rng([seed, 1]).integers(seeds, size=(seeds, draws))
    return Estimate(float(np.mean([e.value for e in estimates])), table[picked, np.arange(draws)].mean(0))
