"""Gate entropy of routers that score by softmax, in one pass over the logits.

    H = log Z - sum_n e^(d_n) d_n / Z,    d = l - max l,    Z = sum_n e^(d_n)

Floor: the logits read once, a number a token written: at 16,384 tokens, N = 40 in float32 2.7 MB, 1 us.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

import torch
import triton
import triton.language as tl
from torch import Tensor

from vmoer.numerics.kernels._tiles import on_device, pad


@triton.jit
def _entropy_kernel(logits_ptr, out_ptr, tokens, N: tl.constexpr, N_PAD: tl.constexpr, B: tl.constexpr):
    t = tl.program_id(0) * B + tl.arange(0, B)
    n = tl.arange(0, N_PAD)
    live = t < tokens
    place = t.to(tl.int64)[:, None] * N + n[None, :]
    inside = live[:, None] & (n < N)[None, :]
    logits_BN = tl.load(logits_ptr + place, mask=inside, other=float("-inf")).to(tl.float32)
    top_B = tl.where(live, tl.max(logits_BN, 1), 0.0)
    d_BN = logits_BN - top_B[:, None]
    e_BN = tl.exp(d_BN)
    total_B = tl.sum(e_BN, 1)
    mean_B = tl.sum(tl.where(e_BN > 0, e_BN * d_BN, 0.0), 1) / total_B
    tl.store(out_ptr + t, tl.log(total_B) - mean_B, mask=live)


def entropy(logits_TN: Tensor) -> Tensor:
    """[T] in float32, in nats. One layout for every batch, so that a token's sum has the same order in all of them."""
    tokens, experts = logits_TN.shape
    out_T = torch.empty(tokens, dtype=torch.float32, device=logits_TN.device)
    n_pad = pad(experts)
    block = max(1, 1024 // n_pad)
    with on_device(logits_TN):
        _entropy_kernel[(triton.cdiv(tokens, block),)](
            logits_TN.contiguous(), out_T, tokens, N=experts, N_PAD=n_pad, B=block, num_warps=4
        )
    return out_T
