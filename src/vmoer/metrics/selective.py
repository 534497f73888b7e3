"""Selective prediction: answer the most confident share c of the questions, abstain on the rest.

    coverage_k = k / n,   risk_k = (1/k) * sum of the errors of the k most confident questions

Among equally confident questions the order is arbitrary; every curve here is its mean over these orders, so that it
does not depend on the order of the questions.
"""

import numpy as np
import numpy.typing as npt

from vmoer.errors import InputError
from vmoer.metrics._inputs import Floats, fractions


def risk_coverage(confidence: npt.ArrayLike, errors: npt.ArrayLike) -> tuple[Floats, Floats]:
    """Coverage and risk for k = 1..n, most confident first; `errors` in [0, 1], 1 for a wrong answer."""
    confidence, errors = fractions(confidence=confidence, errors=errors)
    _, group, size = np.unique(-confidence, return_inverse=True, return_counts=True)
    # The mean over the orders within ties: each question of a group carries the group's mean error.
    mean_error = np.bincount(group, errors) / size
    accepted = np.arange(1, len(errors) + 1)
    return accepted / len(errors), np.cumsum(np.repeat(mean_error, size)) / accepted


def aurc(confidence: npt.ArrayLike, errors: npt.ArrayLike) -> float:
    """AURC = (1/n) sum_k risk_k (Geifman et al. 2019); lower is better."""
    return float(risk_coverage(confidence, errors)[1].mean())


def augrc(confidence: npt.ArrayLike, errors: npt.ArrayLike) -> float:
    """AUGRC = ∫ risk(c) c dc (Traub et al. 2024): the chance that a random question is wrong and yet accepted.

    By the trapezium rule from (0, 0), so that it equals (1 - AUROC) r (1 - r) + r²/2 exactly, where r is the error rate
    and AUROC that of confidence for telling right answers from wrong ones. Unlike AURC it does not give the few most
    confident questions most of the weight.
    """
    coverage, risk = risk_coverage(confidence, errors)
    generalised = risk * coverage
    return float((generalised.sum() - generalised[-1] / 2) / len(risk))


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
