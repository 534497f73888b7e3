"""Training in two processes: the same run as in one."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from train_workers import job, world

import vmoer
from vmoer.cli import run

KINDS = ["whole", "whole-accumulated", "sharded"]


def steps(folder: Path) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (folder / "telemetry.jsonl").read_text().splitlines()]
    return [row for row in rows if "loss" in row]


def same_routing(one: Path, two: Path) -> None:
    """The router logits on the same prompts: equal on both ranks to the bit, and those of one process."""
    first, second = (torch.load(two / f"logits-{rank}.pt") for rank in (0, 1))
    assert torch.equal(first, second)
    torch.testing.assert_close(first, torch.load(one / "logits-0.pt"), atol=1e-4, rtol=0)


def same_trainer_run(one: Path, two: Path) -> None:
    losses, theirs = (json.loads((folder / "losses.json").read_text()) for folder in (one, two))
    assert len(losses) == 8
    assert losses == pytest.approx(theirs, abs=1e-4)
    routers, others = (torch.load(folder / "routers.pt") for folder in (one, two))
    for name, value in routers.items():
        torch.testing.assert_close(value, others[name], atol=1e-5, rtol=0)
    same_routing(one, two)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every two-process run, in one pair of processes, and the runs in this process that they are compared with."""
    torch.set_num_threads(1)
    where = tmp_path_factory.mktemp("parallel")
    command = [sys.executable, "-W", "error", job.__file__, json.dumps({"parallel": str(where)})]
    other = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    job.loop(0, 1, str(where / "one"))
    job.trainer(0, 1, str(where / "trainer-one"), batch=16, accumulate=1)
    job.trainer(0, 1, str(where / "trainer-lora"), batch=16, accumulate=1, lora=True)
    output = other.communicate(timeout=400)[0]
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
    same_routing(folder / "one", folder / kind)


@pytest.mark.slow
def test_trainer_under_ddp_trains_as_in_one_process(folder: Path) -> None:
    """Oracle: one process with batches of 16 rows, against two with accumulation 2 x 4."""
    same_trainer_run(folder / "trainer-one", folder / "trainer")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["trainer-sharded", "trainer-cut"])
def test_trainer_under_fsdp2_trains_as_in_one_process(kind: str, folder: Path) -> None:
    """Oracle: one process, with an adapter; also when the sharded run was stopped half-way and resumed."""
    same_trainer_run(folder / "trainer-lora", folder / kind)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "lora"), [("trainer", False), ("trainer-sharded", True)])
def test_checkpoints_of_several_processes_hold_adapter_and_routers_alone(kind: str, lora: bool, folder: Path) -> None:
    """Oracle: the files' names, the tensors in them, and their sizes against the base model's."""
    checkpoint = folder / kind / "checkpoint-8"
    assert not [p.name for p in checkpoint.iterdir() if p.name.startswith(("model", "pytorch_model"))]
    routers = load_file(checkpoint / "router.safetensors")
    assert routers.keys() == torch.load(folder / kind / "routers.pt").keys()
    if lora:
        adapter = load_file(checkpoint / "adapter_model.safetensors")
        assert adapter
        assert all("lora_" in name for name in adapter)
    base = world.model()
    loaded = vmoer.load(base, checkpoint)
    prompts = torch.tensor(world.examples(6, 3, fillers=0).prompts)
    logits = job.router_logits(loaded, {"input_ids": prompts})
    torch.testing.assert_close(logits, torch.load(folder / kind / "logits-0.pt"), atol=1e-5, rtol=0)


@pytest.mark.slow
def test_trainer_refuses_to_shard_where_accelerate_would_not(folder: Path) -> None:
    for rank in (0, 1):
        assert "shards on GPUs alone" in (folder / f"refusal-{rank}.txt").read_text()


# -- the commands of examples/accelerate/README.md ---------------------------------------------------------------------


def launched(config: str, arguments: list[str]) -> None:
    """`accelerate launch --config_file CONFIG --no_python vmoer ARGUMENTS`: two processes on the CPU."""
    launcher = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(job.CONFIGS / config)]
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    env = os.environ | {"PATH": path, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*launcher, "--no_python", "vmoer", *arguments], env=env, capture_output=True, text=True, timeout=400
    )
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Both stages in one process and in two (ddp.yaml); stage 2 over the same stage 1 in one and sharded (fsdp2.yaml)."""
    torch.set_num_threads(1)
    where = tmp_path_factory.mktemp("launched")
    model, data = world.save(where)
    command = ["train", model, "--task", "sciq", "--data-root", data, "--layers", "0,1", "--rank", "2"]
    command += ["--stage1-epochs", "2", "--stage2-epochs", "2", "--stage2-lr", "5e-3", "--beta", "0.1"]
    assert run([*command, "--out", str(where / "one")]) == 0
    launched("ddp.yaml", [*command, "--out", str(where / "ddp")])
    over = [*command, "--from-map", str(where / "one")]
    assert run([*over, "--out", str(where / "over-one")]) == 0
    launched("fsdp2.yaml", [*over, "--out", str(where / "over-fsdp2")])
    return where


@pytest.mark.slow
@pytest.mark.parametrize(("one", "two", "adapted"), [("one", "ddp", 1e-4), ("over-one", "over-fsdp2", 0.0)])
def test_a_launched_train_command_is_that_of_one_process(one: str, two: str, adapted: float, runs: Path) -> None:
    """Oracle: the same command without a launcher: losses of both stages, the tensors in the run folder, and no others."""
    ours, theirs = steps(runs / one), steps(runs / two)
    assert len(ours) == len(theirs) >= 4
    assert [row["loss"] for row in theirs] == pytest.approx([row["loss"] for row in ours], abs=1e-4)
    files = {p.name for p in (runs / two).iterdir() if p.suffix == ".safetensors"}
    assert files == {"adapter_model.safetensors", "router.safetensors"}
    for name, atol in (("adapter_model", adapted), ("router", 1e-4)):
        mine, other = (load_file(runs / kind / f"{name}.safetensors") for kind in (one, two))
        kept = {key for key in mine if "novelty" not in key}  # a sharded run is fitted afterwards
        assert kept == {key for key in other if "novelty" not in key}
        for key in kept:
            torch.testing.assert_close(mine[key], other[key], atol=atol, rtol=0)
