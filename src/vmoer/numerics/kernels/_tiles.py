"""Building blocks of the kernels: products on tensor cores, sums of exponentials, the choice of K experts, the counter hash.

A float32 product on the tensor cores rounds its operands to tf32, 3e-4 of each logit. That is too coarse where the variance is
large. Heads that answer in bfloat16 are exact there, and the routers choose points that are exact there too. Other points are
written as two bfloat16 numbers, with 2^-18 of them lost, and take two products. Heads in float32 take three tf32 products.
Sums are in float32.

Import a helper under its own name: torch.compile copies a kernel together with what it calls by name.

Shapes: B tokens of a program, N experts, S points, K selected; `_PAD` is the next power of two.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

import contextlib
import functools
import os
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
_INTERPRETED = tl.constexpr(INTERPRETED)
LOWEST = tl.constexpr(-3.0e38)
LOG2_E = tl.constexpr(1.4426950408889634)


def pad(n: int, least: int = 1) -> int:
    return max(least, 1 << (n - 1).bit_length())


def on_device(tensor: Tensor) -> Any:
    """Make the tensor's device the current one, where Triton launches. A compiled graph does so by itself."""
    if torch.compiler.is_compiling() or not tensor.is_cuda:
        return contextlib.nullcontext()
    return torch.cuda.device(tensor.device)


def overlaps(tensor: Tensor) -> dict[str, Any]:
    """How a kernel is launched that begins while the one before it still runs, and waits for what that one writes. Nothing before
    NVIDIA's Hopper, and nothing in code that is being compiled."""
    if INTERPRETED or torch.compiler.is_compiling() or not _overlaps(tensor.device):
        return {}
    return {"launch_pdl": True}


@functools.lru_cache
def _overlaps(device: torch.device) -> bool:
    return torch.version.hip is None and torch.cuda.get_device_capability(device)[0] >= 9


@triton.jit
def start_next(OVERLAP: tl.constexpr):
    """From here on the next kernel may begin, as far as it does not wait."""
    if OVERLAP:
        gdc_launch_dependents()


@triton.jit
def wait_for_former(OVERLAP: tl.constexpr):
    """What the kernel before this one writes is there behind this line."""
    if OVERLAP:
        gdc_wait()


@triton.jit
def product(a, b, acc):
    """acc + a b, for points b in float32, or in bfloat16 where they are exact there."""
    if _INTERPRETED:  # whose dot would multiply bfloat16 numbers as bit patterns
        acc = tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
    elif a.dtype == tl.bfloat16 and b.dtype == tl.bfloat16:
        acc = tl.dot(a, b, acc)
    elif a.dtype == tl.bfloat16:
        b_high = b.to(tl.bfloat16)
        b_low = (b - b_high.to(tl.float32)).to(tl.bfloat16)
        acc = tl.dot(a, b_low, acc)
        acc = tl.dot(a, b_high, acc)
    else:
        acc = tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="tf32x3")
    return acc


