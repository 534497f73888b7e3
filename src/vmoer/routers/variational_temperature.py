"""VTSR: a temperature for each token, learned, and experts sampled at it (paper, section 4, algorithm 3).

    T(u) = T_min + (1 - T_min) s (1 + a) / (1 + a s),   s = softplus(MLP(u)) / softplus(0),   a = (1 - T_min) / (T_max - 1)
    z ~ Sample-K(softmax(l / T(u))) = Top-K(l / T + gumbel),    weights from the unperturbed l / T

T lies between T_min and T_max and is `prior_mean` at the start, where the MLP's last layer is zero but for its bias; that is 1
in the paper, and 1 here unless asked otherwise.

`weights`: "scaled" takes the weights from l / T (the paper's), so that T -> 0 gives the model's own experts at sharper weights;
"own" takes them from l, so that T says how freely experts are drawn and nothing else, and T -> 0 is the model itself.

The paper's algorithm divides l + gumbel by T, which leaves the ranking, and so the law of z, untouched by T; l / T + gumbel
is exactly Sample-K of softmax(l / T), and is used in training and at inference alike.

Gradient. Weights depend on T pathwise: d weights(l / T) / dT at the chosen experts. The choice itself is straight-through:
forward the hard Top-K, backward softmax(l / T + gumbel) at the chosen experts, as a factor on their weights (Gate.route). The
estimator is biased, as every straight-through estimator is; tests compare it with the exact gradient by enumeration.

`regulariser`, summed into the loss with weight beta:
    neg_log_t   -log T                        the paper's; unbounded below, drives T up without limit
    entropy     KL(softmax(l / T) || uniform) the exact divergence that -log T stands in for
    lognormal   (log T - log prior_mean)^2 / (2 prior_sd^2)
                                              a proper prior, log T ~ N(log prior_mean, prior_sd^2), up to a constant
"""

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vmoer.errors import InputError
from vmoer.gates import Gate
from vmoer.numerics import kernels
from vmoer.routers._base import Call, Config, Posterior, Presets, Router, Routing, Sampling, at_least, choice


@dataclass(frozen=True)
class TemperaturePosterior(Posterior):
    per_token: ClassVar[tuple[str, ...]] = ("temperature_T", "logits_TN")
    temperature_T: Tensor
    logits_TN: Tensor
    regulariser: str
    prior_sd: float
    prior_mean: float = 1.0

    def divergence(self) -> Tensor:
        if self.regulariser == "neg_log_t":
            return -self.temperature_T.log()
        if self.regulariser == "lognormal":
            return (self.temperature_T / self.prior_mean).log().square() / (2 * self.prior_sd**2)
        log_p_TN = torch.log_softmax(self.logits_TN.float() / self.temperature_T.unsqueeze(-1), -1)
        return (log_p_TN.exp() * log_p_TN).sum(-1) + math.log(self.logits_TN.shape[-1])

    def signals(self) -> dict[str, Tensor]:
        return {"temperature": self.temperature_T}


