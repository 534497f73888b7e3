"""A study is a grid of independent cells. A finished cell is a file and is never computed again; a failed one is reported
and the rest goes on.

    OUT/cells/<study>-<hash of the key>.json    {"key": ..., "rows": [...]}
    OUT/<study>.json                            all rows, in the grid's order, written when the study ends
"""

import hashlib
import json
import os
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vmoer.files import write_json

Row = dict[str, Any]


@dataclass(frozen=True)
class Cell:
    """One piece of work. `key` says what it is; whatever else decides its numbers must be in it too."""

    study: str
    key: dict[str, Any]
    work: Callable[[], list[Row]] = field(repr=False)

    @property
    def name(self) -> str:
        return " ".join(str(value) for value in self.key.values() if value is not None)

    def path(self, out: Path) -> Path:
        digest = hashlib.sha256(json.dumps([self.study, self.key], sort_keys=True).encode()).hexdigest()[:16]
        return out / "cells" / f"{self.study}-{digest}.json"


@dataclass(frozen=True)
class Outcome:
    rows: list[Row]
    failed: list[tuple[Cell, str]]


def run(cells: Sequence[Cell], out: Path, *, say: Callable[[str], object] = print) -> Outcome:
    """Compute what is missing and collect the rows of every cell that is done."""
    failed: list[tuple[Cell, str]] = []
    todo = [cell for cell in cells if not cell.path(out).exists()]
    if len(todo) < len(cells):
        say(f"{len(cells) - len(todo)} of {len(cells)} cells are done already")
    started = time.monotonic()
    for number, cell in enumerate(todo, 1):
        left = (time.monotonic() - started) / max(1, number - 1) * (len(todo) - number + 1)
        eta = f", about {left / 60:.0f} min left" if number > 1 and left > 90 else ""
        say(f"[{number}/{len(todo)}{eta}] {cell.study}: {cell.name}")
        try:
            write_json(cell.path(out), {"key": cell.key, "rows": cell.work()})
        except Exception as error:  # a cell may fail in any way; the others do not depend on it
            if os.environ.get("VMOER_DEBUG"):
                traceback.print_exc()
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            failed.append((cell, reason))
            say(f"    failed: {reason}")
    rows = [row for cell in cells if cell.path(out).exists() for row in json.loads(cell.path(out).read_text())["rows"]]
    for study in dict.fromkeys(cell.study for cell in cells):
        write_json(out / f"{study}.json", [row for row in rows if row["study"] == study])
    return Outcome(rows, failed)


def row(study: str, metric: str, value: float | None, **keys: Any) -> Row:
    """A row as in `metrics.json`; keys that do not apply are null."""
    base: Row = dict.fromkeys(("model", "task", "split", "method", "seed", "signal"))
    return {"study": study, **base, "metric": metric, "value": value, "low": None, "high": None, **keys}
