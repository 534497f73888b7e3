"""The engine of the studies: what is computed, in which order, and what happens to cells and processes that end badly."""

import json
import os
import signal
import subprocess
import sys
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from toy_cells import lines, log, seconds_to_end, stage, toy

from vmoer.evaluation.scores import Row
from vmoer.studies import _grid, _processes
from vmoer.studies._grid import Cell, Result
from vmoer.studies._processes import processes


def quiet(line: str) -> None:
    pass


def cell(name: str, work: Any, **more: Any) -> Cell:
    return Cell("toy", {"method": name}, work, **more)


# -- files -------------------------------------------------------------------------------------------------------------


def test_a_finished_cell_is_never_computed_again(tmp_path: Path) -> None:
    calls: list[str] = []

    def work(name: str) -> list[Row]:
        calls.append(name)
        return [_grid.row("toy", "value", float(len(name)), method=name)]

    cells = [cell(name, lambda name=name: work(name)) for name in ("a", "bb")]
    first = _grid.run(cells, tmp_path, say=quiet)
    again = _grid.run(cells, tmp_path, say=quiet)
    assert calls == ["a", "bb"]
    assert first.rows == again.rows
    assert [row["value"] for row in first.rows] == [1.0, 2.0]


@pytest.mark.parametrize("damage", ["flip", "cut", "other", "empty", "[]", "unsealed"])
def test_a_damaged_cell_is_named_and_computed_again(damage: str, tmp_path: Path) -> None:
    """Oracle: the rows before the damage."""
    cells = [toy(tmp_path / "log", n) for n in (0, 1)]
    rows, path = _grid.run(cells, tmp_path, say=quiet).rows, cells[0].path(tmp_path)
    whole = path.read_text()
    texts = {"flip": whole.replace("0.0", "0.5", 1), "cut": whole[:-9], "other": cells[1].path(tmp_path).read_text()}
    unsealed = {k: v for k, v in json.loads(whole).items() if k != "sha256"}
    path.write_text((texts | {"empty": "", "[]": "[]", "unsealed": json.dumps(unsealed)})[damage])
    with pytest.warns(UserWarning, match=r"is computed again"):
        again = _grid.run(cells, tmp_path, say=quiet)
    assert again.rows == rows
    assert [len(lines(tmp_path / "log", n)) for n in (0, 1)] == [4, 2]
    assert not _grid.run(cells, tmp_path, say=quiet).failed


def test_a_cells_file_is_where_it_always_was(tmp_path: Path) -> None:
    """Oracle: names of cells that the first version computed, which must be found again. Needs and memory are in no name."""
    results = Path(__file__).parents[2] / "results" / "smolmoe" / "openbookqa" / "files.json"
    stored = {
        name: found for name, found in json.loads(results.read_text()).items() if name.startswith("cells/factors-")
    }
    assert len(stored) > 30
    for name, found in stored.items():
        one = Cell("factors", found["key"], list, needs=(cell("a", list),), gb=3.0)
        assert one.path(tmp_path) == tmp_path / name


def test_a_failed_cell_leaves_the_others(tmp_path: Path) -> None:
    said: list[str] = []
    cells = [toy(tmp_path / "log", 0, "fail"), toy(tmp_path / "log", 1)]
    outcome = _grid.run(cells, tmp_path, say=said.append)
    assert [(c.key["n"], reason) for c, reason in outcome.failed] == [(0, "no such layer")]
    assert [row["value"] for row in outcome.rows] == [1 / 7]
    assert any("failed: no such layer" in line for line in said)
    mended = _grid.run([toy(tmp_path / "log", 0), cells[1]], tmp_path, say=quiet)
    assert not mended.failed
    assert len(mended.rows) == 2


def test_what_a_failed_cell_held_is_given_back(tmp_path: Path) -> None:
    """Oracle: an object that only the failed frame and a cycle through it know of."""

    class Held:
        itself: Any

    kept: list[Any] = []

    def work() -> list[Row]:
        held = Held()
        held.itself = held
        kept.append(weakref.ref(held))
        raise ValueError("no")

    assert _grid.attempt(cell("a", work), tmp_path).reason == "no"
    assert kept[0]() is None


# -- order -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_what_a_cell_needs_comes_first_and_only_where_it_is_needed(workers: int, tmp_path: Path) -> None:
    """Oracle: the logs of every beginning. A stage whose cells are done is not made again."""
    folder = tmp_path / "log"
    shared, unused = stage(folder, 10), stage(folder, 11)
    cells = [toy(folder, 0, needs=(shared,)), toy(folder, 1, needs=(shared,)), toy(folder, 2, needs=(unused,))]
    _grid.run([replace(cells[2], needs=())], tmp_path, say=quiet)
    ended: list[str] = []
    outcome = _grid.run(
        cells, tmp_path, backend=processes(workers), say=quiet, after=lambda end, left: ended.append(end.cell.study)
    )
    assert not outcome.failed
    assert [row["method"] for row in outcome.rows] == ["0", "1", "2"]
    assert ended == ["stage", "toy", "toy"]
    assert [len(lines(folder, n)) for n in (10, 11, 0, 1, 2)] == [2, 0, 2, 2, 2]
    assert not (tmp_path / "stage.json").exists()  # it has no rows


