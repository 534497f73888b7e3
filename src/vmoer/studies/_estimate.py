"""How long a grid will take: what `--dry-run` says.

A finished cell's file holds its seconds; a cell that is not done takes as long as those like it: the same study with the same
settings, of the same method where there is one. Where nothing like it was timed yet, a calibration cell is counted instead: the
questions it answers, and those it trains on three times over, at what one question takes in a batch that is timed now. Cells of
other studies are left out of the sum then, and the sentence says so.

The model's weights are never opened. The batch runs through a model of the same configuration with random weights; of a model
that is too large for that the questions are counted alone.
"""

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from vmoer.files import read_json
from vmoer.models import Opened, random_model, skeleton
from vmoer.saved import manifest
from vmoer.studies import calibration
from vmoer.studies._grid import COORDINATES, Cell
from vmoer.studies._labels import config_of, parse
from vmoer.studies._variants import Study, batches, searches
from vmoer.training.plan import held_out_share
from vmoer.training.presets import PRESETS

LARGEST = 250_000_000
"""Parameters of a model that is built for an estimate."""


@dataclass(frozen=True)
class Expected:
    cell: Cell
    done: bool
    seconds: float | None
    """Taken where it is done, else as cells like it took; None where no such was timed."""


def expected(cells: Sequence[Cell], out: Path) -> list[Expected]:
    timed = [found for path in sorted((out / "cells").glob("*.json")) if (found := _read(path))]
    result = []
    for cell in cells:
        done = cell.done(out)
        if done:
            seconds = (cell.stored(out) or {}).get("seconds") if not cell.leaves else None
        else:
            like = [
                (key, took) for study, key, took in timed if study == cell.study and _shared(key) == _shared(cell.key)
            ]
            same = [took for key, took in like if key.get("method") == cell.key.get("method")]
            took = same or [took for _, took in like]
            seconds = sum(took) / len(took) if took else None
        result.append(Expected(cell, done, seconds))
    return result


def sentence(found: Sequence[Expected], study: Study, workers: int = 1) -> str:
    """What is left, in words; where no cell like those left was timed, a batch of questions is."""
    left = [one for one in found if not one.done]
    if not left:
        return "every cell is done"
    unknown = [one.cell for one in left if one.seconds is None]
    counted = [cell for cell in unknown if cell.study == calibration.STUDY]
    total, basis, large = sum(one.seconds or 0.0 for one in left), [], ""
    if len(left) > len(unknown):
        basis.append("by the times of finished cells")
    if counted:
        passes, each = question_passes(study, counted), seconds_a_question(study)
        if each is None:
            large = f"; {len(counted)} of them put {passes:,} questions through the model, which is too large to be tried out"
            counted = []
        else:
            total += each * passes
            basis.append(f"by a batch timed now, {each * 1e3:.2g} ms a question and pass, which is rough")
    known = len(left) - len(unknown) + len(counted)
    if not known:
        return f"{len(left)} cells are left; none like them was timed yet, so there is no estimate{large}"
    where = f" in {workers} processes" if workers > 1 else ""
    of = f"the {known} cells left" if known == len(left) else f"{known} of the {len(left)} cells left"
    apart = "" if known == len(left) else f"; none like the other {len(left) - known} was timed yet{large}"
    return f"about {_span(total / max(1, workers))}{where} for {of} ({'; '.join(basis)}){apart}"


def question_passes(study: Study, cells: Sequence[Cell]) -> int:
    """Questions that calibration cells put through the model: answered, and trained on where a run is missing."""
    sizes = {split: len(study.questions(study.task, split)) for split in ("train", "validation", "test")}
    answered = sizes["test"] + sum(len(study.questions(task, "test")) for task in study.ood)
    answered += sizes["validation"]
    total, runs = 0, set()
    for cell in cells:
        label, seed = cell.key["method"], cell.key["seed"]
        (_, preset, averaging), config = parse(label), config_of(label)
        total += answered * (study.passes if averaging == "full" else 1)
        wanted = {
            f"map{'@paper' if preset == 'paper' else ''}-s{seed}": _epochs(study.stage1.epochs, sizes["train"], sizes)
        }
        searched = config.search if config.search and (config.search.always or searches(study, label)) else None
        each = searched.passes * sizes["validation"] if searched else 0
        if config.trains:
            plan = PRESETS[preset].stage2 if preset == "paper" or study.stage2 is None else study.stage2
            each = _epochs(plan.epochs, _stage2_size(study, preset), sizes)
        if each:
            wanted[f"{label.partition('+')[0]}-s{seed}"] = each * (len(searched.values) if searched else 1)
        for run, passes in wanted.items():
            if run not in runs and not manifest.complete(study.out / "runs" / run):
                total += passes
                runs.add(run)
    return total


def seconds_a_question(study: Study, size: int = 32) -> float | None:
    """One forward pass over a batch of test questions, timed after one that warms up; None where the model is a large one."""
    if sum(p.numel() for p in skeleton(study.model).parameters()) > LARGEST:
        return None
    device = torch.device(study.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    dtype = study.dtype or (torch.bfloat16 if device.type == "cuda" else torch.float32)
    opened = Opened(*random_model(study.model, device, dtype), study.model, None)
    asked = study.questions(study.task, "test")[:size]
    (batch,) = batches(study, opened, asked, len(asked))
    with torch.no_grad():
        for _ in range(2):
            started = time.perf_counter()
            opened.model(**batch).logits.sum().item()  # waits for the device
    return (time.perf_counter() - started) / len(asked)


def _epochs(epochs: int, trained: int, sizes: dict[str, int]) -> int:
    """A step forward and back counts as three passes; validation follows every epoch."""
    return epochs * (3 * trained + sizes["validation"])


def _stage2_size(study: Study, preset: str) -> int:
    data = PRESETS[preset].stage2_data if preset == "paper" or study.stage2_data is None else study.stage2_data
    if data.startswith("split:"):
        return len(study.questions(study.task, data.removeprefix("split:")))
    return round(len(study.questions(study.task, "train")) * (held_out_share(data) or 1))


def _read(path: Path) -> tuple[str, dict[str, Any], float] | None:
    found = read_json(path)
    return (path.stem.rpartition("-")[0], found["key"], found["seconds"]) if "seconds" in found else None


def _shared(key: dict[str, Any]) -> dict[str, Any]:
    """Without a cell's own coordinates; as it reads back from a file."""
    return json.loads(json.dumps({name: value for name, value in key.items() if name not in COORDINATES}))


def _span(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
