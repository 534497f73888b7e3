"""Maps from a model's answer probabilities to calibrated ones, and the choice between them.

    none          p'_k = p_k
    temperature   p'_k ∝ exp(log p_k / T)
    vector        p'_k ∝ exp(log p_k / T + b_k),                       b_k a bias for each letter, of mean 0
    isotonic      p'_top = f(p_top),   p'_k = p_k (1 - p'_top) / (1 - p_top) for the others

T and b minimise NLL. f is the isotonic regression of correctness on confidence: a non-decreasing function, linear between its
knots and constant beyond them. The choice is the map with the least cross-validated NLL; of equals it is the simplest.

Every map takes and gives log-probabilities [n, C], normalised, -inf where a question has fewer options. All are functions of
their arguments alone.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
from scipy.optimize import minimize
from scipy.special import log_softmax, logsumexp

from vmoer.errors import InputError, unknown
from vmoer.metrics._inputs import Floats, Ints, distributions, questions
from vmoer.metrics.calibration import apply_temperature, confidence, correct_per_question, fit_temperature, nll

LOW, HIGH = 0.05, 20.0
"""The range of temperatures."""
BIAS = 10.0
"""The largest difference between two letters' biases."""
FOLDS = 10
_TIE = 1e-6  # nats: a map must be better by more than this than a simpler one
_EDGE = 1e-6  # how far the most probable option stays above the second, relative to what is left


class Calibrator(Protocol):
    """A map that was fitted: a small frozen record of numbers, which `apply` alone uses."""

    kind: ClassVar[str]
    fewest: ClassVar[int]
    """Questions that fitting needs."""

    @classmethod
    def fit(cls, log_probs: npt.ArrayLike, answers: npt.ArrayLike) -> "Calibrator": ...

    def apply(self, log_probs: npt.ArrayLike) -> Floats: ...


@dataclass(frozen=True)
class Unchanged:
    """p' = p."""

    kind: ClassVar[str] = "none"
    fewest: ClassVar[int] = 1

    @classmethod
    def fit(cls, log_probs: npt.ArrayLike, answers: npt.ArrayLike) -> "Unchanged":
        questions(log_probs, answers)
        return cls()

    def apply(self, log_probs: npt.ArrayLike) -> Floats:
        """The log-probabilities as they are, checked."""
        return distributions(log_probs)


@dataclass(frozen=True)
class OutputTemperature:
    """p' = softmax(log p / T) (Guo et al. 2017)."""

    kind: ClassVar[str] = "temperature"
    fewest: ClassVar[int] = 10
    temperature: float

    def __post_init__(self) -> None:
        _inside("temperature", self.temperature, LOW, HIGH)

    @classmethod
    def fit(cls, log_probs: npt.ArrayLike, answers: npt.ArrayLike) -> "OutputTemperature":
        return cls(_digits(fit_temperature(log_probs, answers, LOW, HIGH)))

    def apply(self, log_probs: npt.ArrayLike) -> Floats:
        """log softmax(log p / T), [n, C]."""
        return apply_temperature(log_probs, self.temperature)


@dataclass(frozen=True)
class VectorScaling:
    """p' = softmax(log p / T + b), b a bias for each letter, of mean 0.

    NLL is convex in (1/T, b). Where the best bias of a letter is infinite, as that of one which is never right, it ends at the
    bound.
    """

    kind: ClassVar[str] = "vector"
    fewest: ClassVar[int] = 50
    temperature: float
    biases: tuple[float, ...]

    def __post_init__(self) -> None:
        _inside("temperature", self.temperature, LOW, HIGH)
        for bias in self.biases:
            _inside("a bias", bias, -BIAS, BIAS)

    @classmethod
    def fit(cls, log_probs: npt.ArrayLike, answers: npt.ArrayLike) -> "VectorScaling":
        log_probs, answers = questions(log_probs, answers)
        there, rows = ~np.isneginf(log_probs), np.arange(len(answers))
        finite = np.where(there, log_probs, 0.0)
        right = np.zeros_like(finite)
        right[rows, answers] = 1.0

        def loss(point: Floats) -> tuple[float, Floats]:
            scaled = log_softmax(np.where(there, point[0] * finite + point[1:], -np.inf), axis=1)
            excess = (np.exp(scaled) - right) / len(rows)
            return -float(scaled[rows, answers].mean()), np.array([(excess * finite).sum(), *excess.sum(0)])

        bounds = [(1 / HIGH, 1 / LOW)] + [(-BIAS / 2, BIAS / 2)] * finite.shape[1]
        start = np.array([1 / fit_temperature(log_probs, answers, LOW, HIGH), *np.zeros(finite.shape[1])])
        found = minimize(loss, start, jac=True, bounds=bounds, options={"ftol": 1e-15, "gtol": 1e-9, "maxiter": 2000}).x
        biases = found[1:] - found[1:].mean()
        return cls(_digits(float(np.clip(1 / found[0], LOW, HIGH))), tuple(_digits(float(b)) for b in biases))

    def apply(self, log_probs: npt.ArrayLike) -> Floats:
        """log softmax(log p / T + b), [n, C]; C may be less than the number of letters, not more."""
        log_probs = distributions(log_probs)
        if log_probs.shape[1] > len(self.biases):
            raise InputError(f"{log_probs.shape[1]} options, and there are biases for {len(self.biases)}")
        biased = log_probs / self.temperature + np.array(self.biases[: log_probs.shape[1]])
        return np.asarray(log_softmax(biased, axis=1), dtype=np.float64)