def test_a_failed_cell_holds_back_what_needs_it_and_no_more(tmp_path: Path) -> None:
    folder = tmp_path / "log"
    first = stage(folder, 0, "fail")
    second = toy(folder, 1, needs=(first,))
    outcome = _grid.run([second, toy(folder, 2, needs=(second,)), toy(folder, 3)], tmp_path, say=quiet)
    assert [(c.key["n"], reason) for c, reason in outcome.failed] == [
        (0, "no such layer"),
        (1, "stage: all failed: no such layer"),
        (2, "toy: all failed: stage: all failed: no such layer"),
    ]
    assert [len(lines(folder, n)) for n in range(4)] == [1, 0, 0, 2]


def test_nothing_is_started_that_would_not_end_in_time(tmp_path: Path) -> None:
    """The first of a kind shows how long it takes, or one of a run before; the others are left and are no failures."""

    def same(seed: int) -> Cell:
        return Cell("toy", {"method": "same", "seed": seed}, lambda: time.sleep(0.1) or [])  # type: ignore[func-returns-value]

    cells = [same(seed) for seed in range(4)]
    left: list[int] = []
    outcome = _grid.run(
        cells, tmp_path, until=time.time() + 0.15, say=quiet, after=lambda end, rest: left.append(len(rest))
    )
    assert [one.done(tmp_path) for one in cells] == [True, False, False, False]
    assert (outcome.failed, left) == ([], [3])
    _grid.run(cells, tmp_path, until=time.time() + 5, took={"toy: same": 10.0}, say=quiet)
    assert not cells[1].done(tmp_path)
    assert _grid.attempt(cells[1], tmp_path, latest=time.time() - 1).late
    assert not cells[1].done(tmp_path)
    _grid.run(cells, tmp_path, until=time.time() + 5, took={"toy: same": 0.1}, say=quiet)
    assert cells[3].done(tmp_path)


# -- memory ------------------------------------------------------------------------------------------------------------


def test_cells_share_the_memory_of_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """100 GB and three processes: never more at one time than there is, but one cell always runs."""
    monkeypatch.setattr(_processes, "gpu_gb", lambda: 100.0)
    pool = _processes._Processes(3, tmp_path)
    running: list[Any] = []
    pool.all = running

    def room(gb: float, *taken: float) -> bool:
        running[:] = [SimpleNamespace(cell=cell("x", list, gb=other)) for other in taken]
        return pool.room(cell("y", list, gb=gb))

    assert room(200)
    assert room(40, 30, 30)
    assert not room(41, 30, 30)
    assert room(0, 60, 60)
    assert not room(0, 1, 1, 1)


def test_a_cell_that_ran_out_of_memory_gets_twice_as_much_once(tmp_path: Path) -> None:
    """Oracle: by hand. Of 100 GB: 30 are too little for b, 60 do; c needs more than 60; d asks for all there is at once."""
    given: list[tuple[str, float]] = []

    class Gpu:
        def __init__(self) -> None:
            self.started: list[Cell] = []

        def room(self, one: Cell) -> bool:
            return not self.started

        def memory(self) -> float:
            return 100.0

        def start(self, one: Cell, latest: float) -> None:
            self.started.append(one)

        def wait(self) -> list[tuple[Cell, Result]]:
            one = self.started.pop()
            given.append((one.key["method"], one.gb))
            if one.gb < {"a": 30, "b": 50, "c": 70, "d": 200}[one.key["method"]]:
                return [(one, Result("CUDA out of memory. Tried to allocate 2 GiB"))]
            return [(one, Result(_grid.compute(one, tmp_path)))]

    @contextmanager
    def gpu(out: Path) -> Iterator[Gpu]:
        yield Gpu()

    said: list[str] = []
    cells = [cell(name, list, gb=gb) for name, gb in (("a", 30), ("b", 30), ("c", 30), ("d", 100))]
    outcome = _grid.run(cells, tmp_path, backend=gpu, say=said.append)
    assert given == [("a", 30), ("b", 30), ("b", 60), ("c", 30), ("c", 60), ("d", 100)]
    assert [one.key["method"] for one, _ in outcome.failed] == ["c", "d"]
    assert "toy: b: 30 GB were not enough; tried once more" in said


