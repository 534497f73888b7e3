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

from vmoer.live.context import NOTHING, Pass, Recorder
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

    @property
    def signals(self) -> dict[str, Tensor]:
        return {} if self.signals_GT is None else dict(zip(self.names, self.signals_GT.unbind(0), strict=True))


Work = Callable[[Tensor, Pass, Recorder | None], Answer]


@dataclass
class _Take:
    """A captured router."""

    graph: Any
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
        self.tensors = [held for m in (router, *method.modules()) for held in (m._parameters, m._buffers)]

        # sharded and quantised tensors are no plain memory
        self.plain = all(type(x) in (Tensor, nn.Parameter) for x in self.values())

    def values(self) -> list[Tensor]:
        return [x for held in self.tensors for x in held.values() if x is not None]

    def state(self) -> tuple[int, ...]:
        """Where the parameters and buffers are: a graph reads them there, whatever is written into them."""
        return tuple([x.data_ptr() for x in self.values()])


class _Local(threading.local):
    def __init__(self) -> None:
        self.kept: weakref.WeakKeyDictionary[nn.Module, _Kept] = weakref.WeakKeyDictionary()
        self.places: dict[Any, _Place] = {}


_LOCAL = _Local()


def on_gpu(states: Tensor) -> bool:
    return kernels.available(states)


def fits(states: Tensor, now: Pass, method: Any) -> bool:
    """Whether this router's answer may come from a graph."""
    if not enabled or torch.compiler.is_compiling() or states.dim() != 2 or not on_gpu(states):
        return False
    asked, record = now.asked, now.asked.record
    if not asked.enabled or asked.collector is not None or asked.check is not None or asked.step is not None:
        return False
    if now.passes_T is not None or not 0 < len(states) <= MOST or not method.repeats:
        return False
    if method.training or torch.is_grad_enabled() or torch.is_inference_mode_enabled() or states.is_inference():
        return False
    if record is not None and not record.repeats:
        return False
    return not torch.is_autocast_enabled("cuda") and not torch.cuda.is_current_stream_capturing()


def captured(router: nn.Module, method: Any, states: Tensor, now: Pass, work: Work) -> Answer | None:
    """The router's answer by its graph; None where it has none (yet), and the caller is to find it."""
    kept = _LOCAL.kept.get(method)
    if kept is None:
        kept = _LOCAL.kept[method] = _Kept(router, method)
    if not kept.plain:
        return None
    stream, record = torch.cuda.current_stream(states.device), now.asked.record
    asks = None if record is None else record.asks
    if asks is not None and method.fitted:
        method.halves()  # found again where the statistics have changed
    where = stream.cuda_stream, states.device.index
    kinds = states.dtype, now.positions_T.dtype
    key = (*where, states.shape, kinds, asks, id(method.config), kernels.enabled, kept.state())
    if key not in kept.takes:
        kept.seen[key] = kept.seen.get(key, 0) + 1
        if kept.seen[key] <= SIGHTS:
            if len(kept.seen) > 256:
                kept.seen.clear()
            return None
        kept.takes[key] = _taken(states, now, work, (method.config, kept.values()))
        kept.seen.pop(key, None)
        while len(kept.takes) > GRAPHS or (len(kept.takes) > 1 and sum(key[2][0] for key in kept.takes) > HELD):
            kept.takes.popitem(last=False)
    else:
        kept.takes.move_to_end(key)
    take = kept.takes[key]
    if take is None:
        return None
    place = _LOCAL.places[where]
    place.input(states).copy_(states)
    if method.reads_positions and place.copied is not now.positions_T:
        place.input(now.positions_T).copy_(now.positions_T)
        place.copied = now.positions_T
    take.graph.replay()
    # copies: the next replay writes into the same memory
    out = tuple(x.clone() for x in take.answer.out)
    chosen_TK = take.answer.chosen_TK.clone() if take.chosen is None else out[take.chosen]
    signals_GT = take.answer.signals_GT
    return Answer(out, chosen_TK, take.answer.names, None if signals_GT is None else signals_GT.clone())


def _taken(states: Tensor, now: Pass, work: Work, held: Any) -> _Take | None:
    """Capture; None, said once, where that cannot be."""
    here = torch.cuda.current_stream(states.device)
    where = here.cuda_stream, states.device.index
    with torch.cuda.device(states.device):
        if where not in _LOCAL.places:
            _LOCAL.places[where] = _Place(torch.cuda.Stream(), torch.cuda.graph_pool_handle())
        place = _LOCAL.places[where]
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
    return _Take(graph, answer, chosen, held)
