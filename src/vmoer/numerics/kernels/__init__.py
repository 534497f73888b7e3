"""Fused GPU versions of `integrals.py`, for CUDA with Triton, supported shapes and no gradient asked for.

Each entry point answers None where the plain path must do the work. A caller writes

    if (fused := kernels.log_expected_softmax(q, eps)) is not None:
        return fused

`VMOER_KERNELS=0` in the environment, or `kernels.enabled = False`, switches them off. The files with kernels in them need
Triton and are imported at their first use on a GPU. Their tests compare each kernel with float64, in Triton's interpreter on the
CPU and on a GPU where there is one.

    cholesky      vglr-fc, N up to 256              low_rank      vglr-mf, vglr-lr and laplace, N up to 512
    temperature   vtsr                              select        Top-K and gate weights by themselves
    quadratic     novelty, rank up to 256           entropies     entropy of the experts' scores
    spreads       that entropy and the trace of the covariance
    few           the inference network, and novelty, for at most 128 tokens
"""

import importlib.util
import os
from typing import Any

import torch
from torch import Tensor

from vmoer.numerics.gaussians import Cholesky, Diagonal, Factored, Gaussian, Scaled
from vmoer.numerics.kernels._asks import MANY, TOLD, Ask, Choice, Keys, Tempered, halves

MOST_POINTS = 64
enabled = os.environ.get("VMOER_KERNELS", "1") != "0"
_TRITON = importlib.util.find_spec("triton") is not None
_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def available(x: Tensor) -> bool:
    """Whether kernels run where this tensor lives: on a CUDA device."""
    return enabled and _TRITON and x.is_cuda and not _INTERPRETED


def _usable(*tensors: Tensor | None) -> bool:
    given = [x for x in tensors if x is not None]
    if not all(available(x) and x.dtype in _DTYPES and x.numel() > 0 for x in given):
        return False
    return not (torch.is_grad_enabled() and any(x.requires_grad for x in given))


def average(
    q: Gaussian,
    eps: Tensor | None,
    *,
    shift_TN: Tensor | None = None,
    own_TN: Tensor | None = None,
    ask: Ask | None = None,
    sigmoid: bool = False,
    told_TG: Tensor | None = None,
) -> Choice | None:
    """log E[softmax(l)], or logit E[sigmoid(l)], for l ~ q over points shared by all tokens.

    Args:
        shift_TN: added to q's mean here, so that no caller has to write the sum out first.
        own_TN: the model's own logits; their logsumexp is added to the result (Gate.expected_logits).
        ask: return K experts and their weights as well.
        told_TG: where to write the first columns of TOLD, for few tokens; the answer says whether they were.
    """
    if eps is None or eps.dim() != 2 or len(eps) > MOST_POINTS or not _usable(q.mean_TN, eps, shift_TN, own_TN):
        return None
    if ask is not None and (sigmoid or ask.k > min(16, q.mean_TN.shape[-1])):
        return None
    more: dict[str, Any] = {"shift_TN": shift_TN, "own_TN": own_TN, "ask": ask, "sigmoid": sigmoid, "told_TG": told_TG}
    n = q.mean_TN.shape[-1]
    if isinstance(q, Cholesky) and n <= 256 and _usable(q.raw_TC):
        from vmoer.numerics.kernels import cholesky

        return cholesky.average(q.mean_TN, q.raw_TC, eps, q.scale, **more)
    if n > 512:
        return None
    from vmoer.numerics.kernels import low_rank

    if isinstance(q, Diagonal) and _usable(q.log_sd_TN):
        return low_rank.average(q.mean_TN, q.log_sd_TN, None, eps, q.scale, **more)
    if isinstance(q, Scaled) and _usable(q.scale_T, q.factor_NN):
        log_sd_TN = (0.5 * q.scale_T.float().log()).unsqueeze(-1).expand(-1, n)
        more["told_TG"] = None  # whose trace is another
        return low_rank.average(q.mean_TN, log_sd_TN, None, eps.float() @ q.factor_NN.float().mT, **more)
    if isinstance(q, Factored) and q.factor_TNR.shape[-1] <= 64 and _usable(q.log_sd_TN):
        factor_TNR = q.factor_TNR if q.factor_TNR.shape[-1] else None
        if factor_TNR is None or _usable(factor_TNR):
            return low_rank.average(q.mean_TN, q.log_sd_TN, factor_TNR, eps, q.scale, **more)
    return None


def log_expected_softmax(q: Gaussian, eps: Tensor | None) -> Tensor | None:
    """integrals.log_expected_softmax(q, eps, "points"), or None."""
    found = average(q, eps)
    return None if found is None else found.logits_TN


def expected_sigmoid_logit(q: Gaussian, eps: Tensor | None) -> Tensor | None:
    """integrals.expected_sigmoid_logit(q, eps, "points"), or None."""
    found = average(q, eps, sigmoid=True)
    return None if found is None else found.logits_TN


