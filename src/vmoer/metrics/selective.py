"""Selective prediction: answer the most confident share c of the questions, abstain on the rest.

    coverage_k = k / n,   risk_k = (1/k) * sum of the errors of the k most confident questions

The order of equally confident questions is arbitrary. Every curve here is the mean over their orders, so it does not
depend on the order in which questions are given.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from scipy.stats import beta, binom

from vmoer.errors import InputError
from vmoer.metrics._inputs import Floats, fractions, vector
from vmoer.metrics.resampling import Interval
from vmoer.metrics.tally import Tally

STARTS = (1 / 16, 1 / 8, 1 / 4, 1 / 2, 1)  # coverages from which a promised threshold is sought upwards


def risk_coverage(confidence: npt.ArrayLike, errors: npt.ArrayLike) -> tuple[Floats, Floats]:
    """Coverage and risk for k = 1..n, most confident first; `errors` in [0, 1], 1 for a wrong answer."""
    confidence, errors = fractions(confidence=confidence, errors=errors)
    _, group, size = np.unique(-confidence, return_inverse=True, return_counts=True)
    # In the mean over their orders, each of the tied questions has the mean error of all of them.
    mean_error = np.bincount(group, errors) / size
    accepted = np.arange(1, len(errors) + 1)
    return accepted / len(errors), np.cumsum(np.repeat(mean_error, size)) / accepted


def aurc(confidence: npt.ArrayLike, errors: npt.ArrayLike) -> float:
    """AURC = (1/n) sum_k risk_k (Geifman et al. 2019); lower is better."""
    return float(aurc_of(_once(confidence, errors))[0])


def aurc_of(t: Tally) -> Floats:
    """`aurc` of each draw, [D]."""
    # Risks at k = before + 1 .. before + size rise linearly in the errors of a tie, so their sums are in closed form.
    size, hits, seen, _ = t.levels
    errors, before = size - hits, seen - size
    harmonic = np.concatenate([[0.0], np.cumsum(1 / np.arange(1, t.n + 1))])
    steps = np.diff(harmonic[seen], prepend=0)
    wrong_before, rate = errors.cumsum(1) - errors, errors / np.maximum(size, 1)
    return np.asarray(((wrong_before - before * rate) * steps + errors).sum(1) / t.n, dtype=np.float64)


def augrc(confidence: npt.ArrayLike, errors: npt.ArrayLike) -> float:
    """AUGRC = ∫ risk(c) c dc (Traub et al. 2024): the chance that a random question is wrong and yet accepted.

    By the trapezium rule from (0, 0), so that it equals (1 - AUROC) r (1 - r) + r²/2 exactly, where r is the error rate
    and AUROC that of confidence for telling right answers from wrong ones. Unlike AURC it does not give the few most
    confident questions most of the weight.
    """
    return float(augrc_of(_once(confidence, errors))[0])


def augrc_of(t: Tally) -> Floats:
    """`augrc` of each draw, [D]."""
    size, errors = t.levels.size_DL, t.levels.size_DL - t.levels.hits_DL
    accepted = size * (errors.cumsum(1) - errors) + errors * (size + 1) / 2
    return np.asarray((accepted.sum(1) - errors.sum(1) / 2) / t.n**2, dtype=np.float64)


def _once(confidence: npt.ArrayLike, errors: npt.ArrayLike) -> Tally:
    checked, wrong = fractions(confidence=confidence, errors=errors)
    return Tally(checked, 1 - wrong)


def threshold_for_risk(confidence: npt.ArrayLike, errors: npt.ArrayLike, risk: float) -> float:
    """min {t : mean error of the questions with confidence >= t is <= risk}, over the confidences seen."""
    confidence, errors = fractions(confidence=confidence, errors=errors)
    thresholds, group, size = np.unique(-confidence, return_inverse=True, return_counts=True)
    # Equally confident questions are accepted together. Sums before the division: 2 errors in 10 are exactly 0.2.
    at_threshold = np.cumsum(np.bincount(group, errors)) / np.cumsum(size)
    allowed = at_threshold <= risk
    if not allowed.any():
        raise InputError(f"no confidence threshold reaches risk {risk:g}: the lowest is {at_threshold.min():.3g}")
    return float(-thresholds[allowed][-1])


class Accepted(NamedTuple):
    """The questions that a threshold accepts and the errors among them, with exact intervals."""

    questions: int
    accepted: int
    errors: int
    coverage: Interval
    risk: Interval
    """The share of errors among the accepted; its interval is 0 to 1 where none is accepted."""


def accepted(scores: npt.ArrayLike, errors: npt.ArrayLike, threshold: float, confidence: float = 0.95) -> Accepted:
    """Coverage and risk of answering the questions whose score is at most the threshold, with exact binomial intervals.

    An answer that is partly wrong (tied options) counts as wrong.
    """
    scores, wrong = _scored(scores, errors)
    taken = scores <= threshold
    n, k, e = len(scores), int(taken.sum()), int(wrong[taken].sum())
    return Accepted(n, k, e, clopper_pearson(k, n, confidence), clopper_pearson(e, k, confidence))


def clopper_pearson(successes: int, n: int, confidence: float) -> Interval:
    """The exact interval of a proportion (Clopper and Pearson 1934)."""
    tail = (1 - confidence) / 2
    low = float(beta.ppf(tail, successes, n - successes + 1)) if successes else 0.0
    return Interval(successes / n if n else 0.0, low, upper_bound(successes, n, tail))


def upper_bound(successes: int, n: int, tail: float) -> float:
    """max {p : P(Binomial(n, p) <= successes) >= tail}: the proportion is above it with probability `tail` at most."""
    return float(beta.ppf(1 - tail, successes + 1, n - successes)) if successes < n else 1.0


class Promise(NamedTuple):
    """A threshold on a score (larger means less certain), and what it promises."""

    threshold: float
    risk: float
    """An upper bound of the risk of the accepted, which holds with the confidence that was asked for."""
    accepted: int
    errors: int
    coverage: float


def promised_threshold(scores: npt.ArrayLike, errors: npt.ArrayLike, risk: float, confidence: float = 0.95) -> Promise:
    """The threshold that accepts most of those with  P(risk of accepting score <= threshold  <=  `risk`) >= confidence.

    Learn-then-Test by fixed sequences (Angelopoulos et al. 2021). Given a limit l, the m questions with score < l are
    independent draws of what l accepts, so their errors are Binomial(m, risk(l)), and

        P(Binomial(m, `risk`) <= errors)  <=  tail    happens with probability `tail` at most where risk(l) > `risk`.

    From each of five coverages (1/16 to 1) l moves up over the scores while the test passes, at
    tail = (1 - confidence) / 5. A sequence promises too much only if it passes the first l with risk(l) > `risk`, or
    starts beyond it. So the best of the five ends is wrong with probability 1 - confidence at most. This assumes that
    ties are few or that risk grows with the score, and nothing else of how they depend on each other. The promise is
    for new questions, drawn as these were.
    """
    scores, wrong = _scored(scores, errors)
    for name, share in (("risk", risk), ("confidence", confidence)):
        if not 0 < share < 1:
            raise InputError(f"{name}={share:g} must lie between 0 and 1")
    n, tail = len(scores), (1 - confidence) / len(STARTS)
    value, group, size = np.unique(scores, return_inverse=True, return_counts=True)
    limits = np.append(value, np.inf)
    below = np.concatenate([[0], np.cumsum(size)])
    failed = np.concatenate([[0], np.cumsum(np.bincount(group, wrong))]).astype(np.int64)
    passed = np.append(binom.cdf(failed, below, risk) <= tail, False)
    starts = [int(np.searchsorted(below, int(share * n), side="right")) - 1 for share in STARTS]
    # Each sequence ends before the first limit that does not pass.
    ends = [start + int(np.argmin(passed[start:])) - 1 for start in starts if passed[start]]
    if not ends:
        bounds = {upper_bound(int(failed[i]), int(below[i]), tail): i for i in starts}
        best = min(bounds)
        raise InputError(
            f"no threshold promises risk {risk:g} with confidence {confidence:g} on {n} questions: the lowest that can be "
            f"promised is {best:.3g}, answering {below[bounds[best]]} of them with {failed[bounds[best]]} errors"
        )
    end = max(ends)
    m, e = int(below[end]), int(failed[end])
    # The largest number below the limit: then "at most the threshold" means "below the limit".
    return Promise(float(np.nextafter(limits[end], -np.inf)), upper_bound(e, m, tail), m, e, m / n)


def _scored(scores: npt.ArrayLike, errors: npt.ArrayLike) -> tuple[Floats, npt.NDArray[np.bool_]]:
    checked, (wrong,) = vector("scores", scores), fractions(errors=errors)
    if len(checked) != len(wrong):
        raise InputError(f"different lengths: scores {len(checked)}, errors {len(wrong)}")
    return checked, wrong > 0
