"""VTSR in one pass: temperature, scaled logits, Gumbel noise from the counter hash, Top-K and gate weights.

    T(u) = T_min + (1 - T_min) s (1 + a) / (1 + a s),   s = softplus(x) / log 2,   a = (1 - T_min) / (T_max - 1)
    select by  l + T gumbel(keys, expert),   weigh by  l / T or by l           (vmoer.routers.variational_temperature)

The hash is vmoer.numerics.noise.hash32 bit for bit, so a token draws the same noise here as there, on every device. Near u = 1
-log(u) is taken from 1 - u by a series: there the noise is large and decides, and an approximate logarithm has no digit right.

Floor at 16,384 tokens, N = 40, K = 8: logits read, scaled and perturbed logits written, weights and indices: 9.4 MB, 2 us.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

import torch
import triton
import triton.language as tl
from torch import Tensor

from vmoer.numerics import noise
from vmoer.numerics.kernels._asks import Ask, Keys, Tempered
from vmoer.numerics.kernels._tiles import log_sum_exp, mix, on_device, pad, store_selected
from vmoer.numerics.kernels.select import room


@triton.jit
def _minus_log(uniform, bits):
    """-log(u) for u = (bits + 1/2) / 2^23."""
    rest = (8388607.5 - bits) * 1.1920928955078125e-07  # 1 - u, exact
    z = rest / (2.0 - rest)
    z2 = z * z
    series = 2.0 * z * (1.0 + z2 * (0.33333334 + z2 * (0.2 + z2 * (0.14285715 + z2 * 0.11111111))))
    return tl.where(rest < 0.25, series, -tl.log(uniform))


@triton.jit
def gumbel_of(state):
    bits = (state >> 9).to(tl.int32).to(tl.float32)
    return -tl.log(_minus_log((bits + 0.5) * 1.1920928955078125e-07, bits))


@triton.jit(do_not_specialize=["state", "between"])
def _temperature_kernel(
    logits_ptr, x_ptr, head_ptr, bias_ptr, position_ptr, first_ptr,
    temperature_ptr, scaled_ptr, select_ptr, weights_ptr, indices_ptr,
    tokens, state, between, low, high, gate_scale, logits_t, logits_n, x_t, position_t, first_t,
    N: tl.constexpr, N_PAD: tl.constexpr, H: tl.constexpr, J: tl.constexpr, B: tl.constexpr, FIRST: tl.constexpr,
    BETWEEN: tl.constexpr, RAW: tl.constexpr, OWN: tl.constexpr, K: tl.constexpr, K_PAD: tl.constexpr, NORMALISE: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0) * B + tl.arange(0, B)
    n = tl.arange(0, N_PAD)
    live = t < tokens
    t64 = t.to(tl.int64)
    inside = live[:, None] & (n < N)[None, :]
    if H > 0:  # the MLP's last layer, on its features
        terms_BJ = tl.zeros([B, J], tl.float32)
        for first in range(0, H, J):
            h = first + tl.arange(0, J)
            head_J = tl.load(head_ptr + h, mask=h < H, other=0.0).to(tl.float32)
            features_BJ = tl.load(
                x_ptr + t64[:, None] * x_t + h[None, :], mask=live[:, None] & (h < H)[None, :], other=0.0
            )
            terms_BJ += features_BJ.to(tl.float32) * head_J[None, :]
        x = tl.sum(terms_BJ, 1) + tl.load(bias_ptr).to(tl.float32)
    else:
        x = tl.load(x_ptr + t64 * x_t, mask=live, other=0.0).to(tl.float32)
    if RAW:
        low, high = tl.cast(low, tl.float32), tl.cast(high, tl.float32)
        softplus = tl.maximum(x, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(x)))
        s = softplus * 1.4426950408889634
        a = (1.0 - low) / (high - 1.0)
        temperature = low + (1.0 - low) * s * ((1.0 + a) / (1.0 + a * s))
        tl.store(temperature_ptr + t64, temperature, mask=live)
    else:
        temperature = x
    place = t64[:, None] * N + n[None, :]
    logits_BN = tl.load(
        logits_ptr + t64[:, None] * logits_t + n.to(tl.int64)[None, :] * logits_n, mask=inside, other=0.0
    ).to(tl.float32)
    scaled_BN = logits_BN
    if not OWN:
        scaled_BN = logits_BN / temperature[:, None]

    key = (tl.zeros([B], tl.int32) + state).to(tl.uint32, bitcast=True)  # torch.compile may hand over plain numbers
    if FIRST:
        key = mix(key, tl.load(first_ptr + t64 * first_t, mask=live, other=0).to(tl.uint32))
    if BETWEEN:
        key = mix(key, (tl.zeros([B], tl.int32) + between).to(tl.uint32, bitcast=True))
    key = mix(key, tl.load(position_ptr + t64 * position_t, mask=live, other=0).to(tl.uint32))
    key_BN = mix(key[:, None], n.to(tl.uint32)[None, :])
    select_BN = logits_BN + temperature[:, None] * gumbel_of(key_BN)

    tl.store(scaled_ptr + place, scaled_BN, mask=inside)
    tl.store(select_ptr + place, select_BN, mask=inside)
    if K > 0:
        only = (n < N)[None, :]
        log_p_BN = tl.where(only, scaled_BN, float("-inf"))
        log_p_BN = tl.where(only, scaled_BN - log_sum_exp(log_p_BN, 1)[:, None], 0.0)
        by_BN = tl.where(only, select_BN, float("-inf"))
        store_selected(
            by_BN, log_p_BN, n, t, live, weights_ptr, indices_ptr, gate_scale, K, K_PAD, NORMALISE, SAME=False
        )


def _signed(x: int) -> int:
    """The 32 bits of x as the signed number that a kernel's argument holds."""
    x &= 0xFFFFFFFF
    return x - (1 << 32) if x >> 31 else x


