"""What `with vmoer.record(model) as rec` collects.

With gradients it keeps the posteriors, and `kl()` does its arithmetic after the forward pass: inside a checkpointed region it
would lose its gradient. Signals wait until they are asked for too, and both are worked out for many layers at once: the
batches of training are small, and thirty layers' kernels would cost more than the model's own. Without gradients it keeps
scalars a token. Layers, batch and tokens are the axes everywhere.

The record of one `model.generate` reads like that of one pass over the finished text (vmoer/following.py).
"""

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vmoer import kernels
from vmoer.context import Pass
from vmoer.errors import InputError
from vmoer.following import Generation
from vmoer.routers import Config, Posterior, Router, Routing


@dataclass
class Entry:
    """What one layer said in one pass."""

    experts_TK: Tensor
    posterior: Posterior | None
    divergence_T: Tensor | None
    signals: dict[str, Tensor]
    late: "Late | None" = None


class Late(NamedTuple):
    """What signals that nobody has asked for yet are made of."""

    method: Router
    u_TD: Tensor
    weight_TN: Tensor


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
    def __init__(self, config: Config, layers: list[int]) -> None:
        self.config, self.layers = config, layers
        self.passes: list[tuple[Pass, dict[int, Entry]]] = []
        self.generation: Generation | None = None
        self.generating = False

    # -- filled by the routers -----------------------------------------------------------------------------------------

    def begin(self, now: Pass) -> None:
        self.passes.append((now, {}))

    def add(self, now: Pass, layer: int, method: Router, u_TD: Tensor, routing: Routing, chosen_TK: Tensor) -> None:
        entries = next((entries for known, entries in reversed(self.passes) if known is now), None)
        if entries is None:  # a router run outside its decoder
            entries = {}
            self.passes.append((now, entries))
        posterior, late = routing.posterior, Late(method, u_TD, routing.weight_TN)
        if torch.is_grad_enabled() and now.step is not None:
            entries[layer] = Entry(chosen_TK, posterior, None, {}, late)
            return
        with torch.no_grad():
            signals = _signals(late, posterior)
            divergence_T = posterior.divergence() if posterior is not None else None
        # a clone: a CUDA graph replays into the same memory
        entries[layer] = Entry(chosen_TK.clone(), None, divergence_T, signals)

    # -- read by the caller --------------------------------------------------------------------------------------------

    def kl(self, tokens: int | Tensor | None = None) -> Tensor:
        """beta * KL: mean over unmasked tokens, summed over layers.

        `tokens` replaces the count the mean is over: with gradient accumulation or data parallelism give the number of
        unmasked tokens in the whole batch, and the parts add up to what one batch would give.
        """
        self._require()
        total: Tensor | None = None
        count: int | Tensor = 0
        for now, entries in self.passes:
            mask_T = None if now.mask_BT is None else now.mask_BT.reshape(-1)
            count = count + (len(now.positions_T) if mask_T is None else mask_T.sum())
            for divergence_LT in _divergences([*entries.values()]):
                if mask_T is not None:  # where, not a product: padding may hold anything
                    divergence_LT = torch.where(mask_T.to(divergence_LT.device), divergence_LT, 0)
                total = divergence_LT.sum() if total is None else total + divergence_LT.sum().to(total.device)
        if total is None:
            return torch.zeros((), device=self.passes[0][0].positions_T.device)
        return getattr(self.config, "beta", 0.0) * total / (count if tokens is None else tokens)

    @property
    def signals(self) -> dict[str, Tensor]:
        """[layer, batch, token] each; several passes over the same rows are joined along the tokens.

        After `model.generate` the rows and tokens are those of its output without the last column, which no router has
        seen: what one pass over the finished text would record.
        """
        self._require()
        for _, entries in self.passes:
            _settle([entry for entry in entries.values() if entry.late is not None])
        names = next(iter(self.passes[0][1].values())).signals
        return {name: self._join(lambda entry, name=name: entry.signals[name]) for name in names}

    @property
    def experts(self) -> Tensor:
        """What was selected, [layer, batch, token, K]."""
        self._require()
        return self._join(lambda entry: entry.experts_TK)

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


