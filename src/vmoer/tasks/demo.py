"""The questions of the embedded model (vmoer.demo.world): `demo`, and the shifts `demo-near` and `demo-far`."""

from collections.abc import Mapping
from typing import Any

from vmoer.demo.world import world
from vmoer.tasks._base import Part, Task


def _task(name: str, *splits: str) -> Task:
    def source() -> Mapping[str, list[dict[str, Any]]]:
        return {split: world().records(name, split) for split in splits}

    return Task(name, source, layouts=({split: Part(split) for split in splits},))


TASKS = (
    _task("demo", "train", "heldout", "validation", "test"),
    _task("demo-near", "test"),
    _task("demo-far", "test"),
)
