"""Cells on a Ray cluster: a worker killed half-way loses nothing, and nothing is computed twice.

Ray starts processes and threads of its own, so each test's driver is a process of its own too.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from vmoer.cli import run
from vmoer.errors import InputError
from vmoer.studies import Study, _grid, _ray, run_study

# Each cell writes down that it began, by which process, and that it ended. The third waits, the first time, to be killed; the
# fifth fails, and the last kills its worker every time.
SCRIPT = """
import os, sys, time
from functools import partial
from pathlib import Path
from vmoer.studies import _grid, _ray

def log(folder, n, what):
    with (folder / f"{n}.log").open("a") as file:
        file.write(what + "\\n")

def work(folder, n, patient):
    first = not (folder / f"{n}.log").exists()
    log(folder, n, f"began {os.getpid()}")
    if n == 2 and first and patient:
        time.sleep(600)
    time.sleep(0.2)
    if n == 4 or (n == 6 and not patient):
        raise ValueError("no such layer")
    if n == 6:
        os.kill(os.getpid(), 9)
    log(folder, n, "ended")
    return [_grid.row("toy", "value", n / 7, method=str(n))]

def share(folder):
    log(folder, "shared", "made")

out, logs, kind = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
logs.mkdir()
cells = [_grid.Cell("toy", {"n": n}, partial(work, logs, n, kind == "ray")) for n in range(7)]
_ray.RETRIES = 1
backend = _ray.cluster("local", cpus=2, first=[partial(share, logs)]) if kind == "ray" else None
outcome = _grid.run(cells, out, backend=backend, say=lambda line: print(line, flush=True))
print("failed", [(cell.key["n"], reason) for cell, reason in outcome.failed])
"""


def driver(script: str, *arguments: str) -> "subprocess.Popen[str]":
    command = [sys.executable, "-c", script, *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.slow
def test_a_killed_worker_loses_nothing_and_nothing_is_done_twice(tmp_path: Path) -> None:
    """kill -9 of the worker that computes a cell. Oracle: a log of every beginning and end, and the sequential backend's
    table, byte for byte. A cell that fails of itself is reported and not begun again, one that kills its worker given up."""
    plain = driver(SCRIPT, str(tmp_path / "one"), str(tmp_path / "logs-one"), "sequential")
    assert "failed [(4, 'no such layer'), (6, 'no such layer')]" in plain.communicate(timeout=120)[0]

    on_ray = driver(SCRIPT, str(tmp_path / "ray"), str(tmp_path / "logs"), "ray")
    victim = tmp_path / "logs" / "2.log"
    deadline = time.monotonic() + 300
    while not (victim.exists() and victim.read_text().endswith("\n")):
        assert on_ray.poll() is None, on_ray.communicate()[1]
        assert time.monotonic() < deadline
        time.sleep(0.1)
    os.kill(int(victim.read_text().split()[1]), signal.SIGKILL)
    said, errors = on_ray.communicate(timeout=300)
    assert on_ray.returncode == 0, errors
    assert "failed [(4, 'no such layer'), (6, 'The worker died" in said

    lines = {n: (tmp_path / "logs" / f"{n}.log").read_text().splitlines() for n in range(7)}
    begun = {n: [line for line in found if line.startswith("began")] for n, found in lines.items()}
    assert {n: len(found) for n, found in begun.items()} == {0: 1, 1: 1, 2: 2, 3: 1, 4: 1, 5: 1, 6: 2}
    assert begun[2][0] != begun[2][1]
    assert [lines[n].count("ended") for n in range(7)] == [1, 1, 1, 1, 0, 1, 0]
    assert (tmp_path / "logs" / "shared.log").read_text() == "made\n"
    assert (tmp_path / "ray" / "toy.json").read_bytes() == (tmp_path / "one" / "toy.json").read_bytes()
    assert len(json.loads((tmp_path / "ray" / "toy.json").read_text())) == 5
    assert not [p for p in (tmp_path / "ray").iterdir() if p.name.startswith(".")]


COMMAND = ["study", "calibration", "--model", "demo", "--task", "demo", "--methods", "map,map-early", "--limit", "20"]


@pytest.mark.slow
def test_a_study_on_ray_is_the_study(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command itself, into a relative folder. Oracle: the same command without Ray, byte for byte; again it needs no Ray."""
    monkeypatch.chdir(tmp_path)
    assert run([*COMMAND, "--out", "one"]) == 0
    script = f"import sys; from vmoer.cli import run; sys.exit(run({COMMAND} + sys.argv[1:]))"
    on_ray = driver(script, "--out", "two", "--backend", "ray", "--ray-address", "local")
    said, errors = on_ray.communicate(timeout=400)
    assert on_ray.returncode == 0, errors
    assert "[2/2] calibration" in said
    assert (tmp_path / "one" / "metrics.json").read_bytes() == (tmp_path / "two" / "metrics.json").read_bytes()
    assert run([*COMMAND, "--out", "two", "--backend", "ray", "--ray-address", "127.0.0.1:1"]) == 0


def closed_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


@pytest.mark.parametrize("kind", ["{}:{}", "ray://{}:{}"])
def test_a_cluster_that_is_not_there(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    address = kind.format("127.0.0.1", closed_port())
    assert run([*COMMAND, "--out", str(tmp_path), "--backend", "ray", "--ray-address", address]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert f"there is no Ray cluster at {address}" in error


def test_no_cluster_is_running(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray looks for one on this machine, and what it raises becomes one line."""
    import ray

    def init(*args: object, **kwargs: object) -> None:
        raise ConnectionError("Could not find any running Ray instance.\nPlease specify the one to connect to.")

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(ray, "init", init)
    assert run([*COMMAND, "--out", str(tmp_path), "--backend", "ray"]) == 2
    assert "there is no Ray cluster running" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"backend": "ray", "ray_address": "here"}, "host:port"),
        ({"backend": "slurm"}, "processes or ray"),
        ({"ray_address": "local"}, "not backend ray"),
        ({"backend": "ray", "workers": 2}, "as many as it has"),
    ],
)
def test_bad_backends(asked: dict[str, object], message: str, tmp_path: Path) -> None:
    study = Study(model="demo", task="demo", out=tmp_path, methods=("map",))
    with pytest.raises(InputError, match=message):
        run_study("calibration", study, **asked)  # type: ignore[arg-type]


def test_a_machine_that_does_not_see_the_folder_says_so(tmp_path: Path) -> None:
    """The folder's name exists there too, but it is another one: the marker is missing."""
    here = _ray.Here(tmp_path, ".ray-of-another", str(tmp_path), {})
    cell = _grid.Cell("toy", {"n": 1}, list)
    assert "on storage that every machine shares" in here.compute(cell)
    assert not cell.path(tmp_path).exists()


def test_a_cell_whose_worker_died_after_its_file_was_there_is_not_begun_again(tmp_path: Path) -> None:
    """Ray gives the task to another worker all the same; the work would fail if it were done."""
    (tmp_path / ".ray-of-this").touch()
    here = _ray.Here(tmp_path, ".ray-of-this", os.getcwd(), {})
    done = _grid.Cell("toy", {"n": 1}, lambda: [_grid.row("toy", "value", 1.0)])
    again = _grid.Cell("toy", {"n": 1}, lambda: [_grid.row("toy", "value", 1 / 0)])
    assert here.compute(done) == ""
    before = done.path(tmp_path).read_bytes()
    assert here.compute(again) == ""
    assert done.path(tmp_path).read_bytes() == before
