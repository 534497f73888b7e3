"""A study is a grid of independent cells. A finished cell is a file and is never computed again; a failed one is reported
and the rest goes on.

    OUT/cells/<study>-<hash of the key>.json    {"key": ..., "seconds": ..., "rows": [...]}
    OUT/<study>.json                            all rows, in the grid's order, written when the study ends

What computes them is a backend: this process, several of this machine, or a Ray cluster (_ray.py). How long a cell took stands
in its file, for estimates; it is in no table.
"""

import hashlib
import json
import os
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from vmoer.files import write_json

Row = dict[str, Any]
COORDINATES = ("method", "layers", "layer", "seed")
"""Keys by which cells of one grid differ; the rest of a key is what they share."""


@dataclass(frozen=True)
class Cell:
    """One piece of work. `key` says what it is; whatever else decides its numbers must be in it too."""

    study: str
    key: dict[str, Any]
    work: Callable[[], list[Row]] = field(repr=False)

    @property
    def name(self) -> str:
        """Its own coordinates; what every cell of the grid shares is left out."""
        shown = {k: v for k, v in self.key.items() if k in COORDINATES}
        return ", ".join(str(v) if k in ("method", "layers") else f"{k} {v}" for k, v in shown.items()) or "all"

    def path(self, out: Path) -> Path:
        digest = hashlib.sha256(json.dumps([self.study, self.key], sort_keys=True).encode()).hexdigest()[:16]
        return out / "cells" / f"{self.study}-{digest}.json"


@dataclass(frozen=True)
class Outcome:
    rows: list[Row]
    failed: list[tuple[Cell, str]]


Backend = Callable[[Sequence[Cell], Path], Iterator[tuple[Cell, str]]]
"""Computes cells and gives each as it ends, with the reason where it failed."""


def run(
    cells: Sequence[Cell],
    out: Path,
    *,
    workers: int = 1,
    backend: Backend | None = None,
    say: Callable[[str], object] = print,
) -> Outcome:
    """Compute what is missing, in `workers` processes or by `backend`, and collect the rows of every cell that is done."""
    failed: list[tuple[Cell, str]] = []
    todo = [cell for cell in cells if not cell.path(out).exists()]
    if len(todo) < len(cells):
        say(f"{len(cells) - len(todo)} of {len(cells)} cells are done already")
    started = time.monotonic()
    for number, (cell, reason) in enumerate((backend or processes(workers))(todo, out), 1):
        left = (time.monotonic() - started) / number * (len(todo) - number)
        eta = f", about {left / 60:.0f} min left" if left > 90 else ""
        say(f"[{number}/{len(todo)}{eta}] {cell.study}: {cell.name}" + (f": failed: {reason}" if reason else ""))
        if reason:
            failed.append((cell, reason))
    rows = [row for cell in cells if cell.path(out).exists() for row in json.loads(cell.path(out).read_text())["rows"]]
    for study in dict.fromkeys(cell.study for cell in cells):
        write_json(out / f"{study}.json", [row for row in rows if row["study"] == study])
    order = {id(cell): i for i, cell in enumerate(cells)}
    return Outcome(rows, sorted(failed, key=lambda pair: order[id(pair[0])]))


def processes(workers: int) -> Backend:
    """Those of this machine; one: this process itself."""

    def computed(todo: Sequence[Cell], out: Path) -> Iterator[tuple[Cell, str]]:
        if workers <= 1 or len(todo) <= 1:
            for cell in todo:
                yield cell, compute(cell, out)
            return
        # spawned, not forked: threads of the libraries do not survive a fork
        with ProcessPoolExecutor(workers, mp_context=get_context("spawn"), initializer=start_worker) as pool:
            waiting = {pool.submit(compute, cell, out): cell for cell in todo}
            for done in as_completed(waiting):
                yield waiting[done], done.result()

    return computed


def start_worker() -> None:
    """One thread a process: the processes share the cores between them."""
    import torch
    import transformers

    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


def compute(cell: Cell, out: Path) -> str:
    """Work on a cell and store it; returns the reason where it failed, which it may do in any way."""
    started = time.monotonic()
    try:
        rows = cell.work()
        seconds = round(time.monotonic() - started, 3)
        write_json(cell.path(out), {"key": cell.key, "seconds": seconds, "rows": rows})
    except Exception as error:
        if os.environ.get("VMOER_DEBUG"):
            traceback.print_exc()
        return (str(error).strip().splitlines() or [type(error).__name__])[0]
    return ""


def row(study: str, metric: str, value: float | None, **keys: Any) -> Row:
    """A row as in `metrics.json`; keys that do not apply are null."""
    base: Row = dict.fromkeys(("model", "task", "split", "method", "seed", "signal"))
    return {"study": study, **base, "metric": metric, "value": value, "low": None, "high": None, **keys}
