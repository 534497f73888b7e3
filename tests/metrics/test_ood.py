"""Oracles: scikit-learn, the definition of AUROC over all pairs, and scipy's matching."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import average_precision_score, roc_auc_score, roc_curve

from vmoer import metrics as m
from vmoer.errors import InputError

# Few distinct values, so that ties are common.
scores = st.lists(st.integers(-3, 3), min_size=1, max_size=30)


@given(scores, scores)
def test_against_scikit_learn_and_all_pairs(scores_in, scores_out):
    """Oracle: sklearn with `out` as the positive class, and P(out > in) + P(out = in)/2 over all pairs."""
    labels, both = np.r_[np.zeros(len(scores_in)), np.ones(len(scores_out))], np.r_[scores_in, scores_out]
    wins = [(o > i) + (o == i) / 2 for o in scores_out for i in scores_in]
    false, true, _ = roc_curve(labels, both, drop_intermediate=False)
    assert m.auroc(scores_in, scores_out) == pytest.approx(np.mean(wins))
    assert m.auroc(scores_in, scores_out) == pytest.approx(roc_auc_score(labels, both))
    assert m.auprc(scores_in, scores_out) == pytest.approx(average_precision_score(labels, both))
    assert m.fpr95(scores_in, scores_out) == pytest.approx(false[true >= 0.95 - 1e-12].min())


def test_fpr95_at_exactly_95_percent():
    """Oracle: by hand; 19 of 20 `out` prompts lie above 0, and so does one of four `in` prompts."""
    assert m.fpr95([-1, -1, -1, 1], [-2] + [1] * 19) == 0.25


@given(scores, scores, st.randoms(use_true_random=False))
def test_invariances(scores_in, scores_out, random):
    """Oracle: AUROC(s) = 1 - AUROC(-s), and the order of the prompts does not matter."""
    negated = [[-s for s in side] for side in (scores_in, scores_out)]
    assert m.auroc(*negated) == pytest.approx(1 - m.auroc(scores_in, scores_out))
    shuffled = [random.sample(side, len(side)) for side in (scores_in, scores_out)]
    for metric in (m.auroc, m.auprc, m.fpr95):
        assert metric(*shuffled) == metric(scores_in, scores_out)


@given(scores, scores, st.integers(0, 100))
def test_length_match_is_one_to_one_and_maximal(lengths_in, lengths_out, seed):
    """Oracle: scipy's maximum bipartite matching of all pairs of equal length."""
    from scipy.sparse import csr_array
    from scipy.sparse.csgraph import maximum_bipartite_matching

    i, j = m.length_match(lengths_in, lengths_out, seed)
    equal = np.equal.outer(lengths_in, lengths_out)
    assert equal[i, j].all()
    assert len(set(i)) == len(i) == len(set(j)) == (maximum_bipartite_matching(csr_array(equal)) >= 0).sum()


def test_length_match_draws_within_ties():
    """Oracle: one of ten equally long prompts has one partner; over seeds each is taken about equally often."""
    taken = [int(m.length_match([7] * 10, [7, 9], seed)[0][0]) for seed in range(1000)]
    assert np.bincount(taken).min() > 60
    assert taken == [int(m.length_match([7] * 10, [7, 9], seed)[0][0]) for seed in range(1000)]


def test_bad_scores_are_refused():
    """Oracle: the message a user should read."""
    with pytest.raises(InputError, match="scores_out contains NaN at position 1"):
        m.auroc([1.0], [1.0, np.nan])
    with pytest.raises(InputError, match="scores_in must be a non-empty vector"):
        m.fpr95([], [1.0])
