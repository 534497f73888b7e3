"""Multiple-choice data sets: `load` gives checked questions from the hub, a folder of JSONL, or one JSONL file.

A new data set is one file that ends in a `TASK`, and one line here.
"""

import os
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from vmoer.errors import InputError, unknown
from vmoer.tasks import (
    arc_challenge,
    arc_easy,
    commonsense_qa,
    demo,
    medmcqa,
    mmlu,
    mmlu_law,
    openbookqa,
    sciq,
    social_iqa,
)
from vmoer.tasks._base import (
    LETTERS,
    Layout,
    Part,
    Question,
    Record,
    Task,
    digest,
    questions,
    read_jsonl,
    subsample,
    take,
    wording,
)
from vmoer.tasks._hub import Hub

__all__ = [
    "LETTERS",
    "Hub",
    "Layout",
    "Part",
    "Question",
    "Task",
    "digest",
    "is_file",
    "load",
    "names",
    "read_jsonl",
    "register",
    "shift",
    "subsample",
    "take",
    "wording",
]

_REGISTRY: dict[str, Task] = {}


def register(task: Task) -> None:
    """Make a data set loadable by its name."""
    if _REGISTRY.setdefault(task.name, task) is not task:
        raise ValueError(f"a task named {task.name!r} is already registered")


def names() -> list[str]:
    """The built-in data sets."""
    return list(_REGISTRY)


def check_name(task: str | Path) -> None:
    """Refuse what is neither the name of a task nor a path."""
    if str(task) not in _REGISTRY and not _is_path(task):
        raise unknown("task", str(task), _REGISTRY, ", or the path of a .jsonl file")


def load(
    task: str | Path,
    split: str = "all",
    *,
    data_root: str | Path | None = None,
    seed: int = 0,
    paper_splits: bool = False,
    limit: int | None = None,
    shuffle_options: bool = False,
    recut: bool = False,
) -> list[Question]:
    """The questions of one split of a data set.

    Args:
        task: a name out of `names()`; or the path of a JSONL file. The split "all" of a file is the whole of it, and its
            train, validation and test are 70, 10 and 20 percent of it.
        split: of the data set.
        data_root: a folder with `<task>/<split>.jsonl` in it, VMOER_DATA by default. Without either the hub is asked.
        seed: decides the splits that we cut ourselves, subsamples and option orders, together with each question and not
            with the order of the rows. Keep it fixed across the training seeds of a study: another seed is another test
            set.
        paper_splits: take a seeded subsample of the size the paper prints for this split; all rows where it prints
            none, and where there are fewer, which gives a warning.
        limit: take a seeded subsample of at most so many questions.
        shuffle_options: permute each question's options.
        recut: take train and validation together and cut them anew by the seed, in their own sizes; test stays what it is. The
            data set must have a test of its own, which no seed decides.
    """
    if limit is not None and limit < 1:
        raise InputError(f"limit must be at least 1, not {limit}")
    check_name(task)
    if recut and split in ("train", "validation"):
        if paper_splits:
            raise InputError("the paper's subsamples are of the published splits: leave recut or paper_splits out")
        found = _recut(task, split, data_root, seed)
    elif str(task) in _REGISTRY:
        found = _from_task(_REGISTRY[str(task)], split, data_root, seed)
        if paper_splits:
            found = _paper_sized(_REGISTRY[str(task)], split, found, seed)
    else:
        found = _from_file(Path(task), split, seed)
    if limit is not None:
        found = subsample(found, limit, seed)
    return [question.shuffled(seed) for question in found] if shuffle_options else found


def shift(task: str | Path, **how: Any) -> list[Question]:
    """A task as a shift: its test split, and of a JSONL file, which nothing was trained on, every question.

    Args:
        task: as in `load`.
        **how: as in `load`.
    """
    if str(task) in _REGISTRY or not is_file(task):
        return load(task, "test", **how)
    return [replace(question, split="test") for question in load(task, "all", **how)]


def is_file(task: str | Path) -> bool:
    """Whether a task is written as a file of one's own, and not as a built-in name."""
    return str(task) not in _REGISTRY and _is_path(task)


def _from_task(task: Task, split: str, data_root: str | Path | None, seed: int) -> list[Question]:
    root = data_root or os.environ.get("VMOER_DATA")
    folder = Path(root) / task.name if root else None
    if folder and folder.is_dir():
        where = str(folder)
        rows = {path.stem: read_jsonl(path) for path in sorted(folder.glob("*.jsonl"))}  # lazy: only one is read
        if not rows:
            raise InputError(f"{folder}: no .jsonl files in it")
    elif folder and isinstance(task.source, Hub):
        raise InputError(f"{folder}: no such folder; --data-root (or VMOER_DATA) needs DIR/{task.name}/<split>.jsonl")
    else:
        where = task.name
        rows = {name: _placed(source, f"{where} {name}") for name, source in task.source().items()}
    part = _part(task.layout(rows), split, where)
    found = questions(rows[part.source], task.name, split, f"{where}, split {part.source!r}")
    return _non_empty(take(part, found, seed), split, f"{where}: {part.source} has only {len(found)} rows")


def _from_file(path: Path, split: str, seed: int) -> list[Question]:
    if not path.is_file():
        raise InputError(f"{path}: no such file")
    found = questions(read_jsonl(path), path.stem, split, str(path))
    train, validation = round(0.7 * len(found)), round(0.8 * len(found))
    layout = {
        "all": Part("all"),
        "train": Part("all", 0, train),
        "validation": Part("all", train, validation),
        "test": Part("all", validation),
    }
    part = _part(layout, split, str(path))
    return _non_empty(take(part, found, seed), split, f"{path}: it has only {len(found)} rows")


def _recut(task: str | Path, split: str, data_root: str | Path | None, seed: int) -> list[Question]:
    parts = {name: load(task, name, data_root=data_root) for name in ("train", "validation", "test")}
    if load(task, "test", data_root=data_root, seed=1) != parts["test"]:
        raise InputError(f"{task}: its test questions are cut by the seed, so train and validation cannot be cut anew")
    size, everything = len(parts["train"]), parts["train"] + parts["validation"]
    mine = Part(split, 0, size) if split == "train" else Part(split, size)
    return [replace(question, split=split) for question in take(mine, everything, seed)]


def _paper_sized(task: Task, split: str, found: list[Question], seed: int) -> list[Question]:
    size = (task.paper_sizes or {}).get(split)
    if size is None:
        return found
    if size > len(found):
        warnings.warn(
            f"{task.name} {split}: the paper takes {size} rows, there are {len(found)}: taking them all", stacklevel=3
        )
    return subsample(found, size, seed)


def _part(layout: Layout, split: str, where: str) -> Part:
    if split not in layout:
        raise InputError(f"{where}: no split {split!r}; it has {', '.join(layout)}")
    return layout[split]


def _non_empty(found: list[Question], split: str, why: str) -> list[Question]:
    if not found:
        raise InputError(f"{why}, which leaves none for split {split!r}")
    return found


def _placed(rows: Iterable[Record], where: str) -> Iterator[tuple[str, Record]]:
    for index, row in enumerate(rows):
        yield f"{where} row {index}", row


def _is_path(task: str | Path) -> bool:
    return isinstance(task, Path) or task.endswith((".jsonl", ".json")) or os.sep in task or Path(task).is_file()


for _module in (openbookqa, arc_easy, arc_challenge, sciq, medmcqa, mmlu, mmlu_law, commonsense_qa, social_iqa):
    register(_module.TASK)
for _task in demo.TASKS:
    register(_task)
