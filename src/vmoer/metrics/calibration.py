"""Proper scores and calibration of answers to multiple-choice questions.

    NLL = -(1/n) sum_i log p_i[a_i]          Brier = (1/n) sum_i sum_c (p_i[c] - 1[c = a_i])²
    ECE = sum_b (n_b / n) |mean correctness - mean confidence in bin b|,   confidence = max_c p[c]

`log_probs` [n, C] are normalised over a question's options, -inf where it has fewer than C (`pad` builds that);
`answers` [n] are option numbers. Everything binned or smoothed takes confidences and correctness [n] in [0, 1]; it is
written once, for each draw of a `Tally`, and the value on the data is the case of one draw.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from scipy.fft import dct, idct
from scipy.optimize import brentq
from scipy.special import log_softmax
from scipy.stats import binom

from vmoer.errors import InputError
from vmoer.metrics._inputs import Floats, Ints, distributions, fractions, questions
from vmoer.metrics.tally import Tally, sums

BINS = 15


def confidence(log_probs: npt.ArrayLike) -> Floats:
    """The probability of the most probable option, [n], rounded to twelve digits, so that every machine sees the same ties."""
    p = np.exp(np.minimum(distributions(log_probs).max(1), 0.0))  # rounding may give log p = 1e-7
    return np.asarray(p.round(12), dtype=np.float64)


def correct_per_question(log_probs: npt.ArrayLike, answers: npt.ArrayLike) -> Floats:
    """1 where the answer is the most probable option, 1/k where it ties with k - 1 others, else 0.

    Ties are common in half precision. Taking the first of the tied options would credit the order of the letters.
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


def _equal_width(confidence: Floats) -> Ints:
    """Bin numbers for ((b-1)/BINS, b/BINS]; 0 joins the first bin, and 1 the last."""
    return np.searchsorted(np.arange(1, BINS) / BINS, confidence, side="left")


def _once(confidence: npt.ArrayLike, correct: npt.ArrayLike) -> Tally:
    """The data as they are, checked: one draw that takes each question once."""
    checked, right = fractions(confidence=confidence, correct=correct)
    return Tally(checked, right)


def ece(confidence: npt.ArrayLike, correct: npt.ArrayLike) -> float:
    """sum_b (n_b/n) |acc_b - conf_b| over equal-width bins (a, b] (Guo et al. 2017). Read it beside `noise_floor`."""
    return float(ece_of(_once(confidence, correct))[0])


def ece_of(t: Tally) -> Floats:
    """`ece` of each draw, [D]."""
    gap_DB = sums(_equal_width(t.confidence), BINS, t.gap_DN)
    return np.asarray(np.abs(gap_DB).sum(1) / t.n, dtype=np.float64)


def mce(confidence: npt.ArrayLike, correct: npt.ArrayLike) -> float:
    """max_b |acc_b - conf_b| over the equal-width bins that hold a question."""
    return float(mce_of(_once(confidence, correct))[0])


def mce_of(t: Tally) -> Floats:
    """`mce` of each draw, [D]."""
    gap_DB, size_DB = (sums(_equal_width(t.confidence), BINS, array) for array in (t.gap_DN, t.times_DN))
    return np.asarray((np.abs(gap_DB) / np.maximum(size_DB, 1)).max(1), dtype=np.float64)


def debiased_ece(confidence: npt.ArrayLike, correct: npt.ArrayLike) -> float:
    """sign(E) sqrt|E|,  E = sum_b (n_b/n) mean of d_i d_j over pairs i ≠ j in bin b,  d = correct - confidence.

    The debiased L2 calibration error of Kumar et al. (2019) over equal-mass bins. The plug-in also counts the d_i², and
    they are its bias; without them E is unbiased for the binned squared error, and has mean exactly 0 for a calibrated
    model. (Kumar et al. subtract acc_b (1 - acc_b)/(n_b - 1), the same but for the spread of confidence in a bin.) The
    root brings it to the scale of ECE, as a root mean square; the sign keeps its mean over data sets near 0 for a
    calibrated model (measured: -0.003 at n = 500, -0.001 at 5000), where truncating at 0 would bring the bias back. An
    L1 form debiased bin by bin is quieter at 0 (spread 0.014, not 0.037), but halves a true error of 0.05 at n = 500.
    """
    return float(debiased_ece_of(_once(confidence, correct))[0])


