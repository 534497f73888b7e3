"""What `with vmoer.record(model) as rec` collects.

With gradients it keeps the posteriors, and `kl()` does its arithmetic after the forward pass: inside a checkpointed region it
would lose its gradient. Signals wait until they are asked for too, and both are worked out for many layers at once: the
batches of training are small, and thirty layers' kernels would cost more than the model's own. Without gradients it keeps
scalars a token. Layers, batch and tokens are the axes everywhere.

The record of one `model.generate` reads like that of one pass over the finished text (vmoer/live/following.py).
"""

import asyncio
import threading
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vmoer.errors import InputError
from vmoer.live import context, html
from vmoer.live.context import NOTHING, Attachment, Pass
from vmoer.live.layers import LayerRecord, compute_signals, divergences
from vmoer.live.signals import Inputs, Rows, Wanted, columns, names, token_signals, tried
from vmoer.live.tape import Tape, tape_for
from vmoer.routers import Config, Router, Routing

QUANTILES = torch.tensor([0.0, 0.5, 1.0])
MOST = 2**24  # numbers that torch.quantile takes
MANY = 4096  # tokens of a pass from which on experts are kept in two bytes: a launch more is nothing there, and memory counts


class Generation(NamedTuple):
    """Where the output of one `model.generate` came from."""

    sequences_BT: Tensor
    prompt: int
    """Columns of the prompts, padding included."""
    prompt_mask_BT: Tensor
    real_BN: Tensor
    """New tokens up to the one that ended the row, that one included."""
    rows_BN: Tensor
    """The row of pass n that new token n was chosen in; anything where `real` is false."""
    passes: int


class Generated(NamedTuple):
    """What was recorded of each new token, read where it was chosen: at the token before it."""

    tokens: Tensor
    """[batch, new token]"""
    mask: Tensor
    """[batch, new token]; false behind a row's end"""
    signals: dict[str, Tensor]
    """[layer, batch, new token] each"""
    experts: Tensor
    """[layer, batch, new token, K]"""


