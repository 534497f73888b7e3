"""Cells for tests of the engine, which processes can be given: each logs that it began, in which process, and that it ended."""

import os
import time
from functools import partial
from pathlib import Path

from vmoer.evaluation.scores import Row
from vmoer.studies._grid import Cell, row


def log(folder: Path, name: object, what: str) -> None:
    with (folder / f"{name}.log").open("a") as file:
        file.write(what + "\n")


def lines(folder: Path, name: object) -> list[str]:
    path = folder / f"{name}.log"
    return path.read_text().splitlines() if path.exists() else []


def work(folder: Path, n: int, how: str = "") -> list[Row]:
    """`how` is what goes wrong: fail, die (its process is killed), once (only the first time), wait (until it is stopped)."""
    first = not lines(folder, n)
    log(folder, n, f"began {os.getpid()}")
    if how == "fail":
        raise ValueError("no such layer\nwith details")
    if how == "die" or (how == "once" and first):
        os.kill(os.getpid(), 9)
    time.sleep(600 if how == "wait" or (how == "wait once" and first) else 0.05)
    log(folder, n, "ended")
    return [row("toy", "value", n / 7, method=str(n))]


def seconds_to_end() -> float:
    """What a study may take to end: five seconds, and more where others use the machine's cores too."""
    return 5 * max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))


def toy(folder: Path, n: int, how: str = "", needs: tuple[Cell, ...] = (), gb: float = 0.0) -> Cell:
    folder.mkdir(exist_ok=True)
    return Cell("toy", {"n": n}, partial(work, folder, n, how), needs, gb=gb)


def stage(folder: Path, n: int, how: str = "") -> Cell:
    """A cell that leaves a file of its own and no rows."""
    folder.mkdir(exist_ok=True)
    return Cell("stage", {"n": n}, partial(_stage, folder, n, how), leaves=(folder / f"stage-{n}",))


def _stage(folder: Path, n: int, how: str) -> list[Row]:
    work(folder, n, how)
    (folder / f"stage-{n}").touch()
    return []
