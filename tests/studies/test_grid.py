"""Cells are stored when done and never computed again; a failed one is reported and the rest goes on."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from vmoer.studies import _grid


def cell(name: str, work: object) -> _grid.Cell:
    return _grid.Cell("toy", {"name": name}, work)  # type: ignore[arg-type]


def test_a_finished_cell_is_never_computed_again(tmp_path: Path) -> None:
    calls: list[str] = []

    def work(name: str) -> list[_grid.Row]:
        calls.append(name)
        return [_grid.row("toy", "value", float(len(name)), method=name)]

    cells = [cell(name, lambda name=name: work(name)) for name in ("a", "bb")]
    first = _grid.run(cells, tmp_path, say=lambda line: None)
    again = _grid.run(cells, tmp_path, say=lambda line: None)
    assert calls == ["a", "bb"]
    assert first.rows == again.rows
    assert [row["value"] for row in first.rows] == [1.0, 2.0]


def test_a_failed_cell_leaves_the_others(tmp_path: Path) -> None:
    def impossible() -> list[_grid.Row]:
        raise ValueError("no such layer\nwith details")

    said: list[str] = []
    done = [_grid.row("toy", "value", 1.0)]
    outcome = _grid.run([cell("bad", impossible), cell("good", lambda: done)], tmp_path, say=said.append)
    assert [(c.key["name"], reason) for c, reason in outcome.failed] == [("bad", "no such layer")]
    assert outcome.rows == done
    assert any("failed: no such layer" in line for line in said)
    mended = _grid.run([cell("bad", lambda: done), cell("good", lambda: done)], tmp_path, say=said.append)
    assert not mended.failed
    assert len(mended.rows) == 2


SCRIPT = """
import sys, time
from pathlib import Path
from vmoer.studies import _grid
def work(n):
    time.sleep(0.3)
    return [_grid.row("toy", "value", n / 7, method=str(n))]
cells = [_grid.Cell("toy", {"n": n}, lambda n=n: work(n)) for n in range(4)]
_grid.run(cells, Path(sys.argv[1]), say=lambda line: print(line, flush=True))
"""


@pytest.mark.slow
def test_kill_and_restart_give_the_same_bytes(tmp_path: Path) -> None:
    """kill -9 after the first cell, start again: the table is that of a run without interruption, byte for byte."""
    command = [sys.executable, "-c", SCRIPT]
    subprocess.run([*command, str(tmp_path / "whole")], check=True, capture_output=True)
    running = subprocess.Popen([*command, str(tmp_path / "killed")], stdout=subprocess.PIPE, text=True)
    assert running.stdout is not None
    for line in running.stdout:
        if line.startswith("[1/"):
            os.kill(running.pid, signal.SIGKILL)
            break
    running.wait()
    running.stdout.close()
    assert not (tmp_path / "killed" / "toy.json").exists()
    out = subprocess.run([*command, str(tmp_path / "killed")], check=True, capture_output=True, text=True).stdout
    assert "1 of 4 cells are done already" in out
    assert (tmp_path / "killed" / "toy.json").read_bytes() == (tmp_path / "whole" / "toy.json").read_bytes()
    assert len(json.loads((tmp_path / "whole" / "toy.json").read_text())) == 4