@triton.jit
def exp2(x):
    """2^x in one instruction, where tl.exp takes five: what lies below 2^-126 is zero."""
    if _INTERPRETED:
        return tl.exp2(x)
    return tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def log2(x):
    """In one instruction, 2^-22 off."""
    if _INTERPRETED:
        return tl.log2(x)
    return tl.inline_asm_elementwise("lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def add_exp(top, total, x):
    """One more term of a running log-sum-exp, total = sum of exp(x - top), by a single exponential."""
    gap = x - top
    e = tl.exp(-tl.abs(gap))
    total = tl.where(gap > 0, total * e + 1.0, total + e)
    return tl.maximum(top, x), total


@triton.jit
def log_sum_exp(x, axis: tl.constexpr):
    """Finite or -inf, never NaN, where a whole line is -inf."""
    top = tl.maximum(tl.max(x, axis), LOWEST)
    total = tl.sum(tl.exp(x - tl.expand_dims(top, axis)), axis)
    return top + tl.log(total)


@triton.jit
def log_sigmoid(x):
    return tl.minimum(x, 0.0) - tl.log(1.0 + tl.exp(-tl.abs(x)))


@triton.jit
def average_points(logits_NS, n, s, N: tl.constexpr, S: tl.constexpr, LOG_S: tl.constexpr, SIGMOID: tl.constexpr):
    """[N_PAD]: log of the mean softmax over the S columns, or the logit of the mean sigmoid; 0 beyond N."""
    inside = n < N
    last = (s < S)[None, :]
    if SIGMOID:
        yes = log_sigmoid(logits_NS)
        out = log_sum_exp(tl.where(last, yes, float("-inf")), 1) - log_sum_exp(
            tl.where(last, yes - logits_NS, float("-inf")), 1
        )
    else:
        inner = tl.where(inside[:, None], logits_NS, float("-inf"))
        log_p = logits_NS - log_sum_exp(inner, 0)[None, :]
        out = log_sum_exp(tl.where(last, log_p, float("-inf")), 1) - LOG_S
    return tl.where(inside, out, 0.0)


@triton.jit
def quick_average(
    mean_N, spread_NS, scale, n, s, N: tl.constexpr, S: tl.constexpr, LOG_S: tl.constexpr, SIGMOID: tl.constexpr
):
    """`average_points` of mean + scale * spread, by one exponential an element, around the largest mean. The second result is
    true where float32 could not hold a sum, so that the first cannot be relied on."""
    inside = n < N
    if SIGMOID:
        return tl.zeros_like(mean_N), True
    around_N = (mean_N - tl.max(tl.where(inside, mean_N, LOWEST), 0)) * LOG2_E
    e_NS = exp2(tl.where(inside, around_N, float("-inf"))[:, None] + spread_NS * (scale * LOG2_E))
    share_S = tl.where(s < S, 1.0 / tl.sum(e_NS, 0), 0.0)
    total_N = tl.sum(e_NS * share_S[None, :], 1)
    bad_N = ((total_N > 1e-30) & (total_N < 1e30)) == 0  # true for NaN
    return tl.where(inside, tl.log(total_N) - LOG_S, 0.0), tl.max((bad_N & inside).to(tl.int32), 0) > 0


@triton.jit
def store_selected(
    by_BN, log_p_BN, n, t, live, weights_ptr, indices_ptr, gate_scale, K: tl.constexpr, K_PAD: tl.constexpr,
    NORMALISE: tl.constexpr, SAME: tl.constexpr,
):  # fmt: skip
    """Store the K experts of largest `by`, best first, and their weights exp(log_p), normalised or not.

    Entries beyond N must be -inf in `by`. `SAME` says that `by` is `log_p`, so that the largest need not be looked up.
    """
    column = tl.arange(0, K_PAD)[None, :]
    log_w = tl.full([by_BN.shape[0], K_PAD], float("-inf"), tl.float32)
    index = tl.zeros([by_BN.shape[0], K_PAD], tl.int32)
    for k in tl.static_range(K):
        most_B = tl.max(by_BN, 1)
        at = tl.min(tl.where(by_BN == most_B[:, None], n[None, :], by_BN.shape[1]), 1)[:, None]
        at = tl.where(at < by_BN.shape[1], at, k)  # NaN equals nothing
        here = n[None, :] == at
        value = most_B[:, None]
        if not SAME:
            value = tl.sum(tl.where(here, log_p_BN, 0.0), 1)[:, None]
        log_w = tl.where(column == k, value, log_w)
        index = tl.where(column == k, at, index)
        by_BN = tl.where(here, float("-inf"), by_BN)
    if NORMALISE:
        log_w = log_w - log_sum_exp(log_w, 1)[:, None]
    place = t.to(tl.int64)[:, None] * K + column
    mask = live[:, None] & (column < K)
    tl.store(weights_ptr + place, gate_scale * tl.exp(log_w), mask=mask)
    tl.store(indices_ptr + place, index.to(tl.int64), mask=mask)


@triton.jit
def store_told(log_p_N, spread_NS, square, scale, told_ptr, live, n, s, N: tl.constexpr, S: tl.constexpr):
    """The first three columns of TOLD (vmoer.numerics.kernels._asks) for one token."""
    inside = n < N
    entropy = -tl.sum(tl.where(inside & (log_p_N > LOWEST), tl.exp(log_p_N) * log_p_N, 0.0), 0)
    counted = inside[:, None] & (s < S)[None, :]
    mean_N = tl.sum(tl.where(counted, spread_NS, 0.0), 1) / S
    off_NS = tl.where(counted, spread_NS - mean_N[:, None], 0.0)
    variance = tl.sum(tl.sum(off_NS * off_NS, 1), 0) / (S - 1 if S > 1 else 1)
    tl.store(told_ptr, entropy, mask=live)
    tl.store(told_ptr + 1, scale * scale * square, mask=live)
    tl.store(told_ptr + 2, scale * scale * variance, mask=live)


@triton.jit
def store_token(
    mean_N, spread_NS, scale, own_N, out_ptr, weights_ptr, indices_ptr, gate_scale, row, tokens, n, s,
    N: tl.constexpr, S: tl.constexpr, LOG_S: tl.constexpr, OWN: tl.constexpr, SIGMOID: tl.constexpr,
    K: tl.constexpr, K_PAD: tl.constexpr, NORMALISE: tl.constexpr, told_ptr, told_t, square, TELL: tl.constexpr,
):  # fmt: skip
    """Average the points of one token, whose number is in `row` [1]; store the result and, for K > 0, the K experts. With `TELL`
    also what is known of it: the entropy of the average, `square` as the covariance's trace, and the points' variance."""
    inside = n < N
    live = inside & (row < tokens)
    log_p_N, exact = quick_average(mean_N, spread_NS, scale, n, s, N, S, LOG_S, SIGMOID)
    if exact:
        log_p_N = average_points(mean_N[:, None] + scale * spread_NS, n, s, N, S, LOG_S, SIGMOID)
    out_N = log_p_N
    if OWN:
        out_N += log_sum_exp(own_N, 0)
    tl.store(out_ptr + row.to(tl.int64) * N + n, out_N, mask=live)
    if TELL:
        store_told(log_p_N, spread_NS, square, scale, told_ptr + row.to(tl.int64) * told_t, row < tokens, n, s, N, S)
    if K > 0:
        by_1N = tl.where(inside, log_p_N, float("-inf"))[None, :]
        store_selected(
            by_1N, log_p_N[None, :], n, row, row < tokens, weights_ptr, indices_ptr, gate_scale,
            K, K_PAD, NORMALISE, SAME=True,
        )  # fmt: skip


@triton.jit
def mix(state, key):
    """One key more: vmoer.numerics.noise.hash32's step, in 32-bit arithmetic that wraps by itself."""
    x = state * 5 + 0x52DCE729 + key
    x = (x ^ (x >> 16)) * 0x85EBCA6B
    x = (x ^ (x >> 13)) * 0xC2B2AE35
    return x ^ (x >> 16)
