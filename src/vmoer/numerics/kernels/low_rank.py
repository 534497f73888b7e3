"""Low-rank and mean-field posteriors to averaged probabilities: E[softmax(N(mu, diag(sd^2) + V V'))] over shared points.

Two shapes of the same sum  l_ns = mu_n + scale (sd_n eps_sn + sum_r V_nr eps_sr):

    by token     l [N, S] of a token in registers, its columns normalised and averaged there
    by point     many tokens without factors: a program holds B tokens' means and deviations, walks through the points
                 and keeps running sums

Mean field is R = 0; `Scaled` posteriors (Laplace) are mean-field with sd_t = sqrt(v_t) for every expert and the points F eps.
Floor at 16,384 tokens, N = 128, R = 8, S = 32, heads in bfloat16: traffic
T N (2 (R + 2) + 4 + 4) bytes = 59 MB, 14 us; an exponential a sample and expert, 67M, 19 us; S N (R + 1) multiplications
and additions a token, 0.6 G.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from vmoer.numerics.kernels._asks import MANY, Ask, Choice
from vmoer.numerics.kernels._tiles import (
    LOG2_E,
    LOWEST,
    add_exp,
    exp2,
    log_sigmoid,
    log_sum_exp,
    on_device,
    overlaps,
    pad,
    product,
    store_selected,
    store_token,
    wait_for_former,
)
from vmoer.numerics.kernels.select import room
from vmoer.numerics.kernels.select import select as select_experts


@triton.jit
def _by_point_kernel(
    mean_ptr, shift_ptr, log_sd_ptr, own_ptr, eps_ptr, out_ptr, weights_ptr, indices_ptr, tokens, scale, gate_scale,
    mean_t, mean_n, shift_t, shift_n, log_sd_t, log_sd_n, own_t, own_n,
    N: tl.constexpr, N_PAD: tl.constexpr, S: tl.constexpr, LOG_S: tl.constexpr, B: tl.constexpr,
    SHIFT: tl.constexpr, OWN: tl.constexpr, SIGMOID: tl.constexpr, K: tl.constexpr, K_PAD: tl.constexpr, NORMALISE: tl.constexpr,
):  # fmt: skip
    scale = tl.cast(scale, tl.float32)
    t = tl.program_id(0) * B + tl.arange(0, B)
    n = tl.arange(0, N_PAD)
    live = t < tokens
    t64 = t.to(tl.int64)[:, None]
    n64 = n.to(tl.int64)[None, :]
    inside = live[:, None] & (n < N)[None, :]
    mean_BN = tl.load(mean_ptr + t64 * mean_t + n64 * mean_n, mask=inside, other=0.0).to(tl.float32)
    if SHIFT:
        mean_BN += tl.load(shift_ptr + t64 * shift_t + n64 * shift_n, mask=inside, other=0.0).to(tl.float32)
    log_sd_BN = tl.load(log_sd_ptr + t64 * log_sd_t + n64 * log_sd_n, mask=inside, other=0.0).to(tl.float32)
    sd_BN = scale * tl.exp(log_sd_BN)
    log_p_BN = tl.zeros([B, N_PAD], tl.float32)
    exact = SIGMOID
    if not SIGMOID:
        # around the largest mean, as powers of two: one exponential a sample and expert, and one sum
        around_BN = (mean_BN - tl.max(tl.where((n < N)[None, :], mean_BN, LOWEST), 1)[:, None]) * LOG2_E
        deviation_BN = sd_BN * LOG2_E
        around_BN = tl.where((n < N)[None, :], around_BN, float("-inf"))
        total = tl.zeros([B, N_PAD], tl.float32)
        for s in range(S):
            eps_N = tl.load(eps_ptr + s * N + n, mask=n < N, other=0.0).to(tl.float32)
            e_BN = exp2(around_BN + deviation_BN * eps_N[None, :])
            total += e_BN * (1.0 / tl.sum(e_BN, 1))[:, None]
        log_p_BN = tl.log(total) - LOG_S
        good = (total > 1e-30) | (inside == 0)  # false for NaN
        exact = tl.min(tl.min(good.to(tl.int32), 1), 0) == 0
    if exact:  # where float32 could not hold the sums
        top = tl.full([B, N_PAD], LOWEST, tl.float32)
        total = tl.zeros([B, N_PAD], tl.float32)
        top_no = tl.full([B, N_PAD], LOWEST, tl.float32)
        total_no = tl.zeros([B, N_PAD], tl.float32)
        for s in range(S):
            eps_N = tl.load(eps_ptr + s * N + n, mask=n < N, other=0.0).to(tl.float32)
            logits_BN = mean_BN + sd_BN * eps_N[None, :]
            if SIGMOID:
                yes = log_sigmoid(logits_BN)
                top, total = add_exp(top, total, yes)
                top_no, total_no = add_exp(top_no, total_no, yes - logits_BN)
            else:
                lse_B = log_sum_exp(tl.where((n < N)[None, :], logits_BN, float("-inf")), 1)
                top, total = add_exp(top, total, logits_BN - lse_B[:, None])
        log_p_BN = top + tl.log(total)
        if SIGMOID:
            log_p_BN -= top_no + tl.log(total_no)
        else:
            log_p_BN -= LOG_S
    out_BN = log_p_BN
    if OWN:
        own_BN = tl.load(own_ptr + t64 * own_t + n64 * own_n, mask=inside, other=float("-inf")).to(tl.float32)
        out_BN += log_sum_exp(own_BN, 1)[:, None]
    tl.store(out_ptr + t64 * N + n64, out_BN, mask=inside)
    if K > 0:
        by_BN = tl.where((n < N)[None, :], log_p_BN, float("-inf"))
        store_selected(
            by_BN, log_p_BN, n, t, live, weights_ptr, indices_ptr, gate_scale, K, K_PAD, NORMALISE, SAME=True
        )


@triton.jit
def _by_token_kernel(
    mean_ptr, shift_ptr, log_sd_ptr, factor_ptr, own_ptr, eps_ptr, out_ptr, weights_ptr, indices_ptr,
    tokens, scale, gate_scale,
    mean_t, mean_n, shift_t, shift_n, log_sd_t, log_sd_n, factor_t, factor_n, factor_r, own_t, own_n,
    N: tl.constexpr, N_PAD: tl.constexpr, R: tl.constexpr, R_PAD: tl.constexpr, S: tl.constexpr, LOG_S: tl.constexpr,
    S_PAD: tl.constexpr, B: tl.constexpr, SHIFT: tl.constexpr, OWN: tl.constexpr, SIGMOID: tl.constexpr,
    K: tl.constexpr, K_PAD: tl.constexpr, NORMALISE: tl.constexpr, told_ptr, told_t, TELL: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    scale = tl.cast(scale, tl.float32)
    n = tl.arange(0, N_PAD)
    r = tl.arange(0, R_PAD)
    s = tl.arange(0, S_PAD)
    inside = n < N
    n64 = n.to(tl.int64)
    r64 = r.to(tl.int64)
    eps_S = eps_ptr + s[None, :] * (N + R)
    wait_for_former(OVERLAP)  # Laplace's points too are what a kernel has just written
    own_eps_NS = tl.load(eps_S + n[:, None], mask=inside[:, None] & (s < S)[None, :], other=0.0)
    if R > 0:
        eps_RS = tl.load(eps_S + N + r[:, None], mask=(r < R)[:, None] & (s < S)[None, :], other=0.0)
    for b in range(B):
        t = (tl.program_id(0) * B + b).to(tl.int64)
        row = t + tl.arange(0, 1)
        live = inside & (row < tokens)
        mean_N = tl.load(mean_ptr + t * mean_t + n64 * mean_n, mask=live, other=0.0).to(tl.float32)
        if SHIFT:
            mean_N += tl.load(shift_ptr + t * shift_t + n64 * shift_n, mask=live, other=0.0).to(tl.float32)
        log_sd_N = tl.load(log_sd_ptr + t * log_sd_t + n64 * log_sd_n, mask=live, other=0.0).to(tl.float32)
        own_N = mean_N
        if OWN:
            own_N = tl.load(own_ptr + t * own_t + n64 * own_n, mask=live, other=float("-inf")).to(tl.float32)
        spread_NS = tl.exp(log_sd_N)[:, None] * own_eps_NS.to(tl.float32)
        if R > 0:
            factor_NR = tl.load(
                factor_ptr + t * factor_t + n64[:, None] * factor_n + r64[None, :] * factor_r,
                mask=live[:, None] & (r < R)[None, :],
                other=0.0,
            )
            spread_NS = product(factor_NR, eps_RS, spread_NS)
        square = 0.0
        if TELL:
            square = tl.sum(tl.where(inside, tl.exp(2.0 * log_sd_N), 0.0), 0)
            if R > 0:
                square += tl.sum(tl.sum(factor_NR.to(tl.float32) * factor_NR.to(tl.float32), 1), 0)
        store_token(
            mean_N, spread_NS, scale, own_N, out_ptr, weights_ptr, indices_ptr, gate_scale,
            row, tokens, n, s, N, S, LOG_S, OWN, SIGMOID, K, K_PAD, NORMALISE, told_ptr, told_t, square, TELL,
        )  # fmt: skip


def average(
    mean_TN: Tensor,
    log_sd_TN: Tensor,
    factor_TNR: Tensor | None,
    eps_SE: Tensor,
    scale: float = 1.0,
    *,
    shift_TN: Tensor | None = None,
    own_TN: Tensor | None = None,
    ask: Ask | None = None,
    sigmoid: bool = False,
    told_TG: Tensor | None = None,
    shape: tuple[str, int, int] | None = None,
) -> Choice:
    """log E[softmax(l)] (or logit E[sigmoid(l)]), l ~ N(mean + shift, scale^2 (D + V V')); + logsumexp(own) where given.

    By token also entropy, trace and the points' variance, into `told_TG`. Without `factor_TNR` the posterior is mean-field.
    `shape` overrides the choice of kernel for tuning: ("token" or "point", tokens a program, warps).
    """
    tokens, experts = mean_TN.shape
    rank, samples = 0 if factor_TNR is None else factor_TNR.shape[-1], len(eps_SE)
    eps_SE = eps_SE.contiguous()
    shift, own = mean_TN if shift_TN is None else shift_TN, mean_TN if own_TN is None else own_TN
    s_pad = pad(samples, 16)
    kind, block, warps = shape or _shape(tokens, pad(experts, 16), s_pad, rank)
    late = kind == "token" and block > 1  # several tokens a program: K experts are chosen by a kernel of its own
    k = 0 if ask is None or late else ask.k
    out_TN = torch.empty(tokens, experts, dtype=torch.float32, device=mean_TN.device)
    weights_TK, indices_TK = room(tokens, ask, out_TN)
    factor: tuple[Any, ...] = ()
    factor_strides: tuple[int, ...] = ()
    more: dict[str, Any] = {}
    tell = kind == "token" and told_TG is not None and not sigmoid
    if kind == "token":
        given = log_sd_TN.unsqueeze(-1) if factor_TNR is None else factor_TNR
        factor, factor_strides = (given,), given.stride()
        told, overlap = out_TN if told_TG is None else told_TG, overlaps(mean_TN)
        more = {"R": rank, "R_PAD": pad(max(1, rank), 16), "S_PAD": s_pad, **overlap}
        more |= {"num_stages": 1} if tell else {}  # a tile that feeds a product is squared as well (quadratic.py)
        more |= {"told_ptr": told, "told_t": told.stride(0), "TELL": tell, "OVERLAP": bool(overlap)}
    kernel = _by_token_kernel if kind == "token" else _by_point_kernel
    with on_device(mean_TN):
        kernel[(triton.cdiv(tokens, block),)](
            mean_TN, shift, log_sd_TN, *factor, own, eps_SE, out_TN, weights_TK, indices_TK,
            tokens, scale, 1.0 if ask is None else ask.scale,
            *mean_TN.stride(), *shift.stride(), *log_sd_TN.stride(), *factor_strides, *own.stride(),
            N=experts, N_PAD=pad(experts, 16), S=samples, LOG_S=math.log(samples), B=block,
            SHIFT=shift_TN is not None, OWN=own_TN is not None, SIGMOID=sigmoid,
            K=k, K_PAD=pad(max(1, k)), NORMALISE=ask is not None and ask.normalise, num_warps=warps, **more,
        )  # fmt: skip
    if late and ask is not None:
        return select_experts(out_TN, out_TN, ask)
    return Choice(out_TN, told=tell) if ask is None else Choice(out_TN, weights_TK, indices_TK, tell)


def _shape(tokens: int, n_pad: int, s_pad: int, rank: int) -> tuple[str, int, int]:
    if tokens < MANY:
        return "token", 1, min(16, max(4, n_pad * s_pad // 1024))
    if rank:
        return "token", 4, max(1, n_pad * s_pad // 4096)
    return "point", 8, 2 if n_pad >= 64 else 4
