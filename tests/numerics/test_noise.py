"""Stateless noise: the right laws, and nothing but its keys decides it."""

import itertools
import math

import numpy as np
import torch
from scipy import stats

from vmoer.numerics import noise

POSITIONS = torch.arange(20_000).unsqueeze(1)
LANES = torch.arange(5)


def test_laws_against_scipy() -> None:
    for draw, law in [(noise.uniform, stats.uniform), (noise.normal, stats.norm), (noise.gumbel, stats.gumbel_r)]:
        values = draw(7, 3, POSITIONS, LANES)
        assert torch.isfinite(values).all()
        for lane in range(5):
            assert stats.kstest(values[:, lane].numpy(), law.cdf).pvalue > 1e-3


def test_neighbouring_keys_are_independent() -> None:
    """Correlations between lanes, positions, layers and seeds lie within sampling error of zero."""
    base = noise.normal(7, 3, POSITIONS, LANES)
    others = [
        base[:, [1, 2, 3, 4, 0]],
        base.roll(1, 0),
        noise.normal(7, 4, POSITIONS, LANES),
        noise.normal(8, 3, POSITIONS, LANES),
    ]
    for other in others:
        assert abs(np.corrcoef(base.flatten(), other.flatten())[0, 1]) < 5 / base.numel() ** 0.5


def test_a_draw_depends_on_its_keys_alone() -> None:
    torch.manual_seed(1)
    first = noise.normal(7, 3, POSITIONS[:9], LANES)
    torch.manual_seed(2)
    assert torch.equal(noise.normal(7, 3, POSITIONS, LANES)[:9], first)
    assert not torch.equal(noise.normal(3, 7, POSITIONS[:9], LANES), first)


def test_uniform_never_reaches_its_ends() -> None:
    """The extreme hashes, by hand: 0 and 2^32 - 1."""
    low, high = ((torch.tensor([0, 2**32 - 1]) >> 9).float() + 0.5) * 2.0**-23
    assert 0 < low < high < 1


def test_sobol_points_are_standardised_and_fixed() -> None:
    points = noise.sobol_normal(32, 40, seed=3)
    torch.testing.assert_close(points.mean(0), torch.zeros(40), atol=1e-6, rtol=0)
    torch.testing.assert_close(points.square().mean(0), torch.ones(40), atol=1e-5, rtol=0)
    assert torch.equal(points, noise.sobol_normal(32, 40, seed=3))
    assert not torch.equal(points, noise.sobol_normal(32, 40, seed=4))


def test_gumbel_noise_draws_without_replacement() -> None:
    """The top two of logits + Gumbel noise, against every order in which the softmax's draws can give that pair."""
    logits = 1.2 * torch.randn(5, generator=torch.Generator().manual_seed(4))
    draws, p = 40_000, torch.softmax(logits, -1).tolist()
    gumbel = noise.gumbel(0, torch.arange(draws).unsqueeze(1), torch.arange(5))
    chosen = torch.topk(logits + gumbel, 2).indices.sort(-1).values
    for i, j in itertools.combinations(range(5), 2):
        exact = p[i] * p[j] / (1 - p[i]) + p[j] * p[i] / (1 - p[j])
        seen = (chosen == torch.tensor([i, j])).all(-1).float().mean().item()
        assert abs(seen - exact) < 4.5 * math.sqrt(exact * (1 - exact) / draws)
