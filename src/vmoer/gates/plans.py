"""Routers under an expert-parallel plan.

transformers' `ep_router` plan replaces `forward` on the router *instance* by a closure. The closure calls the router's
own forward and hides the experts of other processes. It holds the forward it found, so a subclass put on the router
later would never run. We make the closure look its forward up on the router's class at every call, which changes nothing
until the class does. Other wrappers, such as accelerate's hooks, are not known here, and attach refuses them.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import CellType
from typing import Any

from torch import nn


@contextmanager
def lifted(router: nn.Module) -> Iterator[None]:
    """Inside the block the router answers for all experts, whatever plan it is under."""
    wrapper = router.__dict__.pop("forward", None) if _held_forward(router) is not None else None
    try:
        yield
    finally:
        if wrapper is not None:
            router.forward = wrapper


def follow_class(router: nn.Module) -> None:
    """Let the plan's wrapper, where there is one, run the forward of whatever class the router has at that time."""
    cell = _held_forward(router)
    if cell is not None:
        cell.cell_contents = _late(router)


def _late(router: nn.Module) -> Callable[..., Any]:
    def forward(*args: Any, **kwargs: Any) -> Any:
        own: Any = type(router).forward
        return own(router, *args, **kwargs)

    return forward


def _held_forward(router: nn.Module) -> CellType | None:
    """The cell in which a wrapper made by transformers' `install_forward` keeps the forward it wraps."""
    wrapper = router.__dict__.get("forward")
    if not str(getattr(wrapper, "__module__", "")).startswith("transformers."):
        return None
    if "install_forward" not in str(getattr(wrapper, "__qualname__", "")):
        return None
    names, cells = wrapper.__code__.co_freevars, wrapper.__closure__ or ()  # type: ignore[union-attr]
    return dict(zip(names, cells, strict=True)).get("original_forward")
