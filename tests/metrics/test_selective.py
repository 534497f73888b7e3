"""Oracles: the mean over all orders of tied questions, Traub et al.'s closed form, and small cases by hand."""

from itertools import pairwise, permutations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import roc_auc_score

from vmoer import metrics as m
from vmoer.errors import InputError

# A coarse grid, so that ties are common.
data = st.lists(st.tuples(st.integers(0, 4).map(lambda k: k / 4), st.booleans()), min_size=1, max_size=30)


def test_by_hand():
    """Oracle: errors 0, 1, 0, 1 by falling confidence have risks 0, 1/2, 1/3, 1/2."""
    confidence, errors = [0.6, 0.9, 0.7, 0.8], [1, 0, 0, 1]
    coverage, risk = m.risk_coverage(confidence, errors)
    assert coverage.tolist() == [0.25, 0.5, 0.75, 1]
    assert risk == pytest.approx([0, 1 / 2, 1 / 3, 1 / 2])
    assert m.aurc(confidence, errors) == pytest.approx(1 / 3)
    # Generalised risks 0, 0, 1/4, 1/4, 1/2 at coverages 0, 1/4, ..., joined by straight lines.
    assert m.augrc(confidence, errors) == pytest.approx((0 + 1 / 8 + 1 / 4 + 3 / 8) / 4)


@given(st.lists(st.tuples(st.sampled_from([0.3, 0.6]), st.booleans()), min_size=1, max_size=6))
def test_ties_are_averaged_over_all_orders(drawn):
    """Oracle: every order of the questions that falls in confidence, enumerated."""
    orders = [order for order in permutations(drawn) if all(a[0] >= b[0] for a, b in pairwise(order))]
    sums = [np.cumsum([error for _, error in order]) for order in orders]
    expected = np.mean(sums, axis=0) / np.arange(1, len(drawn) + 1)
    confidence, errors = zip(*drawn, strict=True)
    assert m.risk_coverage(confidence, errors)[1] == pytest.approx(expected)


@given(data)
def test_augrc_against_its_closed_form(drawn):
    """Oracle: (1 - AUROC) r (1 - r) + r²/2 (Traub et al. 2024, eq. 6), AUROC from sklearn; and over all pairs."""
    confidence, errors = np.array(drawn, dtype=float).T
    r = errors.mean()
    auroc = roc_auc_score(1 - errors, confidence) if 0 < r < 1 else 0.5
    assert m.augrc(confidence, errors) == pytest.approx((1 - auroc) * r * (1 - r) + r**2 / 2)
    # Question i is wrong, and accepted when question j sets the threshold.
    accepted = (confidence[:, None] > confidence) + 0.5 * (confidence[:, None] == confidence)
    assert m.augrc(confidence, errors) == pytest.approx((errors[:, None] * accepted).mean())


@given(data, st.randoms(use_true_random=False))
def test_aurc_directly_and_in_any_order(drawn, random):
    """Oracle: for each k, the mean error of the k most confident, the last tie group taken in part, in O(n²)."""
    confidence, errors = np.array(drawn, dtype=float).T
    risks = []
    for k in range(1, len(drawn) + 1):
        cut = np.sort(confidence)[::-1][k - 1]
        above, tied = confidence > cut, confidence == cut
        risks.append((errors[above].sum() + (k - above.sum()) * errors[tied].mean()) / k)
    assert m.aurc(confidence, errors) == pytest.approx(np.mean(risks))
    shuffled = np.array(random.sample(drawn, len(drawn)), dtype=float).T
    assert m.aurc(*shuffled) == pytest.approx(m.aurc(confidence, errors))
    assert m.augrc(*shuffled) == pytest.approx(m.augrc(confidence, errors))


@given(data, st.sampled_from([0.0, 0.1, 0.25, 0.5, 1.0]))
def test_threshold_against_trying_all(drawn, risk):
    """Oracle: every confidence tried as the threshold."""
    confidence, errors = np.array(drawn, dtype=float).T
    good = [t for t in confidence if errors[confidence >= t].mean() <= risk]
    if good:
        assert m.threshold_for_risk(confidence, errors, risk) == min(good)
    else:
        with pytest.raises(InputError, match="no confidence threshold reaches"):
            m.threshold_for_risk(confidence, errors, risk)


def test_bad_input_is_refused():
    """Oracle: the message a user should read."""
    with pytest.raises(InputError, match="errors must lie in"):
        m.aurc([0.5], [2])
    with pytest.raises(InputError, match="lengths"):
        m.risk_coverage([0.5, 0.6], [1])
