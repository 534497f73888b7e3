"""Oracle: vmoer.numerics.integrals in float64, which writes the samples out; torch.topk for the choice."""

import kernel_references as references
import pytest
import torch
from kernel_cases import DEVICE, TOLERANCE, Case, assert_same_experts, cases, relative_error

from vmoer.numerics import integrals, noise
from vmoer.numerics.gaussians import Scaled
from vmoer.numerics.kernels import Ask, low_rank


@pytest.mark.parametrize("shape", [("token", 1, 4), ("point", 2, 4)], ids=str)
@pytest.mark.parametrize("case", cases(512), ids=str)
def test_average(case: Case, shape: tuple[str, int, int]) -> None:
    eps_SN = noise.sobol_normal(16, case.experts, seed=1).to(DEVICE)
    got = low_rank.average(case.mean_TN, case.log_sd_TN, None, eps_SN, 1.25, shape=shape).logits_TN
    expected = references.low_rank(case.mean_TN, case.log_sd_TN, None, eps_SN, 1.25)
    assert relative_error(got, expected).max() < TOLERANCE


@pytest.mark.parametrize("log_sd", [0.0, 2.5])
def test_sigmoid(log_sd: float) -> None:
    case = Case(3, 24, mean=8.0, log_sd=log_sd)
    eps_SN = noise.sobol_normal(16, 24, seed=3).to(DEVICE)
    got = low_rank.average(case.mean_TN, case.log_sd_TN, None, eps_SN, sigmoid=True).logits_TN.double()
    expected = references.low_rank(case.mean_TN, case.log_sd_TN, None, eps_SN, sigmoid=True)
    for sign in (1, -1):
        log_score, log_expected = (torch.nn.functional.logsigmoid(sign * x) for x in (got, expected))
        assert relative_error(log_score, log_expected).max() < TOLERANCE


@pytest.mark.parametrize(("k", "normalise"), [(1, False), (16, True), (6, False)])
@pytest.mark.parametrize("shape", [("token", 1, 4), ("point", 4, 4), ("point", 1, 1)])
def test_choice_shift_and_own_logits(k: int, normalise: bool, shape: tuple[str, int, int]) -> None:
    case = Case(5, 40)
    eps_SN = noise.sobol_normal(8, 40, seed=4).to(DEVICE)
    shift_TN = 0.3 * case.mean_TN.flip(0)
    got = low_rank.average(
        case.mean_TN,
        case.log_sd_TN,
        None,
        eps_SN,
        shift_TN=shift_TN,
        own_TN=case.mean_TN,
        ask=Ask(k, normalise),
        shape=shape,
    )
    log_p_TN = references.low_rank(case.mean_TN.double() + shift_TN.double(), case.log_sd_TN, None, eps_SN)
    expected = log_p_TN + torch.logsumexp(case.mean_TN.double(), -1, keepdim=True)
    assert relative_error(got.logits_TN, expected).max() < TOLERANCE
    assert got.weights_TK is not None
    assert got.indices_TK is not None
    assert_same_experts(got.indices_TK, log_p_TN, TOLERANCE)
    weights_TK = log_p_TN.exp().gather(-1, got.indices_TK)
    if normalise:
        weights_TK = weights_TK / weights_TK.sum(-1, keepdim=True)
    torch.testing.assert_close(got.weights_TK.double(), weights_TK, rtol=2 * TOLERANCE, atol=0)


def test_scaled_posterior_is_the_same_kernel() -> None:
    """Laplace's v_t B: one deviation a token, points F eps."""
    case = Case(4, 12)
    factor_NN = torch.linalg.cholesky(torch.eye(12) + 0.3).to(DEVICE)
    scale_T = torch.tensor([0.0, 0.1, 1.0, 25.0], device=DEVICE)
    eps_SN = noise.sobol_normal(16, 12, seed=5).to(DEVICE)
    log_sd_TN = (0.5 * scale_T.log()).unsqueeze(-1).expand(-1, 12)
    got = low_rank.average(case.mean_TN, log_sd_TN, None, eps_SN @ factor_NN.mT).logits_TN
    q = Scaled(case.mean_TN.double(), scale_T.double(), factor_NN.double())
    assert relative_error(got, integrals.log_expected_softmax(q, eps_SN.double())).max() < TOLERANCE
