"""Oracles: scikit-learn, netcal, torchmetrics, relplot, direct sums, and simulations whose calibration is known."""

import time
import warnings

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.special import log_softmax
from scipy.stats import norm
from sklearn.metrics import accuracy_score, log_loss

from vmoer import metrics as m
from vmoer.errors import InputError
from vmoer.evaluation.predictions import entropy

with warnings.catch_warnings():  # their imports warn
    warnings.simplefilter("ignore")
    import relplot
    from netcal.metrics import ECE as NetcalECE
    from netcal.metrics import MCE as NetcalMCE
    from torchmetrics.functional.classification import binary_calibration_error

seeds = st.integers(0, 2**32 - 1)
# A coarse grid, so that ties and bin edges are common.
pairs = st.lists(st.tuples(st.integers(0, 30).map(lambda k: k / 30), st.booleans()), min_size=1, max_size=40)


def test_scores_against_scikit_learn(rng, predictions):
    """Oracle: sklearn's log_loss and accuracy_score, and the Brier sum over one-hot answers written out."""
    log_probs, answers = predictions(rng, 300)
    one_hot = np.eye(4)[answers]
    assert m.nll(log_probs, answers) == pytest.approx(log_loss(answers, np.exp(log_probs), labels=range(4)))
    assert m.accuracy(log_probs, answers) == accuracy_score(answers, log_probs.argmax(1))
    assert m.brier(log_probs, answers) == pytest.approx(((np.exp(log_probs) - one_hot) ** 2).sum(1).mean())


def test_padding_changes_nothing(rng, predictions):
    """Oracle: the same questions in their own array, without the padded option."""
    (three, a), (four, b) = predictions(rng, 20, options=3), predictions(rng, 20, options=4)
    log_probs, answers = m.pad([*three, *four]), np.r_[a, b]
    assert log_probs.shape == (40, 4)
    assert np.isneginf(log_probs[:20, 3]).all()
    for metric in (m.nll, m.brier, m.accuracy):
        assert metric(log_probs, answers) == pytest.approx((metric(three, a) + metric(four, b)) / 2)
    assert np.isneginf(m.apply_temperature(log_probs, 3.0)[:20, 3]).all()


def test_ties_share_the_credit():
    """Oracle: the expectation of a random choice among equally probable options."""
    assert m.correct_per_question(np.log([[0.5, 0.5], [0.9, 0.1]]), [1, 0]).tolist() == [0.5, 1.0]


@given(seeds)
def test_options_and_questions_may_be_permuted(seed):
    """Oracle: invariance. Log-probabilities on a coarse grid, so that ties occur."""
    rng = np.random.default_rng(seed)
    log_probs = log_softmax(rng.integers(0, 3, size=(30, 4)).astype(float), axis=1)
    answers, options, order = rng.integers(4, size=30), rng.permutation(4), rng.permutation(30)
    moved, moved_answers = log_probs[order][:, options], np.argsort(options)[answers][order]
    for metric in (m.nll, m.brier, m.accuracy, m.fit_temperature):
        assert metric(moved, moved_answers) == pytest.approx(metric(log_probs, answers), rel=1e-6)
    before = m.confidence(log_probs), m.correct_per_question(log_probs, answers)
    after = m.confidence(moved), m.correct_per_question(moved, moved_answers)
    for binned in (m.ece, m.mce, m.smooth_ece):
        assert binned(*after) == pytest.approx(binned(*before), abs=1e-9)
    # A root near 0 magnifies rounding; its square does not.
    assert m.debiased_ece(*after) ** 2 == pytest.approx(m.debiased_ece(*before) ** 2, abs=1e-12)


def test_the_order_of_a_sum_breaks_no_tie(rng, predictions):
    """Oracle: the same probabilities in another order, which another machine's sums may take too: equally sure, to the bit."""
    log_probs, _ = predictions(rng, 2000)
    turned = np.roll(log_probs, 1, axis=1)
    for own, other in ((log_probs, turned), (m.apply_temperature(log_probs, 1.7), m.apply_temperature(turned, 1.7))):
        assert (m.confidence(own) == m.confidence(other)).all()
        assert (entropy(own) == entropy(other)).all()


