"""Which layers route brittly, and which layers to attach to (the paper's appendix B.1).

    x' = x + gamma mean||x|| eps,  eps ~ N(0, I)          J = |E ∩ E'| / |E ∪ E'|

One decoder layer at a time: x is the residual stream entering it (before its input norm), E and E' the experts its
router selects for a token given x and given x'. The mean L2 norm is over all unmasked tokens of the run. The noise's
size relative to x is gamma sqrt(D), which stands beside gamma so that models can be compared.

E' depends on the layer's attention and router alone. So two passes are enough: one without noise, for the norms; and
one in which each layer, before its own run, is run on the perturbed states until its router has answered. The noise is
a function of (seed, layer, row of the run, place in the row without padding, coordinate), the same at every gamma. So
nothing depends on how the rows are batched, and the curves over gamma are smooth.

Shapes: L layers, G noise levels, B rows of a batch, R rows of the run, T tokens, D model, K selected.
"""

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from vmoer import gates
from vmoer.errors import AttachError, InputError, RunError
from vmoer.gates import FoundRouter, Gate
from vmoer.live.attach import unrecorded
from vmoer.numerics import noise
from vmoer.numerics.sets import jaccard

GAMMAS = (0.001, 0.002, 0.005, 0.007, 0.01, 0.02, 0.05)
DIAGNOSTIC = 0.01  # the noise level that layers are compared at
STRATEGIES = ("susceptible", "first", "middle", "last", "all")

Batches = Iterable[Mapping[str, Any]]
Forward = Callable[[Tensor], Any]
Enter = Callable[[int, Tensor, Forward], None]


@dataclass(frozen=True)
class Brittleness:
    """Each unmasked token's Jaccard similarity at each layer and noise level."""

    layers: tuple[int, ...]
    gammas: tuple[float, ...]
    jaccard_LGT: npt.NDArray[np.float32]
    rows_T: npt.NDArray[np.int64]
    """The row of the run each token is in."""
    norms_L: tuple[float, ...]
    """The mean L2 norm of the states entering each layer."""
    hidden_size: int
    seed: int
    left_out: dict[int, str]
    """MoE layers whose router's choice cannot be read, and why."""

    @property
    def relative(self) -> tuple[float, ...]:
        """gamma sqrt(D): the norm of the noise as a share of the mean norm."""
        return tuple(gamma * math.sqrt(self.hidden_size) for gamma in self.gammas)

    @property
    def mean_LG(self) -> npt.NDArray[np.float64]:
        return np.asarray(self.jaccard_LGT.mean(-1, dtype=np.float64))

    def at(self, gamma: float = DIAGNOSTIC) -> npt.NDArray[np.float32]:
        """The tokens' values at one noise level, [L, T]."""
        if gamma not in self.gammas:
            raise InputError(f"gamma={gamma} was not measured: there are {', '.join(map(str, self.gammas))}")
        return self.jaccard_LGT[:, self.gammas.index(gamma)]

    def ranking(self, gamma: float = DIAGNOSTIC) -> list[int]:
        """The layers, the most brittle first; the lower index first where two are equal."""
        means = self.at(gamma).mean(-1, dtype=np.float64).tolist()
        return [layer for _, layer in sorted(zip(means, self.layers, strict=True))]


@torch.no_grad()
def brittleness(
    model: nn.Module,
    batches: Batches,
    *,
    gammas: Sequence[float] = GAMMAS,
    layers: Sequence[int] | Literal["all"] = "all",
    seed: int = 0,
) -> Brittleness:
    """How much each layer's choice of experts changes under small noise on what enters the layer.

    Where a method is attached, its routing is measured, including any fresh noise that it draws (`sampling="mc"`).
    """
    if not gammas or not all(math.isfinite(gamma) and gamma >= 0 for gamma in gammas):
        raise InputError(f"gammas must be at least one number, finite and not negative, got {list(gammas)}")
    routers, left_out = _routers(model)
    chosen = sorted(routers) if layers == "all" else _explicit(layers, routers, left_out)
    sites = [_Site.of(model, routers[layer]) for layer in chosen]
    with _undisturbed(model):
        read = _read(batches, next(model.parameters()).device)
        norms_L, width = _mean_norms(model, read, sites)
        sds_LG = [[gamma * norm for gamma in gammas] for norm in norms_L]
        parts = [_measure(model, batch, sites, sds_LG, seed) for batch in read]
    rows = [batch.rows_BT[batch.mask_BT].cpu().numpy() for batch in read]
    jaccard_LGT = np.concatenate(parts, -1, dtype=np.float32)
    return Brittleness(
        tuple(chosen), tuple(gammas), jaccard_LGT, np.concatenate(rows), tuple(norms_L), width, seed, left_out
    )


