"""Random posteriors for the kernels' tests, and what counts as equal."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

HERE = Path(__file__).parent
EVERYWHERE = {"test_kernels_interpreted.py", "test_kernel_dispatch.py", "test_kernel_router_cpu.py"}
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
TOLERANCE = 2e-3  # relative, in probability


@dataclass(frozen=True)
class Case:
    """Means of spread `mean`; standard deviations near exp(`log_sd`), -inf for none at all."""

    tokens: int
    experts: int
    mean: float = 2.0
    log_sd: float = 0.0
    dtype: torch.dtype = torch.bfloat16

    def __str__(self) -> str:
        kind = "bf16" if self.dtype == torch.bfloat16 else "fp32"
        return f"T{self.tokens}-N{self.experts}-mean{self.mean:g}-sd{self.log_sd:g}-{kind}"

    def normal(self, *shape: int, seed: int) -> Tensor:
        generator = torch.Generator().manual_seed(1000 * seed + self.experts + self.tokens)
        return torch.randn(*shape, generator=generator)

    @property
    def mean_TN(self) -> Tensor:
        return (self.mean * self.normal(self.tokens, self.experts, seed=1)).to(DEVICE)

    @property
    def log_sd_TN(self) -> Tensor:
        spread = 0.2 * self.normal(self.tokens, self.experts, seed=2)
        return (self.log_sd + spread).to(DEVICE, self.dtype)

    @property
    def raw_TC(self) -> Tensor:
        """Cholesky entries row by row, the logarithm on the diagonal, half of a row's variance below it."""
        row, column = torch.tril_indices(self.experts, self.experts)
        sd = torch.tensor(self.log_sd).exp()
        below = sd * self.normal(self.tokens, len(row), seed=3) / (row + 1).sqrt()
        on = self.log_sd + 0.2 * self.normal(self.tokens, len(row), seed=4)
        return torch.where(row == column, on, below).to(DEVICE, self.dtype)

    def factor_TNR(self, rank: int) -> Tensor:
        sd = torch.tensor(self.log_sd).exp() * rank**-0.5
        return (sd * self.normal(self.tokens, self.experts, rank, seed=5)).to(DEVICE, self.dtype)


def cases(largest: int) -> list[Case]:
    """N from 4 to `largest`, T that fills no block evenly, both dtypes, extreme logits, no and large variance."""
    return list(_cases(largest))


def _cases(largest: int) -> Iterator[Case]:
    half, full = torch.bfloat16, torch.float32
    yield Case(3, 4, dtype=full)
    yield Case(5, 16)
    yield Case(3, 40)
    yield Case(2, 60, dtype=full)
    yield Case(2, 64, mean=1000.0)
    yield Case(3, 40, mean=1000.0, log_sd=2.5, dtype=full)
    yield Case(2, 40, log_sd=float("-inf"))
    yield Case(3, 40, log_sd=-20.0)
    yield Case(2, 40, log_sd=2.5)
    yield Case(2, 48, mean=0.0, log_sd=2.5, dtype=full)
    yield Case(1, largest // 2 + 1, dtype=half)
    yield Case(1, largest, dtype=full)
    if not INTERPRETED:  # as many tokens as fill a GPU, at shapes that are compiled already
        for tokens, experts in ((1, 40), (131, 60), (1025, 40), (777, 64), (8191, 40), (8195, 64)):
            yield Case(tokens, experts)
            yield Case(tokens, experts, mean=300.0, log_sd=2.5)


def covariance(case: Case, kind: str, rank: int = 5) -> tuple[Tensor, tuple[Tensor, Tensor | None]]:
    """Sigma [T, N, N] in float64 at scale 1, and what the kernel takes of it."""
    if kind == "triangle":
        row, column = torch.tril_indices(case.experts, case.experts, device=DEVICE)
        lower = torch.zeros(case.tokens, case.experts, case.experts, dtype=torch.float64, device=DEVICE)
        raw_TC = case.raw_TC
        lower[:, row, column] = torch.where(row == column, raw_TC.double().exp(), raw_TC.double())
        return lower @ lower.mT, (raw_TC, None)
    factor_TNR = case.factor_TNR(rank) if kind == "factored" else None
    sigma = torch.diag_embed((2 * case.log_sd_TN.double()).exp())
    if factor_TNR is not None:
        sigma = sigma + factor_TNR.double() @ factor_TNR.double().mT
    return sigma, (case.log_sd_TN, factor_TNR)


def relative_error(log_p: Tensor, reference: Tensor) -> Tensor:
    """Of probabilities given by their logarithms, elementwise; NaN counts as infinite."""
    error = torch.expm1(log_p.double() - reference.double()).abs()
    return torch.nan_to_num(torch.where(log_p.double() == reference.double(), 0.0, error), nan=float("inf"))


def assert_same_experts(indices_TK: Tensor, by_TN: Tensor, error: float) -> None:
    """The same set as the reference's Top-K wherever its margin exceeds the error, and never an expert twice."""
    k = indices_TK.shape[-1]
    sorted_TN = by_TN.double().sort(-1, descending=True)
    if k < by_TN.shape[-1]:
        clear_T = sorted_TN.values[:, k - 1] - sorted_TN.values[:, k] > error
    else:
        clear_T = torch.ones(len(by_TN), dtype=torch.bool, device=by_TN.device)
    ours, theirs = indices_TK.sort(-1).values, sorted_TN.indices[:, :k].sort(-1).values
    assert torch.equal(ours[clear_T], theirs[clear_T])
    assert bool((ours[:, 1:] > ours[:, :-1]).all())
    assert bool((ours >= 0).all())
    assert bool((ours < by_TN.shape[-1]).all())
