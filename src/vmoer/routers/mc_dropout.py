"""MCDR: dropout on the router's input, kept on at inference (Gal and Ghahramani 2016; the paper's weight-space baseline).

    l_s = (u * m_s / (1 - p)) (W_r + Delta)',    m_s ~ Bernoulli(1 - p)^D,    p_bar = (1/S) sum_s softmax(l_s)

Delta starts at zero and is trained with a fresh mask for every token. At inference the S masks are fixed by the seed and shared
by all tokens, so that routing stays a function of the input.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from vmoer.errors import AttachError
from vmoer.gates import Gate
from vmoer.numerics import noise
from vmoer.routers._base import SAMPLES, Call, Router, Routing, Sampling, at_least, choice
from vmoer.routers._weight_space import WeightSpaceConfig, WeightSpaceRouter


class MCDropoutRouter(WeightSpaceRouter):
    def __init__(self, config: Any, gate: Gate, weight_ND: Tensor | None, layer: int, device: torch.device) -> None:
        super().__init__(config, gate, weight_ND, layer, device)
        if weight_ND is None:
            raise AttachError("mcdr needs a router whose logits are linear in its input, and this one's are not")
        self.delta = self.new_delta(device)

    def keep(self, uniform: Tensor) -> Tensor:
        return (uniform > self.config.dropout).float() / (1 - self.config.dropout)

    def forward(self, u_TD: Tensor, logits_TN: Tensor, call: Call, weight_ND: Tensor | None) -> Routing:
        assert weight_ND is not None
        config, d = self.config, u_TD.shape[-1]
        if call.draws:
            if call.passes_T is None:
                uniform_TD = call.uniform(config.seed, d)
            else:  # one mask a pass, whatever the position: a draw of the weights, not of the activations
                lane = torch.arange(d, device=u_TD.device)
                uniform_TD = noise.uniform(config.seed, 4, call.passes_T.unsqueeze(-1), self.layer, lane)
            keep_TD = self.keep(uniform_TD)
            u = u_TD.float()
            dropped_TN = (u * (keep_TD - 1)) @ weight_ND.float().mT + (u * keep_TD) @ self.delta.float().mT
            return self.single(logits_TN + dropped_TN)
        shape = (config.samples, d)
        if config.sampling == "mc":
            keep_SD = self.keep(torch.rand(shape, device=u_TD.device))
        else:
            sample = torch.arange(config.samples, device=u_TD.device).unsqueeze(-1)
            keep_SD = self.keep(noise.uniform(config.seed, 5, sample, self.layer, torch.arange(d, device=u_TD.device)))
        keep_S1D = keep_SD.unsqueeze(1)
        return self.average(u_TD, logits_TN, (keep_S1D - 1) * weight_ND.float() + keep_S1D * self.delta.float())


@dataclass(frozen=True, kw_only=True)
class MCDropout(WeightSpaceConfig):
    """Dropout on the router's input, averaged over masks (MCDR).

    Args:
        layers: Indices of the decoder layers to attach to, or "all".
        seed: Decides the method's noise and, where it has a network, its initial weights.
        dropout: Probability that an input is dropped, below 1.
        samples: Masks that are averaged at inference.
        sampling: "fixed" (the same masks for all tokens) or "mc" (fresh masks on every call).
    """

    key: ClassVar[str] = "mcdr"
    about: ClassVar[str] = "dropout on the router's input"
    router: ClassVar[type[Router]] = MCDropoutRouter

    dropout: float = at_least(0, 0.1, 0.999)
    samples: int = at_least(1, 32, SAMPLES)
    sampling: Sampling = choice("fixed", "fixed", "mc")
