"""One sample a token, mean + L eps, and its gradient, without the N x N factor: the training path of vglr-fc.

    l_i = mu_i + scale (exp(raw_ii) eps_i + sum_{j<i} raw_ij eps_j)
    d raw_ij = scale g_i eps_j  below the diagonal,    scale g_i eps_i exp(raw_ii)  on it

The backward pass writes the C entries' gradient straight from g [T, N] and eps [T, N]; nothing but raw and eps is kept for
it. On CUDA both directions are Triton kernels (vmoer.kernels.cholesky); elsewhere the sums below, in the inputs' dtype.
"""

from typing import Any

import torch
from torch import Tensor

from vmoer import kernels


def _forward(mean_TN: Tensor, raw_TC: Tensor, eps_TN: Tensor, scale: float) -> Tensor:
    rows, start = [], 0
    for i in range(mean_TN.shape[-1]):
        below_T = (raw_TC[:, start : start + i] * eps_TN[:, :i]).sum(-1)
        rows.append(below_T + raw_TC[:, start + i].exp() * eps_TN[:, i])
        start += i + 1
    return mean_TN + scale * torch.stack(rows, -1)


def _backward(grad_TN: Tensor, raw_TC: Tensor, eps_TN: Tensor, scale: float) -> Tensor:
    row_C, column_C = torch.tril_indices(grad_TN.shape[-1], grad_TN.shape[-1], device=grad_TN.device)
    grad_TC = scale * grad_TN[:, row_C] * eps_TN[:, column_C]
    diagonal_N = (row_C == column_C).nonzero().squeeze(-1)
    grad_TC[:, diagonal_N] *= raw_TC[:, diagonal_N].exp()
    return grad_TC.to(raw_TC.dtype)


class _Sample(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, mean_TN: Tensor, raw_TC: Tensor, eps_TN: Tensor, scale: float) -> Tensor:
        ctx.save_for_backward(raw_TC, eps_TN)
        ctx.scale, ctx.mean_dtype = scale, mean_TN.dtype
        if _fused(mean_TN):
            from vmoer.kernels import cholesky

            return cholesky.sample(mean_TN, raw_TC, eps_TN, scale)
        return _forward(mean_TN, raw_TC, eps_TN, scale)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raw_TC, eps_TN = ctx.saved_tensors
        (grad_TN,) = grads
        grad_TC = None
        if ctx.needs_input_grad[1]:
            if _fused(grad_TN):
                from vmoer.kernels import cholesky

                grad_TC = cholesky.sample_backward(grad_TN, raw_TC, eps_TN, ctx.scale)
            else:
                grad_TC = _backward(grad_TN, raw_TC, eps_TN, ctx.scale)
        return grad_TN.to(ctx.mean_dtype), grad_TC, None, None


def _fused(x_TN: Tensor) -> bool:
    return kernels.runs(x_TN) and x_TN.numel() > 0 and x_TN.shape[-1] <= 256 and x_TN.dtype != torch.float64


def cholesky_sample(mean_TN: Tensor, raw_TC: Tensor, eps_TN: Tensor, scale: float = 1.0) -> Tensor:
    """mean + L eps, [T, N], with gradients for mean and raw. The noise gets none: it is a constant of the step."""
    out_TN: Tensor = _Sample.apply(mean_TN, raw_TC, eps_TN, scale)
    return out_TN
