"""Routers in compiled code: there each is one operator, of which the compiler knows no more than shapes.

Compiled code is entered through guards: whatever Python it was made from is compared again on every pass, while the GPU waits.
The most expensive are those on tensors, and a router has many. An operator that finds its router by a number has none. But then
nobody sees that a parameter has been put somewhere else, where a CUDA graph would not look. So `numbered` compares them when a
record or a `model.generate` begins, and a router that has changed gets a new number: code that was compiled for the former one is
not entered again. Compiled passes outside of both go through their routers line by line; so do all on a CPU, where the compiler
makes one loop of many small steps, and an operator's Python is run on every pass.

Shapes: T tokens, N experts, D model, K selected, G signals.
"""

import itertools
import threading
import weakref
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from vmoer.live.context import NOTHING, Pass
from vmoer.live.signals import Inputs, columns, token_signals
from vmoer.numerics import kernels
from vmoer.numerics.kernels import TOLD

ALONE = 0
"""The number of a router that compiled code goes through line by line."""


class _Known(NamedTuple):
    number: int
    config: Any
    places: list[Any]
    held: list[Tensor]
    """The tensors at these places: kept, so that no others come to lie there."""


_NUMBERS = itertools.count(ALONE + 1)
_KNOWN: weakref.WeakKeyDictionary[nn.Module, _Known] = weakref.WeakKeyDictionary()
_GATES: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
_LOCK = threading.Lock()
on_gpu = kernels.available


def numbered(gates: list[Any]) -> tuple[int, ...]:
    """The numbers of a model's attached routers, or ALONE for all of them; each has its own in `vmoer_number`, too."""
    with _LOCK:
        numbers = tuple(_number(gate) for gate in gates)
        if ALONE in numbers:
            numbers = (ALONE,) * len(gates)
        for gate, number in zip(gates, numbers, strict=True):
            gate.vmoer_number = number
        return numbers


def forget(gates: list[Any]) -> None:
    """Settings or statistics change: until they are `numbered` again, compiled code goes through these routers line by line."""
    for gate in gates:
        gate.vmoer_number = ALONE


def leave(gate: Any) -> None:
    """The method has been detached."""
    vars(gate).pop("vmoer_number", None)
    _KNOWN.pop(gate, None)


def _number(gate: Any) -> int:
    method = gate.vmoer
    if gate.vmoer_gate.types is None or not method.repeats or not on_gpu(method.novelty_root_RD):
        return ALONE
    method.halves()  # found here, so that it is not first found inside a CUDA graph's memory
    held = [x for m in gate.modules() for kept in (m._parameters, m._buffers) for x in kept.values() if x is not None]
    if any(type(x) not in (Tensor, nn.Parameter) for x in held):
        return ALONE
    places = [(x.data_ptr(), x.dtype) for x in held]
    known = _KNOWN.get(gate)
    if known is None or known.config is not method.config or known.places != places:
        known = _KNOWN[gate] = _Known(next(_NUMBERS), method.config, places, held)
        _GATES[known.number] = gate
    return known.number


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def silent(number: int) -> bool:
    """Whether the router's own forward answers, and the method has nothing but signals to add."""
    return bool(_GATES[number].vmoer.silent)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def place(number: int, name: str) -> int:
    """Which element of the router's return value holds its "logits", "weights" or "indices"."""
    return int(_GATES[number].vmoer_gate.places[name])


@torch.library.custom_op("vmoer::answer", mutates_args=())
def answer(u_TD: Tensor, position_T: Tensor, number: int, names: str) -> list[Tensor]:
    """What the router of that number returns, and behind it the signals of these names (with commas between), [T, `lanes`]."""
    gate = _GATES[number]
    with torch.no_grad():
        alone = Pass(position_T, position_T[:0], None, (1, len(u_TD)), gate.vmoer_attachment, NOTHING)
        out, _, routing, _ = gate._answered(u_TD, alone, True, (), {})
        return [
            *[x.contiguous() for x in out],
            _signals(Inputs(gate.vmoer, u_TD, routing.weight_TN), routing.posterior, names),
        ]


@answer.register_fake
def _(u_TD: Tensor, position_T: Tensor, number: int, names: str) -> list[Tensor]:
    gate = _GATES[number].vmoer_gate
    sizes = {"logits": gate.num_experts, "weights": gate.scoring.k, "indices": gate.scoring.k}
    order = sorted(sizes, key=lambda name: gate.places[name])
    out = [
        u_TD.new_empty((u_TD.shape[0], sizes[name]), dtype=kind) for name, kind in zip(order, gate.types, strict=True)
    ]
    return [*out, _like(u_TD, names)]


@torch.library.custom_op("vmoer::signals", mutates_args=())
def signals(u_TD: Tensor, logits_TN: Tensor, number: int, names: str) -> Tensor:
    """The signals of a method that leaves the answer to the model's own router, [T, `lanes`]."""
    with torch.no_grad():
        return _signals(Inputs(_GATES[number].vmoer, u_TD, logits_TN.float()), None, names)


@signals.register_fake
def _(u_TD: Tensor, logits_TN: Tensor, number: int, names: str) -> Tensor:
    return _like(u_TD, names)


def lanes(names: str) -> tuple[str, ...]:
    """The columns that an operator answers with: the signals of these names. Where kernels find some of them on the way, all that
    these find, so that nothing is copied; what was not asked for may be anything."""
    wanted = tuple(name for name in names.split(",") if name)
    return TOLD if "logit_variance" in wanted and set(wanted) <= set(TOLD) else wanted


def _signals(inputs: Inputs, posterior: Any, names: str) -> Tensor:
    found = token_signals(inputs, posterior, [name for name in names.split(",") if name])
    return columns([found.get(name) for name in lanes(names)], inputs.u_TD)


def _like(u_TD: Tensor, names: str) -> Tensor:
    return u_TD.new_empty((u_TD.shape[0], len(lanes(names))), dtype=torch.float32)
