"""A study is a grid of cells. A finished cell is a file and is never computed again; a failed one is reported, and the rest
goes on.

    OUT/cells/<study>-<hash of the key>.json    {"key": ..., "seconds": ..., "rows": [...], "sha256": ...}
    OUT/<study>.json                            all rows, in the grid's order, written when the study ends

A cell may need others first, such as stage 1, and may say how much of a GPU's memory it takes. `run` starts each cell as soon as
what it needs is done; a backend computes it: this process (`here`), processes of this machine (_processes.py) or a Ray cluster
(_ray.py). A cell whose process dies, or which runs out of the memory it asked for, is tried once more. How long a cell took
stands in its file, for estimates; it is in no table.
"""

import gc
import hashlib
import json
import math
import os
import re
import signal
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch

from vmoer.errors import InputError, first_line, of_files
from vmoer.evaluation import predictions
from vmoer.evaluation.scores import Row
from vmoer.files import read_json, sealed, unsealed, write_json

COORDINATES = ("method", "layers", "layer", "seed")
"""Keys by which cells of one grid differ; the rest of a key is what they share."""
USABLE = 0.95
"""The share of a GPU's memory that cells divide between them; the contexts of their processes take the rest."""


@dataclass(frozen=True)
class Cell:
    """One piece of work. `key` says what it is; whatever else decides its numbers must be in it too."""

    study: str
    key: dict[str, Any]
    work: Callable[[], list[Row]] = field(repr=False)
    needs: tuple["Cell", ...] = field(default=(), repr=False)
    """Cells that must be done before this one starts. They are computed only where this one is missing."""
    leaves: tuple[Path, ...] = ()
    """Files that `work` writes, where it writes its own: the cell is done when all of them exist, and it has no rows."""
    answers: tuple[Path, ...] = ()
    """Folders of predictions that `work` leaves beside its rows."""
    gb: float = 0.0
    """GPU memory that the cell may take where several share a GPU; 0 where that is not counted."""

    @property
    def name(self) -> str:
        """Its own coordinates; what every cell of the grid shares is left out."""
        shown = {k: v for k, v in self.key.items() if k in COORDINATES}
        return ", ".join(str(v) if k in ("method", "layers") else f"{k} {v}" for k, v in shown.items()) or "all"

    @property
    def title(self) -> str:
        return f"{self.study}: {self.name}"

    @property
    def kind(self) -> str:
        """Cells that differ in their seed alone take about as long."""
        return re.sub(r", seed \d+$", "", self.title)

    def path(self, out: Path) -> Path:
        digest = hashlib.sha256(json.dumps([self.study, self.key], sort_keys=True).encode()).hexdigest()[:16]
        return out / "cells" / f"{self.study}-{digest}.json"

    def files(self, out: Path) -> tuple[Path, ...]:
        return self.leaves or (self.path(out),)

    def done(self, out: Path) -> bool:
        """Whether everything is there that it leaves. A damaged file is named, and counts as missing."""
        if self.leaves:
            return all(path.exists() for path in self.leaves)
        return self.path(out).exists() and self.stored(out) is not None and all(map(predictions.whole, self.answers))

    def stored(self, out: Path) -> dict[str, Any] | None:
        """The content of its file; None where that was damaged."""
        try:
            found = unsealed(read_json(self.path(out)), self.path(out))
            if found.get("key") != json.loads(json.dumps(self.key)) or not isinstance(found.get("rows"), list):
                raise InputError(f"{self.path(out)} holds another cell than its name says")
            return found
        except InputError as error:
            warnings.warn(f"{error}; {self.title} is computed again", stacklevel=3)
            return None


class Result(NamedTuple):
    """How an attempt at a cell ended."""

    reason: str = ""
    """Why it failed; empty where it did not."""
    seconds: float = 0.0
    peak_gb: float | None = None
    """The most GPU memory that it held."""
    late: bool = False
    """It was not begun, because there was no time left."""
    died: bool = False
    """Its process ended before the cell did."""


class Ended(NamedTuple):
    cell: Cell
    result: Result
    start: float
    """Seconds since the study began."""


