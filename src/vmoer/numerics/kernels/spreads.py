"""What a record reads of a Gaussian router, in one pass: the entropy of the experts' scores and the trace of the covariance.

    H = log Z - sum_n e^(d_n) d_n / Z,    d = l - max l,    Z = sum_n e^(d_n)
    tr Sigma = scale^2 (sum_n e^(2 log_sd_n) + sum_c raw_c^2)

Three shapes of covariance, by where the logarithms of deviations are and which entries are squared:

    diagonal    log_sd [T, N]                        nothing
    factored    log_sd [T, N]                        the factor's N R entries
    Cholesky    entry i(i+3)/2 of the triangle       its other entries

Both walk over numbers that the averaging kernels have read as well. There the entries feed products on tensor cores and nothing
else: a tile that was squared on the way too is what a compiler once gave one buffer for two uses (quadratic.py). Floor at 16,384
tokens, N = 40 with Cholesky entries in bfloat16: entries and logits read once, 30 MB, 7 us.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

import torch
import triton
import triton.language as tl
from torch import Tensor

from vmoer.numerics.kernels._tiles import on_device, pad


@triton.jit
def _spread_kernel(
    logits_ptr, log_sd_ptr, raw_ptr, entropy_ptr, trace_ptr, tokens, scale,
    log_sd_t, log_sd_n, raw_t, raw_c,
    N: tl.constexpr, N_PAD: tl.constexpr, C: tl.constexpr, J: tl.constexpr, B: tl.constexpr, TRIANGLE: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0) * B + tl.arange(0, B)
    n = tl.arange(0, N_PAD)
    live = t < tokens
    t64 = t.to(tl.int64)
    inside = live[:, None] & (n < N)[None, :]
    logits_BN = tl.load(logits_ptr + t64[:, None] * N + n[None, :], mask=inside, other=float("-inf")).to(tl.float32)
    top_B = tl.where(live, tl.max(logits_BN, 1), 0.0)
    d_BN = logits_BN - top_B[:, None]
    e_BN = tl.exp(d_BN)
    total_B = tl.sum(e_BN, 1)
    mean_B = tl.sum(tl.where(e_BN > 0, e_BN * d_BN, 0.0), 1) / total_B
    tl.store(entropy_ptr + t64, tl.log(total_B) - mean_B, mask=live)

    n64 = n.to(tl.int64)
    place_N = n64
    if TRIANGLE:
        place_N = n64 * (n64 + 3) // 2
    log_sd_BN = tl.load(
        log_sd_ptr + t64[:, None] * log_sd_t + place_N[None, :] * log_sd_n, mask=inside, other=float("-inf")
    )
    square_B = tl.sum(tl.exp(2.0 * log_sd_BN.to(tl.float32)), 1)
    if C > 0:
        square_BJ = tl.zeros([B, J], tl.float32)
        for first in range(0, C, J):
            c = first + tl.arange(0, J)
            wanted = c < C
            if TRIANGLE:  # c = i (i + 3) / 2 lies on the diagonal, and 8 c + 9 is then a square
                i = ((tl.sqrt((8 * c + 9).to(tl.float32)) - 3.0) * 0.5 + 0.5).to(tl.int32)
                wanted = wanted & (i * (i + 3) != 2 * c)
            raw_BJ = tl.load(
                raw_ptr + t64[:, None] * raw_t + c.to(tl.int64)[None, :] * raw_c,
                mask=live[:, None] & wanted[None, :],
                other=0.0,
            ).to(tl.float32)
            square_BJ += raw_BJ * raw_BJ
        square_B += tl.sum(square_BJ, 1)
    tl.store(trace_ptr + t64, tl.cast(scale, tl.float32) * tl.cast(scale, tl.float32) * square_B, mask=live)


def entropy_and_trace(
    logits_TN: Tensor, log_sd_TN: Tensor, factor_TC: Tensor | None, scale: float, *, triangle: bool = False
) -> tuple[Tensor, Tensor]:
    """[T] each, in float32. One layout for every batch, so that a token's sum has the same order in all of them.

    Args:
        logits_TN: the entropy is of their softmax.
        log_sd_TN: logarithms of the standard deviations; with `triangle` the Cholesky entries, row by row.
        factor_TC: entries that are squared, [T, C] or [T, N, R]; with `triangle` None.
    """
    tokens, experts = logits_TN.shape
    entropy_T = torch.empty(tokens, dtype=torch.float32, device=logits_TN.device)
    trace_T = torch.empty(tokens, dtype=torch.float32, device=logits_TN.device)
    raw = log_sd_TN if factor_TC is None else factor_TC.flatten(1)
    count = 0 if factor_TC is None and not triangle else raw.shape[1]
    with on_device(logits_TN):
        _spread_kernel[(triton.cdiv(tokens, 16),)](
            logits_TN.contiguous(), log_sd_TN, raw, entropy_T, trace_T, tokens, scale,
            *log_sd_TN.stride(), *raw.stride(),
            N=experts, N_PAD=pad(experts), C=count, J=64, B=16, TRIANGLE=triangle, num_warps=4,
        )  # fmt: skip
    return entropy_T, trace_T
