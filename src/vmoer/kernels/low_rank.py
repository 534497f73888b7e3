"""Low-rank posterior to averaged probabilities: E[softmax(N(mu, diag(sd^2) + V V'))] over shared points.

A program takes its tokens one after the other: l [N, S] = mu + sd eps_own + V eps_shared stays in registers, its columns are
normalised and averaged there. Floor at 16,384 tokens, N = 128, R = 8, S = 32, heads in bfloat16: traffic
T N (2 (R + 2) + 4 + 4) bytes = 59 MB, 14 us; two exponentials a sample and expert, 134M, 37 us; S N (R + 1) multiplications
and additions a token, 0.6 G.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from vmoer import integrals
from vmoer.gaussians import LowRank
from vmoer.kernels._asks import Ask, Choice
from vmoer.kernels._tiles import average as average_points
from vmoer.kernels._tiles import log_sum_exp, on_device, pad, product
from vmoer.kernels._tiles import select as store_selected
from vmoer.kernels.select import room

MOST_EXPERTS, MOST_RANK = 512, 64


@triton.jit
def _low_rank_kernel(
    mean_ptr, shift_ptr, log_sd_ptr, factor_ptr, own_ptr, eps_ptr, out_ptr, weights_ptr, indices_ptr,
    tokens, scale, gate_scale,
    mean_t, mean_n, shift_t, shift_n, log_sd_t, log_sd_n, factor_t, factor_n, factor_r, own_t, own_n,
    N: tl.constexpr, N_PAD: tl.constexpr, R: tl.constexpr, R_PAD: tl.constexpr, S: tl.constexpr, LOG_S: tl.constexpr,
    S_PAD: tl.constexpr, B: tl.constexpr, SHIFT: tl.constexpr, OWN: tl.constexpr, SIGMOID: tl.constexpr,
    K: tl.constexpr, K_PAD: tl.constexpr, NORMALISE: tl.constexpr,
):  # fmt: skip
    n = tl.arange(0, N_PAD)
    r = tl.arange(0, R_PAD)
    s = tl.arange(0, S_PAD)
    inside = n < N
    n64 = n.to(tl.int64)
    r64 = r.to(tl.int64)
    eps_S = eps_ptr + s[None, :] * (N + R)
    own_eps_NS = tl.load(eps_S + n[:, None], mask=inside[:, None] & (s < S)[None, :], other=0.0)
    eps_RS = tl.load(eps_S + N + r[:, None], mask=(r < R)[:, None] & (s < S)[None, :], other=0.0)
    for b in range(B):
        t = (tl.program_id(0) * B + b).to(tl.int64)
        row = t + tl.arange(0, 1)
        live = inside & (row < tokens)
        mean_N = tl.load(mean_ptr + t * mean_t + n64 * mean_n, mask=live, other=0.0).to(tl.float32)
        if SHIFT:
            mean_N += tl.load(shift_ptr + t * shift_t + n64 * shift_n, mask=live, other=0.0).to(tl.float32)
        log_sd_N = tl.load(log_sd_ptr + t * log_sd_t + n64 * log_sd_n, mask=live, other=0.0).to(tl.float32)
        factor_NR = tl.load(
            factor_ptr + t * factor_t + n64[:, None] * factor_n + r64[None, :] * factor_r,
            mask=live[:, None] & (r < R)[None, :],
            other=0.0,
        )
        spread_NS = product(factor_NR, eps_RS, tl.zeros([N_PAD, S_PAD], tl.float32))
        spread_NS += tl.exp(log_sd_N)[:, None] * own_eps_NS
        log_p_N = average_points(mean_N[:, None] + scale * spread_NS, n, s, N, S, LOG_S, SIGMOID)
        out_N = log_p_N
        if OWN:
            own_N = tl.load(own_ptr + t * own_t + n64 * own_n, mask=live, other=float("-inf")).to(tl.float32)
            out_N += log_sum_exp(own_N, 0)
        tl.store(out_ptr + t * N + n, out_N, mask=live)
        if K > 0:
            by_1N = tl.where(inside, log_p_N, float("-inf"))[None, :]
            store_selected(
                by_1N, log_p_N[None, :], n, row, row < tokens, weights_ptr, indices_ptr, gate_scale, K, K_PAD, NORMALISE
            )


def average(
    mean_TN: Tensor,
    log_sd_TN: Tensor,
    factor_TNR: Tensor,
    eps_SE: Tensor,
    scale: float = 1.0,
    *,
    shift_TN: Tensor | None = None,
    own_TN: Tensor | None = None,
    ask: Ask | None = None,
    sigmoid: bool = False,
    tokens_a_program: int | None = None,
) -> Choice:
    """log E[softmax(l)] (or logit E[sigmoid(l)]), l ~ N(mean + shift, scale^2 (D + V V')); + logsumexp(own) where given."""
    tokens, experts = mean_TN.shape
    rank, samples = factor_TNR.shape[-1], len(eps_SE)
    eps_SE = eps_SE.float().contiguous()
    out_TN = torch.empty(tokens, experts, dtype=torch.float32, device=mean_TN.device)
    weights_TK, indices_TK = room(tokens, ask, out_TN)
    shift, own = mean_TN if shift_TN is None else shift_TN, mean_TN if own_TN is None else own_TN
    n_pad, s_pad, k = pad(experts, 16), pad(samples, 16), 0 if ask is None else ask.k
    block = tokens_a_program or (1 if tokens < 4096 else 4)
    with on_device(mean_TN):
        _low_rank_kernel[(triton.cdiv(tokens, block),)](
            mean_TN, shift, log_sd_TN, factor_TNR, own, eps_SE, out_TN, weights_TK, indices_TK,
            tokens, scale, 1.0 if ask is None else ask.scale,
            *mean_TN.stride(), *shift.stride(), *log_sd_TN.stride(), *factor_TNR.stride(), *own.stride(),
            N=experts, N_PAD=n_pad, R=rank, R_PAD=pad(rank, 16), S=samples, LOG_S=math.log(samples), S_PAD=s_pad, B=block,
            SHIFT=shift_TN is not None, OWN=own_TN is not None, SIGMOID=sigmoid,
            K=k, K_PAD=pad(max(1, k)), NORMALISE=ask is not None and ask.normalise,
            num_warps=min(16, max(4, n_pad * s_pad // 1024)),
        )  # fmt: skip
    return Choice(out_TN) if ask is None else Choice(out_TN, weights_TK, indices_TK)


def reference(
    mean_TN: Tensor,
    log_sd_TN: Tensor,
    factor_TNR: Tensor,
    eps_SE: Tensor,
    scale: float = 1.0,
    *,
    sigmoid: bool = False,
) -> Tensor:
    """The same in float64 by vmoer.integrals."""
    q = LowRank(mean_TN.double(), log_sd_TN.double() + math.log(scale), scale * factor_TNR.double())
    expected = integrals.expected_sigmoid_logit if sigmoid else integrals.log_expected_softmax
    return expected(q, eps_SE.double())