class VariationalTemperatureRouter(Router):
    reads_narrow = True
    reads_positions = True

    @property
    def repeats(self) -> bool:
        return bool(self.config.sampling == "fixed")

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
                self.head.weight.zero_()
                self.head.bias.fill_(self._inverse(config.prior_mean))

    def unbounded(self, u_TD: Tensor) -> Tensor:
        return self.linear(self.features(u_TD, self.backbone, self.backbone.bias), self.head).squeeze(-1)

    def temperature(self, u_TD: Tensor) -> Tensor:
        low, high = self.config.t_min, self.config.t_max
        x_T = self.unbounded(u_TD).float()
        s_T = F.softplus(x_T) / F.softplus(x_T.new_zeros(()))
        a = (1 - low) / (high - 1)
        return low + (1 - low) * s_T * ((1 + a) / (1 + a * s_T))

    def _inverse(self, temperature: float) -> float:
        """What the head says where T is this; 0 for 1, exactly."""
        low, high = self.config.t_min, self.config.t_max
        a, share = (1 - low) / (high - 1), (temperature - low) / (1 - low)
        return math.log(math.expm1(math.log(2) * share / (1 + a - a * share))) if temperature != 1 else 0.0

    def forward(self, u_TD: Tensor, logits_TN: Tensor, call: Call, weight_ND: Tensor | None) -> Routing:
        config = self.config
        fixed, own = config.sampling == "fixed", config.weights == "own"
        if fixed and (keys := call.keys(config.seed)) is not None and kernels.available(u_TD):
            bounds, ask = (config.t_min, config.t_max), self.gate.ask()
            features_TH = self.features(u_TD, self.backbone, self.backbone.bias)
            head = self.head.weight[0], self.head.bias
            fused = kernels.temper(logits_TN, features_TH, keys, bounds=bounds, head=head, own=own, ask=ask)
            if fused is not None:
                posterior = self._posterior(fused.temperature_T, logits_TN)
                return Routing(fused.select_TN, fused.scaled_TN, posterior, given=fused.chosen)
        temperature_T, logits_TN = self.temperature(u_TD), logits_TN.float()
        scaled_TN = logits_TN / temperature_T.unsqueeze(-1)
        gumbel_TN = call.gumbel(self.config.seed, logits_TN.shape[-1], fresh=self.config.sampling == "mc")
        # l + T g ranks as l / T + g does, at the scale that a gate's correction bias was made for
        perturbed_TN = logits_TN + temperature_T.detach().unsqueeze(-1) * gumbel_TN
        weight_TN = logits_TN if own else scaled_TN
        return Routing(perturbed_TN, weight_TN, self._posterior(temperature_T, logits_TN), scaled_TN + gumbel_TN)

    def work(self) -> tuple[int, int]:
        return 1, self.gate.num_experts

    def _posterior(self, temperature_T: Tensor, logits_TN: Tensor) -> TemperaturePosterior:
        c = self.config
        return TemperaturePosterior(temperature_T, logits_TN, c.regulariser, c.prior_sd, c.prior_mean)


@dataclass(frozen=True, kw_only=True)
class VariationalTemperature(Config):
    """A learned temperature for each token; experts are sampled at it (VTSR).

    Args:
        layers: Indices of the decoder layers to attach to, or "all".
        seed: Decides the method's noise and, where it has a network, its initial weights.
        beta: Weight of the regulariser in the loss.
        t_min: Least temperature, below 1.
        t_max: Largest temperature, above 1.
        regulariser: "neg_log_t" (the paper's), "entropy" (the KL to uniform experts) or "lognormal" (a prior on T).
        prior_sd: Standard deviation of log T under the lognormal prior.
        prior_mean: T at the start, and the median of the lognormal prior. 1 here, 0.15 under the command line's preset "default".
        weights: Whether the experts' weights come from the "scaled" logits l / T (the paper's, and the default here) or from the
            model's "own" (under the preset "default").
        sampling: "fixed" (noise is a function of seed, layer and position) or "mc" (fresh noise on every call).

    Presets. The paper chose beta for each data set from {0.05, 0.1} and does not say which: 0.05, and `search` for the rest.
    prior_mean, weights: on the embedded model sampling at T = 1 cost ten points of accuracy, at 0.15 with the model's own
    weights none, and the straight-through gradient, which sees the chosen experts only, does not bring T down
    (benchmarks/demo_temperature.py).
    """

    key: ClassVar[str] = "vtsr"
    about: ClassVar[str] = "variational router: experts sampled at a temperature learned for each token"
    splits: ClassVar[bool] = True
    router: ClassVar[type[Router]] = VariationalTemperatureRouter
    tempered: ClassVar[bool] = True
    presets: ClassVar[Presets] = {
        "paper": {"beta": 0.05, "sampling": "mc", "regulariser": "neg_log_t"},
        "default": {"prior_mean": 0.15, "weights": "own"},
    }

    beta: float = at_least(0, 0.05)
    t_min: float = at_least(1e-6, 0.05, 0.999)
    t_max: float = at_least(1.000001, 10.0)
    regulariser: str = choice("lognormal", "neg_log_t", "entropy", "lognormal")
    prior_sd: float = at_least(1e-6, 0.5)
    prior_mean: float = at_least(1e-6, 1.0)
    weights: str = choice("scaled", "scaled", "own")
    sampling: Sampling = choice("fixed", "fixed", "mc")

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.t_min < self.prior_mean < self.t_max:
            raise InputError(
                f"prior_mean={self.prior_mean!r} must lie between t_min {self.t_min} and t_max {self.t_max}"
            )
