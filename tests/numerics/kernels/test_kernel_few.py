"""Oracles: the two products and the quadratic form written out in float64; what a posterior says of itself in float64."""

import kernel_references as references
import pytest
import torch
from kernel_cases import DEVICE, INTERPRETED, Case, covariance

import vmoer
from vmoer.inference import operator
from vmoer.numerics import integrals, kernels, noise
from vmoer.numerics.gaussians import Cholesky, Diagonal, Factored, Gaussian
from vmoer.numerics.kernels import TOLD, Ask, cholesky, few, halves, low_rank

GENERATOR = torch.Generator()
SIZES = [
    (1, 64, 16, 24, 0),
    (1, 600, 48, 2100, 8),
    (2, 520, 32, 40, 16),
    (3, 512, 64, 80, 16),
    (4, 72, 16, 40, 3),
    (16, 600, 48, 100, 5),
    (17, 1100, 32, 70, 33),
    (33, 72, 80, 2100, 20),
    (100, 530, 16, 40, 3),
]


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=GENERATOR)


@pytest.mark.parametrize(("tokens", "dim", "hidden", "outputs", "rank"), SIZES)
def test_network(tokens: int, dim: int, hidden: int, outputs: int, rank: int) -> None:
    GENERATOR.manual_seed(tokens)
    wide_TD = normal(tokens, 2 * dim).to(DEVICE, torch.bfloat16)
    u_TD = wide_TD[:, :dim]  # rows lie apart
    backbone_HD = (normal(hidden, dim) * dim**-0.5).to(DEVICE, torch.bfloat16)
    heads_OH = (normal(outputs, hidden) * hidden**-0.5).to(DEVICE, torch.bfloat16)
    root_RD = (normal(rank, dim) / dim).to(DEVICE)
    told_TG = torch.empty(tokens, len(TOLD), device=DEVICE)
    got = few.network(u_TD, backbone_HD, heads_OH, halves(root_RD) if rank else None, told_TG)
    features = (u_TD.double() @ backbone_HD.double().mT).relu().to(torch.bfloat16).double()
    expected = features @ heads_OH.double().mT
    assert got.dtype == torch.bfloat16
    # one step of bfloat16 in a feature, another in the output
    torch.testing.assert_close(got.double(), expected, rtol=2**-7, atol=2**-7 * float(expected.abs().max()))
    most = 2**-6 if INTERPRETED else 2**-8  # the interpreter rounds to bfloat16 by cutting off
    assert float((got.double() - expected).square().mean().sqrt()) < most * float(expected.square().mean().sqrt())
    if rank:
        novelty = (u_TD.double() @ root_RD.double().mT).square().sum(-1)
        torch.testing.assert_close(told_TG[:, 3].double(), novelty, rtol=1e-4, atol=0)
        torch.testing.assert_close(few.novelty(u_TD, halves(root_RD)).double(), novelty, rtol=1e-4, atol=0)
    assert bool(told_TG[:, : 3 if rank else 4].isnan().all())  # nothing else is written