class Record:
    """What the routers of one attached model said inside one `vmoer.record` block."""

    def __init__(
        self,
        config: Config,
        layers: list[int],
        *,
        signals: Wanted = None,
        keeps_kl: bool = True,
    ) -> None:
        self.config, self.layers = config, layers
        self.wanted = signals if signals is None or signals == "all" else names(signals)
        self.keeps_kl, self.repeats = keeps_kl, not keeps_kl
        self.asks: tuple[str, ...] = (
            ("cheap",) if signals is None else ("all",) if signals == "all" else ("named", *names(signals))
        )
        self._maker = _here()
        self.tape: Tape | None = None
        """Where compiled code records, if it does."""
        self._passes: list[tuple[Pass, dict[int, LayerRecord]]] = []
        self._taped: Tape | None = None
        self.generation: Generation | None = None
        self.generating = False

    def made_here(self) -> bool:
        """Whether it was made in this thread and, where there is one, this asyncio task."""
        return self._maker == _here()

    def __repr__(self) -> str:
        if not any(entries for _, entries in self.passes):
            return f"Record of {self.config.key}: nothing yet"
        if len(shapes := {now.shape for now, _ in self.passes}) > 1 or self.generation is not None:
            return f"Record of {self.config.key}: {len(self.passes)} passes, layers {self.layers}"
        (batch, tokens) = next(iter(shapes))
        return f"Record of {self.config.key}: layers {self.layers}, {batch} x {len(self.passes) * tokens} tokens"

    def _repr_html_(self) -> str:
        """The range of every signal over the real tokens of all layers."""
        rows = []
        if any(entries for _, entries in self.passes):
            mask_BT = self.mask
            for name, x_LBT in self.signals.items():
                values = x_LBT[:, mask_BT].float()
                shown = [f"{q:.4g}" for q in torch.quantile(values.flatten()[:MOST], QUANTILES.to(values)).tolist()]
                rows.append((name, *shown))
        return html.table(("signal", "least", "median", "largest"), rows, repr(self))

    # -- filled by the routers -----------------------------------------------------------------------------------------

    def begin(self, now: Pass) -> None:
        if self.tape is None:
            self._passes.append((now, {}))
        elif not torch.compiler.is_compiling():
            self.passes.append((now, {}))  # behind those on the tape

    @property
    def passes(self) -> list[tuple[Pass, dict[int, LayerRecord]]]:
        """Every pass, and what each layer said in it."""
        if self.tape is not None and int(self.tape.count):
            self._taped = self.tape.taken()
            self.tape.rewind()
        if self._taped is not None:
            taped, self._taped = self._taped, None
            self._passes += _untaped(taped)
        return self._passes

    @property
    def count(self) -> int:
        """How many passes there are; those on a tape stay there."""
        taped = [tape for tape in (self.tape, self._taped) if tape is not None]
        return len(self._passes) + sum(int(tape.count) for tape in taped)

    @property
    def first(self) -> Pass:
        """The first pass. After `model.generate` that is the prompt's, which is seldom on a tape."""
        return (self._passes or self.passes)[0][0]

    def take_tape(self, attachment: Attachment, columns: int = 0) -> None:
        """Compiled code is about to run: it records on a tape with room for so many tokens."""
        router = next(iter(attachment.routers.values()))
        self.tape = tape_for(
            attachment,
            (self.asks, id(self.config), router.fitted),
            lambda: [*self.describe(*tried(router))],
            layers=self.layers,
            k=router.gate.scoring.k,
            columns=columns,
            device=router.novelty_root_RD.device,
        )

    def end(self) -> None:
        """The block is over: the tape is for another."""
        if self.tape is not None:
            self._taped, self.tape = self.tape.taken(), None

    def add(self, now: Pass, layer: int, method: Router, u_TD: Tensor, routing: Routing, chosen_TK: Tensor) -> None:
        posterior = routing.posterior
        if torch.is_grad_enabled() and now.step is not None:
            inputs = Inputs(method, u_TD, routing.weight_TN)
            self._entries(now)[layer] = LayerRecord(chosen_TK, posterior, None, {}, inputs)
            return
        if self.tape is not None and torch.compiler.is_compiling():
            found = self.describe(method, u_TD, routing)
            self.put_on_tape(now, columns([found[name] for name in self.tape.names], u_TD), self.tape.names, chosen_TK)
            return
        self.keep(now, layer, chosen_TK, self.describe(method, u_TD, routing))
        if self.keeps_kl and posterior is not None:
            with torch.no_grad():
                self._entries(now)[layer].divergence_T = posterior.divergence()

    def put_on_tape(self, now: Pass, signals_TG: Tensor, lanes: Sequence[str], chosen_TK: Tensor) -> None:
        """In compiled code: what one layer says, whose signals have these names. The last one writes."""
        tape = self.tape
        assert tape is not None
        now.told.append((signals_TG, chosen_TK))
        if len(now.told) == len(tape.layers):
            columns = [lanes.index(name) for name in tape.names]
            tape.write(now.shape, now.mask_BT, [told[0] for told in now.told], columns, [told[1] for told in now.told])
            context.over()

    @torch.no_grad()
    def describe(self, method: Router, u_TD: Tensor, routing: Routing) -> dict[str, Tensor]:
        """The signals that were asked for."""
        return token_signals(Inputs(method, u_TD, routing.weight_TN), routing.posterior, self.wanted)

    def keep(self, now: Pass, layer: int, chosen_TK: Tensor, signals: Mapping[str, Tensor]) -> None:
        if len(chosen_TK) > MANY:
            chosen_TK = chosen_TK.to(torch.int16)
        self._entries(now)[layer] = LayerRecord(chosen_TK, None, None, signals)

    def _entries(self, now: Pass) -> dict[int, LayerRecord]:
        """Of this pass, which is nearly always the last."""
        if self._passes and self._passes[-1][0] is now:
            return self._passes[-1][1]
        entries = next((entries for known, entries in reversed(self._passes) if known is now), None)
        if entries is None:  # a router run outside its decoder
            entries = {}
            self._passes.append((now, entries))
        return entries

    # -- read by the caller --------------------------------------------------------------------------------------------

    def kl(self, tokens: int | Tensor | None = None) -> Tensor:
        """beta * KL: mean over unmasked tokens, summed over layers.

        `tokens` replaces the count the mean is over: with gradient accumulation or data parallelism give the number of
        unmasked tokens in the whole batch, and the parts add up to what one batch would give.
        """
        self._require()
        if not self.keeps_kl:
            raise InputError(
                "this record keeps no KL: ask for it by vmoer.record(model, kl=True), or in training by step="
            )
        total: Tensor | None = None
        count: int | Tensor = 0
        for now, entries in self.passes:
            mask_T = None if now.mask_BT is None else now.mask_BT.reshape(-1)
            count = count + (len(now.positions_T) if mask_T is None else mask_T.sum())
            for divergence_LT in divergences([*entries.values()]):
                if mask_T is not None:  # where, not a product: padding may hold anything
                    divergence_LT = torch.where(mask_T.to(divergence_LT.device), divergence_LT, 0)
                total = divergence_LT.sum() if total is None else total + divergence_LT.sum().to(total.device)
        if total is None:
            return torch.zeros((), device=self.passes[0][0].positions_T.device)
        counted = (
            count if tokens is None else tokens
        )  # of padding alone there are 0: then the sum is 0, and the mean too
        counted = counted.clamp_min(1) if isinstance(counted, Tensor) else max(counted, 1)
        return getattr(self.config, "beta", 0.0) * total / counted

    @property
    def signals(self) -> dict[str, Tensor]:
        """[layer, batch, token] each; several passes over the same rows are joined along the tokens.

        After `model.generate` the rows and tokens are those of its output without the last column, which no router has
        seen: what one pass over the finished text would record.
        """
        self._require()
        for _, entries in self.passes:
            compute_signals([entry for entry in entries.values() if entry.inputs is not None], self.wanted)
        first = next(iter(self.passes[0][1].values())).signals
        return {name: self._join(lambda entry, name=name: entry.signals[name]) for name in first}

    @property
    def experts(self) -> Tensor:
        """What was selected, [layer, batch, token, K]."""
        self._require()
        return self._join(lambda entry: entry.experts_TK.long())

    @property
    def mask(self) -> Tensor:
        """Which tokens are real, [batch, token]."""
        self._require()
        if self.generation is not None:
            return torch.cat([self.generation.prompt_mask_BT, self.generation.real_BN[:, 1:]], 1)
        full = [torch.ones(now.shape, dtype=torch.bool, device=now.positions_T.device) for now, _ in self.passes]
        return torch.cat(
            [f if now.mask_BT is None else now.mask_BT for f, (now, _) in zip(full, self.passes, strict=True)], 1
        )

    @property
    def generated(self) -> Generated:
        """The new tokens of `model.generate`, each with what the routers said at the token it was chosen after."""
        self._require()
        if self.generation is None:
            raise InputError("nothing was generated: run model.generate inside `with vmoer.record(model)`")
        made, chosen_at = self.generation, slice(self.generation.prompt - 1, None)
        signals = {name: value[:, :, chosen_at] for name, value in self.signals.items()}
        tokens_BN = made.sequences_BT[:, made.prompt :]
        return Generated(tokens_BN, made.real_BN, signals, self.experts[:, :, chosen_at])

    def _join(self, read: Any) -> Tensor:
        device = self.passes[0][0].positions_T.device
        parts = []
        for now, entries in self.passes:
            per_layer = [read(entries[layer]).to(device) for layer in self.layers]
            parts.append(torch.stack([x.reshape(*now.shape, *x.shape[1:]) for x in per_layer]))
        if self.generation is not None:
            return self._of_output(self.generation, parts)
        if len({part.shape[1] for part in parts}) > 1:
            raise InputError("this record holds passes over batches of different sizes: use one record for each")
        return torch.cat(parts, 2)

    def _of_output(self, made: Generation, parts: list[Tensor]) -> Tensor:
        """The passes' rows and columns as the output has them."""
        if len(parts) != made.passes:
            raise InputError("this record holds a generation and other passes: use one record for each")
        columns, found = 0, []
        for part_LRT in parts:
            # without a cache a pass goes over the whole text again, and its last column alone is new
            new = 1 if 0 < columns < part_LRT.shape[2] else part_LRT.shape[2]
            columns += new
            row_B = made.rows_BN[:, min(max(columns - made.prompt, 0), made.rows_BN.shape[1] - 1)]
            found.append(part_LRT[:, row_B.to(part_LRT.device), -new:])
        routed = made.sequences_BT.shape[1] - 1
        if columns < routed:
            raise InputError(
                f"signals cannot be aligned: {columns} tokens a row were routed for an output of {routed + 1}"
            )
        return torch.cat(found, 2)[:, :, :routed]

    def _require(self) -> None:
        if not any(entries for _, entries in self.passes):
            raise InputError("nothing was recorded: run the model inside `with vmoer.record(model)`")


def _untaped(tape: Tape) -> list[tuple[Pass, dict[int, LayerRecord]]]:
    """The passes that compiled code wrote, like any others."""
    found = tape.passes()
    if found is None:
        raise InputError(f"more than {tape.columns} tokens of compiled passes: use one record for fewer of them")
    passes = []
    positions: dict[tuple[int, int], Tensor] = {}  # passes of one shape have the same
    for shape, mask_BT, signals_LGT, experts_LTK in found:
        if shape not in positions:
            positions[shape] = torch.arange(shape[1], device=mask_BT.device).repeat(shape[0])
        position_T = positions[shape]
        now = Pass(position_T, position_T[:0], mask_BT, shape, tape.of, NOTHING)
        layers = zip(tape.layers, signals_LGT.unbind(), experts_LTK.unbind(), strict=True)
        entries = {
            layer: LayerRecord(experts_TK, None, None, Rows(tape.names, signals_GT))
            for layer, signals_GT, experts_TK in layers
        }
        passes.append((now, entries))
    return passes


def _here() -> tuple[int, object]:
    try:
        return threading.get_ident(), asyncio.current_task()
    except RuntimeError:  # no event loop is running
        return threading.get_ident(), None