def temper(
    logits_TN: Tensor,
    x_T: Tensor,
    keys: Keys,
    *,
    bounds: tuple[float, float] | None = None,
    head: tuple[Tensor, Tensor] | None = None,
    own: bool = False,
    ask: Ask | None = None,
    tokens_a_program: int | None = None,
) -> Tempered:
    """Scaled and perturbed logits.

    Args:
        x_T: the temperature; with `bounds` the MLP's output; with `head` too the input of the MLP's last layer, [T, H].
        bounds: T_min and T_max.
        head: weight [H] and bias of the MLP's last layer.
        own: weigh by the model's own logits in place of the scaled ones.
        ask: return K experts and their weights as well.
    """
    tokens, experts = logits_TN.shape
    if len(keys.between) > 1:
        raise ValueError("at most one number between the two keys a token")
    scaled_TN = torch.empty(tokens, experts, dtype=torch.float32, device=logits_TN.device)
    select_TN = torch.empty(tokens, experts, dtype=torch.float32, device=logits_TN.device)
    temperature_T = x_T if bounds is None else torch.empty(tokens, dtype=torch.float32, device=logits_TN.device)
    weights_TK, indices_TK = room(tokens, ask, scaled_TN)
    first_T = keys.position_T if keys.first_T is None else keys.first_T
    x_T = x_T if head is None else x_T.contiguous()
    weight_H, bias = head or (x_T, x_T)
    low, high = bounds or (0.0, 2.0)
    n_pad, k = pad(experts), 0 if ask is None else ask.k
    block = tokens_a_program or (1 if tokens < 1024 else max(1, 1024 // n_pad))
    with on_device(logits_TN):
        _temperature_kernel[(triton.cdiv(tokens, block),)](
            logits_TN, x_T, weight_H, bias, keys.position_T, first_T, temperature_T, scaled_TN, select_TN, weights_TK, indices_TK,
            tokens, _signed(int(noise.combine(*keys.before))), _signed(keys.between[0] if keys.between else 0), low, high,
            1.0 if ask is None else ask.scale,
            *logits_TN.stride(), x_T.stride(0), *keys.position_T.stride(), *first_T.stride(),
            N=experts, N_PAD=n_pad, H=0 if head is None else x_T.shape[1], J=512 if block == 1 else 64, B=block,
            FIRST=keys.first_T is not None, BETWEEN=len(keys.between) > 0,
            RAW=bounds is not None, OWN=own, K=k, K_PAD=pad(max(1, k)), NORMALISE=ask is not None and ask.normalise,
            num_warps=max(1, n_pad // 128) if block == 1 else 4,
        )  # fmt: skip
    tempered = Tempered(temperature_T, scaled_TN, select_TN)
    return tempered if ask is None else tempered._replace(weights_TK=weights_TK, indices_TK=indices_TK)
