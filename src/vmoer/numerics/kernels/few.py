"""The inference network for few tokens, in two launches: out = V relu(W u), and novelty |R u|^2 on the way. Or,
for routers without a network, novelty and the entropy of the experts' scores.

    features    rows of W and of novelty's root R against a piece of u: partial sums [pieces, T, H + R]
    heads       adds the pieces up in their order; then relu, rounding and rows of V; one program more squares what R gave, and
                has the entropy's time

A step of decoding has a few tokens. There a product is a matrix of weights read once, and what it costs is launching, and waiting
for memory that nobody asked for early enough. So programs are many and short, read their weights before they wait for what the
launch before them writes, and are started while that one still runs (programmatic dependent launch, on Hopper and later). Up to
SINGLE tokens are multiplied one by one, which needs no tensor cores and no shared memory; more go in blocks of 16 or 32.

Floor at one token, D = 1536, H = 384, 860 outputs, R = 128: 2.6 MB of weights, 0.6 us; two launches.

Shapes: T tokens, D model, H hidden, O outputs, R rows of the root, N experts, P pieces of D.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

import torch
import triton
import triton.language as tl
from torch import Tensor

from vmoer.numerics.kernels._asks import TOLD
from vmoer.numerics.kernels._tiles import on_device, overlaps, pad, product, start_next, wait_for_former

PIECE = 512
"""Columns of W that a program takes."""
ROWS = 16
"""Rows of W that a program takes."""
SINGLE = 4
"""Tokens that are taken one by one."""
MOST = 128
"""Tokens; for more the libraries' products are as fast."""


@triton.jit
def _weights(
    backbone_ptr, high_ptr, low_ptr, first, d, D: tl.constexpr, H: tl.constexpr, R: tl.constexpr, ROWS: tl.constexpr,
    PIECE: tl.constexpr,
):  # fmt: skip
    """Rows of W, or of the root's two halves, [ROWS, PIECE]; of W the second is nothing."""
    row = first + tl.arange(0, ROWS)
    of_root = row - H
    if first < H:
        inside = (row < H)[:, None] & (d < D)[None, :]
        high = tl.load(backbone_ptr + row[:, None] * D + d[None, :], mask=inside, other=0.0)
        low = tl.zeros([ROWS, PIECE], high.dtype)
    else:
        inside = (of_root < R)[:, None] & (d < D)[None, :]
        high = tl.load(high_ptr + of_root[:, None] * D + d[None, :], mask=inside, other=0.0)
        low = tl.load(low_ptr + of_root[:, None] * D + d[None, :], mask=inside, other=0.0)
    return high, low


