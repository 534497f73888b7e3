"""Which pass a router finds itself in: its tokens, and what was asked of the model around it.

Two things are kept apart, and neither is kept on the model, so that one attached model serves any number of threads and tasks:

    Asked   what the blocks around a pass ask for (`record`, `sampled`, `switched_off`, ...): a context variable, so that every
            thread and every asyncio task has its own
    Pass    the tokens of the decoder run under way: thread-local, since a run is never left in its middle

A pass takes along what was asked when it began. Gradient checkpointing runs a layer again during backward, in another thread on
a GPU, where nothing is asked: the pass says it all.
"""

import dataclasses
import itertools
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from vmoer.errors import InputError, RunError
from vmoer.routers import Config, Router, Routing

DOCUMENT = 2**20  # rows that a document packed behind others in one row counts as: no batch has as many

Collector = Callable[[int, Tensor, Tensor], None]
"""Called with the layer, its states [T, D] and the model's own logits [T, N]."""


class Recorder(Protocol):
    """What a pass tells a record."""

    def begin(self, now: "Pass") -> None: ...

    def add(
        self, now: "Pass", layer: int, method: Router, u_TD: Tensor, routing: Routing, chosen_TK: Tensor
    ) -> None: ...

    @property
    def repeats(self) -> bool:
        """Whether `describe` is all that it asks of a router, so that its answer can be replayed."""

    @property
    def asks(self) -> Any:
        """What tells one record's questions from another's."""

    def describe(self, method: Router, u_TD: Tensor, routing: Routing) -> dict[str, Tensor]: ...

    def keep(self, now: "Pass", layer: int, chosen_TK: Tensor, signals: Mapping[str, Tensor]) -> None: ...


class Replayed(Protocol):
    """Experts that a pass is to take in place of its own choice."""

    def of(self, positions_BT: Tensor, mask_BT: Tensor | None) -> Mapping[int, Tensor]:
        """By layer, [T, K], for the tokens of a pass; a row with -1 chooses for itself."""
        ...


@dataclass
class Check:
    """A router being tried while it is attached."""

    fired: bool = False
    """Whether our forward was the one that ran."""


@dataclass(frozen=True)
class Asked:
    """What the blocks around a pass ask of an attached model."""

    enabled: bool = True
    record: Recorder | None = None
    step: int | None = None
    first_row: int = 0
    passes: Tensor | int | None = None
    """The numbers of the routing samples to draw; None averages."""
    collector: Collector | None = None
    check: Check | None = None
    replay: Replayed | None = None
    numbers: tuple[int, ...] = ()
    """Of the routers that compiled code may take for what they were when the block began (vmoer/live/compiled.py)."""

    @property
    def repeats(self) -> bool:
        """See `Pass.repeats`."""
        if not self.enabled or self.step is not None or (self.record is not None and not self.record.repeats):
            return False
        return self.collector is None and self.check is None and self.replay is None


NOTHING = Asked()
_ASKED: ContextVar[Mapping["Attachment", Asked]] = ContextVar("vmoer_asked", default={})  # noqa: B039  never written to


class _Local(threading.local):
    """Of each thread: its pass, and a copy of what is asked by the attachment's number, which compiled code reads. It cannot read
    context variables; nor, in torch 2.11, a mapping whose keys are objects, or an attribute that has a default in the class."""

    def __init__(self) -> None:
        self.now: Pass | None = None
        self.asked: Mapping[int, Asked] = {}


_LOCAL = _Local()
_NUMBERS = itertools.count()


