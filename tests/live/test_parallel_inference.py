"""Experts spread over two processes: every process runs every router, and all must route alike.

Processes gather what the experts answered, so equal outputs prove nothing: router logits are compared.
"""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from train_workers import experts, job, world

import vmoer
from vmoer import gates
from vmoer.cli import run as command_line
from vmoer.errors import AttachError
from vmoer.live.attach import attachment_of, routers_of
from vmoer.models import open_model
from vmoer.training.lora import add_lora


def launched(script: Path, *arguments: str) -> str:
    """`accelerate launch --config_file examples/accelerate/expert-parallel.yaml SCRIPT ARGUMENTS`: two CPU processes."""
    config = str(job.CONFIGS / "expert-parallel.yaml")
    command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", config, str(script), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp("experts")
    for name in experts.MODELS:
        tiny.model(name).save_pretrained(where / name)
    launched(Path(experts.__file__), str(where))
    return where


def seen(case: experts.Case, folder: Path) -> list[dict[str, Any]]:
    return [torch.load(folder / f"{case.name}-{rank}.pt") for rank in (0, 1)]


@pytest.mark.slow
@pytest.mark.parametrize("case", experts.CASES, ids=lambda case: case.name)
def test_both_processes_route_alike_and_as_one(case: experts.Case, folder: Path) -> None:
    """Oracle: the other rank, to the bit, and the whole model in one process."""
    one = experts.measure(case, folder, 1, 0)
    first, second = seen(case, folder)
    assert torch.equal(first["router_logits"], second["router_logits"])
    assert torch.equal(first["experts"], second["experts"])
    assert torch.equal(one["experts"], first["experts"])
    for name, value in one.items():
        for there in (first, second):
            torch.testing.assert_close(there[name], value, atol=1e-4, rtol=1e-4)
    assert ("gradients" in one) == (case.method != "temp-scale")


@pytest.mark.slow
@pytest.mark.parametrize("case", experts.FRESH, ids=lambda case: case.name)
def test_equal_outputs_hide_routers_that_differ(case: experts.Case, folder: Path) -> None:
    """With fresh noise from generators that differ the outputs still agree, the logits do not: the test above can fail."""
    first, second = seen(case, folder)
    torch.testing.assert_close(first["outputs"], second["outputs"], atol=1e-5, rtol=0)
    assert (first["router_logits"] - second["router_logits"]).abs().max() > 1e-2


@pytest.mark.slow
@pytest.mark.skipif(not experts.GRANITE, reason="Granite has no expert-parallel plan in this version of transformers")
def test_the_example_answers_as_one_process_does(tmp_path: Path) -> None:
    """`vmoer merge` on a run with an adapter, then expert_parallel.py on its folder. Oracle: the run itself, in one process."""
    name, _ = world.save(tmp_path)
    model = add_lora(open_model(name).model, rank=2)
    vmoer.attach(model, vmoer.FullCovariance(beta=0.1))
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for key, p in model.named_parameters():
            if ".lora_" in key or ".vmoer." in key:
                p.add_(torch.randn(p.shape, generator=generator) * 0.1)
    vmoer.save(model, tmp_path / "run", run={"model": name})

    assert command_line(["merge", str(tmp_path / "run"), "--out", str(tmp_path / "merged")]) == 0
    prompts = ["w1 o3 answer", "filler w5 o7 answer"]
    lines = launched(job.CONFIGS / "expert_parallel.py", str(tmp_path / "merged"), *prompts).splitlines()
    assert len(lines) == 2

    opened = open_model(tmp_path / "run")
    for prompt, line in zip(prompts, lines, strict=True):
        batch = dict(opened.tokenizer(prompt, return_tensors="pt"))
        batch.pop("token_type_ids", None)
        with vmoer.record(opened.model) as rec:
            log_probs = vmoer.predict(opened.model, batch)
        token = int(log_probs[0].argmax())
        said = f"{opened.tokenizer.decode([token])!r} with probability {log_probs[0, token].exp():.3f}"
        variance = f"logit_variance {rec.signals['logit_variance'][:, 0, -1].mean():.4g}"
        assert line.startswith(f"{prompt} -> {said}")
        assert variance in line


class SecondOfTwo:
    """As much of a device mesh as a masked router asks for: this process holds the second half of the experts."""

    def get_local_rank(self) -> int:
        return 1

    def size(self) -> int:
        return 2


def test_a_masked_router_is_reached_and_left_as_it_was() -> None:
    """The plan's wrapper sits on the instance. Oracle: its masking done by hand on what the same router chose without it."""
    from transformers.distributed.tensor_parallel import ALL_PARALLEL_STYLES

    states = torch.randn(7, 32, generator=torch.Generator().manual_seed(0))

    @torch.no_grad()
    def answer(model: Any) -> tuple[torch.Tensor, ...]:
        return gates.find(model)[0].router(states)  # type: ignore[no-any-return]

    plain, masked = tiny.model("qwen3_moe"), tiny.model("qwen3_moe")
    for found in gates.find(masked):
        ALL_PARALLEL_STYLES["ep_router"].install_forward(found.router, SecondOfTwo())
    before = answer(masked)
    for model in (plain, masked):
        vmoer.attach(model, vmoer.FullCovariance(seed=1))
        for router in routers_of(model).values():
            torch.nn.init.normal_(router.heads.weight, std=0.3, generator=torch.Generator().manual_seed(1))
    (logits, weights, chosen), (ours, kept, places) = answer(plain), answer(masked)
    assert torch.equal(ours, logits)
    assert not torch.equal(ours, before[0])
    here = chosen >= 3
    assert torch.equal(kept, weights.where(here, 0.0))
    assert torch.equal(places, (chosen - 3).where(here, 3))
    vmoer.detach(masked)
    assert all(torch.equal(a, b) for a, b in zip(answer(masked), before, strict=True))


def test_an_adapter_over_spread_experts_is_refused(tmp_path: Path) -> None:
    """PEFT would add whole updates to a share of the experts; the model is left as it was."""
    import torch.distributed as dist
    from torch.distributed.tensor import Replicate, distribute_tensor

    model = add_lora(tiny.model("granitemoe"), rank=2)
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        mesh = dist.init_device_mesh("cpu", (1,))
        block: Any = next(m for m in model.modules() if hasattr(m, "gate_up_proj"))
        whole = block.gate_up_proj.detach()
        block._parameters["gate_up_proj"] = torch.nn.Parameter(distribute_tensor(whole, mesh, [Replicate()]))
        with pytest.raises(AttachError, match="merge it first"):
            vmoer.attach(model, vmoer.MeanField())
        assert attachment_of(model) is None
        assert not routers_of(model)
    finally:
        dist.destroy_process_group()