def select_layers(
    model: nn.Module,
    batches: Batches | None = None,
    *,
    strategy: str | Sequence[int] = "susceptible",
    n: int = 10,
    gamma: float = DIAGNOSTIC,
    seed: int = 0,
) -> list[int]:
    """The decoder layers to attach to, ascending, out of those whose router can be attached.

    Args:
        model: A transformers model with MoE layers.
        batches: Of prompts; only "susceptible" needs them.
        strategy: "susceptible" takes the n layers whose expert sets change most under noise of size gamma; "first",
            "middle" and "last" take n of the MoE layers in order; "all" takes every one; a list, or "3,5,7", is checked
            and sorted.
        n: How many layers.
        gamma: Size of the noise, relative to the mean norm of the layer's input.
        seed: Of the noise.
    """
    routers, left_out = _routers(model)
    there = sorted(routers)
    if isinstance(strategy, str) and strategy not in STRATEGIES:
        strategy = _numbers(strategy)
    if not isinstance(strategy, str):
        return _explicit(strategy, routers, left_out)
    if strategy == "all":
        return there
    if not 1 <= n <= len(there):
        which = " whose router can be attached" if left_out else ""
        raise InputError(f"n={n} layers were asked for, but this model has {len(there)} MoE layers{which}")
    if strategy == "susceptible":
        if batches is None:
            raise InputError("strategy='susceptible' needs batches to measure brittleness on")
        return sorted(brittleness(model, batches, gammas=[gamma], seed=seed).ranking(gamma)[:n])
    start = {"first": 0, "middle": (len(there) - n) // 2, "last": len(there) - n}[strategy]
    return there[start : start + n]


def parse_layers(text: str, n: int = 10) -> tuple[str | list[int], int]:
    """`susceptible:10`, `first:4`, `all` or `0,3,5` as strategy and n of `select_layers`; `n` where none is written."""
    name, colon, number = text.strip().partition(":")
    if name not in STRATEGIES:
        return _numbers(text), n
    if colon and (name == "all" or not re.fullmatch(r"0*[1-9]\d*", number)):
        raise InputError(f"layers {text!r}: after a colon goes a number of layers, as in first:4; all takes none")
    return name, int(number) if colon else n


# -- the layers --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Site:
    layer: int
    module: nn.Module
    router: nn.Module
    gate: Gate

    @classmethod
    def of(cls, model: nn.Module, found: FoundRouter) -> "_Site":
        module = model.get_submodule(found.path[: found.path.index(f".{found.layer}.")] + f".{found.layer}")
        router = found.router
        return cls(found.layer, module, router, getattr(router, "vmoer_gate", None) or Gate.probe(found))


def _routers(model: nn.Module) -> tuple[dict[int, FoundRouter], dict[int, str]]:
    """The routers by layer, and the reasons why others cannot be used."""
    routers: dict[int, FoundRouter] = {}
    left_out: dict[int, str] = {}
    for found in gates.find(model):
        if found.reason:
            left_out[found.layer] = f"{found.path} ({found.kind}): {found.reason}"
        elif (other := routers.setdefault(found.layer, found)) is not found:
            both = f"{other.path}, {found.path}"
            raise AttachError(f"layer {found.layer} has two routers ({both}): pass the submodel that holds one")
    if not routers:
        why = next(iter(left_out.values()), "it is a dense model, or its routers are unknown here")
        raise AttachError(f"{type(model).__name__} has no MoE router that can be used: {why}")
    return routers, left_out


def _explicit(layers: Sequence[int], routers: dict[int, FoundRouter], left_out: dict[int, str]) -> list[int]:
    if not layers or len(set(layers)) != len(layers):
        raise InputError(f"layers must be distinct and not empty, got {list(layers)}")
    for layer in layers:
        if layer not in routers:
            raise InputError(
                left_out.get(layer) or f"layer {layer} has no MoE router: those that have are {sorted(routers)}"
            )
    return sorted(layers)


def _numbers(text: str) -> list[int]:
    if not re.fullmatch(r"\s*\d+\s*(,\s*\d+\s*)*", text):
        raise InputError(f"layers {text!r}: choose one of {', '.join(STRATEGIES)}, or numbers such as 3,5,7")
    return [int(number) for number in text.split(",")]


# -- the passes --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Batch:
    inputs: dict[str, Any]
    mask_BT: Tensor
    rows_BT: Tensor

    def unit_noise(self, seed: int, layer: int, states: Tensor) -> Tensor:
        """Standard normal in the shape of the states, zero at padding."""
        mask_BT1, rows_BT1 = (t.to(states.device).unsqueeze(-1) for t in (self.mask_BT, self.rows_BT))
        coordinates_D = torch.arange(states[0, 0].numel(), device=states.device)
        unit_BTD = noise.normal(seed, layer, rows_BT1, mask_BT1.long().cumsum(1) - 1, coordinates_D)
        return torch.where(mask_BT1, unit_BTD, 0).reshape(states.shape)

    def jaccard(self, clean_TK: Tensor, noisy_GTK: list[Tensor]) -> npt.NDArray[np.float64]:
        """[G, T], unmasked tokens only."""
        mask_T = self.mask_BT.reshape(-1).to(clean_TK.device)
        clean, noisy = clean_TK[mask_T].cpu().numpy(), torch.stack(noisy_GTK)[:, mask_T].cpu().numpy()
        return jaccard(np.broadcast_to(clean, noisy.shape), noisy)


def _read(batches: Batches, device: torch.device) -> list[_Batch]:
    read: list[_Batch] = []
    first_row = 0
    for batch in batches:
        inputs = {k: v.to(device) if isinstance(v, Tensor) else v for k, v in batch.items() if k != "labels"}
        tokens = inputs.get("input_ids", inputs.get("inputs_embeds"))
        if tokens is None:
            raise InputError(f"a batch must hold input_ids or inputs_embeds, got {', '.join(batch) or 'nothing'}")
        mask_BT = inputs.get("attention_mask", torch.ones(tokens.shape[:2], device=device)).bool()
        if mask_BT.shape != tokens.shape[:2] or not mask_BT.any():
            want, got = list(tokens.shape[:2]), list(mask_BT.shape)
            raise InputError(f"an attention_mask must have shape {want} and a token to keep; this one has shape {got}")
        rows_BT = first_row + torch.arange(len(tokens), device=device).unsqueeze(1).expand(mask_BT.shape)
        read.append(_Batch({**inputs, "use_cache": False}, mask_BT, rows_BT))
        first_row += len(tokens)
    if not read:
        raise InputError("brittleness was given no batches")
    return read


@contextmanager
def _undisturbed(model: nn.Module) -> Iterator[None]:
    """Evaluation mode, and no record that would take perturbed routing for the model's; afterwards all is as it was."""
    training = [module for module in model.modules() if module.training]
    try:
        model.eval()
        with unrecorded(model):
            yield
    finally:
        for module in training:
            module.training = True


def _run(model: nn.Module, batch: _Batch, sites: list[_Site], enter: Enter) -> list[Tensor]:
    """The experts each site selects in one pass of the model, [L][B T, K].

    `enter(i, states, forward)` is called before the i-th site runs, and may run it on other states by `forward`.
    """
    experts: dict[int, Tensor] = {}
    name = "hidden_states"

    def entering(i: int, layer: nn.Module, args: Any, kwargs: Any) -> None:
        def forward(states: Tensor) -> Any:  # not a call: the layer's hooks have run on these arguments already
            return layer.forward(states, *args[1:], **kwargs) if args else layer.forward(**{**kwargs, name: states})

        enter(i, args[0] if args else kwargs[name], forward)

    def answered(i: int, router: nn.Module, args: Any, out: Any) -> None:
        experts[i] = sites[i].gate.experts(out)

    with ExitStack() as hooks:
        for i, site in enumerate(sites):
            hooks.enter_context(site.module.register_forward_pre_hook(partial(entering, i), with_kwargs=True))
            hooks.enter_context(site.router.register_forward_hook(partial(answered, i)))
        model(**batch.inputs)
    for i, site in enumerate(sites):
        if i not in experts:
            raise RunError(f"layer {site.layer} ran without calling its router ({type(site.router).__name__})")
    return [experts[i] for i in range(len(sites))]


def _mean_norms(model: nn.Module, read: list[_Batch], sites: list[_Site]) -> tuple[list[float], int]:
    """The mean norm of the states entering each site, and D."""
    norms: list[list[Tensor]] = [[] for _ in sites]
    widths = set()

    def enter(batch: _Batch, i: int, states: Tensor, forward: Forward) -> None:
        states_TD = states[batch.mask_BT.to(states.device)].flatten(1)
        widths.add(states_TD.shape[1])
        norms[i].append(states_TD.float().norm(dim=-1).double().cpu())

    for batch in read:
        _run(model, batch, sites, partial(enter, batch))
    means = [torch.cat(parts).mean().item() for parts in norms]
    for mean, site in zip(means, sites, strict=True):
        if not math.isfinite(mean):
            raise RunError(f"the states entering layer {site.layer} are not finite")
    return means, max(widths)


class _Answered(Exception):
    """A router has answered: the rest of its layer is not run."""


def _measure(
    model: nn.Module, batch: _Batch, sites: list[_Site], sds_LG: list[list[float]], seed: int
) -> list[npt.NDArray[np.float64]]:
    """The tokens' Jaccard similarities in one batch, [L][G, T]."""
    noisy: list[list[Tensor]] = [[] for _ in sites]

    def enter(i: int, states: Tensor, forward: Forward) -> None:
        def stop(router: nn.Module, args: Any, out: Any) -> None:
            noisy[i].append(sites[i].gate.experts(out))
            raise _Answered

        unit = batch.unit_noise(seed, sites[i].layer, states)
        with sites[i].router.register_forward_hook(stop, prepend=True):
            for sd in sds_LG[i]:
                with suppress(_Answered):
                    forward((states + sd * unit).to(states.dtype))

    clean = _run(model, batch, sites, enter)
    return [batch.jaccard(*pair) for pair in zip(clean, noisy, strict=True)]
