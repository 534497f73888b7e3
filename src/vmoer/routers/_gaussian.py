"""What the Gaussian routers share once they have their posterior q(l | u).

training      l ~ q, one reparameterised sample, selects and weights                    (paper, section 3.4)
inference     p = (1/S) sum_s softmax(l_s) over S fixed points; log p + logsumexp(l) selects and weights
"""

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, cast

import torch
from torch import Tensor, nn

from vmoer.gates import Gate
from vmoer.numerics import integrals, kernels
from vmoer.numerics.gaussians import Gaussian
from vmoer.routers._base import (
    SAMPLES,
    Call,
    Config,
    Points,
    Posterior,
    Presets,
    Router,
    Routing,
    Sampling,
    at_least,
    choice,
)


@dataclass(frozen=True, kw_only=True)
class GaussianConfig(Config):
    """`beta` weighs the KL, `prior_scale` is the prior's standard deviation s0, `samples` the points averaged at inference.

    `sampling`: "fixed" (one set of scrambled Sobol points for all tokens), "mc" (fresh noise on every call, the paper's),
    "delta" (second-order expansion, no points), "delta-cv" (the expansion as a control variate for the fixed points).

    Presets. The paper chose beta for each data set from {0.01, 0.1} and does not say which: 0.01, and `search` for the rest.
    prior_scale: on the embedded model's validation questions, averaged over whole passes, 0.5 kept accuracy where 1 lost it.
    """

    signal: ClassVar[str] = "logit_variance"
    tempered: ClassVar[bool] = True
    presets: ClassVar[Presets] = {
        "paper": {"beta": 0.01, "samples": 35, "sampling": "mc", "prior_scale": 1.0},
        "default": {"beta": 0.001, "prior_scale": 0.5},
    }

    beta: float = at_least(0, 0.01)
    prior_scale: float = at_least(1e-6, 1.0)
    samples: int = at_least(1, 32, SAMPLES)
    sampling: Sampling = choice("fixed", "fixed", "mc", "delta", "delta-cv")


@dataclass(frozen=True, kw_only=True)
class AmortisedConfig(GaussianConfig):
    """`mean_start`: the mean head's first weights are drawn small ("prior": routing starts at the model's own), or as nn.Linear
    draws them ("listing": what the paper's listing leaves to PyTorch)."""

    presets: ClassVar[Presets] = {
        **GaussianConfig.presets,
        "listing": {**GaussianConfig.presets["paper"], "mean_start": "listing"},
    }

    mean_start: str = choice("prior", "prior", "listing")


class Told(NamedTuple):
    """Signals of few tokens that kernels write while they route, [T, G]: columns in the order of `kernels.TOLD`."""

    signals_TG: Tensor
    novel: bool
    """Whether novelty is among them."""

    def of(self, name: str) -> Tensor:
        return self.signals_TG[:, kernels.TOLD.index(name)]


@dataclass(frozen=True)
class GaussianPosterior(Posterior):
    per_token: ClassVar[tuple[str, ...]] = ("q", "center_TN", "shift_TN")
    q: Gaussian
    center_TN: Tensor
    prior_scale: float
    eps: Tensor | None
    shift_TN: Tensor | None = None
    """What is still to be added to q's mean: the kernels take both, so that the sum is written by whoever asks for it."""
    told: Told | None = None
    """What the kernels found on the way."""

    def divergence(self) -> Tensor:
        return self.q.wide().moved(self.shift_TN).kl(self.center_TN.float(), self.prior_scale)

    def signals(self) -> dict[str, Tensor]:
        return {"logit_variance": self.q.wide().trace()}

    def signals_and_entropy(self, weight_TN: Tensor) -> tuple[dict[str, Tensor], Tensor] | None:
        if self.told is not None:
            return {"logit_variance": self.told.of("logit_variance")}, self.told.of("gate_entropy")
        found = kernels.entropy_and_trace(weight_TN, self.q)
        return None if found is None else ({"logit_variance": found[1]}, found[0])

    def costly_signals(self) -> dict[str, Tensor]:
        if self.eps is None or self.eps.shape[-2] == 1:
            return {}
        if self.told is not None:
            return {"mc_logit_variance": self.told.of("mc_logit_variance")}
        return {"mc_logit_variance": integrals.sample_variance(self.q.wide().moved(self.shift_TN), self.eps)}

    def novelty(self) -> Tensor | None:
        return self.told.of("novelty") if self.told is not None and self.told.novel else None


