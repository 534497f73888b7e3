"""Mean-field posterior to averaged probabilities: E[softmax(N(mu, diag(sd^2)))] over shared points.

A program holds B tokens' means and deviations in registers and walks through the points; of a sample only its running sums
remain. Floor at 16,384 tokens, N = 40, S = 32, heads in bfloat16: traffic T N (2 + 2 + 4 + 4) bytes = 7.9 MB, 2 us; two
exponentials a sample and expert, 42M of them at 16 a cycle and multiprocessor, 12 us.

`Scaled` posteriors (Laplace) are the same with sd_t = sqrt(v_t) for every expert and the points F eps.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from vmoer import integrals
from vmoer.gaussians import Diagonal
from vmoer.kernels._asks import Ask, Choice
from vmoer.kernels._tiles import _LOWEST, add_exp, log_sigmoid, log_sum_exp, on_device, pad
from vmoer.kernels._tiles import select as store_selected
from vmoer.kernels.select import room

MOST_EXPERTS = 512


@triton.jit
def _diagonal_kernel(
    mean_ptr, shift_ptr, log_sd_ptr, own_ptr, eps_ptr, out_ptr, weights_ptr, indices_ptr, tokens, scale, gate_scale,
    mean_t, mean_n, shift_t, shift_n, log_sd_t, log_sd_n, own_t, own_n,
    N: tl.constexpr, N_PAD: tl.constexpr, S: tl.constexpr, LOG_S: tl.constexpr, B: tl.constexpr,
    SHIFT: tl.constexpr, OWN: tl.constexpr, SIGMOID: tl.constexpr, K: tl.constexpr, K_PAD: tl.constexpr, NORMALISE: tl.constexpr,
):  # fmt: skip
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
    top = tl.full([B, N_PAD], _LOWEST, tl.float32)
    total = tl.zeros([B, N_PAD], tl.float32)
    top_no = tl.full([B, N_PAD], _LOWEST, tl.float32)
    total_no = tl.zeros([B, N_PAD], tl.float32)
    for s in range(S):
        eps_N = tl.load(eps_ptr + s * N + n, mask=n < N, other=0.0)
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
        store_selected(by_BN, log_p_BN, n, t, live, weights_ptr, indices_ptr, gate_scale, K, K_PAD, NORMALISE)


def average(
    mean_TN: Tensor,
    log_sd_TN: Tensor,
    eps_SN: Tensor,
    scale: float = 1.0,
    *,
    shift_TN: Tensor | None = None,
    own_TN: Tensor | None = None,
    ask: Ask | None = None,
    sigmoid: bool = False,
    tokens_a_program: int | None = None,
) -> Choice:
    """log E[softmax(l)] (or logit E[sigmoid(l)]), l ~ N(mean + shift, (scale sd)^2); + logsumexp(own) where given."""
    tokens, experts = mean_TN.shape
    eps_SN = eps_SN.float().contiguous()
    out_TN = torch.empty(tokens, experts, dtype=torch.float32, device=mean_TN.device)
    weights_TK, indices_TK = room(tokens, ask, out_TN)
    shift, own = mean_TN if shift_TN is None else shift_TN, mean_TN if own_TN is None else own_TN
    n_pad, k = pad(experts), 0 if ask is None else ask.k
    block = tokens_a_program or (1 if tokens < 1024 else max(1, 1024 // n_pad))
    with on_device(mean_TN):
        _diagonal_kernel[(triton.cdiv(tokens, block),)](
            mean_TN, shift, log_sd_TN, own, eps_SN, out_TN, weights_TK, indices_TK, tokens, scale,
            1.0 if ask is None else ask.scale,
            *mean_TN.stride(), *shift.stride(), *log_sd_TN.stride(), *own.stride(),
            N=experts, N_PAD=n_pad, S=len(eps_SN), LOG_S=math.log(len(eps_SN)), B=block,
            SHIFT=shift_TN is not None, OWN=own_TN is not None, SIGMOID=sigmoid,
            K=k, K_PAD=pad(max(1, k)), NORMALISE=ask is not None and ask.normalise,
            num_warps=max(1, n_pad // 128) if block == 1 else 4,
        )  # fmt: skip
    return Choice(out_TN) if ask is None else Choice(out_TN, weights_TK, indices_TK)


def reference(
    mean_TN: Tensor, log_sd_TN: Tensor, eps_SN: Tensor, scale: float = 1.0, *, sigmoid: bool = False
) -> Tensor:
    """The same in float64 by vmoer.integrals."""
    q = Diagonal(mean_TN.double(), log_sd_TN.double() + math.log(scale))
    expected = integrals.expected_sigmoid_logit if sigmoid else integrals.log_expected_softmax
    return expected(q, eps_SN.double())
