"""Proper scores and calibration of answers to multiple-choice questions.

    NLL = -(1/n) sum_i log p_i[a_i]          Brier = (1/n) sum_i sum_c (p_i[c] - 1[c = a_i])²
    ECE = sum_b (n_b / n) |mean correctness - mean confidence in bin b|,   confidence = max_c p[c]

`log_probs` [n, C] are normalised over a question's options, -inf where it has fewer than C (`pad` builds that);
`answers` [n] are option numbers. Everything binned or smoothed takes confidences and correctness [n] in [0, 1].
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from scipy.fft import dct, idct
from scipy.optimize import brentq
from scipy.special import log_softmax
from scipy.stats import binom, rankdata

from vmoer.errors import InputError
from vmoer.metrics._inputs import Floats, Ints, distributions, fractions, questions

BINS = 15


def confidence(log_probs: npt.ArrayLike) -> Floats:
    """The probability of the most probable option, [n], to twelve digits: what differs by less is a tie on every machine."""
    p = np.exp(np.minimum(distributions(log_probs).max(1), 0.0))  # rounding may give log p = 1e-7
    return np.asarray(p.round(12), dtype=np.float64)


def correct_per_question(log_probs: npt.ArrayLike, answers: npt.ArrayLike) -> Floats:
    """1 where the answer is the most probable option, 1/k where it ties with k - 1 others, else 0.

    Half precision ties often; taking the first of the tied options would credit the model's letter order.
    """
    log_probs, answers = questions(log_probs, answers)
    best = log_probs == log_probs.max(1, keepdims=True)
    return np.asarray(best[np.arange(len(answers)), answers] / best.sum(1), dtype=np.float64)


def nll_per_question(log_probs: npt.ArrayLike, answers: npt.ArrayLike) -> Floats:
    """-log p[a], [n]."""
    log_probs, answers = questions(log_probs, answers)
    return -log_probs[np.arange(len(answers)), answers]


def brier_per_question(log_probs: npt.ArrayLike, answers: npt.ArrayLike) -> Floats:
    """sum_c (p[c] - 1[c = a])², [n], between 0 and 2."""
    log_probs, answers = questions(log_probs, answers)
    residual = np.exp(log_probs)
    residual[np.arange(len(answers)), answers] -= 1
    return np.asarray((residual**2).sum(1), dtype=np.float64)


def accuracy(log_probs: npt.ArrayLike, answers: npt.ArrayLike) -> float:
    """Share of questions whose most probable option is the answer."""
    return float(correct_per_question(log_probs, answers).mean())


def nll(log_probs: npt.ArrayLike, answers: npt.ArrayLike) -> float:
    """Mean negative log-likelihood of the answers, in nats."""
    return float(nll_per_question(log_probs, answers).mean())


def brier(log_probs: npt.ArrayLike, answers: npt.ArrayLike) -> float:
    """Multiclass Brier score: summed over options, averaged over questions."""
    return float(brier_per_question(log_probs, answers).mean())


def _equal_width(confidence: Floats, bins: int) -> Ints:
    """Bin numbers for ((b-1)/bins, b/bins]; 0 joins the first bin, and 1 the last."""
    return np.searchsorted(np.arange(1, bins) / bins, confidence, side="left")


def ece(confidence: npt.ArrayLike, correct: npt.ArrayLike, bins: int = BINS) -> float:
    """sum_b (n_b/n) |acc_b - conf_b| over equal-width bins (a, b] (Guo et al. 2017). Read it beside `noise_floor`."""
    confidence, correct = fractions(confidence=confidence, correct=correct)
    gap = np.bincount(_equal_width(confidence, bins), correct - confidence)
    return float(np.abs(gap).sum() / len(confidence))


def mce(confidence: npt.ArrayLike, correct: npt.ArrayLike, bins: int = BINS) -> float:
    """max_b |acc_b - conf_b| over the equal-width bins that hold a question."""
    confidence, correct = fractions(confidence=confidence, correct=correct)
    index = _equal_width(confidence, bins)
    return float((np.abs(np.bincount(index, correct - confidence)) / np.maximum(np.bincount(index), 1)).max())


def debiased_ece(confidence: npt.ArrayLike, correct: npt.ArrayLike, bins: int = BINS) -> float:
    """sign(E) sqrt|E|,  E = sum_b (n_b/n) mean of d_i d_j over pairs i ≠ j in bin b,  d = correct - confidence.

    The debiased L2 calibration error of Kumar et al. (2019) over equal-mass bins. The plug-in also counts the d_i², and
    they are its bias; without them E is unbiased for the binned squared error, and has mean exactly 0 for a calibrated
    model. (Kumar et al. subtract acc_b (1 - acc_b)/(n_b - 1), the same but for the spread of confidence in a bin.) The
    root brings it to the scale of ECE, as a root mean square; the sign keeps its mean over data sets near 0 for a
    calibrated model (measured: -0.003 at n = 500, -0.001 at 5000), where truncating at 0 would bring the bias back. An
    L1 form debiased bin by bin is quieter at 0 (spread 0.014, not 0.037), but halves a true error of 0.05 at n = 500.
    """
    confidence, correct = fractions(confidence=confidence, correct=correct)
    n, residual = len(confidence), correct - confidence
    # Equally confident questions share a bin, so that their order does not matter; a bin of one has no pairs.
    index = (rankdata(confidence, "min").astype(np.int64) - 1) * max(1, min(bins, n // 2)) // n
    size = np.bincount(index)
    pairs = np.bincount(index, residual) ** 2 - np.bincount(index, residual**2)
    squared = (pairs / np.maximum(size - 1, 1))[size > 1].sum() / n
    return float(np.sign(squared) * np.sqrt(np.abs(squared)))


def smooth_ece(confidence: npt.ArrayLike, correct: npt.ArrayLike) -> float:
    """smECE_s = ∫ |(1/n) sum_i (y_i - c_i) K_s(t, c_i)| dt at the s where smECE_s = s (Błasiok & Nakkiran 2023).

    K_s is the Gaussian reflected at 0 and 1. Its convolution is the heat flow with insulated ends, which the cosine
    transform diagonalises: frequency k is damped by exp(-(pi k s)²/2). smECE_s falls in s, so the root is unique.
    """
    confidence, correct = fractions(confidence=confidence, correct=correct)
    cells = 4096
    index = np.minimum((confidence * cells).astype(np.int64), cells - 1)
    spectrum = dct(np.bincount(index, correct - confidence, cells) / len(confidence), norm="ortho")
    frequency = np.pi * np.arange(cells)

    def error(width: float) -> float:
        return float(np.abs(idct(spectrum * np.exp(-((frequency * width) ** 2) / 2), norm="ortho")).sum())

    narrowest = 1 / cells
    if error(narrowest) <= narrowest:
        return error(narrowest)
    # The error is at most 1, up to rounding: without the slack the bracket may miss a root at 1.
    return min(1.0, float(brentq(lambda width: error(width) - width, narrowest, 1.0 + 1e-9, xtol=1e-9)))


class NoiseFloor(NamedTuple):
    """What a calibrated model with the same confidences shows: its mean, its 95th percentile, and where we stand."""

    mean: float
    high: float
    observed: float | None
    p_value: float | None


def noise_floor(
    confidence: npt.ArrayLike,
    correct: npt.ArrayLike | None = None,
    metric: Callable[[Floats, Floats], float] = ece,
    draws: int = 1000,
    seed: int = 0,
) -> NoiseFloor:
    """The metric of y_i ~ Bernoulli(c_i): its distribution over `draws` data sets of a perfectly calibrated model.

    With `correct`, also the observed value and p = (1 + #{floor >= observed}) / (1 + draws), one-sided.
    """
    (confidence,) = fractions(confidence=confidence)
    rng = np.random.default_rng(seed)
    calibrated = ((rng.random(len(confidence)) < confidence).astype(np.float64) for _ in range(draws))
    floor = np.array([metric(confidence, outcomes) for outcomes in calibrated])
    mean, high = float(floor.mean()), float(np.quantile(floor, 0.95))
    if correct is None:
        return NoiseFloor(mean, high, None, None)
    observed = metric(confidence, np.asarray(correct, dtype=np.float64))
    return NoiseFloor(mean, high, observed, float((1 + (floor >= observed).sum()) / (1 + draws)))


class Reliability(NamedTuple):
    """A reliability diagram: arrays [bins], NaN in empty bins; a calibrated model lies between `low` and `high`."""

    size: Ints
    confidence: Floats
    accuracy: Floats
    low: Floats
    high: Floats


def reliability(confidence: npt.ArrayLike, correct: npt.ArrayLike, bins: int = BINS) -> Reliability:
    """Mean confidence and accuracy per equal-width bin, with the central 95% of Binomial(n_b, conf_b) / n_b."""
    confidence, correct = fractions(confidence=confidence, correct=correct)
    index = _equal_width(confidence, bins)
    size = np.bincount(index, minlength=bins)
    n = np.where(size, size, np.nan)
    mean = np.bincount(index, confidence, bins) / n
    low, high = (binom.ppf(level, n, mean) / n for level in (0.025, 0.975))
    return Reliability(size, mean, np.bincount(index, correct, bins) / n, low, high)


def apply_temperature(log_probs: npt.ArrayLike, temperature: float) -> Floats:
    """log softmax(log p / T); options at -inf stay there."""
    if not temperature > 0:
        raise InputError(f"temperature must be positive, got {temperature}")
    return np.asarray(log_softmax(distributions(log_probs) / temperature, axis=1), dtype=np.float64)


def fit_temperature(log_probs: npt.ArrayLike, answers: npt.ArrayLike, low: float = 0.05, high: float = 20.0) -> float:
    """argmin_T NLL(softmax(log p / T)), T in [low, high] (Guo et al. 2017).

    NLL is convex in b = 1/T with derivative  mean_i( E_{softmax(b log p_i)}[log p_i] - log p_i[a_i] ),  so the root of
    that is the minimum; where it has none in range, the nearer end is.
    """
    log_probs, answers = questions(log_probs, answers)
    finite = np.where(np.isneginf(log_probs), 0.0, log_probs)  # 0 * -inf is NaN; their probability is 0 anyway
    target = log_probs[np.arange(len(answers)), answers].mean()

    def slope(inverse: float) -> float:
        return float((np.exp(log_softmax(inverse * log_probs, axis=1)) * finite).sum(1).mean() - target)

    if slope(1 / low) <= 0:
        return low
    if slope(1 / high) >= 0:
        return high
    return float(1 / brentq(slope, 1 / high, 1 / low, xtol=1e-12))


def cross_tempered(log_probs: npt.ArrayLike, answers: npt.ArrayLike) -> Floats:
    """With an output temperature, and no questions set aside for it: every other one is scaled by that of the rest, [n, C]."""
    log_probs, answers = questions(log_probs, answers)
    out, even = np.empty_like(log_probs), np.arange(len(answers)) % 2 == 0
    for scaled in (even, ~even):
        out[scaled] = apply_temperature(log_probs[scaled], fit_temperature(log_probs[~scaled], answers[~scaled]))
    return out
