"""Eager passes over few tokens: there a router costs what its launches cost the host, so its kernels become one CUDA graph.

A router that is asked the same thing again (as many tokens, the same parameters, the same signals) is captured, and from then on
its states are copied in, the graph is replayed, and what it answers is copied out. The numbers are those of the kernels launched
one by one: they are the same kernels. Nothing is captured where gradients flow, where noise is drawn afresh, inside compiled
code or another capture, or where a method's memory is more than its parameters and buffers (`Router.repeats`).

Graphs belong to a thread and a stream, since they write where they wrote before. Those of one stream are replayed one after the
other, so all routers share the memory between input and answer.
"""

import threading
import warnings
import weakref
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from vmoer.live.context import NOTHING, Pass
from vmoer.live.signals import Rows
from vmoer.numerics import kernels

MOST = 4096
"""Tokens of a pass that is still bound by the host."""
HELD = 8192
"""Tokens of all graphs that a router keeps, at most."""
GRAPHS = 32
"""Graphs that a router keeps, at most."""
SIGHTS = 3
"""How often a router is asked the same before it is captured: prompts of many lengths are not worth it."""
enabled = True
_ONE = threading.Lock()  # capture at a time, whatever the thread


class Answer(NamedTuple):
    """What a router says of a pass."""

    out: tuple[Tensor, ...]
    """The return value of the model's own router, with our choice in it."""
    chosen_TK: Tensor
    names: tuple[str, ...] = ()
    signals_GT: Tensor | None = None
    """A row for each of the names."""


@dataclass
class _Take:
    """A captured router."""

    graph: Any
    place: "_Place"
    states: Tensor
    """Where they are copied to."""
    answer: Answer
    chosen: int | None
    """Which element of the return value the experts are."""
    held: Any
    """What the graph reads, and what its key knows by id."""


@dataclass
class _Place:
    """What the graphs of one stream share."""

    stream: Any
    pool: Any
    anchor: Any
    """A graph that is never let go of: with the last one of a pool the pool ends, and nothing can be captured into it again."""
    room: dict[Any, Tensor] = field(default_factory=dict)
    """Where the tokens' states and positions are copied to, by dtype and size."""
    copied: Tensor | None = None
    """The positions that were copied last."""

    def input(self, like: Tensor) -> Tensor:
        """Room for so many tokens, at the same place every time."""
        key = like.dtype, like.shape[1:]
        if key not in self.room:
            self.room[key] = like.new_empty((MOST, *like.shape[1:]))
        return self.room[key][: len(like)]


class _Kept:
    """The graphs of one router, the latest used last, and how often others were asked for."""

    def __init__(self, router: nn.Module, method: nn.Module) -> None:
        self.takes: OrderedDict[Any, _Take | None] = OrderedDict()
        self.seen: dict[Any, int] = {}
        every = [held for m in (router, *method.modules()) for held in (m._parameters, m._buffers)]
        named = [(held, name) for held in every for name in held]
        self.told = [(held, name) for held, name in named if name.startswith("novelty")]
        """What only a record's signals are read from, and what the routing is."""
        self.read = [(held, name) for held, name in named if not name.startswith("novelty")]

        # sharded and quantised tensors are no plain memory
        self.plain = all(type(x) in (Tensor, nn.Parameter) for x in self.values())

    def values(self) -> list[Tensor]:
        return [x for held, name in (*self.read, *self.told) if (x := held.get(name)) is not None]

    def state(self, asks: Any) -> tuple[int | None, ...]:
        """Where the parameters and buffers are: a graph reads them there, whatever is written into them."""
        places = self.read if asks is None else [*self.read, *self.told]
        return tuple([None if (x := held.get(name)) is None else x.data_ptr() for held, name in places])


class _Local(threading.local):
    def __init__(self) -> None:
        self.kept: weakref.WeakKeyDictionary[nn.Module, _Kept] = weakref.WeakKeyDictionary()
        self.places: dict[Any, _Place] = {}


_LOCAL = _Local()
on_gpu = kernels.available


def stream_of(device: int) -> int:
    """The number of this thread's stream there."""
    return int(torch._C._cuda_getCurrentRawStream(device))


def fits(states: Tensor, method: Any) -> bool:
    """Whether a router's answer to these states may come from a graph, where the pass repeats."""
    if not enabled or torch.compiler.is_compiling() or not on_gpu(states) or not 0 < states.shape[0] <= MOST:
        return False
    if method.training or torch.is_grad_enabled() or torch.is_inference_mode_enabled() or states.is_inference():
        return False
    return not torch.is_autocast_enabled("cuda") and not torch.cuda.is_current_stream_capturing()