@triton.jit
def _features_kernel(
    u_ptr, backbone_ptr, high_ptr, low_ptr, parts_ptr, tokens, u_t,
    D: tl.constexpr, H: tl.constexpr, R: tl.constexpr, T_PAD: tl.constexpr, SINGLE: tl.constexpr,
    PIECE: tl.constexpr, ROWS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    start_next(OVERLAP)
    first, piece = tl.program_id(0) * ROWS, tl.program_id(1)
    row = first + tl.arange(0, ROWS)
    d = piece * PIECE + tl.arange(0, PIECE)
    high, low = _weights(backbone_ptr, high_ptr, low_ptr, first, d, D, H, R, ROWS, PIECE)
    parts_R = parts_ptr + piece * tokens * (H + R) + row
    if SINGLE:
        for one in tl.static_range(T_PAD):
            u_J = tl.load(u_ptr + one * u_t + d, mask=d < D, other=0.0).to(tl.float32)[None, :]
            sums_R = tl.sum(high.to(tl.float32) * u_J, 1)
            if first >= H:
                sums_R += tl.sum(low.to(tl.float32) * u_J, 1)
            tl.store(parts_R + one * (H + R), sums_R, mask=row < H + R)
    else:
        t = tl.program_id(2) * T_PAD + tl.arange(0, T_PAD)
        live = (t < tokens)[None, :]
        u_JT = tl.load(u_ptr + t.to(tl.int64)[None, :] * u_t + d[:, None], mask=live & (d < D)[:, None], other=0.0)
        sums_RT = product(high, u_JT, tl.zeros([ROWS, T_PAD], tl.float32))
        if first >= H:
            sums_RT = product(low, u_JT, sums_RT)
        tl.store(parts_R[:, None] + t[None, :] * (H + R), sums_RT, mask=(row < H + R)[:, None] & live)


@triton.jit
def _entropy(logits_BN):
    """Of softmax(l) along the last axis, which -inf fills up."""
    d_BN = logits_BN - tl.max(logits_BN, 1)[:, None]
    e_BN = tl.exp(d_BN)
    total_B = tl.sum(e_BN, 1)
    return tl.log(total_B) - tl.sum(tl.where(e_BN > 0, e_BN * d_BN, 0.0), 1) / total_B


@triton.jit
def _heads_kernel(
    parts_ptr, heads_ptr, out_ptr, told_ptr, logits_ptr, tokens, told_t, logits_t, blocks, N: tl.constexpr, N_PAD: tl.constexpr,
    H: tl.constexpr, H_PAD: tl.constexpr, R: tl.constexpr, R_PAD: tl.constexpr, OUT: tl.constexpr, P: tl.constexpr,
    T_PAD: tl.constexpr, SINGLE: tl.constexpr, ROWS: tl.constexpr, OVERLAP: tl.constexpr, COLUMN: tl.constexpr,
):  # fmt: skip
    start_next(OVERLAP)
    block = tl.program_id(0)
    if not SINGLE:
        t = tl.program_id(1) * T_PAD + tl.arange(0, T_PAD)
        live = t < tokens
    if block < blocks:
        o = block * ROWS + tl.arange(0, ROWS)
        h = tl.arange(0, H_PAD)
        heads_OH = tl.load(
            heads_ptr + o.to(tl.int64)[:, None] * H + h[None, :], mask=(o < OUT)[:, None] & (h < H)[None, :], other=0.0
        )
        wait_for_former(OVERLAP)
        if SINGLE:
            for one in tl.static_range(T_PAD):
                sums_H = tl.zeros([H_PAD], tl.float32)
                for p in tl.static_range(P):
                    sums_H += tl.load(parts_ptr + (p * T_PAD + one) * (H + R) + h, mask=h < H, other=0.0)
                features_H = tl.where(sums_H < 0, 0.0, sums_H).to(heads_OH.dtype).to(tl.float32)
                out_O = tl.sum(heads_OH.to(tl.float32) * features_H[None, :], 1)
                tl.store(out_ptr + one * OUT + o, out_O.to(heads_OH.dtype), mask=o < OUT)
        else:
            sums_HT = tl.zeros([H_PAD, T_PAD], tl.float32)
            for p in tl.static_range(P):
                sums_HT += tl.load(
                    parts_ptr + (p * tokens + t)[None, :] * (H + R) + h[:, None],
                    mask=live[None, :] & (h < H)[:, None],
                    other=0.0,
                )
            features_HT = tl.where(sums_HT < 0, 0.0, sums_HT).to(heads_OH.dtype)
            out_OT = product(heads_OH, features_HT, tl.zeros([ROWS, T_PAD], tl.float32))
            tl.store(
                out_ptr + t.to(tl.int64)[None, :] * OUT + o[:, None],
                out_OT.to(heads_OH.dtype),
                mask=(o < OUT)[:, None] & live[None, :],
            )
    elif SINGLE:
        r = tl.arange(0, R_PAD)
        wait_for_former(OVERLAP)
        for one in tl.static_range(T_PAD):
            along_R = tl.zeros([R_PAD], tl.float32)
            for p in tl.static_range(P):
                along_R += tl.load(parts_ptr + (p * T_PAD + one) * (H + R) + H + r, mask=r < R, other=0.0)
            tl.store(told_ptr + one * told_t + COLUMN, tl.sum(along_R * along_R, 0))
            if N > 0:
                n = tl.arange(0, N_PAD)[None, :]
                logits_1N = tl.load(logits_ptr + one * logits_t + n, mask=n < N, other=float("-inf")).to(tl.float32)
                tl.store(told_ptr + one * told_t, tl.sum(_entropy(logits_1N), 0))
    else:
        r = tl.arange(0, R_PAD)
        wait_for_former(OVERLAP)
        if N > 0:
            n = tl.arange(0, N_PAD)[None, :]
            place = t.to(tl.int64)[:, None] * logits_t + n
            logits_TN = tl.load(logits_ptr + place, mask=(n < N) & live[:, None], other=float("-inf")).to(tl.float32)
            tl.store(told_ptr + t * told_t, _entropy(tl.where(live[:, None], logits_TN, 0.0)), mask=live)
        along_TR = tl.zeros([T_PAD, R_PAD], tl.float32)
        for p in tl.static_range(P):
            along_TR += tl.load(
                parts_ptr + (p * tokens + t)[:, None] * (H + R) + H + r[None, :],
                mask=live[:, None] & (r < R)[None, :],
                other=0.0,
            )
        tl.store(told_ptr + t * told_t + COLUMN, tl.sum(along_TR * along_TR, 1), mask=live)


def network(
    u_TD: Tensor,
    backbone_HD: Tensor,
    heads_OH: Tensor,
    root: tuple[Tensor, Tensor] | None = None,
    told_TG: Tensor | None = None,
) -> Tensor:
    """V relu(W u), [T, O], in bfloat16 like all that comes in, sums in float32. With the two `halves` of novelty's root, novelty
    goes into its column of `told_TG`."""
    out_TO = torch.empty(len(u_TD), len(heads_OH), dtype=u_TD.dtype, device=u_TD.device)
    if root is None or told_TG is None:
        _launch(
            u_TD, backbone_HD, heads_OH, (backbone_HD, backbone_HD), out_TO, out_TO, hidden=len(backbone_HD), rank=0
        )
    else:
        _launch(u_TD, backbone_HD, heads_OH, root, out_TO, told_TG, hidden=len(backbone_HD), rank=len(root[0]))
    return out_TO


def novelty(u_TD: Tensor, root: tuple[Tensor, Tensor]) -> Tensor:
    """|R u|^2 alone, [T]."""
    out_T1 = torch.empty(len(u_TD), 1, dtype=torch.float32, device=u_TD.device)
    _launch(u_TD, root[0], root[0], root, out_T1, out_T1, hidden=0, rank=len(root[0]), column=0)
    return out_T1.squeeze(1)


def entropy_and_novelty(logits_TN: Tensor, u_TD: Tensor, root: tuple[Tensor, Tensor]) -> Tensor:
    """The entropy of softmax(logits), and |R u|^2, [T, 2]."""
    out_T2 = torch.empty(len(u_TD), 2, dtype=torch.float32, device=u_TD.device)
    _launch(u_TD, root[0], root[0], root, out_T2, out_T2, hidden=0, rank=len(root[0]), column=1, logits_TN=logits_TN)
    return out_T2


def _launch(
    u_TD: Tensor,
    backbone_HD: Tensor,
    heads_OH: Tensor,
    root: tuple[Tensor, Tensor],
    out_TO: Tensor,
    told_TG: Tensor,
    *,
    hidden: int,
    rank: int,
    column: int = TOLD.index("novelty"),
    logits_TN: Tensor | None = None,
) -> None:
    """Both kernels, for so many rows of W and of the root; what there are none of may be any tensor."""
    tokens, dim = u_TD.shape
    outputs = out_TO.shape[1] if hidden else 0
    single = tokens <= SINGLE
    t_pad = tokens if single else 16 if tokens <= 16 else 32
    pieces, rows = triton.cdiv(dim, PIECE), 16 if outputs <= 2048 else 32 if single else 64
    blocks, columns = triton.cdiv(outputs, rows), 1 if single else triton.cdiv(tokens, t_pad)
    parts_PTR = torch.empty(pieces, tokens, hidden + rank, dtype=torch.float32, device=u_TD.device)
    overlap = overlaps(u_TD)
    with on_device(u_TD):
        _features_kernel[(triton.cdiv(hidden, ROWS) + triton.cdiv(rank, ROWS), pieces, columns)](
            u_TD, backbone_HD, *root, parts_PTR, tokens, u_TD.stride(0),
            D=dim, H=hidden, R=rank, T_PAD=t_pad, SINGLE=single, PIECE=PIECE, ROWS=ROWS, OVERLAP=bool(overlap),
            num_warps=4 if t_pad <= 16 else 8,
        )  # fmt: skip
        logits, experts = (told_TG, 0) if logits_TN is None else (logits_TN, logits_TN.shape[1])
        _heads_kernel[(blocks + (rank > 0), columns)](
            parts_PTR, heads_OH, out_TO, told_TG, logits, tokens, told_TG.stride(0), logits.stride(0), blocks,
            N=experts, N_PAD=pad(max(1, experts), 16),
            H=hidden, H_PAD=pad(max(1, hidden), 16), R=rank, R_PAD=pad(max(1, rank), 16), OUT=outputs, P=pieces,
            T_PAD=t_pad, SINGLE=single, ROWS=rows, OVERLAP=bool(overlap), COLUMN=column,
            num_warps=16 if rows == 64 else 8 if max(t_pad, rows) == 32 else 4, **overlap,
        )  # fmt: skip
