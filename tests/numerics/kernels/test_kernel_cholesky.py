"""Oracle: vmoer.numerics.integrals in float64, which writes the factor and the samples out; torch.topk for the choice."""

import kernel_references as references
import pytest
import torch
from kernel_cases import DEVICE, INTERPRETED, TOLERANCE, Case, assert_same_experts, cases, relative_error

from vmoer.numerics import noise
from vmoer.numerics.kernels import Ask, cholesky

SHAPES = [("token", 1, 4), ("token", 2, 4), ("expert", 16, 1), ("expert", 32, 2), ("expert", 64, 4)]


@pytest.mark.parametrize("case", cases(256), ids=str)
@pytest.mark.parametrize("kind", ["token", "expert"])
def test_average(case: Case, kind: str) -> None:
    if kind == "expert" and case.experts > (40 if INTERPRETED else 256 if case.dtype == torch.bfloat16 else 64):
        pytest.skip("float32 heads never take this kernel; in the interpreter it is slow")
    eps_SN = noise.sobol_normal(32, case.experts, seed=1).to(DEVICE)
    shape = next(shape for shape in SHAPES if shape[0] == kind)
    got = cholesky.average(case.mean_TN, case.raw_TC, eps_SN, 1.25, shape=shape).logits_TN
    expected = references.cholesky(case.mean_TN, case.raw_TC, eps_SN, 1.25)
    assert relative_error(got, expected).max() < TOLERANCE


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("samples", [8, 35])
def test_every_shape_and_layout(shape: tuple[str, int, int], samples: int) -> None:
    case = Case(5, 20)
    eps_SN = noise.sobol_normal(samples, 20, seed=2).to(DEVICE)
    wide = torch.cat([torch.full_like(case.mean_TN, 9.0, dtype=case.dtype), case.raw_TC], -1)
    for raw_TC in (wide[:, 20:], wide.t().contiguous().t()[:, 20:]):
        got = cholesky.average(case.mean_TN, raw_TC, eps_SN, shape=shape).logits_TN
        expected = references.cholesky(case.mean_TN, case.raw_TC, eps_SN)
        assert relative_error(got, expected).max() < TOLERANCE


@pytest.mark.parametrize("experts", [70, 132])
def test_more_experts_than_a_tile_has_columns(experts: int) -> None:
    case = Case(3, experts)
    eps_SN = noise.sobol_normal(16, experts, seed=6).to(DEVICE)
    got = cholesky.average(case.mean_TN, case.raw_TC, eps_SN, shape=("expert", 16, 1)).logits_TN
    assert relative_error(got, references.cholesky(case.mean_TN, case.raw_TC, eps_SN)).max() < TOLERANCE


@pytest.mark.parametrize("kind", ["token", "expert"])
@pytest.mark.parametrize("log_sd", [0.0, 2.5])
def test_sigmoid(kind: str, log_sd: float) -> None:
    case = Case(3, 24, mean=8.0, log_sd=log_sd)
    eps_SN = noise.sobol_normal(16, 24, seed=3).to(DEVICE)
    shape = next(shape for shape in SHAPES if shape[0] == kind)
    got = cholesky.average(case.mean_TN, case.raw_TC, eps_SN, sigmoid=True, shape=shape).logits_TN.double()
    expected = references.cholesky(case.mean_TN, case.raw_TC, eps_SN, sigmoid=True)
    for sign in (1, -1):  # both the score and its complement
        log_score, log_expected = (torch.nn.functional.logsigmoid(sign * x) for x in (got, expected))
        assert relative_error(log_score, log_expected).max() < TOLERANCE


@pytest.mark.parametrize("shape", [SHAPES[1], SHAPES[2]], ids=str)
@pytest.mark.parametrize(("k", "normalise"), [(8, True), (6, False)])
def test_choice_shift_and_own_logits(shape: tuple[str, int, int], k: int, normalise: bool) -> None:
    case = Case(5, 40)
    eps_SN = noise.sobol_normal(16, 40, seed=4).to(DEVICE)
    shift_TN = case.log_sd_TN
    ask = Ask(k, normalise, scale=2.5)
    own_TN = case.mean_TN * 3
    got = cholesky.average(case.mean_TN, case.raw_TC, eps_SN, shift_TN=shift_TN, own_TN=own_TN, ask=ask, shape=shape)
    log_p_TN = references.cholesky(case.mean_TN.double() + shift_TN.double(), case.raw_TC, eps_SN)
    expected = log_p_TN + torch.logsumexp(own_TN.double(), -1, keepdim=True)
    assert relative_error(got.logits_TN, expected).max() < TOLERANCE
    assert got.weights_TK is not None
    assert got.indices_TK is not None
    assert_same_experts(got.indices_TK, log_p_TN, TOLERANCE)
    weights_TK = log_p_TN.exp().gather(-1, got.indices_TK)
    if normalise:
        weights_TK = weights_TK / weights_TK.sum(-1, keepdim=True)
    torch.testing.assert_close(got.weights_TK.double(), 2.5 * weights_TK, rtol=2 * TOLERANCE, atol=0)
    assert bool((got.weights_TK[:, 1:] <= got.weights_TK[:, :-1]).all())