def network(
    u_TD: Tensor,
    backbone_HD: Tensor,
    heads_OH: Tensor,
    root: tuple[Tensor, Tensor] | None = None,
    told_TG: Tensor | None = None,
) -> Tensor | None:
    """V relu(W u) for few tokens in bfloat16, [T, O], or None. With `halves` of novelty's root, novelty goes into `told_TG`."""
    hidden = len(backbone_HD)
    if u_TD.dtype != torch.bfloat16 or u_TD.dim() != 2 or u_TD.stride(1) != 1 or hidden % 16 or hidden > 1024:
        return None
    if not _usable(u_TD, backbone_HD, heads_OH) or (root is not None and len(root[0]) > 256):
        return None
    from vmoer.numerics.kernels import few

    if len(u_TD) > few.MOST:
        return None
    backbone_HD, heads_OH = (x.to(u_TD.dtype).contiguous() for x in (backbone_HD, heads_OH))
    return few.network(u_TD, backbone_HD, heads_OH, root, told_TG)


def temper(
    logits_TN: Tensor,
    x_T: Tensor,
    keys: Keys,
    *,
    bounds: tuple[float, float] | None = None,
    head: tuple[Tensor, Tensor] | None = None,
    own: bool = False,
    ask: Ask | None = None,
) -> Tempered | None:
    """VTSR's scaled and perturbed logits, or None. The arguments are those of `temperature.temper`."""
    n = logits_TN.shape[-1]
    if not _usable(logits_TN, x_T, *(head or ())) or n > 1024 or (ask is not None and ask.k > min(16, n)):
        return None
    if len(keys.between) > 1 or not all(isinstance(key, int) for key in keys.before):
        return None
    from vmoer.numerics.kernels import temperature

    return temperature.temper(logits_TN, x_T, keys, bounds=bounds, head=head, own=own, ask=ask)


def entropy(logits_TN: Tensor) -> Tensor | None:
    """[T]: the entropy of softmax(logits) in nats, or None."""
    if not _usable(logits_TN) or logits_TN.dim() != 2 or logits_TN.shape[-1] > 1024:
        return None
    from vmoer.numerics.kernels import entropies

    return entropies.entropy(logits_TN)


def entropy_and_trace(logits_TN: Tensor, q: Gaussian) -> tuple[Tensor, Tensor] | None:
    """[T] each: the entropy of softmax(logits) and q.trace(), in one launch; or None."""
    if not _usable(logits_TN) or logits_TN.dim() != 2 or logits_TN.shape[-1] > 1024:
        return None
    from vmoer.numerics.kernels import spreads

    if isinstance(q, Cholesky) and _usable(q.raw_TC):
        return spreads.entropy_and_trace(logits_TN, q.raw_TC, None, q.scale, triangle=True)
    if isinstance(q, Diagonal) and _usable(q.log_sd_TN):
        return spreads.entropy_and_trace(logits_TN, q.log_sd_TN, None, q.scale)
    if isinstance(q, Factored) and _usable(q.log_sd_TN):
        factor_TNR = q.factor_TNR if q.factor_TNR.shape[-1] else None
        if factor_TNR is None or _usable(factor_TNR):
            return spreads.entropy_and_trace(logits_TN, q.log_sd_TN, factor_TNR, q.scale)
    return None


def novelty(u_TD: Tensor, root_RD: Tensor, split: tuple[Tensor, Tensor] | None = None) -> Tensor | None:
    """[T]: |W u|^2, or None. `split` is `halves(root_RD)`, where the caller has kept it."""
    if not _usable(u_TD, root_RD) or len(root_RD) > 256 or root_RD.dtype != torch.float32:
        return None
    from vmoer.numerics.kernels import few, quadratic

    if split is not None and len(u_TD) <= few.MOST and u_TD.dtype == torch.bfloat16 and u_TD.stride(1) == 1:
        return few.novelty(u_TD, split)
    return quadratic.novelty(u_TD, root_RD, split)


def entropy_and_novelty(logits_TN: Tensor, u_TD: Tensor, split: tuple[Tensor, Tensor] | None) -> Tensor | None:
    """[T, 2] for few tokens in bfloat16: the entropy of softmax(logits), and |W u|^2 by W's `halves`; or None."""
    if split is None or not _usable(logits_TN, u_TD) or u_TD.dtype != torch.bfloat16 or u_TD.stride(1) != 1:
        return None
    if len(split[0]) > 256 or logits_TN.dim() != 2 or logits_TN.shape[-1] > 512 or logits_TN.stride(1) != 1:
        return None
    from vmoer.numerics.kernels import few

    return few.entropy_and_novelty(logits_TN, u_TD, split) if len(u_TD) <= few.MOST else None


__all__ = [
    "MANY",
    "TOLD",
    "Ask",
    "Choice",
    "Keys",
    "Tempered",
    "available",
    "average",
    "enabled",
    "entropy",
    "entropy_and_novelty",
    "entropy_and_trace",
    "expected_sigmoid_logit",
    "halves",
    "log_expected_softmax",
    "network",
    "novelty",
    "temper",
]
