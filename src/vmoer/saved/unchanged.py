"""A model that is put together in steps, and is as it was where one of them fails."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn


@contextmanager
def unchanged_on_failure(model: nn.Module) -> Iterator[None]:
    """Where the block raises, every module of the model has its class, children, parameters, hooks and attributes back.

    Values of parameters are not copied: nothing that goes on inside changes those that were there before. The random state of
    the CPU is as before in any case.
    """
    before = [(module, type(module), _copied(module)) for module in model.modules()]
    grads = [(p, p.requires_grad) for p in model.parameters()]
    with torch.random.fork_rng(devices=[]):
        try:
            yield
        except BaseException:
            for module, kind, attributes in before:
                module.__class__ = kind
                module.__dict__.clear()
                module.__dict__.update(attributes)
            for p, required in grads:
                p.requires_grad_(required)
            raise


def _copied(module: nn.Module) -> dict[str, Any]:
    """Attributes, and a copy of those that hold others: children, parameters, hooks, sets of names."""
    containers = (dict, list, set)
    return {name: value.copy() if isinstance(value, containers) else value for name, value in vars(module).items()}
