"""What makes small models train fast changes no number: draws and posteriors of all layers together, adapters folded in
place, models kept open, states written seldom."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from train_workers import world

import vmoer
from vmoer import models, tasks
from vmoer.live import layers
from vmoer.live.attach import record
from vmoer.models import open_model
from vmoer.numerics import noise
from vmoer.numerics.gaussians import Scaled
from vmoer.numerics.tokens import joined
from vmoer.routers import Call
from vmoer.studies import Study
from vmoer.studies._grid import run
from vmoer.studies._processes import processes
from vmoer.studies._variants import first_stage
from vmoer.tasks.batches import by_length
from vmoer.tasks.prompt import encode
from vmoer.training.data import collate
from vmoer.training.lora import add_lora, folded_quickly
from vmoer.training.objective import answer_log_probs, micro_loss
from vmoer.training.run import Plan, Running, stage1, stage2
from vmoer.training.steps import Steps

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    return world.save(tmp_path_factory.mktemp("world"), n=40, validation=16, test=8)


# -- all layers together -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["step", "passes", "neither"])
def test_layers_draw_together_what_each_draws_alone(kind: str) -> None:
    """Oracle: `vmoer.numerics.noise` itself, a layer at a time, key by key."""
    positions_T, rows_T = torch.arange(12) % 5, torch.arange(12) // 5
    layers, seed, n = (1, 4, 7), 3, 6
    kinds: dict[str, Any] = {"step": {"step": 9}, "passes": {"passes_T": rows_T + 2}, "neither": {}}
    given = kinds[kind]
    drawn: dict[Any, torch.Tensor] = {}
    lane, position = torch.arange(n), positions_T.unsqueeze(1)
    for layer in layers:
        keys: tuple[Any, ...] = {
            "step": (seed, 1, 9, layer, rows_T.unsqueeze(1), position, lane),
            "passes": (seed, 2, (rows_T + 2).unsqueeze(1), layer, position, lane),
            "neither": (seed, 3, layer, position, lane),
        }[kind]
        call = Call(layer, positions_T, rows_T, **given, layers=layers, drawn=drawn)
        assert torch.equal(call.normal(seed, n), noise.normal(*keys))
        assert torch.equal(call.gumbel(seed, n), noise.gumbel(*keys))
        assert torch.equal(call.uniform(seed, n), noise.uniform(*keys))
    assert len(drawn) == 3  # one draw a law, not one a layer


@pytest.mark.parametrize("key", ["vglr-mf", "vglr-fc", "vglr-lr", "vtsr", "mcdr", "swag"])
def test_posteriors_are_asked_together_as_they_would_be_alone(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: the same step with every layer asked by itself: KL, signals, and the gradient of all that is trained."""
    model = vmoer.attach(world.model(), vmoer.methods()[key]())
    batch = collate(world.examples(6, 4), range(6), CPU)
    found = []
    for together in (1, 2**16):
        monkeypatch.setattr(layers, "TOKENS", together)
        model.zero_grad()
        with record(model, step=3) as rec:
            loss = answer_log_probs(model, batch)[:, 0].mean()
        kl = rec.kl()
        (loss + kl).backward()
        gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        found.append((kl.detach(), rec.signals, gradients))
    (kl, signals, gradients), (kl_2, signals_2, gradients_2) = found
    torch.testing.assert_close(kl, kl_2)
    assert signals.keys() == signals_2.keys()
    assert all(value.shape[0] == 3 for value in signals.values())
    for one, other in ((signals, signals_2), (gradients, gradients_2)):
        for name in one:
            torch.testing.assert_close(one[name], other[name], atol=1e-6, rtol=1e-5)


def test_layers_of_unlike_posteriors_are_asked_apart() -> None:
    """A parameter shared by all tokens, such as Laplace's factor, cannot be joined along them."""
    q = [Scaled(torch.zeros(3, 2), torch.ones(3), torch.eye(2) * i) for i in (1.0, 2.0)]
    assert joined(q) is None
    assert joined([q[0], dataclasses.replace(q[0], mean_TN=torch.ones(4, 2), scale_T=torch.ones(4))]).mean_TN.shape == (  # type: ignore[union-attr]
        7,
        2,
    )


# -- stage 1 -----------------------------------------------------------------------------------------------------------


def test_folding_in_place_is_pefts_own_arithmetic() -> None:
    """Oracle: PEFT, bit for bit: the answers and the gradients of every adapter; nothing of the model is left changed."""
    tuned = add_lora(world.model(), rank=2)
    with torch.no_grad():
        for name, p in tuned.named_parameters():
            if "lora_B" in name:
                p.normal_(generator=torch.Generator().manual_seed(1))
    keys = list(tuned.state_dict())
    batch = collate(world.examples(6, 4), range(6), CPU)
    found = []
    for quick in (False, True):
        tuned.zero_grad()
        if quick:
            with folded_quickly(tuned):
                loss, _ = micro_loss(tuned, batch, step=0, first_row=0, rows=6, tokens=1)
                loss.backward()
        else:
            loss, _ = micro_loss(tuned, batch, step=0, first_row=0, rows=6, tokens=1)
            loss.backward()
        found.append((loss.detach(), {n: p.grad.clone() for n, p in tuned.named_parameters() if p.grad is not None}))
    assert torch.equal(found[0][0], found[1][0])
    assert found[0][1].keys() == found[1][1].keys()
    assert any("experts" in name for name in found[0][1])
    assert all(torch.equal(found[0][1][name], found[1][1][name]) for name in found[0][1])
    assert list(tuned.state_dict()) == keys


