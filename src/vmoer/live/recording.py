"""What `with vmoer.record(model) as rec` collects.

With gradients it keeps the posteriors, and `kl()` does its arithmetic after the forward pass: inside a checkpointed region it
would lose its gradient. Signals wait until they are asked for too, and both are worked out for many layers at once: the
batches of training are small, and thirty layers' kernels would cost more than the model's own. Without gradients it keeps
scalars a token. Layers, batch and tokens are the axes everywhere.

The record of one `model.generate` reads like that of one pass over the finished text (vmoer/live/following.py).
"""

import asyncio
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from vmoer.errors import InputError, short
from vmoer.live import html
from vmoer.live.context import Pass
from vmoer.numerics import kernels
from vmoer.numerics.tokens import joined
from vmoer.routers import Config, Posterior, Router, Routing

Wanted = Sequence[str] | Literal["all"] | None
"""Signals that are asked for: by name, all of them, or (None) those that cost next to nothing."""

QUANTILES = torch.tensor([0.0, 0.5, 1.0])
MOST = 2**24  # numbers that torch.quantile takes


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


@dataclass
class LayerRecord:
    """What one layer said in one pass."""

    experts_TK: Tensor
    posterior: Posterior | None
    divergence_T: Tensor | None
    signals: dict[str, Tensor]
    inputs: "Inputs | None" = None


class Inputs(NamedTuple):
    """Inputs of signals that are computed on first access."""

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
        self.wanted = signals if signals is None or signals == "all" else _names(signals)
        self.keeps_kl = keeps_kl
        self._maker = _here()
        self.passes: list[tuple[Pass, dict[int, LayerRecord]]] = []
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
        self.passes.append((now, {}))

    def add(self, now: Pass, layer: int, method: Router, u_TD: Tensor, routing: Routing, chosen_TK: Tensor) -> None:
        entries = next((entries for known, entries in reversed(self.passes) if known is now), None)
        if entries is None:  # a router run outside its decoder
            entries = {}
            self.passes.append((now, entries))
        posterior, inputs = routing.posterior, Inputs(method, u_TD, routing.weight_TN)
        if torch.is_grad_enabled() and now.step is not None:
            entries[layer] = LayerRecord(chosen_TK, posterior, None, {}, inputs)
            return
        with torch.no_grad():
            signals = token_signals(inputs, posterior, self.wanted)
            divergence_T = posterior.divergence() if posterior is not None and self.keeps_kl else None
        # a clone: a CUDA graph replays into the same memory
        entries[layer] = LayerRecord(chosen_TK.clone(), None, divergence_T, signals)

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
            for divergence_LT in _divergences([*entries.values()]):
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
            _compute_signals([entry for entry in entries.values() if entry.inputs is not None], self.wanted)
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


def _here() -> tuple[int, object]:
    try:
        return threading.get_ident(), asyncio.current_task()
    except RuntimeError:  # no event loop is running
        return threading.get_ident(), None


def _names(signals: Any) -> tuple[str, ...]:
    if isinstance(signals, str) or not all(isinstance(name, str) for name in signals):
        raise InputError(f"signals={short(signals)} must be a list of names, or 'all'")
    return tuple(signals)


def token_signals(inputs: Inputs, posterior: Posterior | None, wanted: Wanted = None) -> dict[str, Tensor]:
    """The signals that a record asked for."""
    named = None if wanted is None or wanted == "all" else {*wanted}
    of_posterior = None if named is None else named - {"gate_entropy", "novelty"}
    found: dict[str, Tensor] = {}
    if named is None or "gate_entropy" in named:
        found["gate_entropy"] = gate_entropy(inputs.method, inputs.weight_TN)
    if posterior is not None and of_posterior != set():
        found |= posterior.signals()
        if wanted == "all" or (of_posterior and not of_posterior <= found.keys()):
            found |= posterior.costly_signals()
    if inputs.method.fitted and (named is None or "novelty" in named):
        found["novelty"] = inputs.method.novelty(inputs.u_TD)
    if named is None:
        return found
    for name in sorted(named - found.keys()):
        raise _no_such(name, inputs.method, posterior)
    return {name: value for name, value in found.items() if name in named}


def _no_such(name: str, method: Router, posterior: Posterior | None) -> InputError:
    if name == "novelty":
        return InputError("novelty has no reference yet: call vmoer.fit(model, batches) first")
    own = [] if posterior is None else [*posterior.signals(), *posterior.costly_signals()]
    has = ", ".join(["gate_entropy", *own, *(["novelty"] if method.fitted else [])])
    return InputError(f"{method.config.key} has no signal {short(name)} in this pass: it has {has}")


# -- many layers at once -----------------------------------------------------------------------------------------------

TOKENS = 2**16  # that layers are joined over at most, each layer's counted: joining them takes little memory


def _divergences(entries: Sequence[LayerRecord]) -> Iterator[Tensor]:
    """Every layer's penalty, [layers, T], with its gradient where there is one."""
    yield from (entry.divergence_T.unsqueeze(0) for entry in entries if entry.divergence_T is not None)
    for some in _groups([entry for entry in entries if entry.posterior is not None]):
        posterior = _joined(some)
        if posterior is not None:
            yield posterior.divergence().view(len(some), -1)
        else:
            yield from (entry.posterior.divergence().unsqueeze(0) for entry in some if entry.posterior is not None)


@torch.no_grad()
def _compute_signals(entries: Sequence[LayerRecord], wanted: Wanted) -> None:
    """Fill in the signals of layers that were recorded with their inputs."""
    for some in _groups(entries):
        inputs = [entry.inputs for entry in some if entry.inputs is not None]
        alike = len({(x.method.gate.scoring, x.weight_TN.device) for x in inputs}) == 1
        posterior = _joined(some)
        together = alike and (posterior is not None or some[0].posterior is None)
        if together and not inputs[0].method.fitted:  # novelty: each layer has statistics of its own
            whole = inputs[0]._replace(weight_TN=torch.cat([x.weight_TN for x in inputs]))
            found = {name: x.detach().chunk(len(some)) for name, x in token_signals(whole, posterior, wanted).items()}
            for number, entry in enumerate(some):
                entry.signals, entry.inputs = {name: parts[number] for name, parts in found.items()}, None
        else:
            for entry, own in zip(some, inputs, strict=True):
                entry.signals, entry.inputs = token_signals(own, entry.posterior, wanted), None


def _groups(entries: Sequence[LayerRecord]) -> Iterator[Sequence[LayerRecord]]:
    """Layers in groups of at most TOKENS tokens."""
    size = max(1, TOKENS // max(1, len(entries[0].experts_TK))) if entries else 1
    yield from (entries[start : start + size] for start in range(0, len(entries), size))


def _joined(entries: Sequence[LayerRecord]) -> Posterior | None:
    """One posterior over the tokens of all these layers; None where theirs differ in more than their tokens."""
    posteriors = [entry.posterior for entry in entries if entry.posterior is not None]
    return joined(posteriors) if posteriors and len(posteriors) == len(entries) else None
