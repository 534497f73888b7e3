"""Top-K and gate weights of routers that score by softmax, in one pass over the logits.

    chosen = Top-K(by),    weight_k = scale * softmax(l)_k  [/ sum over the chosen]        (vmoer.gates.rules)

Floor: the logits read once, K weights and indices written: at 16,384 tokens, N = 40, K = 8 in float32 4.2 MB, 1 us.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

import torch
import triton
import triton.language as tl
from torch import Tensor

from vmoer.numerics.kernels._asks import Ask, Choice
from vmoer.numerics.kernels._tiles import log_sum_exp, on_device, pad, store_selected


def room(tokens: int, ask: Ask | None, like: Tensor) -> tuple[Tensor, Tensor]:
    """Where a kernel stores weights and indices; without an ask any pointer, since nothing is stored."""
    if ask is None:
        return like, like
    weights_TK = torch.empty(tokens, ask.k, dtype=ask.dtype, device=like.device)
    return weights_TK, torch.empty(tokens, ask.k, dtype=torch.int64, device=like.device)


@triton.jit
def _select_kernel(
    by_ptr, logits_ptr, weights_ptr, indices_ptr, tokens, gate_scale,
    N: tl.constexpr, N_PAD: tl.constexpr, K: tl.constexpr, K_PAD: tl.constexpr, NORMALISE: tl.constexpr, SAME: tl.constexpr,
    B: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0) * B + tl.arange(0, B)
    n = tl.arange(0, N_PAD)
    live = t < tokens
    place = t.to(tl.int64)[:, None] * N + n[None, :]
    inside = (n < N)[None, :] & live[:, None]
    logits_BN = tl.load(logits_ptr + place, mask=inside, other=float("-inf"))
    log_p_BN = logits_BN - log_sum_exp(logits_BN, 1)[:, None]
    by_BN = log_p_BN
    if not SAME:
        by_BN = tl.load(by_ptr + place, mask=inside, other=float("-inf"))
    log_p_BN = tl.where(inside, log_p_BN, 0.0)
    store_selected(by_BN, log_p_BN, n, t, live, weights_ptr, indices_ptr, gate_scale, K, K_PAD, NORMALISE, SAME)


def select(by_TN: Tensor, logits_TN: Tensor, ask: Ask, shape: tuple[int, int] | None = None) -> Choice:
    """`shape` overrides tokens a program and warps, for tuning."""
    tokens, experts = by_TN.shape
    same = by_TN is logits_TN
    by_TN, logits_TN = by_TN.contiguous(), logits_TN.contiguous()
    weights_TK, indices_TK = room(tokens, ask, by_TN)
    n_pad = pad(experts)
    block, warps = shape or ((1, 1) if tokens < 256 else (max(1, 1024 // n_pad), 4))
    with on_device(by_TN):
        _select_kernel[(triton.cdiv(tokens, block),)](
            by_TN, logits_TN, weights_TK, indices_TK, tokens, ask.scale,
            N=experts, N_PAD=n_pad, K=ask.k, K_PAD=pad(ask.k), NORMALISE=ask.normalise, SAME=same, B=block,
            num_warps=warps,
        )  # fmt: skip
    return Choice(logits_TN, weights_TK, indices_TK)
