"""Routing stability: J(A, B) = |A ∩ B| / |A ∪ B| of the experts a token selects in two passes."""

import numpy as np
import numpy.typing as npt

from vmoer.errors import InputError
from vmoer.metrics._inputs import Floats


def jaccard(experts_a: npt.ArrayLike, experts_b: npt.ArrayLike) -> Floats:
    """J per position of two arrays of expert numbers [..., K] -> [...]; the order within a set does not matter."""
    a, b = np.asarray(experts_a), np.asarray(experts_b)
    if a.ndim == 0 or not a.size or a.shape != b.shape:
        raise InputError(f"expert sets must have one non-empty shape [..., K], got {list(a.shape)} and {list(b.shape)}")
    for experts in (a, b):
        if (np.diff(np.sort(experts, axis=-1), axis=-1) == 0).any():
            raise InputError("an expert is listed twice at one position")
    # Each set lists an expert once, so the shared experts are the equal neighbours once both are sorted together.
    shared = (np.diff(np.sort(np.concatenate([a, b], axis=-1), axis=-1), axis=-1) == 0).sum(-1)
    return np.asarray(shared / (2 * a.shape[-1] - shared), dtype=np.float64)


def mean_jaccard(experts_a: npt.ArrayLike, experts_b: npt.ArrayLike, mask: npt.ArrayLike | None = None) -> float:
    """Mean J over positions, or over those where `mask` (broadcast to [...], False at padding) is true."""
    overlap = jaccard(experts_a, experts_b)
    keep = np.broadcast_to(True if mask is None else np.asarray(mask, dtype=bool), overlap.shape)
    if not keep.any():
        raise InputError("the mask leaves no position")
    return float(overlap[keep].mean())
