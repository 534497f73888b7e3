"""Simulated predictions whose calibration is known by construction."""

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import settings
from scipy.special import log_softmax

# The same examples in every run, and no failures because the machine is busy.
settings.register_profile("reproducible", deadline=None, derandomize=True)
settings.load_profile("reproducible")


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(0)


@pytest.fixture
def calibrated() -> Callable[[np.random.Generator, int], tuple[np.ndarray, np.ndarray]]:
    """Confidences ~ Beta(6, 1.5) and outcomes that are right with exactly that probability."""

    def simulate(rng: np.random.Generator, n: int) -> tuple[np.ndarray, np.ndarray]:
        confidence = rng.beta(6, 1.5, n)
        return confidence, (rng.random(n) < confidence).astype(float)

    return simulate


@pytest.fixture
def predictions() -> Callable[..., tuple[np.ndarray, np.ndarray]]:
    """Log-probabilities [n, options] and answers drawn from softmax(logits / temperature)."""

    def simulate(
        rng: np.random.Generator, n: int, options: int = 4, temperature: float = 1.0
    ) -> tuple[np.ndarray, np.ndarray]:
        log_probs = log_softmax(rng.normal(scale=2, size=(n, options)), axis=1)
        noise = rng.gumbel(size=log_probs.shape)
        return log_probs, (log_probs / temperature + noise).argmax(1)

    return simulate
