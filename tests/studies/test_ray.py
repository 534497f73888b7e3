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

import psutil
import pytest
from toy_cells import lines, seconds_to_end

from vmoer.cli import run
from vmoer.errors import InputError
from vmoer.studies import Study, _grid, _ray, run_study

SCRIPT = """
import sys
from pathlib import Path
from toy_cells import stage, toy
from vmoer.studies import _grid, _ray

out, kind = Path(sys.argv[1]), sys.argv[2]
logs = out / "logs"
out.mkdir()
shared = stage(logs, 9)
cells = [toy(logs, n, how, (shared,)) for n, how in enumerate(sys.argv[3:])]
backend = _ray.cluster("local", cpus=2) if kind == "ray" else None
try:
    outcome = _grid.run(cells, out, backend=backend, say=lambda line: print(line, flush=True))
except KeyboardInterrupt:  # as the command line does
    sys.exit(130)
print("failed", [(cell.key["n"], reason) for cell, reason in outcome.failed])
"""


def driver(script: str, *arguments: str) -> "subprocess.Popen[str]":
    command = [sys.executable, "-c", script, *arguments]
    path = os.pathsep.join([str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    env, pipe = os.environ | {"PYTHONPATH": path}, subprocess.PIPE
    return subprocess.Popen(command, text=True, env=env, stdout=pipe, stderr=pipe)


def began(on_ray: "subprocess.Popen[str]", logs: Path, n: int) -> int:
    """The process that works on a cell, once it does."""
    deadline = time.monotonic() + 300
    while not lines(logs, n):
        assert on_ray.poll() is None, on_ray.communicate()[1]
        assert time.monotonic() < deadline
        time.sleep(0.1)
    return int(lines(logs, n)[-1].split()[1])


@pytest.mark.slow
def test_a_killed_worker_loses_nothing_and_nothing_is_done_twice(tmp_path: Path) -> None:
    """kill -9 of the worker that computes a cell. Oracle: a log of every beginning and end, and the sequential backend's
    table, byte for byte. A cell that fails of itself is reported and not begun again; one that kills its worker twice is
    given up."""
    plain = driver(SCRIPT, str(tmp_path / "one"), "here", "", "", "", "", "fail", "", "fail")
    assert "failed [(4, 'no such layer'), (6, 'no such layer')]" in plain.communicate(timeout=120)[0]

    logs = tmp_path / "ray" / "logs"
    on_ray = driver(SCRIPT, str(tmp_path / "ray"), "ray", "", "", "wait once", "", "fail", "", "die")
    os.kill(began(on_ray, logs, 2), signal.SIGKILL)
    said, errors = on_ray.communicate(timeout=300)
    assert on_ray.returncode == 0, errors
    assert "failed [(4, 'no such layer'), (6, 'The worker died" in said

    begun = [[line for line in lines(logs, n) if line.startswith("began")] for n in range(7)]
    assert [len(found) for found in begun] == [1, 1, 2, 1, 1, 1, 2]
    assert begun[2][0] != begun[2][1]
    assert [lines(logs, n).count("ended") for n in range(7)] == [1, 1, 1, 1, 0, 1, 0]
    assert len(lines(logs, 9)) == 2  # what all need was made once
    assert (tmp_path / "ray" / "toy.json").read_bytes() == (tmp_path / "one" / "toy.json").read_bytes()
    assert len(json.loads((tmp_path / "ray" / "toy.json").read_text())) == 5
    assert not [p for p in (tmp_path / "ray").iterdir() if p.name.startswith(".")]


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_study_on_a_local_ray_is_private_and_ends_when_it_is_told_to(
    number: signal.Signals, code: int, tmp_path: Path
) -> None:
    """Oracles: the system's table of listening sockets, the process table and the clock. Finished cells stay."""
    logs = tmp_path / "ray" / "logs"
    on_ray = driver(SCRIPT, str(tmp_path / "ray"), "ray", "", "wait")
    worker = began(on_ray, logs, 1)
    family = psutil.Process(on_ray.pid).children(recursive=True)
    listening = {
        connection.laddr.ip.removeprefix("::ffff:")
        for process in (psutil.Process(on_ray.pid), *family)
        for connection in process.net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    }
    assert listening == {"127.0.0.1"}
    assert worker in {process.pid for process in family}
    before = time.monotonic()
    on_ray.send_signal(number)
    on_ray.communicate(timeout=60)
    assert time.monotonic() - before < seconds_to_end()
    assert on_ray.returncode == code
    _, alive = psutil.wait_procs(family, timeout=5)
    assert not alive
    assert len(list((tmp_path / "ray" / "cells").glob("toy-*.json"))) == 1


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
    assert "on storage that every machine shares" in here.compute(cell).reason
    assert not cell.path(tmp_path).exists()


def test_a_cell_whose_worker_died_after_its_file_was_there_is_not_begun_again(tmp_path: Path) -> None:
    """It is tried once more all the same; the work would fail if it were done."""
    (tmp_path / ".ray-of-this").touch()
    here = _ray.Here(tmp_path, ".ray-of-this", os.getcwd(), {})
    done = _grid.Cell("toy", {"n": 1}, lambda: [_grid.row("toy", "value", 1.0)])
    again = _grid.Cell("toy", {"n": 1}, lambda: [_grid.row("toy", "value", 1 / 0)])
    assert here.compute(done).reason == ""
    before = done.path(tmp_path).read_bytes()
    assert here.compute(again).reason == ""
    assert done.path(tmp_path).read_bytes() == before
