"""The one protocol all methods share.

A router takes the hidden states and the frozen router's own logits and returns *what to select by*, *what to weight by* and
*the posterior*; the gate (vmoer/gates) turns the first two into the model's own return value. The posterior's `divergence()`
is the method's penalty, its `signals()` what it knows about the token.

Shapes: T tokens, N experts, D model, H hidden, S samples.
"""

import dataclasses
import functools
import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vmoer.errors import InputError, is_number, short
from vmoer.gates import Gate
from vmoer.numerics import kernels, noise
from vmoer.numerics.tokens import PerToken
from vmoer.routers._novelty import Novelty

Sampling = Literal["fixed", "mc", "delta", "delta-cv"]
Trained = Literal["network", "weights"] | None
Presets = Mapping[str, Mapping[str, Any]]
BETAS = (0.0001, 0.001, 0.01, 0.1)
LAYERS = 10_000  # more than any model has
SAMPLES, RANK = 4096, 256  # more than any study asks for; memory grows with both
TOGETHER = 2**22  # numbers that the layers of a pass draw in one go, at most


class Search(NamedTuple):
    """A setting that is chosen on validation."""

    name: str
    values: tuple[float, ...]
    always: bool = False
    """Whether it is chosen even where no search was asked for."""
    passes: int = 1
    """With more than one, candidates are compared by answers averaged over so many whole passes, with an output temperature."""


class Control(NamedTuple):
    """A configuration that the studies know by a name of its own: a control, which shows what a gain is due to."""

    config: "Config"
    about: str = ""
    tempered: bool = True
    search: bool | None = None
    """Whether its setting is searched: always, never, or (None) where the study searches."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """What every method takes. `layers` are decoder-layer indices, or "all".

    The class variables and properties are the method's traits: all that training, studies and benchmarks know about it.
    """

    key: ClassVar[str] = ""
    about: ClassVar[str] = ""
    """What reports say the key stands for."""
    router: ClassVar[type["Router"]]
    signal: ClassVar[str] = "gate_entropy"
    """The signal that the method is known for. Studies that report one signal report this one."""
    tempered: ClassVar[bool] = False
    """Whether studies score it a second time with an output temperature."""
    splits: ClassVar[bool] = False
    """Whether it chooses experts by other logits than it weighs them by. Engines that take one set of logits cannot run it."""
    presets: ClassVar[Presets] = {}
    """Its settings under a training preset, by the preset's name (vmoer/training/presets.py)."""

    layers: Sequence[int] | Literal["all"] = "all"
    seed: int = field(default=0, metadata={"bounds": (0, 2**48)})

    def __post_init__(self) -> None:
        if self.layers != "all":
            object.__setattr__(self, "layers", _layers(self.layers))
        for f in dataclasses.fields(self):
            value, default = getattr(self, f.name), f.default
            allowed = f.metadata.get("one_of")
            if allowed and value not in allowed:
                raise InputError(f"{f.name}={short(value)}: choose one of {', '.join(allowed)}")
            if isinstance(default, int | float):
                _check_number(f.name, value, whole=isinstance(default, int))
                low, high = f.metadata.get("bounds", (-math.inf, math.inf))
                if value < low:
                    raise InputError(f"{f.name}={short(value)} must be at least {low}")
                if value > high:
                    raise InputError(f"{f.name}={short(value)} must be at most {high}")

    def to_dict(self) -> dict[str, Any]:
        return {"method": self.key, **dataclasses.asdict(self)}

    @property
    def trains(self) -> Trained:
        """What stage 2 trains: an inference network, a change of the router's weights, or nothing."""
        return "network"

    @property
    def draws(self) -> bool:
        """Whether passes can differ: where they cannot, nothing is gained by averaging answers over several."""
        return True

    @property
    def search(self) -> Search | None:
        """The setting that validation chooses: the weight of the KL, where there is one and something is trained."""
        beta: float | None = getattr(self, "beta", None) if self.trains else None
        return None if beta is None else Search("beta", tuple(sorted({*BETAS, beta})))

    @property
    def snapshots(self) -> int:
        """How often `Router.collect` is called over the second half of stage 2."""
        return 0

    @classmethod
    def controls(cls) -> dict[str, Control]:
        """Configurations of this method that are controls for others, by their names."""
        return {}


def choice(default: str, *allowed: str) -> Any:
    return field(default=default, metadata={"one_of": allowed})


def at_least(bound: float, default: Any, at_most: float = 1e6) -> Any:
    """A number of the default's type inside bounds: what a file asks for is allocated only if it is sane."""
    return field(default=default, metadata={"bounds": (bound, at_most)})


