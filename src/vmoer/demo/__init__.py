"""The embedded demo: a small Granite MoE, the world of questions it was trained on, and how both were made.

Importing this package makes the tasks `demo`, `demo-near` and `demo-far` loadable by `vmoer.tasks.load`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vmoer.errors import InputError
from vmoer.tasks import Part, Task, register

from .world import world

__all__ = ["STAGES", "model_path"]

STAGES = ("base", "map", "map-early")
"""Before stage 1, after it, and at the epoch of stage 1 with the lowest validation NLL."""


def model_path(stage: str = "map") -> Path:
    """The folder of the embedded model at a stage, for `from_pretrained`."""
    if stage not in STAGES:
        raise InputError(f"the demo model has no stage {stage!r}: there are {', '.join(STAGES)}")
    return Path(__file__).parent / stage


def _task(name: str, splits: tuple[str, ...]) -> Task:
    def source() -> Mapping[str, list[dict[str, Any]]]:
        return {split: world().records(name, split) for split in splits}

    return Task(name, source, layouts=({split: Part(split) for split in splits},))


for _name, _splits in {
    "demo": ("train", "heldout", "validation", "test"),
    "demo-near": ("test",),
    "demo-far": ("test",),
}.items():
    register(_task(_name, _splits))
