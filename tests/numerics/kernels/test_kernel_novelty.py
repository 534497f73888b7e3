"""Oracle: the same product in float64; of full rank, the quadratic form with the inverse matrix written out."""

import pytest
import torch
from kernel_cases import DEVICE, INTERPRETED

from vmoer.numerics.kernels.quadratic import novelty

CASES: list[tuple[int, int, int, int | None]] = [
    (1, 16, 3, 16),
    (37, 72, 72, 16),
    (70, 200, 20, 16),
    (5, 48, 32, 128),
    (300, 576, 128, 128),
]
CASES += [(300, 576, 256, 128)] + ([] if INTERPRETED else [(5000, 576, 256, None), (5000, 1536, 128, None)])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("tokens", "dim", "rank", "block"), CASES)
def test_novelty(tokens: int, dim: int, rank: int, block: int | None, dtype: torch.dtype) -> None:
    """Of states like the fitted ones: nearly all of their length lies in a few directions, which W all but takes away."""
    generator = torch.Generator().manual_seed(tokens)
    scale = torch.logspace(1, -2, dim, dtype=torch.float64)
    seen = torch.randn(2 * dim, dim, generator=generator, dtype=torch.float64) * scale
    matrix = seen.mT @ seen + torch.eye(dim, dtype=torch.float64)
    root = torch.linalg.inv(torch.linalg.cholesky(matrix))
    rows = torch.linalg.qr(torch.randn(dim, rank, generator=generator, dtype=torch.float64)).Q.mT
    u_TD = (torch.randn(tokens, dim, generator=generator, dtype=torch.float64) * scale).to(DEVICE, dtype)
    root_RD = (rows @ root if rank < dim else root).to(DEVICE)
    expected = (u_TD.double() @ root_RD.mT).square().sum(-1)
    if rank == dim:
        whole = (u_TD.double() @ torch.linalg.inv(matrix).to(DEVICE) * u_TD.double()).sum(-1)
        torch.testing.assert_close(whole, expected, rtol=1e-8, atol=0)
    got = novelty(u_TD, root_RD.float(), tokens_a_program=block)
    torch.testing.assert_close(got.double(), expected, rtol=2e-3, atol=0)
    wide_TD = torch.stack([u_TD, torch.full_like(u_TD, 7.0)], -1)[..., 0]
    assert torch.equal(novelty(wide_TD, root_RD.float(), tokens_a_program=block), got)
