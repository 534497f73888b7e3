"""Oracle: Python sets."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vmoer import metrics as m
from vmoer.errors import InputError


@given(st.integers(1, 8), st.integers(0, 2**32 - 1))
def test_jaccard_against_sets(k, seed):
    """Oracle: len(a & b) / len(a | b) with Python sets, at each layer and token."""
    rng = np.random.default_rng(seed)
    a, b = rng.random((2, 3, 5, 10)).argsort(-1)[..., :k]
    expected = [[len(set(x) & set(y)) / len(set(x) | set(y)) for x, y in zip(*rows)] for rows in zip(a, b)]  # noqa: B905
    assert m.jaccard(a, b) == pytest.approx(np.array(expected))
    assert (m.jaccard(a, a[..., ::-1]) == 1).all()
    assert m.mean_jaccard(a, b) == pytest.approx(np.mean(expected))


def test_mean_leaves_out_padding():
    """Oracle: by hand; the masked position alone differs."""
    a, b = np.array([[[0, 1], [2, 3]]]), np.array([[[1, 0], [4, 5]]])
    assert m.mean_jaccard(a, b) == 0.5
    assert m.mean_jaccard(a, b, mask=[True, False]) == 1.0


def test_bad_sets_are_refused():
    """Oracle: the message a user should read."""
    with pytest.raises(InputError, match="shape"):
        m.jaccard([[0, 1]], [[0, 1], [1, 2]])
    with pytest.raises(InputError, match="twice"):
        m.jaccard([0, 0], [0, 1])
    with pytest.raises(InputError, match="no position"):
        m.mean_jaccard([[0, 1]], [[0, 1]], mask=[False])
