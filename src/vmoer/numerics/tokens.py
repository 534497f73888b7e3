"""Dataclasses with a row a token, which can be cut and joined along the tokens."""

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar, Self, TypeVar

import torch
from torch import Tensor

Part = TypeVar("Part", bound="PerToken")


class PerToken:
    """Mixed into a dataclass: the fields named in `per_token` have a row a token, or are such dataclasses themselves."""

    per_token: ClassVar[tuple[str, ...]] = ()

    def rows(self, start: int, stop: int) -> Self:
        """The same for tokens start to stop."""
        return dataclasses.replace(self, **{name: getattr(self, name)[start:stop] for name in self.per_token})  # type: ignore[type-var]


def joined(parts: Sequence[Part]) -> Part | None:
    """One over the tokens of all parts; None where they differ in more than their tokens."""
    first: Any = parts[0]
    if any(type(part) is not type(first) for part in parts):
        return None
    together: dict[str, Any] = {}
    for field in dataclasses.fields(first):
        values = [getattr(part, field.name) for part in parts]
        if field.name in first.per_token and values[0] is not None:
            together[field.name] = _along_tokens(values)
            if together[field.name] is None:
                return None
        elif not all(value is values[0] or _equal(value, values[0]) for value in values):
            return None
    return dataclasses.replace(first, **together)


def _along_tokens(values: Sequence[Any]) -> Any:
    if isinstance(values[0], PerToken):
        return joined(values)
    if any(x is None or (x.shape[1:], x.device) != (values[0].shape[1:], values[0].device) for x in values):
        return None
    return torch.cat(list(values))


def _equal(a: object, b: object) -> bool:
    """Two tensors count as different: to compare them would synchronise with a GPU."""
    return not isinstance(a, Tensor) and not isinstance(b, Tensor) and a == b