def test_ece_and_mce_against_netcal_and_torchmetrics(rng, calibrated):
    """Oracle: netcal and torchmetrics, away from the bin edges, where their conventions differ from ours."""
    confidence, correct = calibrated(rng, 500)
    tensors = torch.tensor(confidence), torch.tensor(correct).long()
    assert m.ece(confidence, correct) == pytest.approx(NetcalECE(bins=15).measure(confidence, correct))
    assert m.mce(confidence, correct) == pytest.approx(NetcalMCE(bins=15).measure(confidence, correct))
    # torchmetrics' binary task takes the probability as confidence, and the label as correctness.
    assert m.ece(confidence, correct) == pytest.approx(float(binary_calibration_error(*tensors, n_bins=15)), abs=1e-6)


def test_edges_of_the_bins():
    """Oracle: by hand, for the bins (a, b]. 0 joins the first bin, 0.2 = 3/15 closes the third, and 1 the last."""
    assert m.reliability([0.0, 0.01, 0.19, 0.2, 0.21, 1.0], [0] * 6).size.tolist() == [2, 0, 2, 1, *[0] * 10, 1]
    # netcal's bins are [a, b): it parts 0.19 from 0.2 and says 0.505.
    assert m.ece([0.19, 0.2], [1, 0]) == pytest.approx(abs(1 - 0.39) / 2)
    # torchmetrics puts 1.0 into a bin of its own, past the last, and says 0.525.
    assert m.ece([1.0, 0.95], [0, 1]) == pytest.approx(abs(1 - 1.95) / 2)
    assert m.ece([1.0] * 7, [0] * 7) == m.mce([1.0] * 7, [0] * 7) == m.smooth_ece([1.0] * 7, [0] * 7) == 1.0
    assert m.debiased_ece([1.0] * 7, [0] * 7) == pytest.approx(1.0)
    assert m.ece([1.0] * 7, [1] * 7) == m.smooth_ece([1.0] * 7, [1] * 7) == m.debiased_ece([0.0] * 7, [0] * 7) == 0.0


@given(pairs)
def test_ece_is_a_fraction_and_at_most_mce(drawn):
    """Oracle: bounds that hold for any data, and the loop over bins written out."""
    confidence, correct = np.array(drawn, dtype=float).T
    total = 0.0
    for b in range(15):
        inside = (confidence > b / 15) & (confidence <= (b + 1) / 15) | ((b == 0) & (confidence == 0))
        total += abs((correct[inside] - confidence[inside]).sum()) / len(confidence)
    assert m.ece(confidence, correct) == pytest.approx(total)
    assert 0 <= m.ece(confidence, correct) <= m.mce(confidence, correct) + 1e-12 <= 1 + 1e-9
    assert 0 <= m.smooth_ece(confidence, correct) <= 1


@pytest.mark.parametrize("doubt", [1.0, 0.5, 0.2])
def test_smooth_ece_against_relplot(rng, calibrated, doubt):
    """Oracle: the authors' relplot, up to its grid of 1/1024 in the bandwidth."""
    confidence, correct = calibrated(rng, 800)
    overconfident = 1 - doubt * (1 - confidence)
    assert m.smooth_ece(overconfident, correct) == pytest.approx(relplot.smECE(overconfident, correct), abs=1e-3)


@pytest.mark.parametrize("shift", [0.0, 0.3])
def test_smooth_ece_is_its_own_bandwidth(rng, calibrated, shift):
    """Oracle: the integral with the reflected Gaussian as a sum over mirror images, at the bandwidth returned.

    With the shift, most confidences are exactly 1. There relplot differs (0.178 against 0.162 at n = 800): it mirrors
    all grid points but the last, so a question at 0 or 1 counts half.
    """
    confidence, correct = calibrated(rng, 200)
    confidence = np.minimum(confidence + shift, 1)
    width, points = m.smooth_ece(confidence, correct), (np.arange(2000) + 0.5) / 2000
    mirrored = [sign * confidence + 2 * k for k in range(-1, 2) for sign in (1, -1)]
    kernel = sum(norm.pdf(points[:, None], image, width) for image in mirrored)
    assert np.abs(kernel @ (correct - confidence) / 200).mean() == pytest.approx(width, abs=1e-4)


