"""Oracle: the entropy of a float64 softmax."""

import math

import kernel_references as references
import pytest
import torch
from kernel_cases import DEVICE

from vmoer.numerics.kernels.entropies import entropy


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("tokens", "experts"), [(1, 4), (37, 40), (300, 60), (257, 129)])
@pytest.mark.parametrize("size", [0.0, 1.0, 300.0])
def test_entropy(tokens: int, experts: int, size: float, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(tokens)
    logits_TN = (size * torch.randn(tokens, experts, generator=generator)).to(DEVICE, dtype)
    torch.testing.assert_close(entropy(logits_TN).double(), references.entropy(logits_TN), rtol=1e-5, atol=1e-5)
    columns = logits_TN.t().contiguous().t()  # other strides, the same numbers
    torch.testing.assert_close(entropy(columns), entropy(logits_TN), rtol=0, atol=0)
    torch.testing.assert_close(entropy(logits_TN[:1]), entropy(logits_TN)[:1], rtol=0, atol=0)


def test_ends_of_its_range() -> None:
    one = torch.full((3, 8), float("-inf"), device=DEVICE)
    one[:, 2] = 5.0
    torch.testing.assert_close(entropy(one).cpu(), torch.zeros(3))
    torch.testing.assert_close(entropy(torch.zeros(3, 8, device=DEVICE)).cpu(), torch.full((3,), math.log(8)))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_record_asks_for_it() -> None:
    """Twice, since a module of a function's name would take its place at the first import."""
    from vmoer.numerics import kernels

    logits_TN = torch.randn(9, 12, device="cuda")
    for _ in range(2):
        fused = kernels.entropy(logits_TN)
        assert fused is not None
        torch.testing.assert_close(fused.double(), references.entropy(logits_TN), rtol=1e-5, atol=1e-5)
