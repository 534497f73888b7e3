"""Oracle: vmoer.numerics.integrals in float64, which writes the samples out; torch.topk for the choice."""

import kernel_references as references
import pytest
import torch
from kernel_cases import DEVICE, TOLERANCE, Case, assert_same_experts, cases, relative_error

from vmoer.numerics import noise
from vmoer.numerics.kernels import Ask, low_rank

SHAPES = pytest.mark.parametrize("shape", [("token", 1, 4), ("token", 4, 1)], ids=str)


@SHAPES
@pytest.mark.parametrize("case", cases(512), ids=str)
def test_average(case: Case, shape: tuple[str, int, int]) -> None:
    if shape[2] == 1 and case.experts > 128:
        shape = ("token", 4, 8)  # a warp would not hold a token
    eps_SE = noise.sobol_normal(32, case.experts + 8, seed=1).to(DEVICE)
    factor_TNR = case.factor_TNR(8)
    got = low_rank.average(case.mean_TN, case.log_sd_TN, factor_TNR, eps_SE, 1.25, shape=shape).logits_TN
    expected = references.low_rank(case.mean_TN, case.log_sd_TN, factor_TNR, eps_SE, 1.25)
    assert relative_error(got, expected).max() < TOLERANCE


@SHAPES
@pytest.mark.parametrize(("rank", "samples"), [(1, 8), (16, 35), (20, 16)])
def test_every_rank_and_layout(rank: int, samples: int, shape: tuple[str, int, int]) -> None:
    case = Case(5, 24)
    eps_SE = noise.sobol_normal(samples, 24 + rank, seed=2).to(DEVICE)
    factor_TNR = case.factor_TNR(rank)
    column_major = factor_TNR.reshape(5, -1).t().contiguous().t().unflatten(-1, (24, rank))
    for factor in (factor_TNR, column_major):
        got = low_rank.average(case.mean_TN, case.log_sd_TN, factor, eps_SE, shape=shape).logits_TN
        expected = references.low_rank(case.mean_TN, case.log_sd_TN, factor_TNR, eps_SE)
        assert relative_error(got, expected).max() < TOLERANCE


@SHAPES
def test_sigmoid(shape: tuple[str, int, int]) -> None:
    case = Case(3, 24, mean=8.0, log_sd=1.0)
    eps_SE = noise.sobol_normal(16, 32, seed=3).to(DEVICE)
    got = low_rank.average(case.mean_TN, case.log_sd_TN, case.factor_TNR(8), eps_SE, sigmoid=True, shape=shape)
    expected = references.low_rank(case.mean_TN, case.log_sd_TN, case.factor_TNR(8), eps_SE, sigmoid=True)
    for sign in (1, -1):
        log_score, log_expected = (torch.nn.functional.logsigmoid(sign * x) for x in (got.logits_TN.double(), expected))
        assert relative_error(log_score, log_expected).max() < TOLERANCE


@SHAPES
@pytest.mark.parametrize(("k", "normalise"), [(1, False), (8, True)])
def test_choice_shift_and_own_logits(k: int, normalise: bool, shape: tuple[str, int, int]) -> None:
    case = Case(5, 40)
    eps_SE = noise.sobol_normal(16, 48, seed=4).to(DEVICE)
    shift_TN, factor_TNR = 0.3 * case.mean_TN.flip(0), case.factor_TNR(8)
    got = low_rank.average(
        case.mean_TN,
        case.log_sd_TN,
        factor_TNR,
        eps_SE,
        shift_TN=shift_TN,
        own_TN=case.mean_TN,
        ask=Ask(k, normalise),
        shape=shape,
    )
    log_p_TN = references.low_rank(case.mean_TN.double() + shift_TN.double(), case.log_sd_TN, factor_TNR, eps_SE)
    expected = log_p_TN + torch.logsumexp(case.mean_TN.double(), -1, keepdim=True)
    assert relative_error(got.logits_TN, expected).max() < TOLERANCE
    assert got.weights_TK is not None
    assert got.indices_TK is not None
    assert_same_experts(got.indices_TK, log_p_TN, TOLERANCE)
    weights_TK = log_p_TN.exp().gather(-1, got.indices_TK)
    if normalise:
        weights_TK = weights_TK / weights_TK.sum(-1, keepdim=True)
    torch.testing.assert_close(got.weights_TK.double(), weights_TK, rtol=2 * TOLERANCE, atol=0)