@pytest.mark.parametrize(("tokens", "experts"), [(1, 40), (3, 5), (4, 128), (16, 60), (33, 257), (100, 40)])
def test_entropy_and_novelty(tokens: int, experts: int) -> None:
    GENERATOR.manual_seed(tokens)
    u_TD = normal(tokens, 600).to(DEVICE, torch.bfloat16)
    root_RD = (normal(20, 600) / 600).to(DEVICE)
    wide_TN = 3 * normal(tokens, experts + 2).to(DEVICE)
    wide_TN[0, 0] = -200.0  # a score that is nothing
    for logits_TN in (wide_TN[:, :experts], wide_TN[:, :experts].to(torch.bfloat16)):
        found_T2 = few.entropy_and_novelty(logits_TN, u_TD, halves(root_RD)).double()
        entropy = torch.special.entr(logits_TN.double().softmax(-1)).sum(-1)
        novelty = (u_TD.double() @ root_RD.double().mT).square().sum(-1)
        torch.testing.assert_close(found_T2[:, 0], entropy, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(found_T2[:, 1], novelty, rtol=1e-4, atol=0)


def test_a_token_is_the_same_beside_others_and_beside_nan() -> None:
    GENERATOR.manual_seed(0)
    u_TD, backbone_HD, heads_OH = (normal(*s).to(DEVICE, torch.bfloat16) for s in ((40, 96), (32, 96), (50, 32)))
    root = halves(normal(8, 96).to(DEVICE))
    told = [torch.empty(n, len(TOLD), device=DEVICE) for n in (40, 7)]
    whole, alone = (few.network(u_TD[: len(x)], backbone_HD, heads_OH, root, x) for x in told)
    poor_TD = u_TD.clone()
    poor_TD[7:] = torch.nan
    beside = torch.empty_like(told[0])
    assert torch.equal(few.network(poor_TD, backbone_HD, heads_OH, root, beside)[:7], whole[:7])
    assert torch.equal(beside[:7, 3], told[0][:7, 3])
    torch.testing.assert_close(alone.float(), whole[:7].float(), rtol=2**-7, atol=2**-7)
    torch.testing.assert_close(told[1][:, 3], told[0][:7, 3], rtol=1e-5, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["diagonal", "factored", "triangle"])
@pytest.mark.parametrize(
    ("tokens", "experts", "log_sd", "scale"), [(3, 20, 0.0, 1.5), (2, 70, -8.0, 0.5), (1, 40, 2.0, 1.0)]
)
def test_what_averaging_tells(
    kind: str, tokens: int, experts: int, log_sd: float, scale: float, dtype: torch.dtype
) -> None:
    case = Case(tokens, experts, log_sd=log_sd, dtype=dtype)
    sigma_TNN, (log_sd_TN, factor_TNR) = covariance(case, kind)
    told_TG = torch.empty(tokens, len(TOLD), device=DEVICE)
    mean_TN, wide_TN = case.mean_TN, case.mean_TN.double()
    q: Gaussian
    if kind == "triangle":
        q = Cholesky(wide_TN, log_sd_TN.double(), scale)
    elif factor_TNR is None:
        q = Diagonal(wide_TN, log_sd_TN.double(), scale)
    else:
        q = Factored(wide_TN, log_sd_TN.double(), factor_TNR.double(), scale)
    eps = noise.sobol_normal(24, q.noise_dim, seed=5).to(DEVICE)
    for ask in (None, Ask(4)):
        told_TG.fill_(torch.nan)
        if kind == "triangle":
            got = cholesky.average(mean_TN, log_sd_TN, eps, scale, told_TG=told_TG, ask=ask)
        else:
            got = low_rank.average(mean_TN, log_sd_TN, factor_TNR, eps, scale, told_TG=told_TG, ask=ask)
        assert got.told
        trace_T = scale**2 * sigma_TNN.diagonal(dim1=-2, dim2=-1).sum(-1)
        torch.testing.assert_close(told_TG[:, 0].double(), references.entropy(got.logits_TN), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(told_TG[:, 1].double(), trace_T, rtol=1e-5, atol=0)
        variance_T = integrals.sample_variance(q, eps.double())
        torch.testing.assert_close(told_TG[:, 2].double(), variance_T, rtol=2e-3, atol=0)
        assert bool(told_TG[:, 3].isnan().all())


def test_scores_by_sigmoids_are_not_told() -> None:
    case = Case(2, 20)
    told_TG = torch.empty(2, len(TOLD), device=DEVICE)
    eps = noise.sobol_normal(8, 20, seed=1).to(DEVICE)
    assert not cholesky.average(case.mean_TN, case.raw_TC, eps, sigmoid=True, told_TG=told_TG).told
    assert bool(told_TG.isnan().all())


@pytest.mark.parametrize("key", ["vglr-fc", "vglr-mf", "vglr-lr"])
@pytest.mark.parametrize("tokens", [1, 4, 21, 140])
def test_a_router_answers_and_tells_as_by_the_plain_path(
    key: str, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the states to the logits and signals of the operator. Oracle: the same router without kernels."""
    config = vmoer.methods()[key](layers=[0])
    gate = operator.logits_gate("softmax", 12, 3, 64)
    router = config.router(config, gate, None, 0, torch.device(DEVICE))
    GENERATOR.manual_seed(1)
    for parameter in router.parameters():
        parameter.data.add_(0.1 * normal(*parameter.shape).to(DEVICE))
    router.novelty_root_RD = (normal(8, 64) / 64).to(DEVICE)
    u_TD, logits_TN = (normal(tokens, n).to(DEVICE, torch.bfloat16) for n in (64, 12))
    monkeypatch.setattr(kernels, "available", lambda x: False)
    operator.host("plain", router, None, torch.bfloat16)
    expected_TN, expected_TG = torch.ops.vmoer.route(u_TD, logits_TN, "plain")
    monkeypatch.setattr(kernels, "available", lambda x: True)
    told_TG = torch.full((tokens, 2, len(TOLD)), torch.nan, device=DEVICE)
    averaged_TN = torch.ops.vmoer.route_into(u_TD, logits_TN, "plain", told_TG[:, 1])
    # the features and the heads' outputs are rounded to bfloat16, one step of which may go either way
    torch.testing.assert_close(averaged_TN.softmax(-1), expected_TN.softmax(-1), rtol=0.05, atol=0.01)
    torch.testing.assert_close(told_TG[:, 1, :3], expected_TG[:, :3], rtol=0.06, atol=0.01)
    torch.testing.assert_close(told_TG[:, 1, 3], expected_TG[:, 3], rtol=1e-3, atol=0)
    torch.testing.assert_close(torch.ops.vmoer.route(u_TD, logits_TN, "plain"), (averaged_TN, told_TG[:, 1]))
    assert bool(told_TG[:, 0].isnan().all())
    operator.forget()
