"""Scores of states against the states of training questions, which know nothing of routing.

    mahalanobis   min_k d(x; mu_k, S),   d the squared distance, mu_k the mean of class k, S the covariance around the means
    relative      min_k d(x; mu_k, S) - d(x; mu_0, S_0),   mu_0 and S_0 of all training states
    probe         P(wrong | x), logistic regression on standardised states, its ridge chosen by cross-validation

The distances are those of Lee et al. (2018) and Ren et al. (2021). Covariances get a ridge, so that fewer states than dimensions
will do. Shapes: n states, m training states, D dimensions, K classes.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from scipy.optimize import minimize
from scipy.special import expit

from vmoer.errors import InputError
from vmoer.metrics._inputs import Floats, Ints

RIDGE = 1e-3  # of the mean variance
RIDGES = (1.0, 10.0, 100.0, 1000.0)
FOLDS = 5


class Classes(NamedTuple):
    """Gaussians of training states: one for each class with a common covariance, and one of all."""

    means_KD: Floats
    whiten_DD: Floats
    mean_D: Floats
    whiten_all_DD: Floats

    def mahalanobis(self, states_nD: npt.ArrayLike) -> Floats:
        """The squared distance to the nearest class, [n]."""
        white = np.asarray(states_nD, dtype=np.float64) @ self.whiten_DD
        means = self.means_KD @ self.whiten_DD
        squares = (white**2).sum(1)[:, None] - 2 * white @ means.T + (means**2).sum(1)
        return np.asarray(squares.min(1))

    def relative(self, states_nD: npt.ArrayLike) -> Floats:
        """The same less the squared distance to all training states together, [n]."""
        states = np.asarray(states_nD, dtype=np.float64)
        background = (((states - self.mean_D) @ self.whiten_all_DD) ** 2).sum(1)
        return np.asarray(self.mahalanobis(states) - background)


def classes(states_mD: npt.ArrayLike, labels: npt.ArrayLike) -> Classes:
    """Fit the Gaussians to training states and their classes."""
    states, kinds = np.asarray(states_mD, dtype=np.float64), np.asarray(labels)
    if states.ndim != 2 or len(states) != len(kinds) or len(states) < 2:
        raise InputError("there must be a class for each of at least two states")
    present, place = np.unique(kinds, return_inverse=True)
    means = np.stack([states[kinds == kind].mean(0) for kind in present])
    mean = states.mean(0)
    return Classes(means, _whitening(states - means[place]), mean, _whitening(states - mean))


def _whitening(centred_mD: Floats) -> Floats:
    """W with W W' = (cov + ridge)^-1."""
    covariance = centred_mD.T @ centred_mD / len(centred_mD)
    ridge = RIDGE * np.trace(covariance) / len(covariance) + np.finfo(np.float64).tiny
    values, vectors = np.linalg.eigh(covariance + ridge * np.eye(len(covariance)))
    return np.asarray(vectors / np.sqrt(values))


class Probe(NamedTuple):
    """P(wrong | state) = sigmoid(w' (x - center) / scale + b)."""

    weights_D: Floats
    bias: float
    center_D: Floats
    scale_D: Floats

    def __call__(self, states_nD: npt.ArrayLike) -> Floats:
        states = (np.asarray(states_nD, dtype=np.float64) - self.center_D) / self.scale_D
        return np.asarray(expit(states @ self.weights_D + self.bias))


def probe(states_nD: npt.ArrayLike, wrong_n: npt.ArrayLike) -> tuple[Probe, Floats]:
    """Fit to answered questions. Also gives each of these questions' own value by a probe that was fitted without it, [n]."""
    states, wrong = np.asarray(states_nD, dtype=np.float64), np.asarray(wrong_n, dtype=np.float64)
    if len(states) != len(wrong) or len(states) < 2 * FOLDS:
        raise InputError(f"a probe needs at least {2 * FOLDS} answered questions")
    fold: Ints = np.arange(len(wrong)) % FOLDS
    held = {ridge: _held_out(states, wrong, fold, ridge) for ridge in RIDGES}
    losses = {ridge: -np.mean(np.log(np.where(wrong > 0, found, 1 - found) + 1e-12)) for ridge, found in held.items()}
    best = min(RIDGES, key=lambda ridge: losses[ridge])
    return _fit(states, wrong, best), held[best]


def _held_out(states: Floats, wrong: Floats, fold: Ints, ridge: float) -> Floats:
    out = np.empty(len(wrong))
    for one in range(FOLDS):
        held = fold == one
        out[held] = _fit(states[~held], wrong[~held], ridge)(states[held])
    return out


def _fit(states: Floats, wrong: Floats, ridge: float) -> Probe:
    center, scale = states.mean(0), states.std(0) + 1e-6
    x, sign = (states - center) / scale, 2 * wrong - 1

    def loss(at: Floats) -> tuple[float, Floats]:
        margin = sign * (x @ at[:-1] + at[-1])
        pull = -sign * expit(-margin)
        value = np.logaddexp(0, -margin).sum() + ridge / 2 * at[:-1] @ at[:-1]
        return float(value), np.append(x.T @ pull + ridge * at[:-1], pull.sum())

    found = minimize(loss, np.zeros(x.shape[1] + 1), jac=True, method="L-BFGS-B", options={"maxiter": 500}).x
    return Probe(found[:-1], float(found[-1]), center, scale)
