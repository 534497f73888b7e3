"""Oracles: the mean over all orders of tied questions, Traub et al.'s closed form, and small cases by hand."""

from itertools import pairwise, permutations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binom, binomtest
from sklearn.metrics import roc_auc_score

from vmoer import metrics as m
from vmoer.errors import InputError
from vmoer.metrics.selective import STARTS, accepted, clopper_pearson, promised_threshold, upper_bound

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


# -- thresholds with a promise -----------------------------------------------------------------------------------------


@given(st.integers(1, 200), st.data())
def test_clopper_pearson_against_scipy(n, drawn):
    """Oracle: scipy's exact interval; the one-sided bound by its definition."""
    k = drawn.draw(st.integers(0, n))
    expected = binomtest(k, n).proportion_ci(0.9, method="exact")
    found = clopper_pearson(k, n, 0.9)
    assert (found.value, found.low, found.high) == pytest.approx((k / n, expected.low, expected.high))
    if k < n:
        assert binom.cdf(k, n, upper_bound(k, n, 0.03)) == pytest.approx(0.03)


def by_hand(scores, errors, risk, confidence):
    """Every sequence walked limit by limit, each limit tested on the questions below it."""
    limits = [*sorted(set(scores)), np.inf]

    def holds(limit):
        below = [e > 0 for s, e in zip(scores, errors, strict=True) if s < limit]
        return binom.cdf(sum(below), len(below), risk) <= (1 - confidence) / len(STARTS)

    best = None
    for share in STARTS:
        limit = max(x for x in limits if sum(s < x for s in scores) <= int(share * len(scores)))
        while holds(limit):
            best = limit if best is None else max(best, limit)
            if limit == np.inf:
                break
            limit = limits[limits.index(limit) + 1]
    return best


@given(st.lists(st.tuples(st.integers(0, 20), st.sampled_from([0, 0, 0, 0, 0, 0.5, 1])), min_size=1, max_size=120))
def test_promised_threshold_against_walking_by_hand(drawn):
    scores, errors = np.array(drawn, dtype=float).T
    limit = by_hand(scores.tolist(), errors.tolist(), 0.3, 0.8)
    if limit is None:
        with pytest.raises(InputError, match=r"no threshold promises risk 0\.3"):
            promised_threshold(scores, errors, 0.3, 0.8)
        return
    found = promised_threshold(scores, errors, 0.3, 0.8)
    below = scores < limit
    assert np.array_equal(scores <= found.threshold, below)
    assert (found.accepted, found.errors) == (below.sum(), (errors[below] > 0).sum())
    assert found.risk <= 0.3 + 1e-12


WORLDS = {
    # P(wrong | score s), s uniform on [0, 1], and the risk of answering all with s <= t: its mean over [0, t]
    "a good score": (lambda s: s**2, lambda t: t**2 / 3),
    "a useless score, just above the risk": (lambda s: np.full_like(s, 0.11), lambda t: 0.11),
    "sure and wrong": (lambda s: np.where(s < 0.3, 0.2, 0.05), lambda t: (0.05 * t + 0.15 * min(t, 0.3)) / t),
}


@pytest.mark.parametrize("world", WORLDS)
def test_the_promise_is_kept(world):
    """Oracle: the true risk of the chosen threshold. Too large in at most 1 - confidence of all validation sets."""
    wrong, risk_of = WORLDS[world]
    rng, trials, broken, naive, reached = np.random.default_rng(0), 400, 0, 0, 0
    for _ in range(trials):
        s = rng.random(400)
        errors = (rng.random(400) < wrong(s)).astype(float)
        try:
            naive += risk_of(1 - m.threshold_for_risk(1 - s, errors, 0.1)) > 0.1
            found = promised_threshold(s, errors, 0.1, confidence=0.8)
        except InputError:
            continue
        reached += 1
        broken += risk_of(min(found.threshold, 1)) > 0.1
    assert broken <= binom.ppf(0.999, trials, 0.2)
    assert naive > 0.2 * trials  # what the promise is needed for
    if world == "a good score":
        assert reached > 0.9 * trials


def test_what_cannot_be_promised_is_said():
    """Oracle: 20 right answers bound the risk by 1 - tail^(1/20), tail = 0.05 / 5; so many questions promise no less."""
    lowest = 1 - 0.01 ** (1 / 20)
    with pytest.raises(
        InputError, match=rf"lowest that can be promised is {lowest:.3g}, answering 20 of them with 0 errors"
    ):
        promised_threshold(np.arange(20), np.zeros(20), 0.1)
    all_of_them = promised_threshold(np.arange(20), np.zeros(20), lowest + 1e-9)
    assert (all_of_them.accepted, all_of_them.coverage, all_of_them.threshold) == (20, 1, np.finfo(float).max)
    for bad in (0, 1, -0.1, float("nan")):
        with pytest.raises(InputError, match="must lie between 0 and 1"):
            promised_threshold([1.0], [0.0], bad)
    with pytest.raises(InputError, match="different lengths"):
        promised_threshold([1.0, 2.0], [0.0], 0.1)


def test_accepted_by_hand():
    """Oracle: three of five answers at or below the threshold, one of them half wrong; none below zero."""
    found = accepted([0.1, 0.2, 0.3, 0.4, 0.5], [0, 0.5, 0, 1, 1], 0.3)
    assert (found.questions, found.accepted, found.errors) == (5, 3, 1)
    assert (found.coverage.value, found.risk.value) == (0.6, pytest.approx(1 / 3))  # type: ignore[comparison-overlap]
    assert found.risk.high == pytest.approx(binomtest(1, 3).proportion_ci(0.95, method="exact").high)
    assert accepted([1.0], [1.0], 0.0).risk == (0, 0, 1)
