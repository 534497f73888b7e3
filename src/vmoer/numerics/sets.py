"""Sets of experts: J(A, B) = |A ∩ B| / |A ∪ B| of the experts that a token selects in two passes."""

import numpy as np
import numpy.typing as npt

from vmoer.errors import InputError


def jaccard(experts_a: npt.ArrayLike, experts_b: npt.ArrayLike) -> npt.NDArray[np.float64]:
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