@dataclass(frozen=True)
class Isotonic:
    """p'_top = f(p_top), and the other options share what is left in the proportions they had.

    f has `confidences` as knots and `accuracies` there, which are kept within 1/(n + 2) of 0 and 1, n the questions fitted on:
    a certain answer that is wrong would cost an infinite NLL. The answer never changes: p'_top is at least what leaves it
    ahead of the second option. k options that tie for the top get f(p_top) each, at most 1/k.
    """

    kind: ClassVar[str] = "isotonic"
    fewest: ClassVar[int] = 50
    confidences: tuple[float, ...]
    accuracies: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.confidences or len(self.confidences) != len(self.accuracies):
            raise InputError("confidences and accuracies must be as many, and not none")
        for name, values in (("confidences", self.confidences), ("accuracies", self.accuracies)):
            for value in values:
                _inside(f"one of {name}", value, 0.0, 1.0)
        if min(self.accuracies) <= 0 or max(self.accuracies) >= 1:
            raise InputError("accuracies must lie inside 0 and 1")
        if (np.diff(self.confidences) <= 0).any() or (np.diff(self.accuracies) < 0).any():
            raise InputError("confidences must increase, and accuracies must not decrease")

    @classmethod
    def fit(cls, log_probs: npt.ArrayLike, answers: npt.ArrayLike) -> "Isotonic":
        sure, right = confidence(log_probs), correct_per_question(log_probs, answers)
        knots, inverse = np.unique(sure, return_inverse=True)
        weight = np.bincount(inverse).astype(np.float64)
        heights = _non_decreasing(np.bincount(inverse, right) / weight, weight)
        heights = np.clip(heights, 1 / (len(sure) + 2), 1 - 1 / (len(sure) + 2))
        flat = np.diff(heights) == 0  # inside a level stretch a knot changes nothing
        kept = ~(np.append(False, flat) & np.append(flat, False))
        return cls(tuple(knots[kept].tolist()), tuple(_digits(height) for height in heights[kept].tolist()))

    def apply(self, log_probs: npt.ArrayLike) -> Floats:
        """log p' as above, [n, C]."""
        log_probs = distributions(log_probs)
        log_top = log_probs.max(1, keepdims=True)
        top = log_probs == log_top
        k = top.sum(1)
        with np.errstate(divide="ignore"):  # no option is left where all tie
            log_rest = logsumexp(np.where(top, -np.inf, log_probs), axis=1)
        alone = np.isneginf(log_rest)
        second = np.exp(np.where(top, -np.inf, log_probs).max(1) - np.where(alone, 0.0, log_rest))  # of what is left
        tie = second / (1 + k * second)  # where the second option would be as probable
        wanted = np.interp(confidence(log_probs), self.confidences, self.accuracies)
        new = np.clip(wanted, tie + _EDGE * (1 / k - tie), (1 - _EDGE) / k)
        log_left = np.log1p(-np.minimum(k * new, 1 - _EDGE / 2)) - np.where(alone, 0.0, log_rest)
        mapped = np.where(top, np.log(new)[:, None], log_probs + log_left[:, None])
        return np.asarray(log_softmax(np.where(alone[:, None], log_probs, mapped), axis=1), dtype=np.float64)


