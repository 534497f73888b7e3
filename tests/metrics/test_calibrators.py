"""Calibrators. Oracles: scikit-learn's isotonic regression and logistic regression, closed forms, and data made with a known
temperature and known biases."""

import dataclasses
import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.special import log_softmax
from sklearn.isotonic import IsotonicRegression
from sklearn.linear_model import LogisticRegression

from vmoer import metrics as m
from vmoer.errors import InputError
from vmoer.metrics.calibrators import KINDS, Isotonic, OutputTemperature, Unchanged, VectorScaling, choose, fold_of


def drawn(n, options=4, temperature=1.0, biases=None, seed=0):
    """Answers that follow softmax(log p / T + b), and the p that a model would give."""
    rng = np.random.default_rng(seed)
    log_probs = log_softmax(2 * rng.normal(size=(n, options)), axis=1)
    true = np.exp(log_softmax(log_probs / temperature + (0 if biases is None else np.array(biases)), axis=1))
    answers = (true.cumsum(1) < rng.random((n, 1))).sum(1)
    return log_probs, answers, [f"q{i}" for i in range(n)]


def test_a_known_temperature_and_known_biases_are_found():
    log_probs, answers, _ = drawn(60_000, temperature=2.5, biases=(1.0, 0.0, -0.6, -0.4))
    found = VectorScaling.fit(log_probs, answers)
    assert found.temperature == pytest.approx(2.5, rel=0.03)
    assert found.biases == pytest.approx((1.0, 0.0, -0.6, -0.4), abs=0.05)
    log_probs, answers, _ = drawn(60_000, temperature=0.5)
    assert OutputTemperature.fit(log_probs, answers).temperature == pytest.approx(0.5, rel=0.03)


def test_vector_scaling_of_two_options_is_logistic_regression():
    """log p'_1/p'_0 = (log p_1/p_0)/T + (b_1 - b_0): one slope and one intercept."""
    log_probs, answers, _ = drawn(500, options=2, temperature=1.7, biases=(0.4, -0.4))
    odds = (log_probs[:, 1] - log_probs[:, 0])[:, None]
    oracle = LogisticRegression(C=np.inf, tol=1e-10, max_iter=1000).fit(odds, answers)
    found = VectorScaling.fit(log_probs, answers)
    assert 1 / found.temperature == pytest.approx(float(oracle.coef_[0, 0]), rel=1e-4)
    assert found.biases[1] - found.biases[0] == pytest.approx(float(oracle.intercept_[0]), abs=1e-4)
    assert np.exp(found.apply(log_probs)) == pytest.approx(oracle.predict_proba(odds), abs=1e-5)


def test_vector_scaling_matches_the_answers_in_the_mean():
    """The optimum's first-order condition: every letter is as probable in the mean as it is right."""
    log_probs, answers, _ = drawn(400, temperature=3.0, biases=(0.5, 0.0, 0.0, -0.5))
    scaled = VectorScaling.fit(log_probs, answers).apply(log_probs)
    assert np.exp(scaled).mean(0) == pytest.approx(np.bincount(answers, minlength=4) / 400, abs=1e-5)


def test_a_letter_that_is_never_right_gets_a_finite_bias():
    log_probs, answers, _ = drawn(200, options=3)
    answers = np.minimum(answers, 1)
    found = VectorScaling.fit(log_probs, answers)
    assert max(map(abs, found.biases)) <= 10
    assert np.exp(found.apply(log_probs))[:, 2].max() < 0.05


def test_isotonic_is_scikit_learns():
    log_probs, answers, _ = drawn(300, temperature=3.0)
    confidence, correct = m.confidence(log_probs), m.correct_per_question(log_probs, answers)
    oracle = IsotonicRegression(y_min=1 / 302, y_max=301 / 302, out_of_bounds="clip").fit(confidence, correct)
    found = Isotonic.fit(log_probs, answers)
    fresh, _, _ = drawn(300, seed=1)
    expected = oracle.predict(m.confidence(fresh))
    second = np.sort(np.exp(fresh), axis=1)[:, -2]
    floor = second / (1 - np.exp(fresh).max(1) + second)  # where the second option would draw level
    assert (expected > floor).mean() > 0.5
    mapped = np.exp(found.apply(fresh))
    assert mapped.max(1) == pytest.approx(np.maximum(expected, floor), abs=1e-5)
    rest = np.exp(fresh) * (np.exp(fresh) < np.exp(fresh).max(1, keepdims=True))
    left = mapped * (mapped < mapped.max(1, keepdims=True))
    assert left / left.sum(1, keepdims=True) == pytest.approx(rest / rest.sum(1, keepdims=True), abs=1e-9)


def test_isotonic_by_hand():
    """f(0.6) = 0.5: the other options had 3 : 1 of 0.4, and have it of 0.5. Two that tie get f each."""
    found = Isotonic((0.4, 0.8), (0.4, 0.6))
    mapped = np.exp(found.apply(np.log([[0.6, 0.3, 0.1], [0.4, 0.4, 0.2]])))
    assert mapped[0] == pytest.approx([0.5, 0.375, 0.125])
    assert mapped[1] == pytest.approx([0.4, 0.4, 0.2])
    uniform = np.log(np.full((1, 3), 1 / 3))
    assert found.apply(uniform) == pytest.approx(uniform)


