"""The plain PyTorch path, which is what CPUs run, against the paper's listing: a ratio within one run."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


@pytest.mark.slow
def test_four_times_faster_than_the_listing() -> None:
    """In a process of its own, as a user runs it: what other tests leave in the allocator changes what the listing's large
    temporaries cost, and so does the number of threads."""
    command = [sys.executable, str(ROOT / "benchmarks" / "router_cpu.py")]
    done = subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    measured = ast.literal_eval(done.stdout.strip().splitlines()[-1])
    assert measured["speedup"] > 4, measured
