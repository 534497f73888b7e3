"""Laplace's method on the last layer. Oracles: the whole precision matrix, inverted; many draws of numpy's own; its limits."""

import numpy as np
import pytest
from scipy.special import log_softmax, softmax

from vmoer.metrics import last_layer

RNG = np.random.default_rng(0)
STATES, WEIGHTS = RNG.normal(size=(60, 5)), RNG.normal(size=(5, 4))
LOGITS = STATES @ WEIGHTS
NEW = RNG.normal(size=(7, 5)) * 2


def test_the_covariance_is_that_of_the_whole_posterior() -> None:
    """Oracle: J P^-1 J' with P the Kronecker product written out, and its factors by a loop over questions."""
    prior, a, b = 4.0, np.zeros((5, 5)), np.zeros((4, 4))
    for h, logits in zip(STATES, LOGITS, strict=True):
        p = softmax(logits)
        a += np.outer(h, h)
        b += (np.diag(p) - np.outer(p, p)) / len(STATES)
    precision = np.kron(b + 2 * np.eye(4), a + 2 * np.eye(5))
    variance, common = last_layer.factors(STATES, LOGITS).covariance(NEW, prior)
    for h, own in zip(NEW, variance, strict=True):
        jacobian = np.kron(np.eye(4), h)
        assert own * common == pytest.approx(jacobian @ np.linalg.inv(precision) @ jacobian.T, abs=1e-10)


def test_answers_are_means_over_the_posterior() -> None:
    """Oracle: 200,000 draws."""
    found = last_layer.factors(STATES, LOGITS)
    variance, common = found.covariance(NEW, 0.01)
    ours = found.log_probs(NEW, NEW @ WEIGHTS, 0.01)
    draws = RNG.multivariate_normal(np.zeros(4), common, size=200_000)
    for h, own, mine in zip(NEW, variance, ours, strict=True):
        mean = softmax(h @ WEIGHTS + np.sqrt(own) * draws, axis=1).mean(0)
        assert np.exp(mine) == pytest.approx(mean, abs=0.02)
        assert np.exp(mine).sum() == pytest.approx(1)


def test_a_certain_prior_gives_the_model_back_and_validation_chooses() -> None:
    """Oracles: the softmax itself; a model whose logits are thrice too large wants a wide posterior, a right one a narrow one."""
    found = last_layer.factors(STATES, LOGITS)
    assert found.log_probs(NEW, NEW @ WEIGHTS, 1e12) == pytest.approx(log_softmax(NEW @ WEIGHTS, axis=1), abs=1e-3)
    states = RNG.normal(size=(2000, 5))
    answers = (states @ WEIGHTS / 3 + RNG.gumbel(size=(2000, 4))).argmax(1)
    right = last_layer.best_prior(found, states, states @ WEIGHTS / 3, answers)
    wrong = last_layer.best_prior(found, states, states @ WEIGHTS, answers)
    assert wrong < right


def test_options_that_are_not_there_stay_impossible() -> None:
    """Oracle: minus infinity in, minus infinity out."""
    logits = LOGITS.copy()
    logits[:, 3] = -np.inf
    found = last_layer.factors(STATES, logits)
    assert np.isneginf(found.log_probs(STATES, logits, 1.0)[:, 3]).all()