@pytest.mark.parametrize(("n", "runs"), [(500, 600), (5000, 200)])
def test_debiased_ece_is_near_zero_for_calibrated_predictions(rng, calibrated, n, runs):
    """Oracle: the simulation is calibrated, so 0. The plain ECE of the same data is not near it."""
    data = [calibrated(rng, n) for _ in range(runs)]
    debiased, plain = np.array([[m.debiased_ece(*d), m.ece(*d)] for d in data]).T
    signed_squares = np.sign(debiased) * debiased**2
    assert abs(signed_squares.mean()) < 3 * signed_squares.std() / np.sqrt(runs)  # exactly unbiased before the root
    assert abs(debiased.mean()) < 0.006 * np.sqrt(500 / n)
    assert plain.mean() == pytest.approx(0.040 * np.sqrt(500 / n), rel=0.08)


def test_debiased_ece_finds_a_known_error(rng):
    """Oracle: right with probability c² at confidence c, so the squared error is the mean of (c - c²)²."""
    confidence = rng.beta(6, 1.5, (200, 500))
    truth = np.sqrt(((confidence - confidence**2) ** 2).mean())
    found = [m.debiased_ece(c, rng.random(500) < c**2) for c in confidence]
    assert np.mean(found) == pytest.approx(truth, abs=0.006)


def test_noise_floor_of_500_questions(rng, calibrated):
    """Oracle: independent simulations of n = 500 and Beta(6, 1.5): mean 0.040, 95th percentile 0.058 to 0.060.

    They draw new confidences each time; given the confidences, the percentile varies by 0.0015 around its mean.
    """
    confidence, correct = calibrated(rng, 500)
    floor = m.noise_floor(confidence, correct)
    assert floor.mean == pytest.approx(0.040, abs=0.002)
    assert floor.high == pytest.approx(0.059, abs=0.004)
    assert floor == m.noise_floor(confidence, correct)
    assert floor != m.noise_floor(confidence, correct, seed=1)
    assert m.noise_floor(confidence).observed is None
    wrong = m.noise_floor(confidence, np.zeros(500), draws=99)
    assert wrong.observed == pytest.approx(confidence.mean())
    assert wrong.p_value == 1 / 100


def test_p_values_of_calibrated_predictions_are_uniform(rng, calibrated):
    """Oracle: under the null a p-value is below 0.1 in 10% of data sets."""
    values = [m.noise_floor(*calibrated(rng, 200), draws=99, seed=s).p_value for s in range(300)]  # type: ignore[misc]
    assert np.mean(np.array(values) <= 0.1) == pytest.approx(0.1, abs=0.05)


def test_noise_floor_is_fast(rng, calibrated):
    """Oracle: the processor's clock. 1000 draws at n = 5000 take about 0.1 s."""
    data = calibrated(rng, 5000)
    start = time.process_time()
    m.noise_floor(*data)
    assert time.process_time() - start < 1.5


def test_reliability_bins_and_band(rng, calibrated):
    """Oracle: ECE recomputed from the bins, and 95% of a calibrated model's bins lie in the band."""
    inside = total = 0
    for _ in range(200):
        confidence, correct = calibrated(rng, 500)
        bins = m.reliability(confidence, correct)
        full = bins.size > 0
        gaps = np.abs(bins.accuracy - bins.confidence)[full]
        assert (bins.size[full] / 500) @ gaps == pytest.approx(m.ece(confidence, correct))
        inside += ((bins.low <= bins.accuracy) & (bins.accuracy <= bins.high))[full].sum()
        total += full.sum()
    assert 0.94 < inside / total < 0.99  # a discrete band covers a little more than its level


@pytest.mark.parametrize("truth", [0.5, 1.0, 4.9])
def test_temperature_is_recovered(rng, predictions, truth):
    """Oracle: answers drawn at a known temperature."""
    assert m.fit_temperature(*predictions(rng, 20000, temperature=truth)) == pytest.approx(truth, rel=0.05)


