"""Oracle: the quadratic form with the inverse matrix written out, in float64."""

import pytest
import torch
from kernel_cases import DEVICE

from vmoer.kernels.quadratic import novelty, reference


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("tokens", "dim", "rank"), [(1, 16, 3), (37, 72, 72), (70, 200, 20), (5, 48, 32)])
def test_novelty(tokens: int, dim: int, rank: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(tokens)
    seen = torch.randn(4 * dim, dim, generator=generator, dtype=torch.float64)
    values, vectors = torch.linalg.eigh(seen.mT @ seen)
    kept, damping = vectors[:, -rank:], 0.5
    inside = torch.randn(tokens, rank, generator=generator, dtype=torch.float64) @ kept.mT
    # most of the state inside the span: the rest is a small difference of large numbers
    u_TD = (3 * inside + 0.1 * torch.randn(tokens, dim, generator=generator, dtype=torch.float64)).to(DEVICE, dtype)
    inverse = torch.eye(dim, dtype=torch.float64) / damping
    inverse += kept @ torch.diag(1 / (values[-rank:] + damping) - 1 / damping) @ kept.mT
    expected = ((u_TD.double() @ inverse.to(DEVICE)) * u_TD.double()).sum(-1)
    arguments = (kept.mT.float().contiguous(), (1 / (values[-rank:] + damping)).float(), torch.tensor(1 / damping))
    got = novelty(u_TD, *(x.to(DEVICE, torch.float32) for x in arguments))
    largest = u_TD.double().square().sum(-1) / damping
    assert ((got - expected).abs() / largest).max() < 1e-4
    again = reference(u_TD, *(x.to(DEVICE) for x in arguments))
    assert ((again - expected).abs() / largest).max() < 1e-6
