"""kill -9 at some of the moments of each command that writes for long; `make attack` takes two hundred (kills.py)."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from attacks import kills


@pytest.mark.slow
@pytest.mark.parametrize("work", kills.WORKS)
def test_killed_anywhere_the_next_start_ends_with_the_same_bytes(work: str, tmp_path: Path) -> None:
    """Oracle: the folder of an attempt that nobody killed. In its own process: one that has trained cannot fork and train."""
    command = [sys.executable, "-W", "ignore", kills.__file__, work, str(tmp_path), "--events", "10", "--times", "2"]
    told = subprocess.run(command, capture_output=True, text=True, timeout=1800)
    found = [json.loads(line) for line in told.stdout.splitlines()]
    assert len(found) == 12, told.stderr[-2000:]
    assert [one for one in found if one["outcome"] != "identical"] == []