@dataclass
class Pass:
    """One run of the decoder. Tokens are numbered as they are routed: row by row."""

    positions_T: Tensor
    rows_T: Tensor
    mask_BT: Tensor | None
    shape: tuple[int, int]
    of: "Attachment"
    asked: Asked
    passes_T: Tensor | None = None
    seen: set[int] = field(default_factory=set)
    drawn: dict[Any, Tensor] = field(default_factory=dict)
    replayed: Mapping[int, Tensor] = field(default_factory=dict)
    """Experts to take, by layer."""
    told: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    """In compiled code, each layer's signals and experts until the last layer has spoken."""
    parts: tuple["Pass", ...] = ()
    """Columns that are routed apart from each other, in their order: those that average, and those that draw."""
    repeats: bool = field(init=False)
    """Whether a router is asked for its answer and its signals and for nothing else, so that both can be replayed."""

    def __post_init__(self) -> None:
        self.repeats = self.asked.repeats and self.passes_T is None and not self.parts

    @property
    def step(self) -> int | None:
        return self.asked.step

    def split(self, x: Tensor) -> list[Tensor]:
        """What each part is given of the tokens' states, [B T, D] or [B, T, D]."""
        columns = x.view(*self.shape, -1).split([part.shape[1] for part in self.parts], 1)
        return [own.flatten(0, 1) if x.dim() == 2 else own.contiguous() for own in columns]

    def join(self, given: tuple[Tensor, ...]) -> Tensor:
        """What the parts answered, in the tokens' order."""
        columns = [x.reshape(*part.shape, -1) for part, x in zip(self.parts, given, strict=True)]
        whole = torch.cat(columns, 1)
        return whole.flatten(0, 1) if given[0].dim() == 2 else whole

    def hand_over(self, layer: int, method: Router, u_TD: Tensor, routing: Routing, chosen_TK: Tensor) -> None:
        """Give the record what a layer routed; once, though checkpointing may run the layer again."""
        if self.asked.record is not None and layer not in self.seen:
            self.seen.add(layer)
            self.asked.record.add(self, layer, method, u_TD, routing, chosen_TK)

    def keep(self, layer: int, chosen_TK: Tensor, signals: Mapping[str, Tensor]) -> None:
        """The same where the signals are known."""
        if self.asked.record is not None and layer not in self.seen:
            self.seen.add(layer)
            self.asked.record.keep(self, layer, chosen_TK, signals)


def under_way() -> Pass | None:
    """This thread's pass, of whatever model."""
    return _LOCAL.now


def over() -> None:
    """The pass under way has said all that it has to say. A pass that outlived compiled code would be one of its results: built
    anew, with all its tensors, on every run."""
    _LOCAL.now = None


@dataclass(eq=False)
class Attachment:
    """A method on a model. Nothing here changes while it is attached, whoever runs the model."""

    routers: dict[int, Router]
    """By layer, ascending."""
    required_grad: list[nn.Parameter] = field(default_factory=list)
    hooks: list[Any] = field(default_factory=list)
    gates: list[nn.Module] = field(default_factory=list)
    """The model's own routers, as `routers` has the methods."""
    decoder_layers: list[nn.Module] = field(default_factory=list)
    """Those that the routers are in."""
    number: int = field(default_factory=_NUMBERS.__next__)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """A copy has a number of its own."""
        self.__dict__ |= state | {"number": next(_NUMBERS)}

    @property
    def config(self) -> Config:
        """The one configuration: that of the routers."""
        return next(iter(self.routers.values())).config

    @property
    def layers(self) -> list[int]:
        return list(self.routers)

    @property
    def asked(self) -> Asked:
        """What is asked here and now."""
        if torch.compiler.is_compiling():
            return _LOCAL.asked.get(self.number, NOTHING)
        return _ASKED.get().get(self, NOTHING)

    @contextmanager
    def asking(self, **changes: Any) -> Iterator[None]:
        """Inside the block, in this thread or task alone, the fields of `Asked` that are named are as given."""
        token = _ASKED.set({**_ASKED.get(), self: dataclasses.replace(self.asked, **changes)})
        outside, _LOCAL.now = _LOCAL.asked, None
        _LOCAL.asked = {attachment.number: asked for attachment, asked in _ASKED.get().items()}
        try:
            yield
        finally:
            _ASKED.reset(token)
            _LOCAL.asked, _LOCAL.now = outside, None

    @property
    def now(self) -> Pass | None:
        """This model's pass under way in this thread."""
        now = _LOCAL.now
        return now if now is not None and now.of is self else None

    @contextmanager
    def within(self, now: Pass) -> Iterator[None]:
        """Inside the block that pass is the one under way."""
        before, _LOCAL.now = _LOCAL.now, now
        try:
            yield
        finally:
            _LOCAL.now = before

    def resume(self, now: Pass) -> None:
        """A layer of that pass is about to run again."""
        _LOCAL.now = now

    def begin(self, positions_BT: Tensor, mask_BT: Tensor | None) -> Pass:
        """A decoder begins to run on these tokens."""
        passes = self.asked.passes
        drawn = passes.shape[1] if isinstance(passes, Tensor) and passes.dim() == 2 else None
        if drawn is None or drawn == positions_BT.shape[1]:
            begun = self._pass(positions_BT, mask_BT, passes)
        else:
            before, behind = slice(None, -drawn), slice(-drawn, None)
            masks = (None, None) if mask_BT is None else (mask_BT[:, before], mask_BT[:, behind])
            parts = (
                self._pass(positions_BT[:, before], masks[0], None),
                self._pass(positions_BT[:, behind], masks[1], passes),
            )
            shape = (positions_BT.shape[0], positions_BT.shape[1])
            empty = positions_BT.new_empty(0)
            begun = Pass(positions_BT.reshape(-1), empty, mask_BT, shape, self, self.asked, parts=parts)
        _LOCAL.now = begun
        return begun

    def _pass(self, positions_BT: Tensor, mask_BT: Tensor | None, passes: Tensor | int | None) -> Pass:
        asked, (batch, tokens), device = self.asked, positions_BT.shape, positions_BT.device
        rows_T = positions_BT.new_empty(0)  # only training noise is keyed by them
        if asked.step is not None:
            rows_T = (asked.first_row + torch.arange(batch, device=device)).repeat_interleave(tokens)
            rows_T = rows_T + DOCUMENT * documents(positions_BT, mask_BT).reshape(-1)
        passes_T = None
        if passes is not None:
            given = torch.as_tensor(passes, device=device)
            passes_T = given.reshape(-1) if given.dim() == 2 else given.expand(batch).repeat_interleave(tokens)
        begun = Pass(positions_BT.reshape(-1), rows_T, mask_BT, (batch, tokens), self, asked, passes_T)
        if asked.replay is not None:
            begun.replayed = asked.replay.of(positions_BT, mask_BT)
        if asked.record is not None:
            asked.record.begin(begun)
        return begun

    def replayed(self, layer: int, tokens: int, device: torch.device) -> Tensor | None:
        """The experts that so many tokens are to take at a layer; None where they choose."""
        now = self.now
        if now is None and self.asked.replay is None:
            return None
        if now is None or len(now.positions_T) != tokens:
            if now is None or now.replayed:
                raise RunError(f"layer {layer} routes {tokens} tokens that are not those of the pass to be replayed")
            return None
        found_TK = now.replayed.get(layer)
        return None if found_TK is None else found_TK.to(device)

    def alone(self, u_TD: Tensor) -> Pass:
        """The pass of a router that is run by itself: its tokens are one row."""
        arange = torch.arange(len(u_TD), device=u_TD.device)
        return Pass(arange, torch.zeros_like(arange), None, (1, len(u_TD)), self, self.asked)


