"""Distances and a probe. Oracles: scipy's Mahalanobis distance, a closed form, and scikit-learn's logistic regression."""

import numpy as np
import pytest
from scipy.spatial.distance import mahalanobis
from sklearn.linear_model import LogisticRegression

from vmoer.errors import InputError
from vmoer.metrics import distances

RNG = np.random.default_rng(0)
LABELS = RNG.integers(3, size=400)
CENTERS = np.array([[0.0, 0, 0, 0], [3, 0, 0, 1], [0, 4, 1, 0]])
STATES = CENTERS[LABELS] + RNG.normal(size=(400, 4)) * [1, 2, 0.5, 1]


def test_distances_are_scipys() -> None:
    """Oracle: scipy, with the covariance around the class means and its ridge."""
    found, asked = distances.classes(STATES, LABELS), RNG.normal(size=(20, 4)) * 3
    means = np.stack([STATES[k == LABELS].mean(0) for k in range(3)])

    def inverse(centred: np.ndarray) -> np.ndarray:
        covariance = centred.T @ centred / len(centred)
        return np.linalg.inv(covariance + distances.RIDGE * np.trace(covariance) / 4 * np.eye(4))

    within, overall = inverse(STATES - means[LABELS]), inverse(STATES - STATES.mean(0))
    near = [min(mahalanobis(x, mean, within) ** 2 for mean in means) for x in asked]
    far = [mahalanobis(x, STATES.mean(0), overall) ** 2 for x in asked]
    assert found.mahalanobis(asked) == pytest.approx(near, rel=1e-9)
    assert found.relative(asked) == pytest.approx(np.subtract(near, far), rel=1e-8, abs=1e-8)


def test_fewer_states_than_dimensions_will_do() -> None:
    """Oracle: a state at its class's mean has distance 0, another a finite one."""
    few = RNG.normal(size=(6, 40))
    found = distances.classes(few, [0, 0, 0, 1, 1, 1])
    assert found.mahalanobis(few[:3].mean(0, keepdims=True)) == pytest.approx([0], abs=1e-6)
    assert np.isfinite(found.relative(RNG.normal(size=(3, 40)))).all()


def test_the_probe_is_ridge_regression() -> None:
    """Oracle: scikit-learn on standardised states at the ridge that was chosen; held-out values by refitting without the fold."""
    chance = 1 / (1 + np.exp(-(STATES @ [0.8, -0.5, 0.0, 0.3] - 0.5)))
    wrong = RNG.random(400) < chance
    fitted, held = distances.probe(STATES, wrong)
    x = (STATES - STATES.mean(0)) / (STATES.std(0) + 1e-6)
    theirs = {}
    for ridge in distances.RIDGES:
        model = LogisticRegression(C=1 / ridge, tol=1e-8, max_iter=2000).fit(x, wrong)
        theirs[ridge] = model.predict_proba(x)[:, 1]
    closest = min(theirs, key=lambda ridge: float(np.abs(theirs[ridge] - fitted(STATES)).max()))
    assert fitted(STATES) == pytest.approx(theirs[closest], abs=2e-3)
    fold = np.arange(400) % distances.FOLDS == 2
    center, scale = STATES[~fold].mean(0), STATES[~fold].std(0) + 1e-6
    again = LogisticRegression(C=1 / closest, tol=1e-8, max_iter=2000).fit(
        (STATES[~fold] - center) / scale, wrong[~fold]
    )
    assert held[fold] == pytest.approx(again.predict_proba((STATES[fold] - center) / scale)[:, 1], abs=2e-3)


def test_too_little_is_refused() -> None:
    with pytest.raises(InputError, match="at least 10"):
        distances.probe(STATES[:9], np.zeros(9))
    with pytest.raises(InputError, match="a class for each"):
        distances.classes(STATES, LABELS[:5])
