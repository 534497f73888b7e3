"""`OUT/settings.json`: what a study's folder was made with. A study with other settings is refused: it would take old numbers.

Cells, runs and predictions are taken as they are found. So one folder has one model, by its files; one limit; the same rows of
each task; the same plans, passes and way of searching. Methods, seeds and averaging may be others: these stand in files' names.
"""

import hashlib
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from huggingface_hub import hf_hub_download

from vmoer import tasks
from vmoer.errors import InputError
from vmoer.evaluation.predictions import read_meta
from vmoer.files import digest, read_json, sealed, unsealed, write_json
from vmoer.models import embedded
from vmoer.saved.fetch import is_repository
from vmoer.studies._variants import Study

NAME = "settings.json"
WEIGHTS = "model's files"
_READ = (".safetensors", ".gguf", ".bin", ".json", ".txt", ".jinja")
_ANOTHER = "give the same settings to go on, or use another --out"


def keep_to_one(study: Study, asked: Sequence[str] | None = None) -> None:
    """Refuse a folder that was made with other settings; write down those of a new one.

    Args:
        study: whose folder it is.
        asked: the tasks whose cells lie there, where these may be several.
    """
    path = study.out / NAME
    found = settings(study, [study.task]) | {"task": study.task} if asked is None else settings(study, asked)
    begun = any(any(study.out.glob(place)) for place in ("cells/*.json", "runs/*", "*/meta.json"))
    known: dict[str, Any] = {}
    if begun:
        if not path.exists():
            raise InputError(f"{study.out} has cells or runs, and no {NAME} says how they were made: use another --out")
        known = unsealed(read_json(path), path)
        for name, value in found.items():
            if name in known and known[name] != value:
                raise InputError(f"{study.out} was made with {_difference(name, known[name], value)}: {_ANOTHER}")
    if not begun or found.keys() - known.keys():
        write_json(path, sealed(known | found))


def check_shifts(study: Study, folder: Path) -> None:
    """Refuse, before anything is trained, finished answers to other shifts than the study asks about."""
    try:
        theirs = read_meta(folder / "meta.json")
    except InputError:  # none there, or none that is whole
        return
    asked = [Path(task).stem if tasks.is_file(task) else task for task in study.ood]
    if sorted(theirs.get("ood_tasks", ())) != sorted({*asked} - {theirs.get("source_task")}):
        said = ", ".join(theirs.get("ood_tasks", ())) or "none"
        raise InputError(f"{folder} has answers to other shifts ({said}): {_ANOTHER}")


def settings(study: Study, asked: Sequence[str]) -> dict[str, Any]:
    """All that decides a study's numbers and stands in no name of a file; what cannot be read is left to the cells to say."""
    found: dict[str, Any] = {
        "model": study.model,
        "limit": study.limit,
        "stage 1": study.stage1.described(),
        "stage 2": None if study.stage2 is None else study.stage2.described(),
        "data of stage 2": study.stage2_data,
        "preset": study.preset,
        "search": study.search,
        "transfer_from": None if study.transfer_from is None else str(study.transfer_from.resolve()),
        "passes": study.passes,
        "dtype": None if study.dtype is None else str(study.dtype),
        "vary_data": study.vary_data,
        "system_prompt": study.system_prompt,
    }
    if (weights := _weights(study.model)) is not None:
        found[WEIGHTS] = weights
    kind, _, split_of_stage2 = (study.stage2_data or "").partition(":")
    more = [split_of_stage2] if kind == "split" else []
    for task in asked:
        for split in ("train", "validation", "test", *more):
            found |= _rows(f"{task} {split}", partial(tasks.load, task, split, data_root=study.data_root))
    for task in study.ood:
        found |= _rows(f"{task}, a shift", partial(tasks.shift, task, data_root=study.data_root))
    return found


def _rows(name: str, load: Callable[[], Sequence[tasks.Question]]) -> dict[str, str]:
    try:
        return {f"rows of {name}": digest([(q.id, q.question, q.choices, q.answer) for q in load()])}
    except InputError:
        return {}


def _weights(model: str) -> str | None:
    """The content of a local model's files; of one on the hub, its commit."""
    place = Path(embedded(model) or model)
    if not place.exists():
        return _commit(model)
    files = [place] if place.is_file() else [path for path in sorted(place.iterdir()) if path.suffix in _READ]
    sums = []
    for path in files:
        with path.open("rb") as file:
            sums.append((path.name, hashlib.file_digest(file, "sha256").hexdigest()))
    return digest(sums)


def _commit(model: str) -> str | None:
    """The commit of a model's snapshot in the cache; the name of the folder that its files lie in."""
    if not is_repository(model):
        return None
    try:
        return Path(hf_hub_download(model, "config.json")).parent.name
    except Exception:  # whatever the hub says to this name, opening the model says it in one line
        return None


def _difference(name: str, theirs: Any, ours: Any) -> str:
    """What differs, with both values where they are short."""
    if name == WEIGHTS or name.startswith("rows of "):
        return f"other {name}"
    shown = [value for value in (theirs, ours) if not isinstance(value, dict | list)]
    return f"{name} = {theirs}, and now it is {ours}" if len(shown) == 2 else f"another plan of {name}"