def captured(router: Any, method: Any, states: Tensor, now: Pass) -> tuple[Tensor, ...] | None:
    """The router's answer by its graph, and its signals told to the record; None where it has no graph (yet)."""
    if not fits(states, method):
        return None
    kept, record, device = _LOCAL.kept.get(method), now.asked.record, states.get_device()
    if kept is None:
        kept = _LOCAL.kept[method] = _Kept(router, method)
    asks = None if record is None else record.asks
    if asks is not None:
        method.halves()  # found again where the statistics have changed
    where = stream_of(device), device
    kinds = states.dtype, now.positions_T.dtype
    key = (where, states.shape, kinds, asks, id(method.config), kept.state(asks))
    take = kept.takes.get(key)
    if take is None:
        take = _taken_after_a_while(kept, key, router, states, now)
        if take is None:
            return None
    kept.takes.move_to_end(key)
    place = take.place
    take.states.copy_(states)
    if method.reads_positions and place.copied is not now.positions_T:
        place.input(now.positions_T).copy_(now.positions_T)
        place.copied = now.positions_T
    take.graph.replay()
    # copies: the next replay writes into the same memory
    first, second, third = take.answer.out
    out = first.clone(), second.clone(), third.clone()
    if record is not None:
        names, signals_GT = take.answer.names, take.answer.signals_GT
        signals = {} if signals_GT is None else Rows(names, signals_GT.clone())
        chosen_TK = take.answer.chosen_TK.clone() if take.chosen is None else out[take.chosen]
        now.keep(router.vmoer_layer, chosen_TK, signals)
    return out


def _taken_after_a_while(kept: _Kept, key: Any, router: Any, states: Tensor, now: Pass) -> _Take | None:
    """The graph of what was asked often enough."""
    method = router.vmoer
    if key in kept.takes or not kept.plain or not method.repeats:
        return None
    kept.seen[key] = kept.seen.get(key, 0) + 1
    if kept.seen[key] <= SIGHTS:
        if len(kept.seen) > 256:
            kept.seen.clear()
        return None
    take = kept.takes[key] = _taken(key[0], states, now, router._described, (method.config, kept.values()))
    kept.seen.pop(key, None)
    while len(kept.takes) > GRAPHS or (len(kept.takes) > 1 and sum(key[1][0] for key in kept.takes) > HELD):
        kept.takes.popitem(last=False)
    return take


def _place(device: torch.device) -> _Place:
    stream, pool, anchor = torch.cuda.Stream(), torch.cuda.graph_pool_handle(), torch.cuda.CUDAGraph()
    with _ONE, torch.cuda.stream(stream):
        stream.synchronize()
        anchor.capture_begin(pool=pool, capture_error_mode="thread_local")
        held = torch.zeros(1, device=device)
        anchor.capture_end()
    return _Place(stream, pool, (anchor, held))


def _taken(where: Any, states: Tensor, now: Pass, work: Callable[..., Answer], held: Any) -> _Take | None:
    """Capture; None, said once, where that cannot be."""
    here = torch.cuda.current_stream(states.device)
    with torch.cuda.device(states.device):
        place = _LOCAL.places.get(where)
        if place is None:
            place = _LOCAL.places[where] = _place(states.device)
        u_TD, position_T = place.input(states).copy_(states), place.input(now.positions_T).copy_(now.positions_T)
        place.copied = now.positions_T
        alone = replace(now, positions_T=position_T, asked=NOTHING, seen=set(), drawn={}, parts=())
        graph = torch.cuda.CUDAGraph()
        place.stream.wait_stream(here)
        try:
            with _ONE, torch.cuda.stream(place.stream):
                work(u_TD, alone, now.asked.record)  # compiles what is to be compiled, and gives libraries their room
                place.stream.synchronize()
                graph.capture_begin(pool=place.pool, capture_error_mode="thread_local")
                try:
                    answer = work(u_TD, alone, now.asked.record)
                finally:
                    graph.capture_end()
        except RuntimeError as error:
            warnings.warn(f"a router runs kernel by kernel, since it cannot be captured: {error}", stacklevel=2)
            return None
        finally:
            here.wait_stream(place.stream)
    chosen = next((i for i, x in enumerate(answer.out) if x is answer.chosen_TK), None)
    return _Take(graph, place, u_TD, answer, chosen, held)