KINDS: dict[str, Any] = {kind.kind: kind for kind in (Unchanged, OutputTemperature, VectorScaling, Isotonic)}
"""From the simplest up."""


def _non_decreasing(values: Floats, weights: Floats) -> Floats:
    """argmin_f sum_i w_i (f_i - y_i)², f non-decreasing: pool adjacent violators."""
    blocks: list[list[float]] = []  # mean, weight, how many
    for value, weight in zip(values.tolist(), weights.tolist(), strict=True):
        blocks.append([value, weight, 1])
        while len(blocks) > 1 and blocks[-2][0] >= blocks[-1][0]:
            mean, own, count = blocks.pop()
            last = blocks[-1]
            blocks[-1] = [(last[0] * last[1] + mean * own) / (last[1] + own), last[1] + own, last[2] + count]
    return np.repeat([block[0] for block in blocks], [int(block[2]) for block in blocks])


def _inside(name: str, value: object, low: float, high: float) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise InputError(f"{name} must be a number from {low:g} to {high:g}")


def _digits(value: float) -> float:
    """Ten digits: the last ones depend on the machine's summation order, and a file should not."""
    return float(f"{value:.10g}")


# -- choosing ----------------------------------------------------------------------------------------------------------


class Choice(NamedTuple):
    """A calibrator fitted on all questions, and what cross-validation says of each kind."""

    calibrator: Calibrator
    nll: dict[str, float | None]
    """By kind; None where there are too few questions to fit it."""
    held_out: Floats
    """Log-probabilities [n, C] of the chosen kind, each question's by a map that was fitted without it."""


def fold_of(ids: Sequence[str], folds: int = FOLDS, seed: int = 0) -> Ints:
    """The fold of each question, [n]: the questions by a hash of seed and id, dealt out one by one.

    Folds do not depend on the order of the questions, and their sizes differ by at most one.
    """
    ranked = sorted(range(len(ids)), key=lambda i: (hashlib.sha256(f"{seed} {ids[i]}".encode()).digest(), i))
    out = np.empty(len(ids), dtype=np.int64)
    out[ranked] = np.arange(len(ids)) % min(folds, len(ids))
    return out


def cross_calibrated(kind: str, log_probs: npt.ArrayLike, answers: npt.ArrayLike, fold: Ints) -> Floats:
    """Log-probabilities [n, C], those of each fold by a map that was fitted on the others."""
    log_probs, answers = questions(log_probs, answers)
    out = np.empty_like(log_probs)
    for one in np.unique(fold):
        held = fold == one
        out[held] = KINDS[kind].fit(log_probs[~held], answers[~held]).apply(log_probs[held])
    return out


def choose(
    log_probs: npt.ArrayLike,
    answers: npt.ArrayLike,
    ids: Sequence[str],
    kind: str = "auto",
    folds: int = FOLDS,
    seed: int = 0,
) -> Choice:
    """Fit the kind asked for, or by "auto" the one of least cross-validated NLL.

    Args:
        log_probs: of the answers to validation questions, [n, C].
        answers: the right options, [n].
        ids: of the questions, which decide their folds.
        kind: none, temperature, vector, isotonic, or auto.
        folds: of cross-validation.
        seed: of the folds.
    """
    log_probs, answers = questions(log_probs, answers)
    if kind != "auto" and kind not in KINDS:
        raise unknown("calibrator", kind, ["auto", *KINDS])
    n = len(answers)
    if kind != "auto" and n < KINDS[kind].fewest:
        most = next(name for name in reversed(KINDS) if n >= KINDS[name].fewest)
        raise InputError(
            f"{kind} calibration needs at least {KINDS[kind].fewest} validation questions, and there are {n}: "
            f"choose {most}"
        )
    fold = fold_of(ids, folds, seed)
    held: dict[str, Floats] = {"none": log_probs}
    if n > 1:
        held |= {
            name: cross_calibrated(name, log_probs, answers, fold)
            for name in KINDS
            if name != "none" and n >= KINDS[name].fewest
        }
    scored = {name: nll(found, answers) for name, found in held.items()}
    best = next(name for name in scored if scored[name] <= min(scored.values()) + _TIE) if kind == "auto" else kind
    table = {name: _digits(scored[name]) if name in scored else None for name in KINDS}
    return Choice(KINDS[best].fit(log_probs, answers), table, held[best])
