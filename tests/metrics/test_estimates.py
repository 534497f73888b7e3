"""Oracles: the metrics of the questions of each draw, repeated as often as drawn, and Gaussians whose AUROC is known."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import norm

from vmoer import metrics as m
from vmoer.errors import InputError
from vmoer.metrics import calibration, ood, selective
from vmoer.metrics.estimates import calibration as calibration_estimates
from vmoer.metrics.estimates import detection, multiplicities, over_seeds
from vmoer.metrics.resampling import percentiles
from vmoer.metrics.tally import Tally

DETECTION = ("auroc", "auprc", "fpr95")


@settings(deadline=None, derandomize=True, max_examples=40)
@given(
    st.lists(st.tuples(st.integers(1, 8), st.sampled_from([0.0, 0.5, 1.0])), min_size=2, max_size=40),
    st.integers(0, 99),
)
def test_a_draw_is_the_metric_of_its_questions(drawn, seed):
    """Oracle: the metric on the questions of each draw, repeated as often as drawn; ties are common."""
    confidence, correct = np.array([c / 8 for c, _ in drawn]), np.array([y for _, y in drawn])
    counts = multiplicities((len(drawn),), 5, seed)
    tally = Tally(confidence, correct, counts)
    for d, count in enumerate(counts):
        c, y = np.repeat(confidence, count), np.repeat(correct, count)
        for name in ("ece", "mce", "debiased_ece"):
            assert getattr(calibration, f"{name}_of")(tally)[d] == pytest.approx(getattr(m, name)(c, y), abs=1e-6)
        for name in ("aurc", "augrc"):
            assert getattr(selective, f"{name}_of")(tally)[d] == pytest.approx(getattr(m, name)(c, 1 - y))
        assert calibration.smooth_ece_of(tally)[d] == pytest.approx(m.smooth_ece(c, y), abs=4e-3)


@settings(deadline=None, derandomize=True, max_examples=40)
@given(
    st.lists(st.integers(-3, 3), min_size=1, max_size=30),
    st.lists(st.integers(-3, 3), min_size=1, max_size=30),
    st.integers(0, 99),
)
def test_a_draw_of_detection_is_the_metric_of_its_prompts(scores_in, scores_out, seed):
    """Oracle: the metric on the prompts of each draw, repeated as often as drawn; ties are common."""
    counts = multiplicities((len(scores_in), len(scores_out)), 5, seed)
    flagged = ood.flagged(scores_in, scores_out, counts)
    for d, count in enumerate(counts):
        both = np.repeat(scores_in, count[: len(scores_in)]), np.repeat(scores_out, count[len(scores_in) :])
        for name in DETECTION:
            assert getattr(ood, f"{name}_of")(flagged)[d] == pytest.approx(getattr(m, name)(*both))


def test_chunks_of_draws_are_one_series(rng, predictions):
    """Oracle: `bootstrap_metric`, which resamples the questions themselves, on 120 draws: two chunks and a part."""
    log_probs, answers = predictions(rng, 80)
    found = calibration_estimates(log_probs, answers, 120, 3)
    confidence, correct = m.confidence(log_probs), m.correct_per_question(log_probs, answers)
    for name in ("ece", "mce", "debiased_ece"):
        value, draws = found[name]
        expected = m.bootstrap_metric(getattr(m, name), confidence, correct, draws=120, seed=3)
        assert percentiles(value, draws - (draws.mean() - value), 0.95) == pytest.approx(expected, abs=1e-9)
    assert found["nll"].value == m.nll(log_probs, answers)


def test_over_seeds_draws_the_seeds_too(rng, predictions):
    """Oracle: draws of one seed are those of the estimate; equal seeds change nothing."""
    (one,) = [calibration_estimates(*predictions(rng, 50), 40, 0)["nll"]]  # type: ignore[call-arg]
    assert over_seeds([one], 0) is one
    value, draws = over_seeds([one, one], 0)
    assert value == pytest.approx(one.value)
    assert draws == pytest.approx(one.draws)


def test_detection_of_the_null_signal(rng):
    """Oracle: prompt length as the score separates by length alone, so matched for length it is at chance exactly."""
    both = rng.integers(20, 60, 600).astype(float), rng.integers(30, 70, 500).astype(float)
    found, reason = detection(both, both, 100, 0)
    assert list(found) == [name + suffix for suffix in ("", "_matched") for name in DETECTION]
    assert reason is None
    assert found["auroc"].value == m.auroc(*both) > 0.6
    assert found["auprc"].value == m.auprc(*both)
    assert found["fpr95"].value == m.fpr95(*both)
    assert found["auroc_matched"].value == 0.5
    assert (found["auroc_matched"].draws == 0.5).all()


def test_detection_without_matching_lengths(rng):
    """Oracle: by hand; no prompt of one set is as long as any of the other."""
    found, reason = detection((rng.random(300), rng.random(300)), (np.full(300, 10.0), np.full(300, 11.0)), 20, 0)
    assert list(found) == list(DETECTION)
    assert reason is not None
    assert reason.startswith("not matchable: 0 pairs")


def test_intervals_cover_the_known_auroc(rng):
    """Oracle: two unit Gaussians at distance 1 have AUROC Phi(1/sqrt 2)."""
    truth, hits = norm.cdf(np.sqrt(0.5)), 0
    for seed in range(120):
        scores = rng.normal(size=150), rng.normal(1, size=120)
        found, _ = detection(scores, (np.zeros(150), np.ones(120)), 150, seed)
        _, low, high = percentiles(*found["auroc"], 0.95)
        hits += low <= truth <= high
    assert 0.89 <= hits / 120 <= 0.99


def test_a_length_for_every_score():
    """Oracle: the message a user should read."""
    with pytest.raises(InputError, match="one length for every score"):
        detection((np.ones(1), np.ones(1)), (np.array([3.0, 4.0]), np.array([3.0])), 10, 0)
