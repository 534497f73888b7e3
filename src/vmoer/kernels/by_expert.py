"""Averaged probabilities for many tokens at once: a program takes B tokens and walks through the experts.

    l_is = mu_i + scale (sd_i eps_si + sum_j a_ij eps_sj)        one product [B, J] x [J, S] an expert

`a` are the Cholesky entries of row i (j < i, sd_i = exp of the diagonal one) or the factors of expert i. A first walk sums
each sample's exponentials, [B, S]; a second one divides and averages. Nothing of size N S is ever held, and no thread needs
another's sum. Both walks take one exponential an element, in one instruction as a power of two, around a guess of the result's
size; where a guess was so poor that float32 could not hold the sum, the program takes its sums again, safely. An expert's
numbers are asked for while the one before is worked on. The first experts' rows of a Cholesky factor are short: they take a
product of half the width.

Entries lie best one by one (strides 1, T), as heads computed as W h' rather than h W' leave them.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from vmoer.kernels._tiles import (
    _LOG2_E,
    _LOWEST,
    add_exp,
    exp2,
    log2,
    log_sigmoid,
    log_sum_exp,
    on_device,
    pad,
    product,
)

COLUMNS = 64  # Cholesky entries a product takes at once


@triton.jit
def _fetch(
    i, mean_T, mean_n, shift_T, shift_n, entries_T, entry_n, entry_j, log_sd_T, log_sd_n, live,
    N: tl.constexpr, R: tl.constexpr, J: tl.constexpr, SHIFT: tl.constexpr,
):  # fmt: skip
    """Expert i's mean, log standard deviation and first J entries, for B tokens; nothing beyond the last expert."""
    j = tl.arange(0, J)
    i64 = tl.full([1], 0, tl.int64) + i
    live = live & (i64 < N)
    mean_B = tl.load(mean_T + i64 * mean_n, mask=live, other=0.0).to(tl.float32)
    if SHIFT:
        mean_B += tl.load(shift_T + i64 * shift_n, mask=live, other=0.0).to(tl.float32)
    if R > 0:
        row_T = entries_T + i64 * entry_n
        log_sd_B = tl.load(log_sd_T + i64 * log_sd_n, mask=live, other=0.0)
        a_BJ = tl.load(row_T[:, None] + j[None, :] * entry_j, mask=live[:, None] & (j < R)[None, :], other=0.0)
    else:
        row_T = entries_T + i64 * (i64 + 1) // 2 * entry_j
        log_sd_B = tl.load(row_T + i64 * entry_j, mask=live, other=0.0)
        a_BJ = tl.load(row_T[:, None] + j[None, :] * entry_j, mask=live[:, None] & (j < i)[None, :], other=0.0)
    return mean_B, log_sd_B, a_BJ