# -- processes ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_killed_process_is_one_failed_cell_tried_once_more(tmp_path: Path) -> None:
    """Oracle: the log of every beginning and end, and the rows of a run in one process."""
    folder, said = tmp_path / "log", list[str]()
    how = {1: "once", 3: "fail", 4: "die"}
    cells = [toy(folder, n, how.get(n, "")) for n in range(6)]
    outcome = _grid.run(cells, tmp_path / "two", backend=processes(2), say=said.append)
    assert [(c.key["n"], reason) for c, reason in outcome.failed] == [(3, "no such layer"), (4, _processes.DIED)]
    begun = [[line for line in lines(folder, n) if line != "ended"] for n in range(6)]
    assert [len(found) for found in begun] == [1, 2, 1, 1, 2, 1]
    assert begun[1][0] != begun[1][1]
    assert [lines(folder, n).count("ended") for n in range(6)] == [1, 1, 1, 0, 0, 1]
    assert sum("its process died; tried once more" in line for line in said) == 2
    alone = _grid.run([toy(folder, n) for n in (0, 1, 2, 5)], tmp_path / "one", say=quiet)
    assert outcome.rows == alone.rows


SCRIPT = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[3])
from toy_cells import toy
from vmoer.studies import _grid
from vmoer.studies._processes import processes
if __name__ == "__main__":
    out, workers = Path(sys.argv[1]), int(sys.argv[2])
    cells = [toy(out / "log", n, how) for n, how in enumerate(sys.argv[4:])]
    try:
        _grid.run(cells, out, backend=processes(workers), say=lambda line: print(line, flush=True))
    except KeyboardInterrupt:  # as the command line does
        sys.exit(130)
"""


def started(out: Path, workers: int, *how: str) -> "subprocess.Popen[str]":
    out.mkdir(exist_ok=True)
    script = out / "script.py"
    script.write_text(SCRIPT)
    command = [sys.executable, str(script), str(out), str(workers), str(Path(__file__).parent), *how]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("workers", "number", "everybody", "code"),
    [
        (1, signal.SIGINT, True, 130),
        (1, signal.SIGTERM, False, 143),
        (2, signal.SIGINT, True, 130),
        (2, signal.SIGTERM, False, 143),
        (2, signal.SIGKILL, False, -signal.SIGKILL),
    ],
)
def test_a_study_ends_when_it_is_told_to(
    workers: int, number: signal.Signals, everybody: bool, code: int, tmp_path: Path
) -> None:
    """Ctrl-C goes to all processes of a terminal, SIGTERM to one. Oracles: the clock, the process table, the cells' files."""
    running = started(tmp_path, workers, "", *["wait"] * workers, "")
    deadline = time.monotonic() + 120
    while not all(lines(tmp_path / "log", n) for n in range(workers + 1)):
        assert running.poll() is None, running.communicate()[1]
        assert time.monotonic() < deadline
        time.sleep(0.05)
    pids = [int(line.split()[1]) for n in range(workers + 1) for line in lines(tmp_path / "log", n) if "began" in line]
    before = time.monotonic()
    (os.killpg if everybody else os.kill)(running.pid, number)
    running.communicate(timeout=30)
    assert time.monotonic() - before < seconds_to_end()
    assert running.returncode == code
    time.sleep(0.5)  # a process whose parent was killed needs a moment to notice
    assert not [pid for pid in pids if alive(pid)]
    assert len(list((tmp_path / "cells").glob("toy-*.json"))) == 1
    if number != signal.SIGTERM:
        return
    for n in range(workers + 2):
        log(tmp_path / "log", n, "asked again")
    again = started(tmp_path, workers, *[""] * (workers + 2))
    said, errors = again.communicate(timeout=120)
    assert again.returncode == 0, errors
    assert f"1 of {workers + 2} cells are done already" in said


@pytest.mark.slow
def test_an_interrupt_while_a_process_starts_is_not_its_own(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Ctrl-C goes to all processes of a terminal. Oracle: the cell is done, and nothing is printed."""
    pool: Any
    with processes(2)(tmp_path) as pool:
        pool.start(toy(tmp_path / "log", 0), 0.0)
        os.kill(pool.all[0].process.pid, signal.SIGINT)
        (ended,) = pool.wait()
    assert (ended[1].reason, ended[1].died) == ("", False)
    assert capfd.readouterr().err == ""


@pytest.mark.slow
def test_kill_and_restart_give_the_same_bytes(tmp_path: Path) -> None:
    """kill -9 after the first cell, start again: the table is that of a run without interruption, byte for byte."""
    whole = started(tmp_path / "whole", 1, "", "", "")
    assert "[3/3" in whole.communicate(timeout=120)[0]
    running = started(tmp_path / "killed", 1, "", "wait", "")
    assert running.stdout is not None
    assert running.stdout.readline().startswith("[1/")
    os.kill(running.pid, signal.SIGKILL)
    running.communicate()
    assert not (tmp_path / "killed" / "toy.json").exists()
    said, errors = started(tmp_path / "killed", 1, "", "", "").communicate(timeout=120)
    assert "1 of 3 cells are done already" in said, errors
    assert (tmp_path / "killed" / "toy.json").read_bytes() == (tmp_path / "whole" / "toy.json").read_bytes()
    assert len(json.loads((tmp_path / "whole" / "toy.json").read_text())) == 3