def test_recomputing_layers_gives_the_same_adapter(tmp_path: Path) -> None:
    """Oracle: stage 1 without gradient checkpointing."""
    found = []
    for recompute in (False, True):
        running = Running(recompute=recompute)
        data = world.examples(32, 1), world.examples(8, 2)
        plan = Plan(epochs=1, lr=1e-3)
        tuned, outcome = stage1(world.model(), *data, plan, folder=tmp_path / str(recompute), rank=2, running=running)
        assert not tuned.is_gradient_checkpointing
        found.append(outcome.last)
    for name, value in found[0].items():
        torch.testing.assert_close(value, found[1][name], atol=1e-6, rtol=1e-5)


# -- files and models --------------------------------------------------------------------------------------------------


def test_a_state_written_seldom_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: the run that writes at every step. Killed before anything was written, it starts again to the same end."""
    config = vmoer.FullCovariance(layers=[1])
    data = world.examples(48, 1), world.examples(16, 2)

    def go(folder: Path, seconds: float) -> Any:
        running = Running(checkpoint_every=1, log_every=2, checkpoint_seconds=seconds)
        return stage2(world.model(), *data, config, Plan(epochs=2, lr=1e-3), folder=folder, running=running)

    often = go(tmp_path / "often", 0)
    assert (tmp_path / "often" / "stage2.safetensors").exists()
    real, made = Steps.take, 0

    def dies(*args: Any, **kwargs: Any) -> Any:
        nonlocal made
        made += 1
        if made == 5:
            raise KeyboardInterrupt
        return real(*args, **kwargs)

    monkeypatch.setattr(Steps, "take", dies)
    with pytest.raises(KeyboardInterrupt):
        go(tmp_path / "seldom", 1e9)
    assert not (tmp_path / "seldom" / "stage2.safetensors").exists()
    monkeypatch.setattr(Steps, "take", real)
    seldom = go(tmp_path / "seldom", 1e9)
    assert all(torch.equal(value, seldom.last[name]) for name, value in often.last.items())
    assert often.state == seldom.state
    lines = [(tmp_path / name / "telemetry.jsonl").read_text() for name in ("often", "seldom")]
    assert lines[0] == lines[1]


def test_a_kept_model_is_opened_as_a_copy(place: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: the weights on disk. What is done to one opened model does not reach the next."""
    monkeypatch.setattr(models, "KEEP_MODELS", 1)
    monkeypatch.setattr(models, "_kept", {})
    first = open_model(place[0], device="cpu")
    before = {name: value.clone() for name, value in first.model.state_dict().items()}
    with torch.no_grad():
        for p in first.model.parameters():
            p.zero_()
    vmoer.attach(first.model, vmoer.MeanField())
    monkeypatch.setattr(models, "_base", None)  # nothing is read again
    second = open_model(place[0], device="cpu")
    assert second.tokenizer is first.tokenizer
    assert second.model.state_dict().keys() == before.keys()
    assert all(torch.equal(value, before[name]) for name, value in second.model.state_dict().items())
    assert len(models._kept) == 1


def test_a_prompt_is_encoded_once_for_each_form(place: tuple[str, str]) -> None:
    """Oracle: a tokenizer that has encoded nothing before."""
    tokenizer, other = (open_model(place[0], device="cpu").tokenizer for _ in range(2))
    asked = tasks.load("sciq", "test", data_root=place[1])
    plain = encode(tokenizer, asked, 128)
    assert all(a is b for a, b in zip(plain, encode(tokenizer, asked, 128), strict=True))
    tokenizer.chat_template = other.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %} answer"
    assert encode(tokenizer, asked, 128) == encode(other, asked, 128) != plain


def test_batches_by_length_hold_every_row_once() -> None:
    """Oracle: counting; no batch with more tokens than asked for, but of one row."""
    lengths = torch.randint(1, 90, (200,), generator=torch.Generator().manual_seed(0)).tolist()
    batches = by_length([*lengths, 500], 256)
    assert sorted(row for batch in batches for row in batch) == list(range(201))
    sizes = [len(batch) * max([*lengths, 500][row] for row in batch) for batch in batches]
    assert all(size <= 256 or len(batch) == 1 for size, batch in zip(sizes, batches, strict=True))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*the paper takes")
def test_stage_1_of_several_seeds_side_by_side(place: tuple[str, str], tmp_path: Path) -> None:
    """Oracle: the same in one process, byte for byte."""
    plan = Plan(epochs=1, lr=1e-3)
    for workers in (1, 2):
        study = Study(
            place[0], "sciq", tmp_path / str(workers), seeds=(0, 1), data_root=place[1], stage1=plan, methods=("map",)
        )
        stages = [cell for seed in study.seeds for cell in first_stage(study, "map", seed)]
        assert not run(stages, study.out, backend=processes(workers), say=lambda line: None).failed
    for seed in (0, 1):
        one, two = (tmp_path / str(workers) / "runs" / f"map-s{seed}" for workers in (1, 2))
        assert json.loads((two / "run.json").read_text())["seed"] == seed
        name = "adapter_model.safetensors"
        assert (one / "map" / name).read_bytes() == (two / "map" / name).read_bytes()
