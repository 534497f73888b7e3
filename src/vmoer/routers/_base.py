"""The one protocol all methods share.

A router takes the hidden states and the frozen router's own logits and returns *what to select by*, *what to weight by* and
*the posterior*; the gate (vmoer/gates) turns the first two into the model's own return value. The posterior's `divergence()`
is the method's penalty, its `signals()` what it knows about the token.

Shapes: T tokens, N experts, D model, H hidden, S samples.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vmoer import kernels, noise
from vmoer.errors import InputError
from vmoer.gates import Gate

Sampling = Literal["fixed", "mc", "delta", "delta-cv"]
TOGETHER = 2**22  # numbers that the layers of a pass draw in one go, at most


@dataclass(frozen=True, kw_only=True)
class Config:
    """What every method takes. `layers` are decoder-layer indices, or "all"."""

    key: ClassVar[str] = ""
    router: ClassVar[type["Router"]]

    layers: Sequence[int] | Literal["all"] = "all"
    seed: int = 0

    def __post_init__(self) -> None:
        if self.layers != "all":
            if isinstance(self.layers, str):
                raise InputError(f"layers must be a list of indices or 'all', not {self.layers!r}")
            object.__setattr__(self, "layers", tuple(int(i) for i in self.layers))
        for f in dataclasses.fields(self):
            allowed = f.metadata.get("one_of")
            if allowed and getattr(self, f.name) not in allowed:
                raise InputError(f"{f.name}={getattr(self, f.name)!r}: choose one of {', '.join(allowed)}")
            at_least = f.metadata.get("at_least")
            value = getattr(self, f.name)
            if at_least is not None and value is not None and not value >= at_least:
                raise InputError(f"{f.name}={value!r} must be at least {at_least}")

    def to_dict(self) -> dict[str, Any]:
        return {"method": self.key, **dataclasses.asdict(self)}


def choice(default: str, *allowed: str) -> Any:
    return field(default=default, metadata={"one_of": allowed})


def at_least(bound: float, default: Any) -> Any:
    return field(default=default, metadata={"at_least": bound})


@functools.lru_cache(maxsize=64)
def _on_device(numbers: tuple[int, ...], device: torch.device) -> Tensor:
    """Kept, since bringing numbers to a GPU synchronises with it."""
    return torch.tensor(numbers, device=device)


@dataclass(frozen=True)
class Call:
    """The forward pass a router finds itself in: which tokens these are, and what kind of draw is wanted of them.

    `step` is set in training: one sample a token, keyed by (step, row of the global batch, position). `passes_T` is set when
    answers are averaged: one sample a token, keyed by (pass, position). With neither the router averages.
    """

    layer: int
    positions_T: Tensor
    rows_T: Tensor
    step: int | Tensor | None = None
    passes_T: Tensor | None = None
    layers: Sequence[int] = ()
    drawn: dict[Any, Tensor] | None = None
    """Where the attached `layers` keep what they draw in this pass; see `_draw`."""

    @property
    def draws(self) -> bool:
        return self.step is not None or self.passes_T is not None

    def _draw(self, law: Callable[..., Tensor], seed: int, n: int) -> Tensor:
        """[T, n] numbers. In a small batch all layers' at once: a hash is a hundred kernels whatever its size, and a draw a
        function of its keys, so the numbers are the same."""
        size = len(self.layers) * len(self.positions_T) * n
        if self.drawn is None or not 0 < size <= TOGETHER or torch.compiler.is_compiling():
            return law(*self._keys(seed, n, self.layer))
        kept = (law, seed, n, self.step is None, self.passes_T is None)
        if kept not in self.drawn:
            layers_L11 = _on_device(tuple(self.layers), self.positions_T.device)[:, None, None]
            self.drawn[kept] = law(*self._keys(seed, n, layers_L11))
        return self.drawn[kept][self.layers.index(self.layer)]

    def _keys(self, seed: int, n: int, layer: noise.Key) -> tuple[noise.Key, ...]:
        lane = torch.arange(n, device=self.positions_T.device)
        position = self.positions_T.unsqueeze(-1)
        if self.step is not None:
            return seed, 1, self.step, layer, self.rows_T.unsqueeze(-1), position, lane
        if self.passes_T is not None:
            return seed, 2, self.passes_T.unsqueeze(-1), layer, position, lane
        return seed, 3, layer, position, lane

    def keys(self, seed: int) -> kernels.Keys | None:
        """The same for vmoer.kernels.temper; None in training, whose step may be a tensor."""
        if self.step is not None:
            return None
        if self.passes_T is not None:
            return kernels.Keys((seed, 2), self.positions_T, self.passes_T, (self.layer,))
        return kernels.Keys((seed, 3, self.layer), self.positions_T)

    def normal(self, seed: int, n: int) -> Tensor:
        return self._draw(noise.normal, seed, n)

    def gumbel(self, seed: int, n: int, fresh: bool = False) -> Tensor:
        if fresh and not self.draws:
            shape = (len(self.positions_T), n)
            return -torch.empty(shape, device=self.positions_T.device).exponential_().log()
        return self._draw(noise.gumbel, seed, n)

    def uniform(self, seed: int, n: int) -> Tensor:
        return self._draw(noise.uniform, seed, n)


class Posterior(Protocol):
    def divergence(self) -> Tensor:
        """The penalty of each token, [T], with its gradient."""
        ...

    def signals(self) -> dict[str, Tensor]:
        """What the posterior says about each token, [T] each, larger meaning less certain."""
        ...


@dataclass(frozen=True)
class Routing:
    select_TN: Tensor
    weight_TN: Tensor
    posterior: Posterior | None = None
    relaxed_TN: Tensor | None = None
    """Logits of the relaxed choice whose gradient a sampled selection carries, straight-through."""
    given: tuple[Tensor, Tensor] | None = None
    """The gate's weights and experts, [T, K] each, where a fused kernel found them on the way."""