class GaussianRouter(Router):
    reads_narrow = True
    noise_dim: int

    @property
    def repeats(self) -> bool:
        return bool(self.config.sampling == "fixed")

    def add_points(self, device: torch.device) -> None:
        self.points = Points(self.config.samples, self.noise_dim, self.config.seed + self.layer, device)

    def configure(self, config: Any) -> None:
        super().configure(config)
        self.add_points(self.points.eps_SE.device)

    def route(
        self, q: Gaussian, logits_TN: Tensor, call: Call, shift_TN: Tensor | None = None, told: Told | None = None
    ) -> Routing:
        """Experts for a posterior `q` whose mean is to be moved by `shift_TN`; `told` is what its network found on the way."""
        config = cast(GaussianConfig, self.config)
        if call.draws:
            q, logits_TN = q.wide().moved(shift_TN), logits_TN.float()
            sample_TN = q.sample(call.normal(config.seed, self.noise_dim))
            return Routing(sample_TN, sample_TN, GaussianPosterior(q, logits_TN, config.prior_scale, None))
        eps: Tensor | None = self.points()
        if config.sampling == "mc":
            eps = torch.randn(len(logits_TN), config.samples, self.noise_dim, device=logits_TN.device)
        if config.sampling == "fixed" and self.gate.scoring.score == "softmax":
            into_TG = None if told is None else told.signals_TG
            fused = kernels.average(
                q, self.points.narrow_SE, shift_TN=shift_TN, own_TN=logits_TN, ask=self.gate.ask(), told_TG=into_TG
            )
            if fused is not None:
                own = (config.prior_scale, eps, shift_TN, told if fused.told else None)
                posterior = GaussianPosterior(q, logits_TN, *own)
                return Routing(fused.logits_TN, fused.logits_TN, posterior, given=fused.chosen)
        q, logits_TN = q.wide().moved(shift_TN), logits_TN.float()
        rule = config.sampling if config.sampling in ("delta", "delta-cv") else "points"
        averaged_TN = self.gate.expected_logits(q, None if rule == "delta" else eps, cast(Any, rule), logits_TN)
        return Routing(averaged_TN, averaged_TN, GaussianPosterior(q, logits_TN, config.prior_scale, eps))


class AmortisedRouter(GaussianRouter):
    """The inference network: a backbone Linear(D, H) + ReLU and heads that start at the prior (paper, section 3.3).

    The heads are one matrix whose rows are split among mean and covariance, so that they cost one product.
    """

    samples_logits = True
    no_bias_H: Tensor
    entry_by_entry: ClassVar[bool] = False
    """Whether the kernels like this method's outputs best as W h', each entry's tokens side by side."""

    def __init__(self, config: Any, gate: Gate, weight_ND: Tensor | None, layer: int, device: torch.device) -> None:
        super().__init__(config, gate, weight_ND, layer, device)
        self.sizes = self.head_sizes()
        hidden, outputs = gate.hidden_size // 4, sum(self.sizes)
        if outputs:
            self.backbone = nn.Linear(gate.hidden_size, hidden, bias=False, device=device, dtype=torch.float32)
            self.heads = nn.Linear(hidden, outputs, bias=False, device=device, dtype=torch.float32)
            self.register_buffer("no_bias_H", torch.zeros(hidden, device=device), persistent=False)
            self.reset(config.seed)
        self.add_points(device)

    def head_sizes(self) -> list[int]:
        """Outputs of the network for the mean, then for the covariance."""
        raise NotImplementedError

    def work(self) -> tuple[int, int] | None:
        """Averaging multiplies every entry of the covariance by every point."""
        mean, *covariance = self.sizes
        return mean + sum(covariance), self.config.samples * sum(covariance)

    def reset(self, seed: int) -> None:
        """Backbone as nn.Linear does, heads normal(0, 1e-3) but for `mean_start`, from a generator of their own."""
        if self.backbone.weight.is_meta:
            return
        generator = torch.Generator().manual_seed(seed * 1000 + self.layer)
        bound = self.backbone.in_features**-0.5
        backbone = torch.empty(self.backbone.weight.shape).uniform_(-bound, bound, generator=generator)
        heads = torch.empty(self.heads.weight.shape).normal_(0, 1e-3, generator=generator)
        if self.config.mean_start == "listing":
            bound = self.heads.in_features**-0.5
            heads[: self.sizes[0]].uniform_(-bound, bound, generator=generator)
        with torch.no_grad():
            self.backbone.weight.copy_(backbone)
            self.heads.weight.copy_(heads)

    def infer(self, u_TD: Tensor, call: Call) -> tuple[tuple[Tensor, ...], Told | None]:
        """The heads' outputs split by `head_sizes`: in float32, but on a GPU, where the kernels read the model's dtype. Where
        tokens are few, also room for what the kernels find on the way."""
        told, out = None, None
        if kernels.available(u_TD) and not torch.is_grad_enabled() and len(u_TD) < kernels.MANY:
            root = self.halves() if self.fitted and u_TD.dtype == torch.bfloat16 else None
            signals_TG = call.into_TG
            if signals_TG is None:
                signals_TG = u_TD.new_empty((len(u_TD), len(kernels.TOLD)), dtype=torch.float32)
            out = kernels.network(u_TD, self.backbone.weight, self.heads.weight, root, signals_TG)
            told = Told(signals_TG, novel=out is not None and root is not None)
        if out is None:
            out = self._products(u_TD)
        return (out if kernels.available(out) else out.float()).split(self.sizes, dim=-1), told

    def _products(self, u_TD: Tensor) -> Tensor:
        features_TH = self.features(u_TD, self.backbone, self.no_bias_H)
        if (
            self.entry_by_entry
            and len(u_TD) >= kernels.MANY
            and kernels.available(features_TH)
            and not torch.is_grad_enabled()
        ):
            return (self.heads.weight.to(features_TH.dtype) @ features_TH.mT).mT
        return self.linear(features_TH, self.heads)