def gate_entropy(method: Router, weight_TN: Tensor) -> Tensor:
    """Entropy of the experts' scores as a distribution, in nats, [T]."""
    scoring = method.gate.scoring
    if scoring.score == "softmax" and (fused := kernels.entropy(weight_TN)) is not None:
        return fused
    p_TN = scoring.probabilities(weight_TN)
    return torch.special.entr(p_TN).sum(-1)


def _signals(late: Late, posterior: Posterior | None) -> dict[str, Tensor]:
    signals = {"gate_entropy": gate_entropy(late.method, late.weight_TN)}
    if posterior is not None:
        signals |= posterior.signals()
    if late.method.fitted:
        signals["novelty"] = late.method.novelty(late.u_TD)
    return signals


# -- many layers at once -----------------------------------------------------------------------------------------------

TOGETHER = 2**16  # tokens, each counted once a layer: what joining them takes in memory stays small


def _divergences(entries: Sequence[Entry]) -> Iterator[Tensor]:
    """Every layer's penalty, [layers, T], with its gradient where there is one."""
    yield from (entry.divergence_T.unsqueeze(0) for entry in entries if entry.divergence_T is not None)
    for some, posterior in _together([entry for entry in entries if entry.posterior is not None]):
        yield posterior.divergence().view(len(some), -1)


@torch.no_grad()
def _settle(entries: Sequence[Entry]) -> None:
    """Work out the signals that were not asked for before."""
    for some, posterior in _together(entries):
        late = [entry.late for entry in some if entry.late is not None]
        whole = late[0] if len(late) == 1 else late[0]._replace(weight_TN=torch.cat([x.weight_TN for x in late]))
        if len(late) > 1 and whole.method.fitted:  # each layer has statistics of its own
            found = [_signals(x, entry.posterior) for x, entry in zip(late, some, strict=True)]
        else:
            joined = _signals(whole, posterior)
            found = [
                dict(zip(joined, parts, strict=True))
                for parts in zip(*(value.detach().chunk(len(late)) for value in joined.values()), strict=True)
            ]
        for entry, signals in zip(some, found, strict=True):
            entry.signals, entry.late = signals, None


def _together(entries: Sequence[Entry]) -> Iterator[tuple[Sequence[Entry], Any]]:
    """Layers that can be asked as one, and the posterior to ask; a layer by itself where it is like no other."""
    size = max(1, TOGETHER // max(1, len(entries[0].experts_TK))) if entries else 1
    for start in range(0, len(entries), size):
        some = entries[start : start + size]
        late = [entry.late for entry in some if entry.late is not None]
        try:
            if len({(x.method.gate.scoring, x.weight_TN.device) for x in late}) > 1:
                raise _Apart
            yield some, _joined([entry.posterior for entry in some])
        except _Apart:
            yield from (([entry], entry.posterior) for entry in some)


class _Apart(Exception):
    """These differ in more than their tokens."""


def _joined(parts: Sequence[Any]) -> Any:
    """Posteriors, or what they are made of, as one over all their tokens; fields with a row a token end in `_T...`."""
    first = parts[0]
    if len(parts) == 1:
        return first
    if any(type(part) is not type(first) for part in parts):
        raise _Apart
    if not dataclasses.is_dataclass(first) or isinstance(first, type):
        if isinstance(first, Tensor) or any(part != first for part in parts):
            raise _Apart
        return first
    fields = {}
    for field in dataclasses.fields(first):
        values = [getattr(part, field.name) for part in parts]
        if "_T" in field.name and isinstance(values[0], Tensor):
            if any(x.shape[1:] != values[0].shape[1:] or x.device != values[0].device for x in values):
                raise _Apart
            fields[field.name] = torch.cat(values)
        else:
            fields[field.name] = _joined(values)
    return type(first)(**fields)
