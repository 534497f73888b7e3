"""What one layer said in one pass, and what many layers said worked out together."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from vmoer.live.signals import Inputs, Wanted, token_signals
from vmoer.numerics.tokens import joined
from vmoer.routers import Posterior

TOKENS = 2**16  # that layers are joined over at most, each layer's counted: joining them takes little memory


@dataclass
class LayerRecord:
    """What one layer said in one pass."""

    experts_TK: Tensor
    posterior: Posterior | None
    divergence_T: Tensor | None
    signals: Mapping[str, Tensor]
    inputs: Inputs | None = None


def divergences(entries: Sequence[LayerRecord]) -> Iterator[Tensor]:
    """Every layer's penalty, [layers, T], with its gradient where there is one."""
    yield from (entry.divergence_T.unsqueeze(0) for entry in entries if entry.divergence_T is not None)
    for some in _groups([entry for entry in entries if entry.posterior is not None]):
        posterior = _joined(some)
        if posterior is not None:
            yield posterior.divergence().view(len(some), -1)
        else:
            yield from (entry.posterior.divergence().unsqueeze(0) for entry in some if entry.posterior is not None)


@torch.no_grad()
def compute_signals(entries: Sequence[LayerRecord], wanted: Wanted) -> None:
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
