"""What `with vmoer.record(model) as rec` collects.

With gradients it keeps the posteriors, and `kl()` does its arithmetic after the forward pass: inside a checkpointed region it
would lose its gradient. Without, it keeps scalars a token. Layers, batch and tokens are the axes everywhere.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vmoer.context import Pass
from vmoer.errors import InputError
from vmoer.routers import Config, Posterior, Router, Routing


@dataclass
class Entry:
    """What one layer said in one pass."""

    experts_TK: Tensor
    posterior: Posterior | None
    divergence_T: Tensor | None
    signals: dict[str, Tensor]


class Record:
    def __init__(self, config: Config, layers: list[int]) -> None:
        self.config, self.layers = config, layers
        self.passes: list[tuple[Pass, dict[int, Entry]]] = []

    # -- filled by the routers -----------------------------------------------------------------------------------------

    def begin(self, now: Pass) -> None:
        self.passes.append((now, {}))

    def add(self, now: Pass, layer: int, method: Router, u_TD: Tensor, routing: Routing, chosen_TK: Tensor) -> None:
        entries = next((entries for known, entries in reversed(self.passes) if known is now), None)
        if entries is None:  # a router run outside its decoder
            entries = {}
            self.passes.append((now, entries))
        posterior = routing.posterior
        grad = torch.is_grad_enabled() and now.step is not None
        with torch.no_grad():
            signals = {"gate_entropy": gate_entropy(method, routing.weight_TN)}
            if posterior is not None:
                signals |= posterior.signals()
            if method.fitted:
                signals["novelty"] = method.novelty(u_TD)
            divergence_T = posterior.divergence() if posterior is not None and not grad else None
        # clones: a CUDA graph replays into the same memory
        signals = {name: value.detach().clone() for name, value in signals.items()}
        entries[layer] = Entry(chosen_TK.clone(), posterior if grad else None, divergence_T, signals)

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
            for entry in entries.values():
                divergence_T = entry.posterior.divergence() if entry.posterior is not None else entry.divergence_T
                if divergence_T is None:
                    continue
                if mask_T is not None:  # where, not a product: padding may hold anything
                    divergence_T = torch.where(mask_T.to(divergence_T.device), divergence_T, 0)
                total = divergence_T.sum() if total is None else total + divergence_T.sum().to(total.device)
        if total is None:
            return torch.zeros((), device=self.passes[0][0].positions_T.device)
        return getattr(self.config, "beta", 0.0) * total / (count if tokens is None else tokens)

    @property
    def signals(self) -> dict[str, Tensor]:
        """[layer, batch, token] each; several passes over the same rows (generation) are joined along the tokens."""
        self._require()
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
        full = [torch.ones(now.shape, dtype=torch.bool, device=now.positions_T.device) for now, _ in self.passes]
        return torch.cat(
            [f if now.mask_BT is None else now.mask_BT for f, (now, _) in zip(full, self.passes, strict=True)], 1
        )

    def _join(self, read: Any) -> Tensor:
        device = self.passes[0][0].positions_T.device
        parts = []
        for now, entries in self.passes:
            per_layer = [read(entries[layer]).to(device) for layer in self.layers]
            parts.append(torch.stack([x.reshape(*now.shape, *x.shape[1:]) for x in per_layer]))
        if len({part.shape[1] for part in parts}) > 1:
            raise InputError("this record holds passes over batches of different sizes: use one record for each")
        return torch.cat(parts, 2)

    def _require(self) -> None:
        if not any(entries for _, entries in self.passes):
            raise InputError("nothing was recorded: run the model inside `with vmoer.record(model)`")


def gate_entropy(method: Router, weight_TN: Tensor) -> Tensor:
    """Entropy of the experts' scores as a distribution, in nats, [T]."""
    p_TN = method.gate.scoring.probabilities(weight_TN)
    return torch.special.entr(p_TN).sum(-1)
