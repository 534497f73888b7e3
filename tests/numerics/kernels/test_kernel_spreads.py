"""Oracles: the entropy of a float64 softmax, and the trace of the covariance written out in float64."""

import kernel_references as references
import pytest
import torch
from kernel_cases import DEVICE, Case, covariance

from vmoer.numerics.kernels.spreads import entropy_and_trace

DTYPES = [torch.float32, torch.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["diagonal", "factored", "triangle"])
@pytest.mark.parametrize(("tokens", "experts"), [(1, 4), (37, 40), (19, 65), (70, 16)])
@pytest.mark.parametrize(("log_sd", "scale"), [(0.0, 1.0), (-8.0, 0.5), (3.0, 2.0)])
def test_entropy_and_trace(
    tokens: int, experts: int, kind: str, dtype: torch.dtype, log_sd: float, scale: float
) -> None:
    case = Case(tokens, experts, log_sd=log_sd, dtype=dtype)
    sigma_TNN, (log_sd_TN, factor_TNR) = covariance(case, kind)
    given = {"triangle": kind == "triangle"}
    entropy_T, trace_T = entropy_and_trace(case.mean_TN, log_sd_TN, factor_TNR, scale, **given)
    torch.testing.assert_close(entropy_T.double(), references.entropy(case.mean_TN), rtol=1e-5, atol=1e-5)
    expected_T = scale**2 * sigma_TNN.diagonal(dim1=-2, dim2=-1).sum(-1)
    torch.testing.assert_close(trace_T.double(), expected_T, rtol=1e-5, atol=0)
    columns = log_sd_TN.t().contiguous().t()  # entry by entry, as the heads of many tokens leave them
    again = entropy_and_trace(case.mean_TN, columns, factor_TNR, scale, **given)
    torch.testing.assert_close(again[1], trace_T, rtol=1e-6, atol=0)
    alone = entropy_and_trace(
        case.mean_TN[:1], log_sd_TN[:1], None if factor_TNR is None else factor_TNR[:1], scale, **given
    )
    assert torch.equal(alone[0], entropy_T[:1])
    assert torch.equal(alone[1], trace_T[:1])


def test_every_diagonal_entry_of_a_triangle_is_known() -> None:
    """256 experts: off the diagonal all is zero, on it the logarithm of 3; the trace is 256 times 9."""
    experts = 256
    row, column = torch.tril_indices(experts, experts)
    raw_1C = torch.where(row == column, torch.tensor(3.0).log(), 0.0).unsqueeze(0).to(DEVICE)
    _, trace_1 = entropy_and_trace(torch.zeros(1, experts, device=DEVICE), raw_1C, None, 1.0, triangle=True)
    torch.testing.assert_close(trace_1.cpu(), torch.tensor([9.0 * experts]), rtol=1e-5, atol=0)
