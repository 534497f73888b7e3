"""Stage 2 in two processes: the same run as in one."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from train_workers import job

KINDS = ["whole", "whole-accumulated", "sharded"]


def steps(folder: Path) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (folder / "telemetry.jsonl").read_text().splitlines()]
    return [row for row in rows if "loss" in row]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every two-process run, in one pair of processes, and the runs in this process that they are compared with."""
    torch.set_num_threads(1)
    where = tmp_path_factory.mktemp("parallel")
    command = [sys.executable, "-W", "error", job.__file__, json.dumps({"parallel": str(where)})]
    other = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    job.loop(0, 1, str(where / "one"))
    job.trainer(0, 1, str(where / "trainer-one"), batch=16, accumulate=1)
    output = other.communicate(timeout=300)[0]
    assert other.returncode == 0, output
    return where


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_two_processes_train_as_one(kind: str, folder: Path) -> None:
    """Oracle: one process from the same seed. Loss and KL of 32 steps (a KL counted twice would differ by its own size),
    and the routers at the end, although the ranks hold different rows, padding and shards."""
    one, two = steps(folder / "one"), steps(folder / kind)
    assert len(one) == len(two) == 32
    assert one[-1]["kl"] > 1e-4
    for a, b in zip(one, two, strict=True):
        assert a["loss"] == pytest.approx(b["loss"], abs=1e-4)
        assert a["kl"] == pytest.approx(b["kl"], rel=1e-3, abs=1e-9)
        assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=1e-3)
    routers, theirs = (torch.load(folder / name / "routers.pt") for name in ("one", kind))
    assert routers.keys() == theirs.keys()
    for name, value in routers.items():
        torch.testing.assert_close(value, theirs[name], atol=1e-5, rtol=0)


@pytest.mark.slow
def test_trainer_under_ddp_trains_as_in_one_process(folder: Path) -> None:
    """Oracle: one process with batches of 16 rows, against two with accumulation 2 x 4."""
    losses, theirs = (json.loads((folder / name / "losses.json").read_text()) for name in ("trainer-one", "trainer"))
    assert losses == pytest.approx(theirs, abs=1e-4)
    routers, others = (torch.load(folder / name / "routers.pt") for name in ("trainer-one", "trainer"))
    for name, value in routers.items():
        torch.testing.assert_close(value, others[name], atol=1e-5, rtol=0)
