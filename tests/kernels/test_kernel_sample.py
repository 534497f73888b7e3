"""Oracles: the factor written out (vmoer.gaussians), autograd through it, and torch.autograd.gradcheck."""

import pytest
import torch

from vmoer.gaussians import Cholesky
from vmoer.kernels.sample import cholesky_sample

GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


def _inputs(tokens: int, experts: int, dtype: torch.dtype, device: str) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(experts)
    entries = experts * (experts + 1) // 2
    shapes = ((tokens, experts), (tokens, entries), (tokens, experts))
    return tuple(torch.randn(*shape, generator=generator, dtype=torch.float64).to(device, dtype) for shape in shapes)


def test_gradcheck() -> None:
    mean_TN, raw_TC, eps_TN = _inputs(3, 5, torch.float64, "cpu")
    mean_TN.requires_grad_(True)
    raw_TC.requires_grad_(True)
    assert torch.autograd.gradcheck(lambda m, r: cholesky_sample(m, r, eps_TN, 0.7), (mean_TN, raw_TC))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=GPU)])
@pytest.mark.parametrize(("tokens", "experts"), [(1, 1), (3, 4), (7, 40), (2, 65), (2, 256)])
def test_value_and_gradient(tokens: int, experts: int, device: str) -> None:
    mean_TN, raw_TC, eps_TN = _inputs(tokens, experts, torch.float32, device)
    weight_TN = torch.linspace(-1, 1, tokens * experts, device=device).view(tokens, experts)
    results = []
    for dtype in (torch.float32, torch.float64):
        mean, raw = (x.detach().to(dtype).requires_grad_(True) for x in (mean_TN, raw_TC))
        if dtype == torch.float32:
            out = cholesky_sample(mean, raw, eps_TN, 1.3)
        else:
            out = Cholesky(mean, raw, 1.3).sample(eps_TN.double())
        (out * weight_TN).sum().backward()
        assert mean.grad is not None
        assert raw.grad is not None
        results.append((out.detach().double(), mean.grad.double(), raw.grad.double()))
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_nothing_of_the_factors_size_is_kept() -> None:
    """What autograd saves for the backward pass: raw [T, C] and eps [T, N]."""
    mean_TN, raw_TC, eps_TN = _inputs(4, 12, torch.float32, "cpu")
    raw_TC.requires_grad_(True)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x.numel()) or x, lambda x: x):
        cholesky_sample(mean_TN, raw_TC, eps_TN)
    assert sorted(saved) == [eps_TN.numel(), raw_TC.numel()]
