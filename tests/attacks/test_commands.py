"""Commands that share a folder, that are stopped, and that have no room: a part of `make attack` (commands.py)."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from attacks import commands


def attempts(part: str, folder: Path, *more: str) -> list[dict[str, str]]:
    command = [sys.executable, "-W", "ignore", commands.__file__, part, str(folder), *more]
    told = subprocess.run(command, capture_output=True, text=True, timeout=1800)
    found = [json.loads(line) for line in told.stdout.splitlines()]
    assert found, told.stderr[-2000:]
    if any(one["outcome"] == "left out" for one in found):
        found = [one for one in found if one["outcome"] != "left out"] or pytest.skip(str(found))
    return found


@pytest.mark.slow
def test_two_processes_on_one_folder(tmp_path: Path) -> None:
    """Of every command that writes, also in two PID namespaces where that is permitted: the second says why not, the first works.

    Oracle: the folder that the command leaves alone, byte for byte.
    """
    found = attempts("two", tmp_path)
    assert {one["command"] for one in found} == {*commands.lines(tmp_path)}
    assert [one for one in found if one["outcome"] != "refused"] == []


@pytest.mark.slow
def test_a_stopped_command_goes_on_to_the_same_bytes(tmp_path: Path) -> None:
    """Ctrl-C and SIGTERM. Oracles: the exit codes of shells, the clock, the folder of the command alone."""
    found = attempts("stop", tmp_path, "--only", "train,calibrate,report,demo", "--moments", "1")
    assert len(found) == 8
    assert [one for one in found if one["outcome"] not in ("stopped", "late")] == []


@pytest.mark.slow
def test_without_room_it_is_one_line_and_with_room_the_same_bytes(tmp_path: Path) -> None:
    """A disk that is full at several sizes, and one that cannot be written. Oracle: the folder of the command alone."""
    found = attempts("room", tmp_path, "--only", "train,calibrate,threshold")
    assert len(found) == 15
    assert [one for one in found if one["outcome"] != "refused"] == []


def test_two_writers_and_readers_never_tear_a_file(tmp_path: Path) -> None:
    """Both writers have process number 1 where namespaces are permitted. Oracle: the two texts that are written."""
    (found,) = attempts("reads", tmp_path)
    assert found["outcome"] == "whole", found["said"]
