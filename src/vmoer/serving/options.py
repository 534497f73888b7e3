"""A question with options: the letters' probabilities where the answer starts, through the calibrator of the run.

A client that sends such a prompt as `vmoer eval` does says how many options it has, and vLLM is asked for their letters.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from scipy.special import log_softmax

from vmoer.evaluation.predictions import entropy
from vmoer.metrics import confidence
from vmoer.saved.calibrator import Stored
from vmoer.tasks import LETTERS

SIGNALS = ("predictive_entropy", "least_confidence")
"""What a threshold may be on."""


class Options(NamedTuple):
    """What is known about the options of a question."""

    said: dict[str, Any]
    """As the client is given it."""
    own: dict[str, float]
    """The signals of the model's own probabilities,"""
    calibrated: dict[str, float]
    """and those after the calibrator."""


def options(letter_log_probs: Sequence[float], stored: Stored | None) -> Options:
    """From the letters' log-probabilities among all tokens; without a calibrator they are the model's own."""
    own_1C = log_softmax(np.array([letter_log_probs], dtype=np.float64), -1)
    calibrated_1C = own_1C if stored is None else stored.apply(own_1C)
    chances = np.exp(calibrated_1C[0]).tolist()
    said = dict(zip(LETTERS, chances, strict=False))
    about = {"probabilities": said, "calibrator": None if stored is None else stored.kind}
    return Options(about, _signals(own_1C), _signals(calibrated_1C))


def _signals(log_probs_1C: Any) -> dict[str, float]:
    return {
        "predictive_entropy": float(entropy(log_probs_1C)[0]),
        "least_confidence": float(1 - confidence(log_probs_1C)[0]),
    }