@triton.jit
def _spread(
    i, log_sd_B, a_BJ, entries_T, entry_j, eps_ptr, first_JS, live,
    N: tl.constexpr, R: tl.constexpr, S: tl.constexpr, S_PAD: tl.constexpr, J: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    """What the points add to expert i's mean, over `scale`, [B, S_PAD]. Their first J coordinates are held by the caller."""
    s = tl.arange(0, S_PAD)
    eps_S = tl.load(eps_ptr + s * (N + R) + i, mask=s < S, other=0.0).to(tl.float32)
    spread_BS = product(a_BJ, first_JS, tl.exp(log_sd_B.to(tl.float32))[:, None] * eps_S[None, :])
    if R == 0 and N > J:
        i64 = tl.full([1], 0, tl.int64) + i
        row_T = entries_T + i64 * (i64 + 1) // 2 * entry_j
        for first in range(J, i, J):
            column = first + tl.arange(0, J)
            more_BJ = tl.load(
                row_T[:, None] + column[None, :] * entry_j, mask=live[:, None] & (column < i)[None, :], other=0.0
            )
            eps_JS = tl.load(
                eps_ptr + s[None, :] * N + column[:, None], mask=(column < N)[:, None] & (s < S)[None, :], other=0.0
            )
            spread_BS = product(more_BJ, eps_JS, spread_BS)
    return spread_BS


@triton.jit
def _points(eps_ptr, N: tl.constexpr, R: tl.constexpr, S: tl.constexpr, S_PAD: tl.constexpr, J: tl.constexpr):
    """The first J coordinates that entries are multiplied by, [J, S_PAD]."""
    s = tl.arange(0, S_PAD)
    j = tl.arange(0, J)
    width = R if R > 0 else N
    offset = N if R > 0 else 0
    return tl.load(
        eps_ptr + s[None, :] * (N + R) + offset + j[:, None], mask=(j < width)[:, None] & (s < S)[None, :], other=0.0
    )


@triton.jit
def _totals(
    total_BS, top_B, begin, end, mean_T, mean_n, shift_T, shift_n, entries_T, entry_n, entry_j, log_sd_T, log_sd_n,
    eps_ptr, live, scale,
    N: tl.constexpr, R: tl.constexpr, S: tl.constexpr, S_PAD: tl.constexpr, J: tl.constexpr, B: tl.constexpr,
    SHIFT: tl.constexpr,
):  # fmt: skip
    """The first walk, from expert `begin` to `end`: each sample's sum of 2^(l - top), l in units of log 2."""
    first_JS = _points(eps_ptr, N, R, S, S_PAD, J)
    mean_B, log_sd_B, a_BJ = _fetch(
        begin, mean_T, mean_n, shift_T, shift_n, entries_T, entry_n, entry_j, log_sd_T, log_sd_n, live, N, R, J, SHIFT
    )
    for i in range(begin, end):
        next_mean, next_sd, next_a = _fetch(
            i + 1, mean_T, mean_n, shift_T, shift_n, entries_T, entry_n, entry_j, log_sd_T, log_sd_n, live,
            N, R, J, SHIFT,
        )  # fmt: skip
        spread_BS = _spread(
            i, log_sd_B, a_BJ, entries_T, entry_j, eps_ptr, first_JS, live, N, R, S, S_PAD, J, B
        )  # fmt: skip
        total_BS += exp2((mean_B * _LOG2_E - top_B)[:, None] + spread_BS * (scale * _LOG2_E))
        mean_B, log_sd_B, a_BJ = next_mean, next_sd, next_a
    return total_BS


@triton.jit
def _averages(
    low_B, high_B, lse_BS, rest_B, t64, out_ptr, begin, end,
    mean_T, mean_n, shift_T, shift_n, entries_T, entry_n, entry_j, log_sd_T, log_sd_n, eps_ptr, live, scale,
    N: tl.constexpr, R: tl.constexpr, S: tl.constexpr, S_PAD: tl.constexpr, J: tl.constexpr, B: tl.constexpr,
    SHIFT: tl.constexpr,
):  # fmt: skip
    """The second walk: the sum of 2^(l - lse) over the points, written as a logarithm; and how small and large it was."""
    s = tl.arange(0, S_PAD)
    first_JS = _points(eps_ptr, N, R, S, S_PAD, J)
    mean_B, log_sd_B, a_BJ = _fetch(
        begin, mean_T, mean_n, shift_T, shift_n, entries_T, entry_n, entry_j, log_sd_T, log_sd_n, live, N, R, J, SHIFT
    )
    for i in range(begin, end):
        next_mean, next_sd, next_a = _fetch(
            i + 1, mean_T, mean_n, shift_T, shift_n, entries_T, entry_n, entry_j, log_sd_T, log_sd_n, live,
            N, R, J, SHIFT,
        )  # fmt: skip
        spread_BS = _spread(
            i, log_sd_B, a_BJ, entries_T, entry_j, eps_ptr, first_JS, live, N, R, S, S_PAD, J, B
        )  # fmt: skip
        p_BS = exp2(spread_BS * (scale * _LOG2_E) - lse_BS)
        total_B = tl.sum(p_BS if S == S_PAD else tl.where((s < S)[None, :], p_BS, 0.0), 1)
        low_B = tl.minimum(low_B, total_B, propagate_nan=tl.PropagateNan.ALL)
        high_B = tl.maximum(high_B, total_B, propagate_nan=tl.PropagateNan.ALL)
        tl.store(out_ptr + t64 * N + i, mean_B + rest_B + log2(total_B) / _LOG2_E, mask=live)
        mean_B, log_sd_B, a_BJ = next_mean, next_sd, next_a
    return low_B, high_B


@triton.jit
def _expert(
    i, mean_T, mean_n, shift_T, shift_n, entries_T, entry_n, entry_j, log_sd_T, log_sd_n, eps_ptr, first_JS, live, scale,
    N: tl.constexpr, R: tl.constexpr, S: tl.constexpr, S_PAD: tl.constexpr, J: tl.constexpr, B: tl.constexpr,
    SHIFT: tl.constexpr,
):  # fmt: skip
    """Expert i's logits, [B, S_PAD], asked for when they are needed: for sums that are seldom taken."""
    mean_B, log_sd_B, a_BJ = _fetch(
        i, mean_T, mean_n, shift_T, shift_n, entries_T, entry_n, entry_j, log_sd_T, log_sd_n, live, N, R, J, SHIFT
    )
    spread_BS = _spread(
        i, log_sd_B, a_BJ, entries_T, entry_j, eps_ptr, first_JS, live, N, R, S, S_PAD, J, B
    )  # fmt: skip
    return mean_B[:, None] + scale * spread_BS


@triton.jit
def _largest_mean(mean_T, mean_n, shift_T, shift_n, n, inside, N: tl.constexpr, SHIFT: tl.constexpr):
    mean_BN = tl.load(mean_T[:, None] + n[None, :] * mean_n, mask=inside, other=0.0).to(tl.float32)
    if SHIFT:
        mean_BN += tl.load(shift_T[:, None] + n[None, :] * shift_n, mask=inside, other=0.0).to(tl.float32)
    return tl.max(tl.where((n < N)[None, :], mean_BN, _LOWEST), 1)


@triton.jit
def _by_expert_kernel(
    mean_ptr, shift_ptr, entries_ptr, log_sd_ptr, own_ptr, eps_ptr, out_ptr, tokens, scale,
    mean_t, mean_n, shift_t, shift_n, entry_t, entry_n, entry_j, log_sd_t, log_sd_n, own_t, own_n,
    N: tl.constexpr, N_PAD: tl.constexpr, R: tl.constexpr, S: tl.constexpr, LOG_S: tl.constexpr, S_PAD: tl.constexpr,
    FEW: tl.constexpr, J: tl.constexpr, B: tl.constexpr, SHIFT: tl.constexpr, OWN: tl.constexpr,
    SIGMOID: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0) * B + tl.arange(0, B)
    live = t < tokens
    t64 = t.to(tl.int64)
    n = tl.arange(0, N_PAD)
    inside = live[:, None] & (n < N)[None, :]
    s = tl.arange(0, S_PAD)
    points = (s < S)[None, :]
    mean_T = mean_ptr + t64 * mean_t
    shift_T = shift_ptr + t64 * shift_t
    entries_T = entries_ptr + t64 * entry_t
    log_sd_T = log_sd_ptr + t64 * log_sd_t
    own_B = tl.zeros([B], tl.float32)
    if OWN:
        own_BN = tl.load(own_ptr + t64[:, None] * own_t + n[None, :] * own_n, mask=inside, other=float("-inf"))
        own_B = tl.where(live, log_sum_exp(own_BN.to(tl.float32), 1), 0.0)
    exact = SIGMOID
    if not SIGMOID:
        largest_B = _largest_mean(mean_T, mean_n, shift_T, shift_n, n, inside, N, SHIFT)
        total_BS = tl.zeros([B, S_PAD], tl.float32)
        if FEW > 0:  # the first experts have few entries each
            total_BS = _totals(
                total_BS, largest_B * _LOG2_E, 0, FEW, mean_T, mean_n, shift_T, shift_n, entries_T, entry_n, entry_j,
                log_sd_T, log_sd_n, eps_ptr, live, scale, N, R, S, S_PAD, FEW, B, SHIFT,
            )  # fmt: skip
        total_BS = _totals(
            total_BS, largest_B * _LOG2_E, FEW, N, mean_T, mean_n, shift_T, shift_n, entries_T, entry_n, entry_j,
            log_sd_T, log_sd_n, eps_ptr, live, scale, N, R, S, S_PAD, J, B, SHIFT,
        )  # fmt: skip
        lse_BS = tl.log2(total_BS)
        guess_B = tl.sum(tl.where(points, lse_BS, 0.0), 1) / S
        lse_BS = lse_BS - guess_B[:, None]
        rest_B = own_B - largest_B - guess_B / _LOG2_E - LOG_S
        low_B = tl.full([B], 1.0, tl.float32)
        high_B = tl.full([B], 1.0, tl.float32)
        if FEW > 0:
            low_B, high_B = _averages(
                low_B, high_B, lse_BS, rest_B, t64, out_ptr, 0, FEW, mean_T, mean_n, shift_T, shift_n, entries_T, entry_n,
                entry_j, log_sd_T, log_sd_n, eps_ptr, live, scale, N, R, S, S_PAD, FEW, B, SHIFT,
            )  # fmt: skip
        low_B, high_B = _averages(
            low_B, high_B, lse_BS, rest_B, t64, out_ptr, FEW, N, mean_T, mean_n, shift_T, shift_n, entries_T, entry_n, entry_j,
            log_sd_T, log_sd_n, eps_ptr, live, scale, N, R, S, S_PAD, J, B, SHIFT,
        )  # fmt: skip
        good_B = (low_B > 1e-30) & (high_B < 1e30)  # false for NaN
        exact = tl.min((good_B | (live == 0)).to(tl.int32), 0) == 0
    if exact:
        first_JS = _points(eps_ptr, N, R, S, S_PAD, J)
        lse_BS = tl.zeros([B, S_PAD], tl.float32)
        if not SIGMOID:
            top = tl.full([B, S_PAD], _LOWEST, tl.float32)
            total = tl.zeros([B, S_PAD], tl.float32)
            for i in range(N):
                logits_BS = _expert(
                    i, mean_T, mean_n, shift_T, shift_n, entries_T, entry_n, entry_j, log_sd_T, log_sd_n, eps_ptr, first_JS,
                    live, scale, N, R, S, S_PAD, J, B, SHIFT,
                )  # fmt: skip
                top, total = add_exp(top, total, logits_BS)
            lse_BS = top + tl.log(total)
        for i in range(N):
            logits_BS = _expert(
                i, mean_T, mean_n, shift_T, shift_n, entries_T, entry_n, entry_j, log_sd_T, log_sd_n, eps_ptr, first_JS,
                live, scale, N, R, S, S_PAD, J, B, SHIFT,
            )  # fmt: skip
            if SIGMOID:
                yes = tl.where(points, log_sigmoid(logits_BS), float("-inf"))
                no = tl.where(points, log_sigmoid(-logits_BS), float("-inf"))
                out_B = log_sum_exp(yes, 1) - log_sum_exp(no, 1)
            else:
                out_B = log_sum_exp(tl.where(points, logits_BS - lse_BS, float("-inf")), 1) - LOG_S
            tl.store(out_ptr + t64 * N + i, out_B + own_B, mask=live)


def average(
    mean_TN: Tensor,
    entries: Tensor,
    log_sd_TN: Tensor | None,
    eps_SE: Tensor,
    scale: float,
    *,
    shift_TN: Tensor | None,
    own_TN: Tensor | None,
    sigmoid: bool,
    block: int,
    warps: int,
) -> Tensor:
    """[T, N]: log E[softmax(l)] or logit E[sigmoid(l)], + logsumexp(own) where given.

    `entries` are Cholesky entries [T, C], or with `log_sd_TN` factors [T, N, R].
    """
    tokens, experts = mean_TN.shape
    rank = 0 if log_sd_TN is None else entries.shape[-1]
    out_TN = torch.empty(tokens, experts, dtype=torch.float32, device=mean_TN.device)
    shift, own = mean_TN if shift_TN is None else shift_TN, mean_TN if own_TN is None else own_TN
    log_sd = mean_TN if log_sd_TN is None else log_sd_TN
    strides = entries.stride() if rank else (entries.stride(0), 0, entries.stride(1))
    columns = pad(rank, 16) if rank else min(COLUMNS, pad(experts, 16))
    with on_device(mean_TN):
        _by_expert_kernel[(triton.cdiv(tokens, block),)](
            mean_TN, shift, entries, log_sd, own, eps_SE, out_TN, tokens, scale,
            *mean_TN.stride(), *shift.stride(), *strides, *log_sd.stride(), *own.stride(),
            N=experts, N_PAD=pad(experts, 16), R=rank, S=len(eps_SE), LOG_S=math.log(len(eps_SE)),
            S_PAD=pad(len(eps_SE), 16), FEW=0 if rank or columns < COLUMNS else COLUMNS // 2, J=columns, B=block,
            SHIFT=shift_TN is not None, OWN=own_TN is not None, SIGMOID=sigmoid,
            num_warps=warps, num_stages=1,
        )  # fmt: skip
    return out_TN
