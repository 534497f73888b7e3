"""Novelty in one pass over the states: u' A^-1 u by the kept eigenvectors and the damping for the rest.

    along_r = v_r' u,    novelty = sum_r along_r^2 / (lambda_r + damping) + (|u|^2 - sum_r along_r^2) / damping

The rest is a difference of large numbers, so the product must be better than bfloat16: states in bfloat16 are exact, and the
eigenvectors are given as two bfloat16 numbers, 2^-18 of them lost. Floor at 16,384 tokens, D = 1536, R = 128: the
states read once, 50 MB, 12 us; 6.4 G multiplications and additions, twice, 30 us.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

import torch
import triton
import triton.language as tl
from torch import Tensor

from vmoer.kernels import MANY
from vmoer.kernels._tiles import on_device, pad, product


@triton.jit
def _novelty_kernel(
    u_ptr, basis_ptr, low_ptr, inverse_ptr, rest_ptr, out_ptr, tokens, u_t, u_d,
    D: tl.constexpr, R: tl.constexpr, R_PAD: tl.constexpr, B: tl.constexpr, J: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0) * B + tl.arange(0, B)
    r = tl.arange(0, R_PAD)
    live = t < tokens
    kept = r < R
    u_T = u_ptr + t.to(tl.int64)[:, None] * u_t
    along_BR = tl.zeros([B, R_PAD], tl.float32)
    square_B = tl.zeros([B], tl.float32)
    for first in range(0, D, J):
        d = first + tl.arange(0, J)
        u_BJ = tl.load(u_T + d[None, :] * u_d, mask=live[:, None] & (d < D)[None, :], other=0.0)
        place = r[None, :] * D + d[:, None]
        inside = kept[None, :] & (d < D)[:, None]
        if SPLIT:
            along_BR = product(u_BJ, tl.load(low_ptr + place, mask=inside, other=0.0), along_BR)
        along_BR = product(u_BJ, tl.load(basis_ptr + place, mask=inside, other=0.0), along_BR)
        wide_BJ = u_BJ.to(tl.float32)
        square_B += tl.sum(wide_BJ * wide_BJ, 1)
    along_BR = along_BR * along_BR
    inverse_R = tl.load(inverse_ptr + r, mask=kept, other=0.0)
    rest_B = tl.maximum(square_B - tl.sum(along_BR, 1), 0.0)
    out_B = tl.sum(along_BR * inverse_R[None, :], 1) + rest_B * tl.load(rest_ptr)
    tl.store(out_ptr + t, out_B, mask=live)


def novelty(u_TD: Tensor, basis_RD: Tensor, inverse_R: Tensor, rest: Tensor, tokens_a_program: int = 128) -> Tensor:
    """[T] in float32; basis, inverse and rest in float32."""
    tokens, dim = u_TD.shape
    rank = pad(len(basis_RD), 16)
    out_T = torch.empty(tokens, dtype=torch.float32, device=u_TD.device)
    block = 16 if tokens < MANY else tokens_a_program
    split = u_TD.dtype == torch.bfloat16
    high_RD = basis_RD.bfloat16() if split else basis_RD.contiguous()
    low_RD = (basis_RD - high_RD).bfloat16() if split else high_RD
    with on_device(u_TD):
        _novelty_kernel[(triton.cdiv(tokens, block),)](
            u_TD, high_RD, low_RD, inverse_R.contiguous(), rest, out_T, tokens, *u_TD.stride(),
            D=dim, R=len(basis_RD), R_PAD=rank, B=block, J=32 if u_TD.dtype == torch.float32 else 64, SPLIT=split,
            num_warps=4 if block < 64 else 8, num_stages=4 if split and rank <= 128 else 2,
        )  # fmt: skip
    return out_T


def reference(u_TD: Tensor, basis_RD: Tensor, inverse_R: Tensor, rest: Tensor) -> Tensor:
    """The same in float64."""
    u = u_TD.double()
    along_TR = (u @ basis_RD.double().mT).square()
    return along_TR @ inverse_R.double() + (u.square().sum(-1) - along_TR.sum(-1)).clamp_min(0) * rest.double()