class Router(nn.Module):
    """A method at one layer. Parameters are float32; `forward` gets float32 logits whatever the model's dtype."""

    needs_fit: ClassVar[bool] = False
    reads_narrow: ClassVar[bool] = False
    """Whether `forward` takes the logits in the model's dtype on a GPU, for a kernel that widens them as it reads."""
    novelty_root_RD: Tensor

    def __init__(self, config: Any, gate: Gate, weight_ND: Tensor | None, layer: int, device: torch.device) -> None:
        super().__init__()
        self.config, self.gate, self.layer = config, gate, layer
        self.register_novelty(device)

    def forward(self, u_TD: Tensor, logits_TN: Tensor, call: Call, weight_ND: Tensor | None) -> Routing | None:
        """None means: keep what the model's own router said."""
        raise NotImplementedError

    def register_novelty(self, device: torch.device) -> None:
        """Room for `vmoer.fit`; empty until fitted."""
        self.register_buffer("novelty_root_RD", torch.zeros(0, self.gate.hidden_size, device=device))

    def _apply(self, fn: Any, recurse: bool = True) -> "Router":
        """The statistics stay in float32 whatever the model is cast to: what they leave of a state is small against it."""
        kept = self.novelty_root_RD
        super()._apply(fn, recurse)
        if self.novelty_root_RD.dtype != kept.dtype:
            self.novelty_root_RD = kept.to(self.novelty_root_RD.device)
        return self

    @property
    def replaces(self) -> bool:
        """Whether `forward` answers for the model's own router, which then need not choose experts itself."""
        return True

    @property
    def fitted(self) -> bool:
        return self.novelty_root_RD.shape[0] > 0

    def novelty(self, u_TD: Tensor) -> Tensor:
        """u' A^-1 u = |W u|^2, [T]; W is a root of A^-1 or a sketch of it (vmoer.fitting)."""
        fused = kernels.novelty(u_TD, self.novelty_root_RD)
        if fused is not None:
            return fused
        return (u_TD.float() @ self.novelty_root_RD.float().mT).square().sum(-1)

    def linear(self, x: Tensor, layer: nn.Linear) -> Tensor:
        """In float32 where gradients flow; in the model's dtype, with float32 accumulation, at inference."""
        if torch.is_grad_enabled() and layer.weight.requires_grad:
            return F.linear(x.to(layer.weight.dtype), layer.weight, layer.bias)
        bias = layer.bias.to(x.dtype) if layer.bias is not None else None
        return F.linear(x, layer.weight.to(x.dtype), bias)

    def features(self, x: Tensor, layer: nn.Linear, bias: Tensor) -> Tensor:
        """ReLU(W x + b); on a GPU's way to the kernels the product itself applies the ReLU."""
        if kernels.available(x) and not torch.is_grad_enabled():
            return torch._addmm_activation(bias.to(x.dtype), x, layer.weight.to(x.dtype).mT)
        return torch.relu(self.linear(x, layer))


class Points(nn.Module):
    """The fixed points a router averages over, kept in float32 whatever the model is cast to.

    They are rounded to bfloat16, which makes them no worse as points and lets a GPU multiply them exactly.
    """

    eps_SE: Tensor
    narrow_SE: Tensor

    def __init__(self, samples: int, dim: int, seed: int, device: torch.device) -> None:
        super().__init__()
        self.samples, self.dim, self.seed = samples, dim, seed
        for name in ("eps_SE", "narrow_SE"):
            self.register_buffer(name, torch.empty(0, device=device), persistent=False)
        self._fill(device)

    def _fill(self, device: torch.device) -> None:
        self.narrow_SE = noise.sobol_normal(self.samples, self.dim, self.seed).to(torch.bfloat16).to(device)
        self.eps_SE = self.narrow_SE.float()

    def _apply(self, fn: Any, recurse: bool = True) -> "Points":
        super()._apply(fn, recurse)
        if self.eps_SE.dtype != torch.float32 or self.narrow_SE.dtype != torch.bfloat16:
            self._fill(self.eps_SE.device)
        return self

    def forward(self) -> Tensor:
        return self.eps_SE
