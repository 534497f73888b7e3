"""A LoRA adapter whose A is drawn: one sample in every training step, one in every pass that asks for a sample, else its mean.

    W + scale B A_m,    A_m = a function of (A, seed, layer, training or inference, number of the step or pass)

What a draw is made of is said by an `AdapterNoise`: masks (training/lora_dropout.py) or Gaussian noise (training/blob.py). All
tokens of a pass share its sample, so that experts stacked in one tensor, whose update is added to their weights, can have one,
and an answer does not depend on the batch it is in. As with routers, an instance's class is replaced: parameters keep their
names, and `taken_off` gives the plain adapter back. A method must be attached, such as `Deterministic()`: it knows the pass.

Shapes: R rows of A (the rank, times the experts where they are stacked), I inputs.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from vmoer.errors import InputError
from vmoer.live.attach import attached
from vmoer.live.context import Attachment
from vmoer.numerics.noise import Key

OWN = "vmoer_noise"
"""The name of what is trained beside A, under A's own module."""
TRAINING, PASS = 0, 1


class AdapterNoise(ABC):
    """What A's samples are made of."""

    @abstractmethod
    def sample(self, mean_RI: Tensor, own_RI: Tensor | None, *key: Key) -> Tensor:
        """A for the integers of `key`, and nothing else: two draws with the same ones are the same."""

    @abstractmethod
    def described(self) -> dict[str, Any]:
        """As files say it."""

    def start(self, mean_RI: Tensor, *key: Key) -> Tensor | None:
        """What is trained beside A, as it is at first; None where nothing is."""
        return None

    def divergence(self, mean_RI: Tensor, own_RI: Tensor | None) -> Tensor | None:
        """What the loss of all questions together has to pay for A's posterior; None where it pays nothing."""
        return None


@dataclass(frozen=True, eq=False)
class _Drawing:
    """What a layer's A is drawn by."""

    noise: AdapterNoise
    seed: int
    number: int
    questions: int
    attachment: Attachment = field(repr=False)

    def key(self) -> tuple[int, ...] | None:
        """Which sample is wanted here and now; None for the mean. A layer that backward runs again gets its own pass's."""
        now = self.attachment.now
        asked = self.attachment.asked if now is None else now.asked
        if asked.step is not None:
            return self.seed, self.number, TRAINING, asked.step
        if isinstance(asked.passes, Tensor):
            raise InputError("an adapter is drawn once for a whole pass: take averaging='full'")
        return None if asked.passes is None else (self.seed, self.number, PASS, asked.passes)


class Drawn(nn.Linear):
    """A LoRA's A, as PEFT keeps it, with another weight for every sample."""

    vmoer_drawing: _Drawing

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        mean_RI = self._parameters["weight"]
        assert mean_RI is not None
        key = self.vmoer_drawing.key()
        return mean_RI if key is None else self.vmoer_drawing.noise.sample(mean_RI, self._parameters.get(OWN), *key)

    def divergence(self) -> Tensor | None:
        mean_RI = self._parameters["weight"]
        assert mean_RI is not None
        return self.vmoer_drawing.noise.divergence(mean_RI, self._parameters.get(OWN))


def draw(
    model: nn.Module, noise: AdapterNoise, *, seed: int, questions: int = 1, attachment: Attachment | None = None
) -> None:
    """From now on every A of the model's adapter is drawn.

    Args:
        model: A PEFT model with a LoRA adapter that is not merged, and a method attached.
        noise: What the samples are made of.
        seed: Decides the samples, and how they start.
        questions: How many the divergence is shared between.
        attachment: Says which pass it is; by default the one on the model.
    """
    found = layers_A(model)
    if not found:
        raise InputError("this model has no LoRA adapter whose weights could be drawn")
    if any(getattr(module, "merged", False) for module in model.modules()):
        raise InputError("this model's adapter is merged into its weights, and cannot be drawn any more")
    attachment = attachment or attached(model)
    for number, layer in enumerate(found.values()):
        own_RI = noise.start(layer.weight.detach(), seed, number)
        if own_RI is not None:
            layer.register_parameter(OWN, nn.Parameter(own_RI, requires_grad=layer.weight.requires_grad))
        _put_on(layer, _Drawing(noise, seed, number, questions, attachment))


def layers_A(model: nn.Module) -> dict[str, nn.Linear]:
    """Every A of the adapter, by its path."""
    return {
        path: module
        for path, module in model.named_modules()
        if path.rpartition(".")[0].endswith("lora_A") and isinstance(module, nn.Linear)
    }


def drawn_layers(model: nn.Module) -> dict[str, Drawn]:
    """Those that are drawn."""
    return {path: layer for path, layer in layers_A(model).items() if isinstance(layer, Drawn)}


def _put_on(layer: Any, drawing: _Drawing) -> None:
    layer.__class__ = Drawn
    layer.vmoer_drawing = drawing


@contextmanager
def taken_off(model: nn.Module) -> Iterator[None]:
    """Inside the block the adapter is the plain one, as PEFT and files know it, at its mean."""
    found = [(layer, layer.vmoer_drawing, layer._parameters.pop(OWN, None)) for layer in drawn_layers(model).values()]
    for layer, _, _ in found:
        layer.__class__ = nn.Linear  # type: ignore[assignment]
        del layer.vmoer_drawing
    try:
        yield
    finally:
        for layer, drawing, own_RI in found:
            if own_RI is not None:
                layer.register_parameter(OWN, own_RI)
            _put_on(layer, drawing)


def divergence(model: nn.Module) -> Tensor | None:
    """One question's share of the penalty on A's posterior; None where there is none."""
    parts = [
        own / layer.vmoer_drawing.questions
        for layer in drawn_layers(model).values()
        if (own := layer.divergence()) is not None
    ]
    return torch.stack(parts).sum() if parts else None


def own_tensors(model: nn.Module) -> dict[str, Tensor]:
    """What was trained beside A, by the paths of its layers, on the CPU."""
    found = {path: layer._parameters.get(OWN) for path, layer in drawn_layers(model).items()}
    return {path: own_RI.detach().cpu().contiguous() for path, own_RI in found.items() if own_RI is not None}


@torch.no_grad()
def fill(model: nn.Module, tensors: Mapping[str, Tensor], name: object) -> None:
    """Give the layers what was trained; `name` is what errors call the file."""
    own = {path: layer._parameters[OWN] for path, layer in drawn_layers(model).items() if OWN in layer._parameters}
    if {path: value.shape for path, value in own.items() if value is not None} != {
        p: t.shape for p, t in tensors.items()
    }:
        raise InputError(f"{name} does not fit this model's adapter")
    for path, value in own.items():
        assert value is not None
        value.copy_(tensors[path])
