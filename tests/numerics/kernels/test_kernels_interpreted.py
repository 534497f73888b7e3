"""The other files of this folder on the CPU, in Triton's interpreter, in two processes of their own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from kernel_cases import EVERYWHERE, HERE, INTERPRETED

pytest.importorskip("triton")


@pytest.mark.slow
@pytest.mark.skipif(INTERPRETED, reason="this is that process")
@pytest.mark.parametrize("half", [0, 1])
def test_interpreted(half: int) -> None:
    files = sorted(str(path) for path in HERE.glob("test_*.py") if path.name not in EVERYWHERE)
    files = files[:1] if half == 0 else files[1:]  # the first, cholesky, takes as long as the rest
    environment = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    environment = {key: value for key, value in environment.items() if not key.startswith("PYTEST_")}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-p", "no:xdist", *files]
    done = subprocess.run(command, env=environment, cwd=Path(HERE).parents[2], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
