"""What the kernels must answer, written plainly in float64."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from vmoer.numerics import integrals, noise
from vmoer.numerics.gaussians import Cholesky, Factored, Gaussian
from vmoer.numerics.kernels import Ask, Choice, Keys, Tempered


def cholesky(mean_TN: Tensor, raw_TC: Tensor, eps_SN: Tensor, scale: float = 1.0, *, sigmoid: bool = False) -> Tensor:
    return _average(Cholesky(mean_TN.double(), raw_TC.double(), scale), eps_SN, sigmoid)


def low_rank(
    mean_TN: Tensor,
    log_sd_TN: Tensor,
    factor_TNR: Tensor | None,
    eps_SE: Tensor,
    scale: float = 1.0,
    *,
    sigmoid: bool = False,
) -> Tensor:
    if factor_TNR is None:
        factor_TNR = mean_TN.new_zeros(*mean_TN.shape, 0)
    q = Factored(mean_TN.double(), log_sd_TN.double() + math.log(scale), scale * factor_TNR.double())
    return _average(q, eps_SE, sigmoid)


def _average(q: Gaussian, eps: Tensor, sigmoid: bool) -> Tensor:
    expected = integrals.expected_sigmoid_logit if sigmoid else integrals.log_expected_softmax
    return expected(q, eps.double())


def entropy(logits_TN: Tensor) -> Tensor:
    return torch.special.entr(torch.softmax(logits_TN.double(), -1)).sum(-1)


def select(by_TN: Tensor, logits_TN: Tensor, ask: Ask) -> Choice:
    """By torch.topk and softmax, as vmoer.gates.rules.Scoring does it."""
    indices_TK = torch.topk(by_TN.double(), ask.k, dim=-1).indices
    weights_TK = torch.softmax(logits_TN.double(), -1).gather(-1, indices_TK)
    if ask.normalise:
        weights_TK = weights_TK / weights_TK.sum(-1, keepdim=True)
    return Choice(logits_TN, weights_TK * ask.scale, indices_TK)


def temper(
    logits_TN: Tensor, x_T: Tensor, keys: Keys, *, bounds: tuple[float, float] | None = None, own: bool = False
) -> Tempered:
    """The noise by vmoer.numerics.noise."""
    temperature_T = x_T.double()
    if bounds is not None:
        low, high = bounds
        s_T = F.softplus(temperature_T) / F.softplus(temperature_T.new_zeros(()))
        a = (1 - low) / (high - 1)
        temperature_T = low + (1 - low) * s_T * ((1 + a) / (1 + a * s_T))
    lane = torch.arange(logits_TN.shape[-1], device=logits_TN.device)
    first = () if keys.first_T is None else (keys.first_T.unsqueeze(-1),)
    gumbel_TN = noise.gumbel(*keys.before, *first, *keys.between, keys.position_T.unsqueeze(-1), lane)
    scaled_TN = logits_TN.double() / (1 if own else temperature_T.unsqueeze(-1))
    select_TN = logits_TN.double() + temperature_T.unsqueeze(-1) * gumbel_TN.double()
    return Tempered(temperature_T, scaled_TN, select_TN)