def _check_number(name: str, value: Any, whole: bool) -> None:
    number = isinstance(value, int) or (isinstance(value, float) and not whole)
    if not number or isinstance(value, bool):
        raise InputError(f"{name}={short(value)} must be a {'whole ' if whole else ''}number")
    if not is_number(value):
        raise InputError(f"{name}={short(value)} must be finite")


def _layers(asked: Any) -> tuple[int, ...]:
    """Indices of layers: whole numbers, of which a model has at most some hundreds."""
    if isinstance(asked, str) or not isinstance(asked, Iterable):
        raise InputError(f"layers must be a list of indices or 'all', not {short(asked)}")
    layers = tuple(asked)
    for layer in layers:
        if isinstance(layer, bool) or not hasattr(layer, "__index__") or not 0 <= operator.index(layer) < LAYERS:
            raise InputError(f"layers must be whole numbers from 0 to {LAYERS - 1}, not {short(layer)}")
    return tuple(operator.index(layer) for layer in layers)


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
    into_TG: Tensor | None = None  # where kernels write signals, in the order of `kernels.TOLD`

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
        """The same for vmoer.numerics.kernels.temper; None in training, whose step may be a tensor."""
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


class Posterior(PerToken):
    """What a method believes about each token's routing: a dataclass; `per_token` names its fields with a row a token."""

    def divergence(self) -> Tensor:
        """The penalty of each token, [T], with its gradient."""
        raise NotImplementedError

    def signals(self) -> dict[str, Tensor]:
        """What the posterior says about each token, [T] each, larger meaning less certain; cheap to compute."""
        raise NotImplementedError

    def costly_signals(self) -> dict[str, Tensor]:
        """More of the same, computed only where a record asks for it."""
        return {}

    def signals_and_entropy(self, weight_TN: Tensor) -> tuple[dict[str, Tensor], Tensor] | None:
        """`signals()`, and the entropy of softmax(weight), where one kernel finds both; else None."""
        return None

    def novelty(self) -> Tensor | None:
        """[T], where a kernel found it on the way."""
        return None


@dataclass(frozen=True)
class Routing:
    select_TN: Tensor
    weight_TN: Tensor
    posterior: Posterior | None = None
    relaxed_TN: Tensor | None = None
    """Logits of the relaxed choice whose gradient a sampled selection carries, straight-through."""
    given: tuple[Tensor, Tensor] | None = None
    """The gate's weights and experts, [T, K] each, where a fused kernel found them on the way."""


class Router(Novelty):
    """A method at one layer. Parameters are float32; `forward` gets float32 logits whatever the model's dtype."""

    needs_fit: ClassVar[bool] = False
    reads_narrow: ClassVar[bool] = False
    """Whether `forward` takes the logits in the model's dtype on a GPU, for a kernel that widens them as it reads."""
    samples_logits: ClassVar[bool] = False
    """Whether it averages over samples of a posterior `q` at `self.points()`, which can be looked at one by one."""
    silent: ClassVar[bool] = False
    """Whether it never answers for the model's own router, so that it need not be asked where nobody records."""
    reads_positions: ClassVar[bool] = False
    """Whether averaging depends on where a token stands."""

    def __init__(self, config: Any, gate: Gate, weight_ND: Tensor | None, layer: int, device: torch.device) -> None:
        super().__init__()
        self.config, self.gate, self.layer = config, gate, layer
        self.register_novelty(gate.hidden_size, device)

    def forward(self, u_TD: Tensor, logits_TN: Tensor, call: Call, weight_ND: Tensor | None) -> Routing | None:
        """None means: keep what the model's own router said."""
        raise NotImplementedError

    @property
    def repeats(self) -> bool:
        """Whether `forward` at inference depends on its arguments, parameters and buffers alone: it can be replayed then."""
        return False

    @property
    def replaces(self) -> bool:
        """Whether `forward` answers for the model's own router, which then need not choose experts itself."""
        return True

    def configure(self, config: Any) -> None:
        """Take on other settings (vmoer.live.attach.reconfigured). What was derived from the former ones is derived anew."""
        self.config = config

    def collect(self) -> None:
        """Take a snapshot of what is trained; see `Config.snapshots`."""
        raise NotImplementedError(f"{self.config.key} asks for snapshots and does not take them")

    def settle(self) -> None:
        """Enter the state of inference without training or fitting, so that the cost of a pass can be counted."""

    def held(self) -> int:
        """Numbers held in memory besides the model's own."""
        return sum(p.numel() for p in self.parameters())

    def work(self) -> tuple[int, int] | None:
        """Outputs of the inference network for a token, and multiply-accumulates after it; None without a network."""
        return None

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
    """The fixed points a router averages over, in float32 whatever the model is cast to; rounded to bfloat16, which makes them
    no worse as points and lets a GPU multiply them exactly."""

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
