"""Covariances and divergences against torch.distributions in float64."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributions import LowRankMultivariateNormal, MultivariateNormal, kl_divergence

from vmoer.numerics import gaussians as g

SHAPES = ("diagonal", "cholesky", "low-rank", "scaled")


def build(shape: str, tokens: int, n: int, spread: float, seed: int, rank: int = 2) -> tuple[g.Gaussian, torch.Tensor]:
    """A Gaussian of ours in float32 and its covariance in float64, built by hand."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*size: int) -> torch.Tensor:
        return spread * torch.randn(*size, generator=generator)

    mean, log_sd = draw(tokens, n), draw(tokens, n).clamp(-3, 2)
    if shape == "diagonal":
        return g.Diagonal(mean, log_sd), torch.diag_embed((2 * log_sd.double()).exp())
    if shape == "low-rank":
        v = draw(tokens, n, rank)
        return g.Factored(mean, log_sd, v), torch.diag_embed((2 * log_sd.double()).exp()) + v.double() @ v.double().mT
    if shape == "scaled":
        scale, factor = (
            draw(tokens).exp(),
            torch.linalg.cholesky(torch.eye(n) + draw(n, 3) @ torch.ones(3, n) * 0 + torch.eye(n)),
        )
        return g.Scaled(mean, scale, factor), scale.double()[:, None, None] * (factor @ factor.mT).double()
    raw, dense = draw(tokens, n * (n + 1) // 2).clamp(-3, 2), torch.zeros(tokens, n, n, dtype=torch.float64)
    at = 0
    for i in range(n):
        for j in range(i + 1):
            dense[:, i, j] = 1.5 * (raw[:, at].double().exp() if i == j else raw[:, at].double())
            at += 1
    return g.Cholesky(mean, raw, scale=1.5), dense @ dense.mT


@given(
    st.sampled_from(SHAPES),
    st.integers(1, 4),
    st.integers(1, 9),
    st.floats(0.01, 1.5),
    st.floats(0.1, 4),
    st.integers(0, 1000),
)
def test_kl_equals_torch_distributions(shape: str, tokens: int, n: int, spread: float, prior: float, seed: int) -> None:
    """KL(q || prior), not the other way round, to a relative 1e-5."""
    q, covariance = build(shape, tokens, n, spread, seed)
    center = q.mean_TN + torch.randn(tokens, n, generator=torch.Generator().manual_seed(seed))
    exact = kl_divergence(
        MultivariateNormal(q.mean_TN.double(), covariance),
        MultivariateNormal(center.double(), prior**2 * torch.eye(n, dtype=torch.float64)),
    )
    torch.testing.assert_close(q.kl(center, prior).double(), exact, rtol=1e-5, atol=2e-5)


@given(st.integers(2, 12), st.integers(1, 5), st.floats(0.1, 1.5), st.integers(0, 1000))
def test_low_rank_equals_torchs_own(n: int, rank: int, spread: float, seed: int) -> None:
    q, covariance = build("low-rank", 3, n, spread, seed, rank)
    assert isinstance(q, g.Factored)
    theirs = LowRankMultivariateNormal(q.mean_TN.double(), q.factor_TNR.double(), (2 * q.log_sd_TN.double()).exp())
    prior = MultivariateNormal(torch.zeros(3, n, dtype=torch.float64), torch.eye(n, dtype=torch.float64))
    dense = MultivariateNormal(theirs.mean, theirs.covariance_matrix)
    torch.testing.assert_close(q.kl(torch.zeros(3, n), 1.0).double(), kl_divergence(dense, prior), rtol=1e-5, atol=2e-5)
    torch.testing.assert_close(covariance, theirs.covariance_matrix)


def test_the_prior_has_no_divergence() -> None:
    for q in (
        g.Diagonal(torch.ones(2, 3), torch.full((2, 3), math.log(2))),
        g.Cholesky(torch.ones(2, 3), torch.zeros(2, 6), 2.0),
    ):
        torch.testing.assert_close(q.kl(torch.ones(2, 3), 2.0), torch.zeros(2), atol=1e-6, rtol=0)


@pytest.mark.parametrize("shape", SHAPES)
def test_samples_have_the_stated_moments(shape: str) -> None:
    """Mean, covariance, trace, Sigma x and rows, against the dense covariance."""
    q, covariance = build(shape, 2, 4, 0.7, seed=3)
    eps = torch.randn(200_000, q.noise_dim, generator=torch.Generator().manual_seed(0))
    samples = q.samples(eps)
    torch.testing.assert_close(samples.mean(1), q.mean_TN, atol=0.05, rtol=0)
    for t in range(2):
        torch.testing.assert_close(torch.cov(samples[t].T).double(), covariance[t], atol=0.15, rtol=0.03)
    x = torch.randn(2, 4)
    torch.testing.assert_close(
        q.times(x).double(), (covariance @ x.double().unsqueeze(-1)).squeeze(-1), atol=1e-5, rtol=1e-5
    )
    variance = covariance.diagonal(dim1=-2, dim2=-1)
    torch.testing.assert_close(q.trace().double(), variance.sum(-1), rtol=1e-5, atol=0)
    torch.testing.assert_close(q.variance_TN.double(), variance, rtol=1e-5, atol=0)
    torch.testing.assert_close(q.log_det().double(), torch.logdet(covariance), atol=1e-4, rtol=1e-5)
    torch.testing.assert_close(q.rows(1, 2).samples(eps[:5]), samples[1:2, :5])
    torch.testing.assert_close(q.sample(eps[:2]), samples.diagonal(dim1=0, dim2=1).mT[:2])


def test_gradients_of_the_kl_against_finite_differences() -> None:
    raw = torch.randn(2, 6, dtype=torch.float64, requires_grad=True)
    mean = torch.randn(2, 3, dtype=torch.float64, requires_grad=True)

    def kl(mean: Any, raw: Any) -> Any:
        return g.Cholesky(mean, raw, 1.3).kl(torch.zeros(2, 3, dtype=torch.float64), 0.7)

    assert torch.autograd.gradcheck(kl, (mean, raw))