def debiased_ece_of(t: Tally) -> Floats:
    """`debiased_ece` of each draw, [D]."""
    bins, squares_DN = max(1, min(BINS, t.n // 2)), t.times_DN * (t.correct - t.confidence) ** 2
    # The number of less confident questions says which bin. Equally confident questions share it, so that their order
    # does not matter; a bin of one has no pairs.
    bin_DL = np.minimum((t.n - t.levels.seen_DL).astype(np.int64) * bins // t.n, bins - 1)
    bin_DN = bin_DL.take(t.levels.of_N, axis=1)
    gap_DB, squares_DB, size_DB = (sums(bin_DN, bins, array) for array in (t.gap_DN, squares_DN, t.times_DN))
    squared = ((gap_DB**2 - squares_DB) / np.maximum(size_DB - 1, 1) * (size_DB > 1)).sum(1) / t.n
    return np.asarray(np.sign(squared) * np.sqrt(np.abs(squared)), dtype=np.float64)


def smooth_ece(confidence: npt.ArrayLike, correct: npt.ArrayLike) -> float:
    """smECE_s = ∫ |(1/n) sum_i (y_i - c_i) K_s(t, c_i)| dt at the s where smECE_s = s (Błasiok & Nakkiran 2023).

    K_s is the Gaussian reflected at 0 and 1. Its convolution is the heat flow with insulated ends, which the cosine
    transform diagonalises: frequency k is damped by exp(-(pi k s)²/2). smECE_s falls in s, so the root is unique.
    """
    cells = 4096
    errors = _smoothed(_once(confidence, correct), cells)

    def error(width: float) -> float:
        return float(errors(np.array([width]))[0])

    narrowest = 1 / cells
    if error(narrowest) <= narrowest:
        return error(narrowest)
    # The error is at most 1, up to rounding: without the slack the bracket may miss a root at 1.
    return min(1.0, float(brentq(lambda width: error(width) - width, narrowest, 1.0 + 1e-9, xtol=1e-9)))


def smooth_ece_of(t: Tally) -> Floats:
    """`smooth_ece` of each draw, [D], to 4e-3: bisection of all draws at once, then one secant step."""
    # A grid of 128 is fine enough for the spread of smooth ECE, whose bandwidth is rarely below 0.01.
    errors = _smoothed(t, 128)
    low, high = np.zeros(t.draws), np.ones(t.draws)
    at_low, at_high = errors(low) - low, errors(high) - high
    for _ in range(8):
        middle = (low + high) / 2
        at_middle = errors(middle) - middle
        above = at_middle > 0
        low, at_low = np.where(above, middle, low), np.where(above, at_middle, at_low)
        high, at_high = np.where(above, high, middle), np.where(above, at_high, at_middle)
    return np.asarray(low + (high - low) * at_low / np.maximum(at_low - at_high, 1e-12), dtype=np.float64)


def _smoothed(t: Tally, cells: int) -> Callable[[Floats], Floats]:
    """smECE_s of each draw as a function of the bandwidths s, [D] to [D], with residuals on a grid of `cells` on [0, 1]."""
    cell = np.minimum((t.confidence * cells).astype(np.int64), cells - 1)
    spectrum = dct(sums(cell, cells, t.gap_DN) / t.n, norm="ortho", axis=1)
    frequency = np.pi * np.arange(cells)

    def errors(width: Floats) -> Floats:
        damped = spectrum * np.exp(-((width[:, None] * frequency) ** 2) / 2)
        return np.asarray(np.abs(idct(damped, norm="ortho", axis=1)).sum(1), dtype=np.float64)

    return errors


class NoiseFloor(NamedTuple):
    """The ECE of a calibrated model with the same confidences, its mean and 95th percentile, and the observed ECE."""

    mean: float
    high: float
    observed: float | None
    p_value: float | None


def noise_floor(
    confidence: npt.ArrayLike, correct: npt.ArrayLike | None = None, draws: int = 1000, seed: int = 0
) -> NoiseFloor:
    """The ECE of y_i ~ Bernoulli(c_i): its distribution over `draws` data sets of a perfectly calibrated model.

    With `correct`, also the observed ECE and p = (1 + #{floor >= observed}) / (1 + draws), one-sided.
    """
    (confidence,) = fractions(confidence=confidence)
    rng, floor = np.random.default_rng(seed), np.empty(draws)
    for part in np.array_split(floor, max(1, draws // 50)):  # a view each: what 50 draws need stays in the cache
        outcomes = (rng.random((len(part), len(confidence))) < confidence).astype(np.float64)
        part[:] = ece_of(Tally(confidence, outcomes))
    mean, high = float(floor.mean()), float(np.quantile(floor, 0.95))
    if correct is None:
        return NoiseFloor(mean, high, None, None)
    observed = ece(confidence, correct)
    return NoiseFloor(mean, high, observed, float((1 + (floor >= observed).sum()) / (1 + draws)))


class Reliability(NamedTuple):
    """A reliability diagram: arrays [bins], NaN in empty bins. Bins of a calibrated model lie between `low` and `high`."""

    size: Ints
    confidence: Floats
    accuracy: Floats
    low: Floats
    high: Floats


def reliability(confidence: npt.ArrayLike, correct: npt.ArrayLike) -> Reliability:
    """Mean confidence and accuracy per equal-width bin, with the central 95% of Binomial(n_b, conf_b) / n_b."""
    confidence, correct = fractions(confidence=confidence, correct=correct)
    index = _equal_width(confidence)
    size = np.bincount(index, minlength=BINS)
    n = np.where(size, size, np.nan)
    mean = np.bincount(index, confidence, BINS) / n
    low, high = (binom.ppf(level, n, mean) / n for level in (0.025, 0.975))
    return Reliability(size, mean, np.bincount(index, correct, BINS) / n, low, high)


def apply_temperature(log_probs: npt.ArrayLike, temperature: float) -> Floats:
    """log softmax(log p / T); options at -inf stay there."""
    if not temperature > 0:
        raise InputError(f"temperature must be positive, got {temperature}")
    return np.asarray(log_softmax(distributions(log_probs) / temperature, axis=1), dtype=np.float64)


def fit_temperature(log_probs: npt.ArrayLike, answers: npt.ArrayLike, low: float = 0.05, high: float = 20.0) -> float:
    """argmin_T NLL(softmax(log p / T)), T in [low, high] (Guo et al. 2017).

    NLL is convex in b = 1/T with derivative  mean_i( E_{softmax(b log p_i)}[log p_i] - log p_i[a_i] ).  Its minimum is
    the root of that, or the nearer end of the range where there is no root in it.
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
    """Log-probabilities [n, C] at an output temperature: each half of the questions gets the one fitted on the other half."""
    log_probs, answers = questions(log_probs, answers)
    out, even = np.empty_like(log_probs), np.arange(len(answers)) % 2 == 0
    for scaled in (even, ~even):
        out[scaled] = apply_temperature(log_probs[scaled], fit_temperature(log_probs[~scaled], answers[~scaled]))
    return out
