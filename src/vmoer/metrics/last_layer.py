"""Laplace's method on the rows of the last layer that give the letters' logits, from states and logits alone.

    A = sum_i h_i h_i',   B = mean_i (diag p_i - p_i p_i'),   posterior precision (A + sqrt(d) I) (x) (B + sqrt(d) I)
    logits at h ~ N(logits, h' (A + sqrt(d) I)^-1 h  (B + sqrt(d) I)^-1),   p(y) = E softmax(logits)

The Kronecker-factored Gauss-Newton approximation of Ritter et al. (2018), on the last layer (Kristiadi et al., 2020). The prior's
precision d is the one of least NLL on validation. Shapes: n questions, m training questions, D states, K letters, S samples.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from scipy.special import log_softmax, logsumexp, softmax
from scipy.stats import norm, qmc

from vmoer.metrics._inputs import Floats
from vmoer.metrics.calibration import nll

PRIORS = tuple(10.0**k for k in range(-2, 9))
SAMPLES = 64


class Factors(NamedTuple):
    """The eigenvalues and eigenvectors of A and of B."""

    a_D: Floats
    states_DD: Floats
    b_K: Floats
    letters_KK: Floats

    def covariance(self, states_nD: npt.ArrayLike, prior: float) -> tuple[Floats, Floats]:
        """The factor of each question, [n], and what it multiplies, [K, K]: together the covariance of its logits."""
        root = np.sqrt(prior)
        rotated_nD = np.asarray(states_nD, dtype=np.float64) @ self.states_DD
        return (rotated_nD**2) @ (1 / (self.a_D + root)), self.letters_KK / (self.b_K + root) @ self.letters_KK.T

    def log_probs(self, states_nD: npt.ArrayLike, logits_nK: npt.ArrayLike, prior: float) -> Floats:
        """Averaged over fixed samples of the logits, [n, K]."""
        variance_n, common_KK = self.covariance(states_nD, prior)
        points_SK = norm.ppf(qmc.Sobol(len(common_KK), seed=0).random(SAMPLES))
        drawn_SK = points_SK @ np.linalg.cholesky(common_KK).T
        logits = np.asarray(logits_nK, dtype=np.float64)[:, None] + np.sqrt(variance_n)[:, None, None] * drawn_SK
        return np.asarray(logsumexp(log_softmax(logits, axis=-1), axis=1) - np.log(SAMPLES))


def factors(states_mD: npt.ArrayLike, logits_mK: npt.ArrayLike) -> Factors:
    """Of the training questions."""
    states, p = np.asarray(states_mD, dtype=np.float64), softmax(np.asarray(logits_mK, dtype=np.float64), axis=1)
    b_KK = np.diag(p.mean(0)) - p.T @ p / len(p)
    a, b = np.linalg.eigh(states.T @ states), np.linalg.eigh(b_KK)
    return Factors(np.maximum(a[0], 0), a[1], np.maximum(b[0], 0), b[1])


def best_prior(found: Factors, states_nD: npt.ArrayLike, logits_nK: npt.ArrayLike, answers_n: npt.ArrayLike) -> float:
    """The precision of least NLL on validation questions."""
    return min(PRIORS, key=lambda prior: nll(found.log_probs(states_nD, logits_nK, prior), answers_n))
