"""Checks of what metrics are given: log-probabilities [n, C] padded with -inf, answers [n], vectors without NaN."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from vmoer.errors import InputError

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


def pad(rows: Sequence[Sequence[float]]) -> Floats:
    """Rows of log-probabilities of different lengths as one array [n, C]; missing options are -inf."""
    if not len(rows):
        raise InputError("no questions")
    padded = np.full((len(rows), max(map(len, rows))), -np.inf)
    for line, row in zip(padded, rows, strict=True):
        line[: len(row)] = row
    return padded


def distributions(log_probs: npt.ArrayLike) -> Floats:
    """`log_probs` as a checked array [n, C]: each row a normalised distribution."""
    checked = np.asarray(log_probs, dtype=np.float64)
    if checked.ndim != 2 or not checked.size:
        raise InputError(f"log_probs must have shape [questions, options], got {list(checked.shape)}")
    if np.isnan(checked).any():
        raise InputError(f"log_probs of question {np.isnan(checked).any(1).argmax()} contain NaN")
    # The sums of half precision are off by up to 1e-2. Those of raw logits, given by mistake, are off by far more.
    with np.errstate(over="ignore"):
        total = np.exp(checked).sum(1)
    if (wrong := np.abs(total - 1) > 2e-2).any():
        row = wrong.argmax()
        raise InputError(f"log_probs of question {row} are not normalised: their probabilities sum to {total[row]:.3g}")
    return checked


def questions(log_probs: npt.ArrayLike, answers: npt.ArrayLike) -> tuple[Floats, Ints]:
    """Log-probabilities [n, C] and the right option of each question [n], checked."""
    checked, given = distributions(log_probs), np.asarray(answers)
    if given.shape != checked.shape[:1]:
        raise InputError(f"{len(checked)} questions but answers of shape {list(given.shape)}")
    if not np.issubdtype(given.dtype, np.integer):
        raise InputError(f"answers must be integers, got {given.dtype}")
    outside = (given < 0) | (given >= checked.shape[1])
    # -inf marks an option that does not exist, so it can never be the answer.
    outside |= np.isneginf(checked[np.arange(len(given)), np.where(outside, 0, given)])
    if outside.any():
        raise InputError(f"answer {given[outside.argmax()]} of question {outside.argmax()} is not one of its options")
    return checked, given.astype(np.int64)


def vector(name: str, values: npt.ArrayLike) -> Floats:
    """`values` as a float vector: one-dimensional, not empty, without NaN."""
    checked = np.asarray(values, dtype=np.float64)
    if checked.ndim != 1 or not checked.size:
        raise InputError(f"{name} must be a non-empty vector, got shape {list(checked.shape)}")
    if np.isnan(checked).any():
        raise InputError(f"{name} contains NaN at position {np.isnan(checked).argmax()}")
    return checked


def fractions(**named: npt.ArrayLike) -> tuple[Floats, ...]:
    """Vectors of one length with values in [0, 1]: confidences, correctness, errors."""
    checked = {name: vector(name, values) for name, values in named.items()}
    for name, values in checked.items():
        if values.min() < 0 or values.max() > 1:
            raise InputError(f"{name} must lie in [0, 1], got {values.min():.6g} to {values.max():.6g}")
    if len({len(values) for values in checked.values()}) > 1:
        raise InputError("different lengths: " + ", ".join(f"{name} {len(v)}" for name, v in checked.items()))
    return tuple(checked.values())
