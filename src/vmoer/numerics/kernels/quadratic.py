"""Novelty in one pass over the states: |W u|^2, where W has few rows.

W u is small against u, so the product must be better than bfloat16. States in bfloat16 are exact; W is given as two bfloat16
numbers, with 2^-18 of them lost. Floor at 16,384 tokens, D = 1536, R = 128: the states read once, 50 MB, 12 us; 6.4 G
multiplications and additions, twice, 30 us.

The tile of states must feed products and nothing else. When it was squared and summed on the way as well, Triton 3.6 gave it one
buffer for Hopper's asynchronous products, and copied the next tile over it while the last product still read it.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

import torch
import triton
import triton.language as tl
from torch import Tensor

from vmoer.numerics.kernels._asks import MANY, halves
from vmoer.numerics.kernels._tiles import on_device, pad, product


@triton.jit
def _novelty_kernel(
    u_ptr, root_ptr, low_ptr, out_ptr, tokens, u_t, u_d,
    D: tl.constexpr, R: tl.constexpr, R_PAD: tl.constexpr, B: tl.constexpr, J: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0) * B + tl.arange(0, B)
    r = tl.arange(0, R_PAD)
    live = t < tokens
    u_T = u_ptr + t.to(tl.int64)[:, None] * u_t
    along_BR = tl.zeros([B, R_PAD], tl.float32)
    for first in range(0, D, J):
        d = first + tl.arange(0, J)
        u_BJ = tl.load(u_T + d[None, :] * u_d, mask=live[:, None] & (d < D)[None, :], other=0.0)
        place = r[None, :] * D + d[:, None]
        inside = (r < R)[None, :] & (d < D)[:, None]
        if SPLIT:
            along_BR = product(u_BJ, tl.load(low_ptr + place, mask=inside, other=0.0), along_BR)
        along_BR = product(u_BJ, tl.load(root_ptr + place, mask=inside, other=0.0), along_BR)
    tl.store(out_ptr + t, tl.sum(along_BR * along_BR, 1), mask=live)


def novelty(
    u_TD: Tensor, root_RD: Tensor, split: tuple[Tensor, Tensor] | None = None, *, tokens_a_program: int | None = None
) -> Tensor:
    """[T] in float32; the root in float32. States in bfloat16 are multiplied by its two parts: `split`, or found here."""
    tokens, dim = u_TD.shape
    block = tokens_a_program or (16 if tokens < MANY else 128)
    rank = pad(len(root_RD), 16)
    out_T = torch.empty(tokens, dtype=torch.float32, device=u_TD.device)
    narrow = u_TD.dtype == torch.bfloat16
    if narrow:
        high_RD, low_RD = split or halves(root_RD)
    else:
        high_RD = low_RD = root_RD.contiguous()
    with on_device(u_TD):
        _novelty_kernel[(triton.cdiv(tokens, block),)](
            u_TD, high_RD, low_RD, out_T, tokens, *u_TD.stride(),
            D=dim, R=len(root_RD), R_PAD=rank, B=block, J=32 if u_TD.dtype == torch.float32 else 64, SPLIT=narrow,
            num_warps=4 if block < 64 else 8, num_stages=4 if narrow and rank <= 128 else 2,
        )  # fmt: skip
    return out_T
