"""Cholesky entries and mean to averaged probabilities: E[softmax(N(mu, L L'))] over shared points, L never in memory.

`raw_TC` holds the lower triangle row by row, row i from entry i(i+1)/2 on, the logarithm on the diagonal; any strides. Two
shapes of the same sum  l_is = mu_i + scale (exp(raw_ii) eps_si + sum_{j<i} raw_ij eps_sj):

    by token     few tokens: a program takes one token after the other, l [N, S] = raw [N, N] eps' [N, S] in registers
    by expert    many tokens: a program takes B tokens and walks through the experts (vmoer.numerics.kernels.by_expert)

Floor at 16,384 tokens, N = 40, S = 32, heads in bfloat16: traffic T (2 C + (2 + 4 + 4) N) bytes = 35 MB, 8 us at 4.3 TB/s;
S C = 26k multiplications and additions a token, 0.43 G, two or three times in bfloat16 pieces, 3 us; exponentials 2 S N,
42M, 12 us. At N = 64: 79 MB, 18 us; 1.1 G; 67M, 19 us.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from vmoer.numerics.kernels import by_expert
from vmoer.numerics.kernels._asks import MANY, Ask, Choice
from vmoer.numerics.kernels._tiles import on_device, overlaps, pad, product, store_token, wait_for_former
from vmoer.numerics.kernels.select import room
from vmoer.numerics.kernels.select import select as select_experts


@triton.jit
def _by_token_kernel(
    mean_ptr, shift_ptr, raw_ptr, own_ptr, eps_ptr, out_ptr, weights_ptr, indices_ptr, tokens, scale, gate_scale,
    mean_t, mean_n, shift_t, shift_n, raw_t, raw_c, own_t, own_n,
    N: tl.constexpr, N_PAD: tl.constexpr, S: tl.constexpr, LOG_S: tl.constexpr, S_PAD: tl.constexpr, J: tl.constexpr,
    B: tl.constexpr, SHIFT: tl.constexpr, OWN: tl.constexpr, SIGMOID: tl.constexpr,
    K: tl.constexpr, K_PAD: tl.constexpr, NORMALISE: tl.constexpr, told_ptr, told_t, TELL: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    scale = tl.cast(scale, tl.float32)
    n = tl.arange(0, N_PAD)
    j = tl.arange(0, J)
    s = tl.arange(0, S_PAD)
    inside = n < N
    n64 = n.to(tl.int64)
    row_start = n64 * (n64 + 1) // 2
    eps_S = eps_ptr + s[None, :] * N
    wait_for_former(OVERLAP)
    own_eps_NS = tl.load(eps_S + n[:, None], mask=inside[:, None] & (s < S)[None, :], other=0.0).to(tl.float32)
    for b in range(B):
        t = (tl.program_id(0) * B + b).to(tl.int64)
        row = t + tl.arange(0, 1)
        live = inside & (row < tokens)
        raw_T = raw_ptr + t * raw_t
        # all that a token needs is asked for before anything waits
        log_sd_N = tl.load(raw_T + (row_start + n64) * raw_c, mask=live, other=0.0).to(tl.float32)
        mean_N = tl.load(mean_ptr + t * mean_t + n64 * mean_n, mask=live, other=0.0).to(tl.float32)
        if SHIFT:
            mean_N += tl.load(shift_ptr + t * shift_t + n64 * shift_n, mask=live, other=0.0).to(tl.float32)
        own_N = mean_N
        if OWN:
            own_N = tl.load(own_ptr + t * own_t + n64 * own_n, mask=live, other=float("-inf")).to(tl.float32)
        square_N = tl.zeros([N_PAD], tl.float32)
        spread_NS = tl.zeros([N_PAD, S_PAD], tl.float32)
        for first in range(0, N, J):
            column = first + j
            raw_NJ = tl.load(
                raw_T + (row_start[:, None] + column[None, :]) * raw_c,
                mask=live[:, None] & (column[None, :] < n[:, None]),
                other=0.0,
            )
            eps_JS = tl.load(eps_S + column[:, None], mask=(column < N)[:, None] & (s < S)[None, :], other=0.0)
            spread_NS = product(raw_NJ, eps_JS, spread_NS)
            if TELL:  # then no tile is on its way while another is worked on (num_stages), which could take its place
                square_N += tl.sum(raw_NJ.to(tl.float32) * raw_NJ.to(tl.float32), 1)
        sd_N = tl.exp(log_sd_N)
        spread_NS += sd_N[:, None] * own_eps_NS
        square = tl.sum(square_N + tl.where(inside, sd_N * sd_N, 0.0), 0)
        store_token(
            mean_N, spread_NS, scale, own_N, out_ptr, weights_ptr, indices_ptr, gate_scale,
            row, tokens, n, s, N, S, LOG_S, OWN, SIGMOID, K, K_PAD, NORMALISE, told_ptr, told_t, square, TELL,
        )  # fmt: skip


def average(
    mean_TN: Tensor,
    raw_TC: Tensor,
    eps_SN: Tensor,
    scale: float = 1.0,
    *,
    shift_TN: Tensor | None = None,
    own_TN: Tensor | None = None,
    ask: Ask | None = None,
    sigmoid: bool = False,
    told_TG: Tensor | None = None,
    shape: tuple[str, int, int] | None = None,
) -> Choice:
    """log E[softmax(l)] (or logit E[sigmoid(l)]), l ~ N(mean + shift, scale^2 L L'); + logsumexp(own) where given.

    By token also entropy, trace and the points' variance, into `told_TG`. `shape` overrides the choice of kernel for tuning:
    ("token" or "expert", tokens a program, warps).
    """
    tokens, experts = mean_TN.shape
    samples = len(eps_SN)
    s_pad = pad(samples, 16)
    eps_SN = eps_SN.contiguous()
    shift, own = mean_TN if shift_TN is None else shift_TN, mean_TN if own_TN is None else own_TN
    columns = min(64, pad(experts, 16))
    kind, block, warps = shape or _shape(tokens, pad(experts, 16), s_pad, raw_TC.dtype)
    if kind == "expert":
        out_TN = by_expert.average(
            mean_TN, raw_TC, eps_SN, scale,
            shift_TN=shift_TN, own_TN=own_TN, sigmoid=sigmoid, block=block, warps=warps,
        )  # fmt: skip
        return Choice(out_TN) if ask is None else select_experts(out_TN, out_TN, ask)
    out_TN = torch.empty(tokens, experts, dtype=torch.float32, device=mean_TN.device)
    weights_TK, indices_TK = room(tokens, ask, out_TN)
    k = 0 if ask is None else ask.k
    tell = told_TG is not None and not sigmoid
    told = out_TN if told_TG is None else told_TG
    overlap = overlaps(mean_TN)
    with on_device(mean_TN):
        _by_token_kernel[(triton.cdiv(tokens, block),)](
            mean_TN, shift, raw_TC, own, eps_SN, out_TN, weights_TK, indices_TK, tokens, scale,
            1.0 if ask is None else ask.scale,
            *mean_TN.stride(), *shift.stride(), *raw_TC.stride(), *own.stride(),
            N=experts, N_PAD=pad(experts, 16), S=samples, LOG_S=math.log(samples), S_PAD=s_pad, J=columns, B=block,
            SHIFT=shift_TN is not None, OWN=own_TN is not None, SIGMOID=sigmoid,
            K=k, K_PAD=pad(max(1, k)), NORMALISE=ask is not None and ask.normalise,
            told_ptr=told, told_t=told.stride(0), TELL=tell, OVERLAP=bool(overlap),
            num_warps=warps, num_stages=1 if tell or experts <= columns or raw_TC.dtype == torch.float32 else 2, **overlap,
        )  # fmt: skip
    return Choice(out_TN, told=tell) if ask is None else Choice(out_TN, weights_TK, indices_TK, tell)


def _shape(tokens: int, n_pad: int, s_pad: int, dtype: torch.dtype) -> tuple[str, int, int]:
    if tokens >= MANY and dtype != torch.float32:
        return ("expert", 16, 1) if n_pad <= 64 else ("expert", 64, 4)
    if tokens < MANY:
        return "token", 1, 8 if n_pad > 64 else min(16, max(4, n_pad * s_pad // 1024))
    return "token", 4, min(16, max(4, n_pad * s_pad // 1024))