@dataclass(frozen=True)
class Outcome:
    rows: list[Row]
    failed: list[tuple[Cell, str]]


class Pool(Protocol):
    """What computes cells."""

    def room(self, cell: Cell) -> bool:
        """Whether the cell can start now."""

    def memory(self) -> float:
        """GB of GPU memory that one cell can have at most."""

    def start(self, cell: Cell, latest: float) -> None:
        """Compute the cell, unless its turn comes after the time `latest`."""

    def wait(self) -> list[tuple[Cell, Result]]:
        """The cells that ended since the last call; at least one."""


Backend = Callable[[Path], AbstractContextManager[Pool]]
"""Opens a pool for a study's folder; on leaving, everything that the pool started has ended."""


def run(
    cells: Sequence[Cell],
    out: Path,
    *,
    backend: Backend | None = None,
    until: float = math.inf,
    took: Mapping[str, float] | None = None,
    say: Callable[[str], object] = print,
    after: Callable[[Ended, Sequence[Cell]], object] | None = None,
) -> Outcome:
    """Compute what is missing, and collect the rows of every cell that is done.

    Args:
        backend: what computes the cells; this process, where None.
        until: a time (`time.time()`); no cell is started that is not expected to end before it.
        took: seconds that cells of a kind took before, for `until`; cells that end add to it.
        after: called as cells end, with the cell and those that are left.
    """
    began, failed = time.monotonic(), []
    todo = missing(cells, out)
    if done := sum(cell.done(out) for cell in cells):
        say(f"{done} of {len(cells)} cells are done already")
    if todo:
        with _ended_by_sigterm(), (backend or here)(out) as pool:
            for number, (cell, result, left) in enumerate(_drive(todo, out, pool, until, dict(took or {}), say), 1):
                now = time.monotonic() - began
                rest = now / number * len(left)
                eta = f", about {rest / 60:.0f} min left" if rest > 90 else ""
                why = f": failed: {result.reason}" if result.reason else ""
                say(f"[{number}/{len(todo)}{eta}] {cell.title}{why}")
                if result.reason:
                    failed.append((cell, result.reason))
                if after is not None:
                    after(Ended(cell, result, now - result.seconds), left)
    stored = [cell for cell in cells if not cell.leaves]
    rows = [row for cell in stored if cell.done(out) for row in (cell.stored(out) or {"rows": []})["rows"]]
    for study in dict.fromkeys(cell.study for cell in stored):
        write_json(out / f"{study}.json", [row for row in rows if row["study"] == study])
    order = {cell.files(out): i for i, cell in enumerate(todo)}
    return Outcome(rows, sorted(failed, key=lambda pair: order[pair[0].files(out)]))


def missing(cells: Sequence[Cell], out: Path) -> list[Cell]:
    """What is not done, each cell after those that it needs."""
    found: dict[tuple[Path, ...], Cell] = {}

    def add(cell: Cell) -> None:
        if cell.files(out) not in found and not cell.done(out):
            for need in cell.needs:
                add(need)
            found[cell.files(out)] = cell

    for cell in cells:
        add(cell)
    return list(found.values())


def _drive(
    todo: Sequence[Cell], out: Path, pool: Pool, until: float, took: dict[str, float], say: Callable[[str], object]
) -> Iterator[tuple[Cell, Result, list[Cell]]]:
    """Start cells in their order as soon as they can; gives each that ended, and what is left."""
    waiting, running = list(todo), dict[tuple[Path, ...], Cell]()
    failed, tried = dict[tuple[Path, ...], str](), set[tuple[Path, ...]]()
    while waiting or running:
        unfinished = {cell.files(out) for cell in waiting} | running.keys()
        for cell in list(waiting):
            latest = until - took.get(cell.kind, 0.0)
            if broken := [need for need in cell.needs if need.files(out) in failed]:
                waiting.remove(cell)
                reason = failed[cell.files(out)] = f"{broken[0].title} failed: {failed[broken[0].files(out)]}"
                yield cell, Result(reason), [*waiting, *running.values()]
            elif time.time() <= latest and not any(need.files(out) in unfinished for need in cell.needs):
                if not pool.room(cell):
                    break
                waiting.remove(cell)
                running[cell.files(out)] = cell
                pool.start(cell, latest)
        if not running:
            return  # what still waits would not end in time
        for cell, result in pool.wait():
            files = cell.files(out)
            del running[files]
            if result.late:
                until = -math.inf
                continue
            again = _again(cell, result, pool) if files not in tried else None
            if again is not None:
                tried.add(files)
                waiting.insert(0, again)
                how = "its process died" if result.died else f"{cell.gb:.0f} GB were not enough"
                say(f"{cell.title}: {how}; tried once more")
                continue
            took[cell.kind] = result.seconds
            if result.reason:
                failed[files] = result.reason
            yield cell, result, [*waiting, *running.values()]