def documents(positions_BT: Tensor, mask_BT: Tensor | None) -> Tensor:
    """Which of the documents packed into its row a token belongs to, [B, T], from 0: one starts where positions do again.

    Training noise is keyed by it beside the row, so that documents in one row draw apart and a row draws the same in any batch.
    """
    starts_BT = (positions_BT[:, 1:] < positions_BT[:, :-1]) | (positions_BT[:, 1:] == 0)
    if mask_BT is not None:
        starts_BT = starts_BT & mask_BT[:, 1:] & mask_BT[:, :-1]
    return torch.nn.functional.pad(starts_BT.long().cumsum(-1), (1, 0))


def positions_and_mask(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, Tensor | None]:
    """Each token's position in its own sequence without padding, [B, T], and the mask, [B, T], from a decoder's arguments."""
    states = kwargs.get("input_ids")
    if states is None:
        states = kwargs.get("inputs_embeds")
    if states is None:
        states = args[0]
    batch, tokens = states.shape[:2]
    mask = kwargs.get("attention_mask")
    if mask is None and len(args) > 1 and isinstance(args[1], Tensor):
        mask = args[1]
    mask_BT = None
    if isinstance(mask, Tensor) and mask.dim() == 2 and mask.shape[1] >= tokens:
        mask_BT = mask[:, -tokens:].bool()
    position_ids = kwargs.get("position_ids")
    if isinstance(position_ids, Tensor):
        position_ids = position_ids[0] if position_ids.dim() == 3 else position_ids
        return position_ids.expand(batch, tokens), mask_BT
    if any(kwargs.get(name) is not None for name in ("cu_seq_lens_q", "seq_idx")):
        raise InputError("packed rows need position_ids that restart with every document: noise is keyed by them")
    if mask_BT is not None:
        return (mask.long().cumsum(-1) - 1).clamp_min(0)[:, -tokens:], mask_BT  # type: ignore[union-attr]
    past = kwargs.get("past_key_values")
    seen = past.get_seq_length() if past is not None and hasattr(past, "get_seq_length") else 0
    return (torch.arange(tokens, device=states.device) + seen).expand(batch, tokens), mask_BT
