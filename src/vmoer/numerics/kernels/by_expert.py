"""Averaged probabilities of a Cholesky posterior for many tokens: a program takes B tokens and walks through the experts.

    l_is = mu_i + scale (sd_i eps_si + sum_(j < i) a_ij eps_sj)        one product [B, J] x [J, S] an expert

`a` are the entries of row i below the diagonal, sd_i is the exponential of the diagonal one. A first walk over the experts sums
each sample's exponentials, [B, S]. A second walk divides and averages. Nothing of size N S is held, and no thread needs another's
sum. Both walks take one exponential an element, as a power of two in one instruction, around a guess of the result's size. Where
the guess was so poor that float32 could not hold the sum, the program takes its sums again in a safe way. The next expert's
numbers are loaded while the present one is worked on. The first experts' rows are short, so products start SHORTEST wide and
double in width with the rows, up to 128.

Entries lie best one by one (strides 1, T), as heads computed as W h' rather than h W' leave them.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from vmoer.numerics.kernels._tiles import (
    LOG2_E,
    LOWEST,
    add_exp,
    exp2,
    log2,
    log_sigmoid,
    log_sum_exp,
    on_device,
    pad,
    product,
)

SHORTEST = tl.constexpr(32)  # entries a product takes at least
STAGES = tl.constexpr(3)  # experts, or groups of UNROLL, whose entries are on their way
UNROLL = tl.constexpr(2)


@triton.jit
def _numbers(
    i, mean_T, mean_n, shift_T, shift_n, raw_T, raw_c, eps_ptr, live,
    N: tl.constexpr, S: tl.constexpr, S_PAD: tl.constexpr, SHIFT: tl.constexpr,
):  # fmt: skip
    """Expert i's mean and log standard deviation for B tokens, and coordinate i of the points. Zeros beyond the last expert."""
    s = tl.arange(0, S_PAD)
    i64 = tl.full([1], 0, tl.int64) + i
    eps_S = tl.load(eps_ptr + s * N + i64, mask=(s < S) & (i64 < N), other=0.0)
    live = live & (i64 < N)
    mean_B = tl.load(mean_T + i64 * mean_n, mask=live, other=0.0).to(tl.float32)
    if SHIFT:
        mean_B += tl.load(shift_T + i64 * shift_n, mask=live, other=0.0).to(tl.float32)
    log_sd_B = tl.load(raw_T + i64 * (i64 + 3) // 2 * raw_c, mask=live, other=0.0)
    return mean_B, log_sd_B, eps_S


@triton.jit
def _spread(
    i, log_sd_B, eps_S, raw_T, raw_c, eps_ptr, first_JS, live,
    N: tl.constexpr, S: tl.constexpr, S_PAD: tl.constexpr, J: tl.constexpr, END: tl.constexpr,
):  # fmt: skip
    """What the points add to expert i's mean, over `scale`, [B, S_PAD], for i < END. Their first J coordinates are given."""
    s = tl.arange(0, S_PAD)
    j = tl.arange(0, J)
    i64 = tl.full([1], 0, tl.int64) + i
    row_T = raw_T + i64 * (i64 + 1) // 2 * raw_c
    a_BJ = tl.load(row_T[:, None] + j[None, :] * raw_c, mask=live[:, None] & (j < i)[None, :], other=0.0)
    own_BS = tl.exp(log_sd_B.to(tl.float32))[:, None] * eps_S.to(tl.float32)[None, :]
    spread_BS = product(a_BJ, first_JS, own_BS)
    if END > J:
        for first in range(J, i, J):
            column = first + tl.arange(0, J)
            more_BJ = tl.load(
                row_T[:, None] + column[None, :] * raw_c, mask=live[:, None] & (column < i)[None, :], other=0.0
            )
            eps_JS = tl.load(
                eps_ptr + s[None, :] * N + column[:, None], mask=(column < N)[:, None] & (s < S)[None, :], other=0.0
            )
            spread_BS = product(more_BJ, eps_JS, spread_BS)
    return spread_BS


@triton.jit
def _points(eps_ptr, N: tl.constexpr, S: tl.constexpr, S_PAD: tl.constexpr, J: tl.constexpr):
    """The points' first J coordinates, [J, S_PAD]."""
    s = tl.arange(0, S_PAD)
    j = tl.arange(0, J)
    return tl.load(eps_ptr + s[None, :] * N + j[:, None], mask=(j < N)[:, None] & (s < S)[None, :], other=0.0)


@triton.jit
def _totals(
    total_BS, top_B, mean_T, mean_n, shift_T, shift_n, raw_T, raw_c, eps_ptr, live, scale,
    LEVEL: tl.constexpr, LEVELS: tl.constexpr, N: tl.constexpr, S: tl.constexpr, S_PAD: tl.constexpr, SHIFT: tl.constexpr,
):  # fmt: skip
    """The first walk, through the experts whose rows a product of this level's width takes: each sample's sum of 2^(l - top),
    l in units of log 2."""
    J: tl.constexpr = SHORTEST << LEVEL
    BEGIN: tl.constexpr = 0 if LEVEL == 0 else J // 2
    END: tl.constexpr = N if LEVEL == LEVELS - 1 else J
    first_JS = _points(eps_ptr, N, S, S_PAD, J)
    mean_B, log_sd_B, eps_S = _numbers(
        BEGIN, mean_T, mean_n, shift_T, shift_n, raw_T, raw_c, eps_ptr, live, N, S, S_PAD, SHIFT
    )
    for i in tl.range(BEGIN, END, num_stages=STAGES, loop_unroll_factor=UNROLL):
        next_mean, next_sd, next_eps = _numbers(
            i + 1, mean_T, mean_n, shift_T, shift_n, raw_T, raw_c, eps_ptr, live, N, S, S_PAD, SHIFT
        )
        spread_BS = _spread(i, log_sd_B, eps_S, raw_T, raw_c, eps_ptr, first_JS, live, N, S, S_PAD, J, END)
        total_BS += exp2((mean_B * LOG2_E - top_B)[:, None] + spread_BS * (scale * LOG2_E))
        mean_B, log_sd_B, eps_S = next_mean, next_sd, next_eps
    return total_BS


@triton.jit
def _averages(
    low_B, high_B, lse_BS, rest_B, t64, out_ptr, mean_T, mean_n, shift_T, shift_n, raw_T, raw_c, eps_ptr, live, scale,
    LEVEL: tl.constexpr, LEVELS: tl.constexpr, N: tl.constexpr, S: tl.constexpr, S_PAD: tl.constexpr, SHIFT: tl.constexpr,
):  # fmt: skip
    """The second walk: the sum of 2^(l - lse) over the points, written as a logarithm; and how small and large it was."""
    s = tl.arange(0, S_PAD)
    J: tl.constexpr = SHORTEST << LEVEL
    BEGIN: tl.constexpr = 0 if LEVEL == 0 else J // 2
    END: tl.constexpr = N if LEVEL == LEVELS - 1 else J
    first_JS = _points(eps_ptr, N, S, S_PAD, J)
    mean_B, log_sd_B, eps_S = _numbers(
        BEGIN, mean_T, mean_n, shift_T, shift_n, raw_T, raw_c, eps_ptr, live, N, S, S_PAD, SHIFT
    )
    for i in tl.range(BEGIN, END, num_stages=STAGES, loop_unroll_factor=UNROLL):
        next_mean, next_sd, next_eps = _numbers(
            i + 1, mean_T, mean_n, shift_T, shift_n, raw_T, raw_c, eps_ptr, live, N, S, S_PAD, SHIFT
        )
        spread_BS = _spread(i, log_sd_B, eps_S, raw_T, raw_c, eps_ptr, first_JS, live, N, S, S_PAD, J, END)
        p_BS = exp2(spread_BS * (scale * LOG2_E) - lse_BS)
        total_B = tl.sum(p_BS if S == S_PAD else tl.where((s < S)[None, :], p_BS, 0.0), 1)
        low_B = tl.minimum(low_B, total_B, propagate_nan=tl.PropagateNan.ALL)
        high_B = tl.maximum(high_B, total_B, propagate_nan=tl.PropagateNan.ALL)
        tl.store(out_ptr + t64 * N + i, mean_B + rest_B + log2(total_B) / LOG2_E, mask=live)
        mean_B, log_sd_B, eps_S = next_mean, next_sd, next_eps
    return low_B, high_B


@triton.jit
def _expert(
    i, mean_T, mean_n, shift_T, shift_n, raw_T, raw_c, eps_ptr, first_JS, live, scale,
    N: tl.constexpr, S: tl.constexpr, S_PAD: tl.constexpr, J: tl.constexpr, SHIFT: tl.constexpr,
):  # fmt: skip
    """Expert i's logits, [B, S_PAD], loaded when they are needed: for the safe sums, which are seldom taken."""
    mean_B, log_sd_B, eps_S = _numbers(
        i, mean_T, mean_n, shift_T, shift_n, raw_T, raw_c, eps_ptr, live, N, S, S_PAD, SHIFT
    )
    spread_BS = _spread(i, log_sd_B, eps_S, raw_T, raw_c, eps_ptr, first_JS, live, N, S, S_PAD, J, N)
    return mean_B[:, None] + scale * spread_BS


@triton.jit
def _largest_mean(mean_T, mean_n, shift_T, shift_n, n, inside, N: tl.constexpr, SHIFT: tl.constexpr):
    mean_BN = tl.load(mean_T[:, None] + n[None, :] * mean_n, mask=inside, other=0.0).to(tl.float32)
    if SHIFT:
        mean_BN += tl.load(shift_T[:, None] + n[None, :] * shift_n, mask=inside, other=0.0).to(tl.float32)
    return tl.max(tl.where((n < N)[None, :], mean_BN, LOWEST), 1)


@triton.jit
def _by_expert_kernel(
    mean_ptr, shift_ptr, raw_ptr, own_ptr, eps_ptr, out_ptr, tokens, scale,
    mean_t, mean_n, shift_t, shift_n, raw_t, raw_c, own_t, own_n,
    N: tl.constexpr, N_PAD: tl.constexpr, S: tl.constexpr, LOG_S: tl.constexpr, S_PAD: tl.constexpr,
    LEVELS: tl.constexpr, J: tl.constexpr, B: tl.constexpr, SHIFT: tl.constexpr, OWN: tl.constexpr, SIGMOID: tl.constexpr,
):  # fmt: skip
    scale = tl.cast(scale, tl.float32)
    t = tl.program_id(0) * B + tl.arange(0, B)
    live = t < tokens
    t64 = t.to(tl.int64)
    n = tl.arange(0, N_PAD)
    inside = live[:, None] & (n < N)[None, :]
    s = tl.arange(0, S_PAD)
    points = (s < S)[None, :]
    mean_T = mean_ptr + t64 * mean_t
    shift_T = shift_ptr + t64 * shift_t
    raw_T = raw_ptr + t64 * raw_t
    own_B = tl.zeros([B], tl.float32)
    if OWN:
        own_BN = tl.load(own_ptr + t64[:, None] * own_t + n[None, :] * own_n, mask=inside, other=float("-inf"))
        own_B = tl.where(live, log_sum_exp(own_BN.to(tl.float32), 1), 0.0)
    exact = SIGMOID
    if not SIGMOID:
        largest_B = own_B  # the logits are about as large as the model's own
        if not OWN:
            largest_B = _largest_mean(mean_T, mean_n, shift_T, shift_n, n, inside, N, SHIFT)
        top_B = largest_B * LOG2_E
        total_BS = tl.zeros([B, S_PAD], tl.float32)
        for level in tl.static_range(LEVELS):
            total_BS = _totals(
                total_BS, top_B, mean_T, mean_n, shift_T, shift_n, raw_T, raw_c, eps_ptr, live, scale,
                level, LEVELS, N, S, S_PAD, SHIFT,
            )  # fmt: skip
        lse_BS = tl.log2(total_BS)
        guess_B = tl.sum(tl.where(points, lse_BS, 0.0), 1) / S
        lse_BS = lse_BS - guess_B[:, None]
        rest_B = own_B - largest_B - guess_B / LOG2_E - LOG_S
        low_B = tl.full([B], 1.0, tl.float32)
        high_B = tl.full([B], 1.0, tl.float32)
        for level in tl.static_range(LEVELS):
            low_B, high_B = _averages(
                low_B, high_B, lse_BS, rest_B, t64, out_ptr, mean_T, mean_n, shift_T, shift_n, raw_T, raw_c, eps_ptr, live,
                scale, level, LEVELS, N, S, S_PAD, SHIFT,
            )  # fmt: skip
        good_B = (low_B > 1e-30) & (high_B < 1e30)  # false for NaN
        exact = tl.min((good_B | (live == 0)).to(tl.int32), 0) == 0
    if exact:
        first_JS = _points(eps_ptr, N, S, S_PAD, J)
        lse_BS = tl.zeros([B, S_PAD], tl.float32)
        if not SIGMOID:
            top = tl.full([B, S_PAD], LOWEST, tl.float32)
            total = tl.zeros([B, S_PAD], tl.float32)
            for i in range(N):
                logits_BS = _expert(
                    i, mean_T, mean_n, shift_T, shift_n, raw_T, raw_c, eps_ptr, first_JS, live, scale, N, S, S_PAD, J, SHIFT
                )  # fmt: skip
                top, total = add_exp(top, total, logits_BS)
            lse_BS = top + tl.log(total)
        for i in range(N):
            logits_BS = _expert(
                i, mean_T, mean_n, shift_T, shift_n, raw_T, raw_c, eps_ptr, first_JS, live, scale, N, S, S_PAD, J, SHIFT
            )
            if SIGMOID:
                yes = tl.where(points, log_sigmoid(logits_BS), float("-inf"))
                no = tl.where(points, log_sigmoid(-logits_BS), float("-inf"))
                out_B = log_sum_exp(yes, 1) - log_sum_exp(no, 1)
            else:
                out_B = log_sum_exp(tl.where(points, logits_BS - lse_BS, float("-inf")), 1) - LOG_S
            tl.store(out_ptr + t64 * N + i, out_B + own_B, mask=live)


def average(
    mean_TN: Tensor,
    raw_TC: Tensor,
    eps_SN: Tensor,
    scale: float,
    *,
    shift_TN: Tensor | None,
    own_TN: Tensor | None,
    sigmoid: bool,
    block: int,
    warps: int,
) -> Tensor:
    """[T, N]: log E[softmax(l)] or logit E[sigmoid(l)], + logsumexp(own) where given."""
    tokens, experts = mean_TN.shape
    out_TN = torch.empty(tokens, experts, dtype=torch.float32, device=mean_TN.device)
    shift, own = mean_TN if shift_TN is None else shift_TN, mean_TN if own_TN is None else own_TN
    levels = min(3, max(1, pad(experts) // SHORTEST.value).bit_length())  # wider products would not fit the registers
    with on_device(mean_TN):
        _by_expert_kernel[(triton.cdiv(tokens, block),)](
            mean_TN, shift, raw_TC, own, eps_SN, out_TN, tokens, scale,
            *mean_TN.stride(), *shift.stride(), *raw_TC.stride(), *own.stride(),
            N=experts, N_PAD=pad(experts, 16), S=len(eps_SN), LOG_S=math.log(len(eps_SN)), S_PAD=pad(len(eps_SN), 16),
            LEVELS=levels, J=min(64, pad(experts, 16)), B=block,
            SHIFT=shift_TN is not None, OWN=own_TN is not None, SIGMOID=sigmoid, num_warps=warps,
        )  # fmt: skip
    return out_TN
