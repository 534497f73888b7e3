"""The average of a softmax or a sigmoid over Gaussian logits.

    E[softmax(l)],  E[sigmoid(l)],   l ~ N(mu, Sigma)                                  (paper, section 3.4)

There are three rules. "points" averages over points, random or scrambled Sobol. "delta" takes a second-order expansion around mu
and needs no points. "delta-cv" uses that expansion as a control variate for the points. Tokens are worked through in pieces, so
that no intermediate is larger than [piece, S, N]. Results are logarithms, exact where probabilities would underflow.

Shapes: T tokens, N experts, S samples.
"""

from collections.abc import Callable
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from vmoer.numerics import kernels
from vmoer.numerics.gaussians import Gaussian

Rule = Literal["points", "delta", "delta-cv"]
_PIECE = {"cpu": 1 << 18}  # numbers in the largest intermediate; a core's cache holds 2^18, other devices get 2^22


def in_pieces(
    q: Gaussian, samples: int, eps: Tensor | None, work: Callable[[Gaussian, Tensor | None], Tensor]
) -> Tensor:
    """`work` on a few tokens at a time, joined. `eps` is shared by all tokens, [S, E], or has a first dimension T."""
    tokens, experts = q.mean_TN.shape
    step = max(1, _PIECE.get(q.mean_TN.device.type, 1 << 22) // (max(1, samples) * experts))
    if tokens <= step:
        return work(q, eps)
    per_token = eps is not None and eps.dim() == 3
    pieces = []
    for start in range(0, tokens, step):
        own = eps[start : start + step] if eps is not None and per_token else eps
        pieces.append(work(q.rows(start, start + step), own))
    return torch.cat(pieces)


def log_expected_softmax(q: Gaussian, eps: Tensor | None, rule: Rule = "points") -> Tensor:
    """log E[softmax(l)], [T, N]. `eps`: [S, E] points shared by all tokens or [T, S, E]; unused by the delta rule."""
    if rule == "points" and (fused := kernels.log_expected_softmax(q, eps)) is not None:
        return fused
    samples = 1 if eps is None or rule == "delta" else eps.shape[-2]
    return in_pieces(q, samples, eps, lambda q, eps: _softmax_piece(q, eps, rule))


def _softmax_piece(q: Gaussian, eps: Tensor | None, rule: Rule) -> Tensor:
    if rule == "delta":
        return _delta(q).log()
    assert eps is not None
    samples_TSN = q.samples(eps)
    log_p_TSN = torch.log_softmax(samples_TSN, -1)
    log_mean_TN = torch.logsumexp(log_p_TSN, 1) - torch.log(torch.tensor(float(log_p_TSN.shape[1])))
    if rule == "points":
        return log_mean_TN
    p_TN = torch.softmax(q.mean_TN, -1)
    residual_TN = log_mean_TN.exp() - _taylor(p_TN, samples_TSN - q.mean_TN.unsqueeze(1)).mean(1)
    estimate_TN = _delta(q, clip=False) + residual_TN
    # a control variate may leave the simplex where the expansion is poor; the plain average never does
    bad_T = (estimate_TN <= 0).any(-1, keepdim=True)
    return torch.where(bad_T, log_mean_TN, estimate_TN.clamp_min(torch.finfo(p_TN.dtype).tiny).log())


def _taylor(p_TN: Tensor, d_TSN: Tensor) -> Tensor:
    """Second-order expansion of softmax(mu + d): p (1 + c_i + (c_i^2 - p'c^2) / 2) with c = d - p'd."""
    p_T1N = p_TN.unsqueeze(1)
    c_TSN = d_TSN - (p_T1N * d_TSN).sum(-1, keepdim=True)
    spread = (p_T1N * c_TSN.square()).sum(-1, keepdim=True)
    return p_T1N * (1 + c_TSN + 0.5 * (c_TSN.square() - spread))


def _delta(q: Gaussian, clip: bool = True) -> Tensor:
    """E of that expansion: p + p (diag S - 2 S p + 2 p'Sp - p'diag S) / 2, kept positive and normalised where `clip`."""
    p_TN = torch.softmax(q.mean_TN, -1)
    sp_TN, var_TN = q.times(p_TN), q.variance_TN
    psp, pvar = (p_TN * sp_TN).sum(-1, keepdim=True), (p_TN * var_TN).sum(-1, keepdim=True)
    out = p_TN * (1 + 0.5 * (var_TN - 2 * sp_TN + 2 * psp - pvar))
    if not clip:
        return out
    out = torch.maximum(out, 1e-3 * p_TN)
    return out / out.sum(-1, keepdim=True)


def expected_sigmoid_logit(q: Gaussian, eps: Tensor | None, rule: Rule = "points") -> Tensor:
    """logit E[sigmoid(l)], [T, N], from the logarithms of both sides: exact where the sigmoid saturates.

    The delta rule is s + s (1 - s) (1 - 2 s) var / 2. As a control variate it needs the expansion of every sample.
    """
    if rule == "points" and (fused := kernels.expected_sigmoid_logit(q, eps)) is not None:
        return fused
    samples = 1 if eps is None or rule == "delta" else eps.shape[-2]
    return in_pieces(q, samples, eps, lambda q, eps: _sigmoid_piece(q, eps, rule))


def _sigmoid_piece(q: Gaussian, eps: Tensor | None, rule: Rule) -> Tensor:
    s = torch.sigmoid(q.mean_TN)
    if rule == "delta":  # logit of it = mu + log(1 + (1 - s) b) - log(1 - s b), which does not saturate
        b = 0.5 * (1 - 2 * s) * q.variance_TN
        return q.mean_TN + torch.log1p(((1 - s) * b).clamp_min(-0.999)) - torch.log1p((-s * b).clamp_min(-0.999))
    assert eps is not None
    samples_TSN = q.samples(eps)
    plain = torch.logsumexp(F.logsigmoid(samples_TSN), 1) - torch.logsumexp(F.logsigmoid(-samples_TSN), 1)
    if rule == "points":
        return plain
    d = samples_TSN - q.mean_TN.unsqueeze(1)
    slope, bend = (s * (1 - s)).unsqueeze(1), (s * (1 - s) * (1 - 2 * s)).unsqueeze(1)
    taylor = (slope * d + 0.5 * bend * d.square()).mean(1)
    estimate = torch.sigmoid(plain) - taylor + 0.5 * bend.squeeze(1) * q.variance_TN
    return torch.where((estimate > 1e-4) & (estimate < 1 - 1e-4), torch.logit(estimate.clamp(1e-6, 1 - 1e-6)), plain)


def sample_variance(q: Gaussian, eps: Tensor) -> Tensor:
    """Total sample variance of the drawn logits, sum over experts, [T] (paper D.3, MC-Logit-Var)."""

    def piece(q: Gaussian, eps: Tensor | None) -> Tensor:
        assert eps is not None
        return q.samples(eps).var(1, correction=1).sum(-1)

    return in_pieces(q, eps.shape[-2], eps, piece)
