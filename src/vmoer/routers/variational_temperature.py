"""VTSR: a temperature for each token, learned, and experts sampled at it (paper, section 4, algorithm 3).

    T(u) = T_min + (1 - T_min) s (1 + a) / (1 + a s),   s = softplus(MLP(u)) / softplus(0),   a = (1 - T_min) / (T_max - 1)
    z ~ Sample-K(softmax(l / T(u))) = Top-K(l / T + gumbel),    weights from the unperturbed l / T

T lies between T_min and T_max and is 1 at the start, where the MLP's last layer is zero.

The paper's algorithm divides l + gumbel by T, which leaves the ranking, and so the law of z, untouched by T; l / T + gumbel
is exactly Sample-K of softmax(l / T), and is used in training and at inference alike.

Gradient. Weights depend on T pathwise: d weights(l / T) / dT at the chosen experts. The choice itself is straight-through:
forward the hard Top-K, backward softmax(l / T + gumbel) at the chosen experts, as a factor on their weights (Gate.route). The
estimator is biased, as every straight-through estimator is; tests compare it with the exact gradient by enumeration.

`regulariser`, summed into the loss with weight beta:
    neg_log_t   -log T                        the paper's; unbounded below, drives T up without limit
    entropy     KL(softmax(l / T) || uniform) the exact divergence that -log T stands in for
    lognormal   (log T)^2 / (2 prior_sd^2)    a proper prior, log T ~ N(0, prior_sd^2), up to a constant
"""

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vmoer import kernels
from vmoer.gates import Gate
from vmoer.routers._base import Call, Config, Router, Routing, Sampling, at_least, choice


@dataclass(frozen=True)
class TemperaturePosterior:
    temperature_T: Tensor
    logits_TN: Tensor
    regulariser: str
    prior_sd: float

    def divergence(self) -> Tensor:
        if self.regulariser == "neg_log_t":
            return -self.temperature_T.log()
        if self.regulariser == "lognormal":
            return self.temperature_T.log().square() / (2 * self.prior_sd**2)
        log_p_TN = torch.log_softmax(self.logits_TN / self.temperature_T.unsqueeze(-1), -1)
        return (log_p_TN.exp() * log_p_TN).sum(-1) + math.log(self.logits_TN.shape[-1])

    def signals(self) -> dict[str, Tensor]:
        return {"temperature": self.temperature_T}


class VariationalTemperatureRouter(Router):
    def __init__(self, config: Any, gate: Gate, weight_ND: Tensor | None, layer: int, device: torch.device) -> None:
        super().__init__(config, gate, weight_ND, layer, device)
        hidden = gate.hidden_size // 4
        self.backbone = nn.Linear(gate.hidden_size, hidden, device=device, dtype=torch.float32)
        self.head = nn.Linear(hidden, 1, device=device, dtype=torch.float32)
        if not self.head.weight.is_meta:
            generator = torch.Generator().manual_seed(config.seed * 1000 + layer)
            bound = gate.hidden_size**-0.5
            with torch.no_grad():
                for p in self.backbone.parameters():
                    p.copy_(torch.empty(p.shape).uniform_(-bound, bound, generator=generator))
                for p in self.head.parameters():
                    p.zero_()

    def unbounded(self, u_TD: Tensor) -> Tensor:
        return self.linear(torch.relu(self.linear(u_TD, self.backbone)), self.head).squeeze(-1)

    def temperature(self, u_TD: Tensor) -> Tensor:
        low, high = self.config.t_min, self.config.t_max
        x_T = self.unbounded(u_TD).float()
        s_T = F.softplus(x_T) / F.softplus(x_T.new_zeros(()))
        a = (1 - low) / (high - 1)
        return low + (1 - low) * s_T * ((1 + a) / (1 + a * s_T))

    def forward(self, u_TD: Tensor, logits_TN: Tensor, call: Call, weight_ND: Tensor | None) -> Routing:
        config = self.config
        if (keys := call.keys(config.seed)) is not None and kernels.available(u_TD) and config.sampling == "fixed":
            bounds, ask = (config.t_min, config.t_max), self.gate.scoring.ask()
            fused = kernels.temper(logits_TN, self.unbounded(u_TD), keys, bounds=bounds, ask=ask)
            if fused is not None:
                posterior = TemperaturePosterior(fused.temperature_T, logits_TN, config.regulariser, config.prior_sd)
                return Routing(fused.select_TN, fused.scaled_TN, posterior, given=fused.chosen)
        temperature_T = self.temperature(u_TD)
        scaled_TN = logits_TN / temperature_T.unsqueeze(-1)
        gumbel_TN = call.gumbel(self.config.seed, logits_TN.shape[-1], fresh=self.config.sampling == "mc")
        posterior = TemperaturePosterior(temperature_T, logits_TN, self.config.regulariser, self.config.prior_sd)
        # l + T g ranks as l / T + g does, at the scale that a gate's correction bias was made for
        perturbed_TN = logits_TN + temperature_T.detach().unsqueeze(-1) * gumbel_TN
        return Routing(perturbed_TN, scaled_TN, posterior, relaxed_TN=scaled_TN + gumbel_TN)


@dataclass(frozen=True, kw_only=True)
class VariationalTemperature(Config):
    key: ClassVar[str] = "vtsr"
    router: ClassVar[type[Router]] = VariationalTemperatureRouter

    beta: float = at_least(0, 0.05)
    t_min: float = at_least(1e-6, 0.05)
    t_max: float = at_least(1.000001, 10.0)
    regulariser: str = choice("lognormal", "neg_log_t", "entropy", "lognormal")
    prior_sd: float = at_least(1e-6, 0.5)
    sampling: Sampling = choice("fixed", "fixed", "mc")