def _again(cell: Cell, result: Result, pool: Pool) -> Cell | None:
    """The cell to try a second time: with twice the memory, where it ran out of it."""
    if result.died:
        return cell
    exhausted = result.reason.removeprefix("CUDA ").startswith("out of memory")
    return replace(cell, gb=2 * cell.gb) if exhausted and 0 < cell.gb < pool.memory() else None


@contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """SIGTERM ends a study as Ctrl-C does, by an exception: what the study started is ended on the way out."""

    told: list[int] = []

    def stop(number: int, frame: object) -> None:
        told.append(number)
        raise SystemExit(128 + number)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    except SystemExit:
        if told:  # Ray gives the exception on with another code
            raise SystemExit(128 + told[0]) from None
        raise
    finally:
        signal.signal(signal.SIGTERM, before or signal.SIG_DFL)


class _Here:
    """This process, one cell at a time."""

    def __init__(self, out: Path) -> None:
        self.out, self.ended = out, list[tuple[Cell, Result]]()

    def room(self, cell: Cell) -> bool:
        return not self.ended

    def memory(self) -> float:
        return 0.0  # one cell has all there is

    def start(self, cell: Cell, latest: float) -> None:
        self.ended.append((cell, attempt(cell, self.out)))

    def wait(self) -> list[tuple[Cell, Result]]:
        ended, self.ended = self.ended, []
        return ended


@contextmanager
def here(out: Path) -> Iterator[Pool]:
    yield _Here(out)


def attempt(cell: Cell, out: Path, share: float = 1.0, latest: float = math.inf) -> Result:
    """Compute a cell with at most a share of the GPU's memory, unless it is done or it is too late.

    A process keeps what it has freed, and would keep it from the others: so it gets its share and no more.
    """
    if time.time() > latest:
        return Result(late=True)
    if cell.done(out):  # by a process that died after it
        return Result()
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_per_process_memory_fraction(share * USABLE if share < 1 else 1.0)
        torch.cuda.reset_peak_memory_stats()
    started = time.monotonic()
    reason = compute(cell, out)
    seconds = time.monotonic() - started
    gc.collect()  # an error's frames refer to each other and to what they held on the GPU
    if not cuda:
        return Result(reason, seconds)
    torch.cuda.empty_cache()
    return Result(reason, seconds, round(torch.cuda.max_memory_reserved() / 1e9, 1))


def compute(cell: Cell, out: Path) -> str:
    """Work on a cell and store it; returns the reason where it failed, which it may do in any way."""
    started = time.monotonic()
    try:
        rows = cell.work()
        seconds = round(time.monotonic() - started, 3)
        if not cell.leaves:
            write_json(cell.path(out), sealed({"key": cell.key, "seconds": seconds, "rows": rows}))
    except Exception as error:
        if os.environ.get("VMOER_DEBUG"):
            traceback.print_exc()
        if isinstance(error, OSError) and error.filename:
            return of_files(error)
        return first_line(error)
    return ""


def row(study: str, metric: str, value: float | None, **keys: Any) -> Row:
    """A row as in `metrics.json`; keys that do not apply are null."""
    base: Row = dict.fromkeys(("model", "task", "split", "method", "seed", "signal"))
    return {"study": study, **base, "metric": metric, "value": value, "low": None, "high": None, **keys}
