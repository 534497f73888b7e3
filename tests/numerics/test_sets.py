"""Oracle: Python sets."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vmoer.errors import InputError
from vmoer.numerics.sets import jaccard


@given(st.integers(1, 8), st.integers(0, 2**32 - 1))
def test_jaccard_against_sets(k, seed):
    """Oracle: len(a & b) / len(a | b) with Python sets, at each layer and token."""
    rng = np.random.default_rng(seed)
    a, b = rng.random((2, 3, 5, 10)).argsort(-1)[..., :k]
    expected = [[len(set(x) & set(y)) / len(set(x) | set(y)) for x, y in zip(*rows)] for rows in zip(a, b)]  # noqa: B905
    assert jaccard(a, b) == pytest.approx(np.array(expected))
    assert (jaccard(a, a[..., ::-1]) == 1).all()


def test_bad_sets_are_refused():
    """Oracle: the message a user should read."""
    with pytest.raises(InputError, match="shape"):
        jaccard([[0, 1]], [[0, 1], [1, 2]])
    with pytest.raises(InputError, match="twice"):
        jaccard([0, 0], [0, 1])