@given(st.sampled_from(sorted(KINDS)), st.integers(0, 2**20), st.floats(0.01, 60), st.booleans())
def test_every_map_gives_a_distribution_over_the_same_options(kind, seed, spread, half):
    """Confident, tied and rounded probabilities included; options that a question does not have stay out."""
    rng = np.random.default_rng(seed)
    logits = spread * rng.normal(size=(60, 4))
    logits[rng.random(60) < 0.3, 3] = -np.inf
    logits = logits.astype(np.float16 if half else np.float64).astype(np.float64)
    log_probs = log_softmax(logits, axis=1)
    answers = rng.integers(3, size=60)
    mapped = KINDS[kind].fit(log_probs, answers).apply(log_probs)
    assert np.exp(mapped).sum(1) == pytest.approx(1)
    assert (np.isneginf(mapped) == np.isneginf(log_probs)).all()
    if kind != "vector":  # the order of the options stays, ties included
        assert m.correct_per_question(mapped, answers) == pytest.approx(m.correct_per_question(log_probs, answers))


def test_the_right_kind_is_chosen_and_of_equals_the_simplest():
    assert choose(*drawn(2000)).calibrator.kind in ("none", "temperature")
    assert choose(*drawn(2000, temperature=3.0)).calibrator.kind == "temperature"
    assert choose(*drawn(2000, temperature=3.0, biases=(1.0, 0, 0, -1.0))).calibrator.kind == "vector"
    rng = np.random.default_rng(0)
    uniform = np.log(np.full((100, 4), 0.25))  # nothing can be made of these but by biases
    answers = np.tile(np.arange(4), 25)
    assert choose(uniform, answers, [str(i) for i in rng.permutation(100)]).calibrator == Unchanged()


def test_right_where_confidence_lies_in_steps_isotonic_is_chosen():
    """Sure answers are right half the time, unsure ones nearly always: no temperature can say that."""
    rng = np.random.default_rng(0)
    top = rng.uniform(0.4, 0.99, 3000)
    rest = rng.dirichlet(np.ones(3), 3000) * (1 - top)[:, None] * 0.999 + 1e-9
    p = np.column_stack([top, rest])
    p /= p.sum(1, keepdims=True)
    right = rng.random(3000) < np.where(top > 0.9, 0.95, 0.55)
    answers = np.where(right, 0, 1 + (rest.cumsum(1) / rest.sum(1, keepdims=True) < rng.random((3000, 1))).sum(1))
    order = rng.permuted(np.tile(np.arange(4), (3000, 1)), axis=1)  # so that no letter is the most probable one
    p = np.take_along_axis(p, order, 1)
    answers = (order == answers[:, None]).argmax(1)
    assert choose(np.log(p), answers, [str(i) for i in range(3000)]).calibrator.kind == "isotonic"


def test_cross_validation_by_hand():
    """Each fold's NLL by a temperature fitted on the others, summed by hand."""
    log_probs, answers, ids = drawn(100, temperature=2.0)
    found, fold = choose(log_probs, answers, ids), fold_of(ids)
    total = 0.0
    for one in range(10):
        temperature = m.fit_temperature(log_probs[fold != one], answers[fold != one])
        total += m.nll_per_question(
            m.apply_temperature(log_probs[fold == one], temperature), answers[fold == one]
        ).sum()
    assert found.nll["temperature"] == pytest.approx(total / 100, abs=1e-8)
    assert found.nll["none"] == pytest.approx(m.nll(log_probs, answers), abs=1e-8)
    assert m.nll(found.held_out, answers) == pytest.approx(found.nll[found.calibrator.kind], abs=1e-8)


def test_folds_are_even_and_do_not_depend_on_the_order():
    ids = [f"q{i}" for i in range(43)]
    fold, turned = fold_of(ids), fold_of(ids[::-1])
    assert (fold == turned[::-1]).all()
    assert set(np.bincount(fold)) == {4, 5}
    assert (fold != fold_of(ids, seed=1)).any()


def test_too_few_questions():
    log_probs, answers, ids = drawn(49)
    found = choose(log_probs, answers, ids)
    assert found.nll["vector"] is None
    assert found.nll["isotonic"] is None
    assert found.nll["temperature"] is not None
    for kind in ("vector", "isotonic"):
        with pytest.raises(InputError, match="needs at least 50 validation questions, and there are 49: choose temper"):
            choose(log_probs, answers, ids, kind)
    assert choose(log_probs[:1], answers[:1], ids[:1]).calibrator == Unchanged()
    with pytest.raises(InputError, match="unknown calibrator 'isotone'; did you mean isotonic"):
        choose(log_probs, answers, ids, "isotone")


def test_numbers_out_of_bounds_are_refused():
    wrong = [
        lambda: OutputTemperature(0.0),
        lambda: OutputTemperature(float("nan")),
        lambda: OutputTemperature(True),
        lambda: VectorScaling(1.0, (1e9, 0.0)),
        lambda: VectorScaling(100.0, (0.0, 0.0)),
        lambda: Isotonic((), ()),
        lambda: Isotonic((0.5, 0.4), (0.1, 0.2)),
        lambda: Isotonic((0.4, 0.5), (0.3, 0.2)),
        lambda: Isotonic((0.4, 0.5), (0.3, 1.0)),
        lambda: Isotonic((0.4,), (0.3, 0.4)),
    ]
    for make in wrong:
        with pytest.raises(InputError):
            make()
    with pytest.raises(InputError, match="4 options, and there are biases for 2"):
        VectorScaling(1.0, (0.0, 0.0)).apply(np.log(np.full((1, 4), 0.25)))


def test_a_fitted_map_is_frozen_and_the_same_every_time():
    data = drawn(200, temperature=2.0)[:2]
    for kind, _ in itertools.product(KINDS.values(), range(2)):
        found = kind.fit(*data)
        assert found == kind.fit(*data)
        with pytest.raises(dataclasses.FrozenInstanceError):
            found.temperature = 2.0