def test_temperature_against_lbfgs(rng, predictions):
    """Oracle: torch's LBFGS on the cross-entropy of the scaled logits, with questions of two and four options."""
    (two, a), (four, b) = predictions(rng, 100, 2, 2.0), predictions(rng, 200, 4, 3.0)
    log_probs, answers = m.pad([*two, *four]), np.r_[a, b]
    inverse = torch.ones(1, dtype=torch.float64, requires_grad=True)
    optimiser = torch.optim.LBFGS([inverse], max_iter=100, tolerance_grad=1e-10, tolerance_change=1e-14)
    logits = torch.tensor(log_probs).clamp(min=-1e4)  # autograd has no 0 * inf

    def closure() -> torch.Tensor:
        optimiser.zero_grad()
        loss = torch.nn.functional.cross_entropy(logits * inverse, torch.tensor(answers))
        loss.backward()
        return loss

    optimiser.step(closure)
    temperature = m.fit_temperature(log_probs, answers)
    assert temperature == pytest.approx(1 / inverse.item(), rel=1e-5)
    scaled = m.apply_temperature(log_probs, temperature)
    assert np.exp(scaled).sum(1) == pytest.approx(1)
    assert m.nll(scaled, answers) == pytest.approx(closure().item())


def test_each_half_is_scaled_by_the_temperature_of_the_other(rng, predictions):
    """Oracle: calibrated log-probabilities, half of them doubled, half of them trebled."""
    log_probs, answers = predictions(rng, 4000)
    halves = {2.0: slice(0, None, 2), 3.0: slice(1, None, 2)}
    stretched = np.empty_like(log_probs)
    for factor, half in halves.items():
        stretched[half] = log_softmax(log_probs[half] * factor, axis=1)
    scaled = m.cross_tempered(stretched, answers)
    for factor, half in halves.items():
        temperature = m.fit_temperature(stretched[halves[5.0 - factor]], answers[halves[5.0 - factor]])
        assert temperature == pytest.approx(5.0 - factor, rel=0.1)
        np.testing.assert_array_equal(scaled[half], m.apply_temperature(stretched[half], temperature))


def test_temperature_stays_in_its_bounds():
    """Oracle: always right wants T = 0, worse than chance wants T = infinity."""
    log_probs = np.log([[0.7, 0.3], [0.6, 0.4]])
    assert m.fit_temperature(log_probs, [0, 0]) == 0.05
    assert m.fit_temperature(log_probs, [1, 1]) == 20.0
    with pytest.raises(InputError, match="positive"):
        m.apply_temperature(log_probs, 0.0)


@pytest.mark.parametrize(
    ("log_probs", "answers", "message"),
    [
        (np.empty((0, 4)), [], "shape"),
        (np.log([0.5, 0.5]), [0], "shape"),
        ([[np.nan, 0.0]], [0], "NaN"),
        ([[3.0, 1.0]], [0], "not normalised"),
        ([[-np.inf, -np.inf]], [0], "not normalised"),
        (np.log([[0.5, 0.5]]), [2], "answer 2 of question 0"),
        (np.log([[0.5, 0.5]]), [-1], "answer -1"),
        ([[0.0, -np.inf]], [1], "not one of its options"),
        (np.log([[0.5, 0.5]]), [0, 1], "1 questions"),
        (np.log([[0.5, 0.5]]), [0.0], "integers"),
    ],
)
def test_bad_predictions_are_refused(log_probs, answers, message):
    """Oracle: the message a user should read."""
    with pytest.raises(InputError, match=message):
        m.nll(log_probs, answers)


@pytest.mark.parametrize(
    ("confidence", "correct", "message"),
    [([], [], "non-empty"), ([0.5], [1, 0], "lengths"), ([np.nan], [1], "NaN"), ([1.2], [1], r"\[0, 1\]")],
)
@pytest.mark.parametrize("metric", [m.ece, m.mce, m.debiased_ece, m.smooth_ece, m.noise_floor, m.reliability])
def test_bad_confidences_are_refused(metric, confidence, correct, message):
    """Oracle: the message a user should read."""
    with pytest.raises(InputError, match=message):
        metric(confidence, correct)


def test_no_questions_cannot_be_padded():
    """Oracle: the message a user should read."""
    with pytest.raises(InputError, match="no questions"):
        m.pad([])
