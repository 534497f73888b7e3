"""Stage 1, stage 2 and the loop, in one process."""

import copy
import hashlib
import json
import math
import warnings
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from train_workers import world
from transformers import get_cosine_schedule_with_warmup

import vmoer
from vmoer import metrics
from vmoer.errors import InputError, RunError
from vmoer.live.attach import record, routers_of
from vmoer.training import steps
from vmoer.training.data import collate, epoch_batches
from vmoer.training.lora import add_lora, lora_targets
from vmoer.training.objective import evaluate, micro_loss
from vmoer.training.plan import learning_rate
from vmoer.training.run import DEFAULT, PAPER, Plan, Running, TrainingWarning, Workers, stage1, stage2
from vmoer.training.steps import Steps

CPU = torch.device("cpu")


def fc(**changes: Any) -> Any:
    return vmoer.FullCovariance(**dict[str, Any](layers=[1, 2], beta=0.01) | changes)


def run(
    folder: Path, config: Any, n: int = 48, model: Any = None, epochs: int = 2, lr: float = 1e-3, **more: Any
) -> Any:
    """A short stage 2; returns the model and the outcome."""
    model = world.model() if model is None else model
    running = more.pop("running", Running(log_every=2))
    plan = Plan(epochs=epochs, lr=lr, micro_batch=more.pop("micro_batch", None))
    outcome = stage2(
        model, world.examples(n, 1), world.examples(16, 2), config, plan, folder=folder, running=running, **more
    )
    return model, outcome


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "telemetry.jsonl").read_text().splitlines()]


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


# -- data, schedule, LoRA ----------------------------------------------------------------------------------------------


def test_an_epoch_holds_every_question_and_batches_are_of_like_length() -> None:
    """Oracle: counting. Padding is compared with batches cut from the same questions unsorted."""
    lengths = torch.randint(5, 100, (501,), generator=torch.Generator().manual_seed(0)).tolist()
    batches = epoch_batches(lengths, 16, seed=3, epoch=2)
    assert {row for batch in batches for row in batch} == set(range(501))
    assert {len(batch) for batch in batches} == {16}
    assert len(batches) == math.ceil(501 / 16)
    assert batches == epoch_batches(lengths, 16, seed=3, epoch=2)
    assert batches != epoch_batches(lengths, 16, seed=3, epoch=3)

    def padded(batches: list[list[int]]) -> int:
        return sum(16 * max(lengths[row] for row in batch) for batch in batches)

    unsorted = [list(range(i, i + 16)) for i in range(0, 480, 16)]
    assert padded(batches) < 0.75 * padded(unsorted)


def test_the_learning_rate_is_the_usual_cosine_with_warm_up() -> None:
    """Oracle: transformers' scheduler, which starts its warm-up at zero where ours starts one step in."""
    plan, total = Plan(epochs=1, lr=0.5, warmup=0.0), 40
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.5)
    scheduler = get_cosine_schedule_with_warmup(optimizer, 0, total)
    for step in range(total):
        assert learning_rate(plan, step, total) == pytest.approx(scheduler.get_last_lr()[0], abs=1e-9)
        optimizer.step()
        scheduler.step()
    warm = [learning_rate(Plan(epochs=1, lr=1.0, warmup=0.05), step, 100) for step in range(6)]
    assert warm[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert learning_rate(plan, 39, total, hold=True) == learning_rate(plan, 20, total)


@pytest.mark.parametrize("name", ["granitemoe", "qwen2_moe", "olmoe", "mixtral", "deepseek_v2", "gpt_oss", "jamba"])
def test_lora_reaches_attention_and_experts_of(name: str) -> None:
    """Oracle: PEFT's own parameters. Every expert stack of every MoE layer and each projection has an adapter."""
    model = tiny.model(name)
    modules, parameters = lora_targets(model)
    assert modules
    assert parameters
    assert not any("shared" in p or "router" in p or "gate.weight" in p for p in parameters)
    tuned = add_lora(model, rank=2)
    adapted = [key for key, p in tuned.named_parameters() if "lora_A" in key]
    assert any("experts" in key for key in adapted)
    assert any("attn" in key or "attention" in key for key in adapted)
    assert all("lora_" in key for key, p in tuned.named_parameters() if p.requires_grad)


# -- the objective -----------------------------------------------------------------------------------------------------


def test_the_predictive_objective_is_the_log_of_the_mean_likelihood() -> None:
    """Oracle: M passes by hand over the whole vocabulary's logits, without our collation: one row at a time, no padding."""
    model = vmoer.attach(world.model(), fc())
    examples, rows, step, passes = world.examples(6, 4), [0, 1, 2, 3, 4, 5], 7, 3
    tokens = sum(examples.lengths)
    batch = collate(examples, rows, CPU)
    loss, logged = micro_loss(model, batch, step=step, first_row=10, rows=6, tokens=tokens, passes=passes)
    likelihood, kl = torch.zeros(6), 0.0
    for number in range(passes):
        for row in rows:
            with record(model, step=step * passes + number, first_row=10 + row) as rec:
                logits = model(input_ids=torch.tensor([examples.prompts[row]])).logits[0, -1]
            likelihood[row] += torch.softmax(logits[world.LETTERS], -1)[examples.answers[row]].detach() / passes
            kl += rec.kl(tokens=tokens).item() / passes
    assert loss.item() == pytest.approx(-likelihood.log().mean().item() + kl, abs=1e-5)
    assert float(logged["kl"]) == pytest.approx(kl, abs=1e-7)
    assert kl > 0


def test_evaluation_is_that_of_predict() -> None:
    """Oracle: `vmoer.predict`, question by question, in both ways of averaging that training validates by."""
    model = vmoer.attach(world.model(), fc())
    examples = world.examples(5, 4)
    averaging: Any
    for passes, averaging in ((1, "router"), (3, "full")):
        ours = evaluate(model, examples, Workers(), passes=passes)
        for row, prompt in enumerate(examples.prompts):
            batch = {"input_ids": torch.tensor([prompt])}
            theirs = vmoer.predict(model, batch, averaging=averaging, passes=passes, tokens=world.LETTERS)
            torch.testing.assert_close(ours[row], theirs[0].double(), atol=1e-5, rtol=1e-5)


def test_four_times_four_rows_are_one_time_sixteen(tmp_path: Path) -> None:
    """Oracle: the same run without accumulation; loss, KL and gradient of every step, and the routers at the end."""
    _, one = run(tmp_path / "a", fc())
    _, four = run(tmp_path / "b", fc(), micro_batch=4)
    for a, b in zip(lines(tmp_path / "a"), lines(tmp_path / "b"), strict=True):
        for name in ("loss", "nll", "kl", "grad_norm"):
            assert a.get(name, 0) == pytest.approx(b.get(name, 0), abs=1e-5)
    for name, value in one.last.items():
        torch.testing.assert_close(value, four.last[name], atol=1e-5, rtol=0)


# -- what stage 2 touches ----------------------------------------------------------------------------------------------


def digest(model: nn.Module) -> str:
    total = hashlib.sha256()
    for name, value in sorted(model.state_dict().items()):
        if ".vmoer." not in name:
            total.update(name.encode() + value.contiguous().view(torch.uint8).numpy().tobytes())
    return total.hexdigest()


@pytest.mark.filterwarnings("ignore:.*snapshots fit")
@pytest.mark.parametrize("key", ["vglr-mf", "vglr-fc", "vglr-lr", "vtsr", "mcdr", "swag"])
def test_only_routers_change(key: str, tmp_path: Path) -> None:
    """Oracle: a hash of everything else before and after; and the routers did change."""
    model = world.model()
    before = digest(model)
    _, outcome = run(tmp_path, vmoer.methods()[key](layers=[1]), model=model, n=32)
    assert digest(model) == before
    start = vmoer.attach(world.model(), vmoer.methods()[key](layers=[1]))
    moved = [
        not torch.equal(outcome.last[f"param/{name}"], p) for name, p in start.named_parameters() if p.requires_grad
    ]
    assert all(moved)


def test_nothing_before_the_first_attached_layer_is_in_the_graph() -> None:
    """Oracle: requires_grad of the states that enter each decoder layer."""
    model: Any = vmoer.attach(world.model(), fc(layers=[1]))
    seen = []
    for layer in model.model.layers:
        layer.register_forward_pre_hook(lambda module, args: seen.append(args[0].requires_grad))
    micro_loss(model, collate(world.examples(4), range(4), CPU), step=0, first_row=0, rows=4, tokens=9)
    assert seen == [False, False, True]


def test_routers_stay_float32_while_the_model_is_bfloat16(tmp_path: Path) -> None:
    """Oracle: the dtypes themselves, after training."""
    model, _ = run(tmp_path, fc(), model=world.model().to(torch.bfloat16), n=32, epochs=1)
    assert {p.dtype for p in model.parameters() if p.requires_grad} == {torch.float32}
    assert {p.dtype for p in model.parameters() if not p.requires_grad} == {torch.bfloat16}
    assert all(math.isfinite(row["loss"]) for row in lines(tmp_path) if "loss" in row)


def test_swag_collects_its_snapshots_over_the_second_half(tmp_path: Path) -> None:
    """Oracle: counting, and a mean that differs from the last point of the path."""
    model, _ = run(tmp_path, vmoer.SWAG(layers=[1]), n=64, epochs=10)
    router = routers_of(model)[1]
    assert int(router.count) == 20
    assert not torch.equal(router.mean_ND, router.delta)
    rates = [row["lr"] for row in lines(tmp_path) if "lr" in row]
    assert rates[20:] == [rates[20]] * 20


def test_too_few_snapshots_are_said(tmp_path: Path) -> None:
    with pytest.warns(TrainingWarning, match="only 3 snapshots fit.*wants 20"):
        run(tmp_path, vmoer.SWAG(layers=[1]), n=48, epochs=2)


def test_methods_without_parameters_have_nothing_to_train(tmp_path: Path) -> None:
    for config in (vmoer.Deterministic(), vmoer.MeanField(learn="nothing"), vmoer.Temperature()):
        assert run(tmp_path, config)[1] is None


def test_noise_in_stage_1_trains_the_adapter_alone(tmp_path: Path) -> None:
    """Oracle: the run without noise; the adapters differ, and what is attached is gone afterwards."""
    train, valid = world.examples(32, 1), world.examples(16, 2)
    found = []
    for noise in (None, fc(prior_scale=2.0)):
        tuned, outcome = stage1(
            world.model(),
            train,
            valid,
            Plan(epochs=1, lr=1e-3),
            folder=tmp_path / str(noise is None),
            rank=2,
            noise=noise,
            running=Running(),
        )
        assert not routers_of(tuned)
        assert all("lora_" in name for name in outcome.last)
        found.append(outcome.last)
    assert not same(*found)


# -- safety ------------------------------------------------------------------------------------------------------------


class Poison:
    """Turns a tensor into NaN from its n-th use on, once."""

    def __init__(self, at: int) -> None:
        self.at, self.calls = at, 0

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return tensor * math.nan if self.calls == self.at else tensor


def poisoned(where: str, at: int) -> Any:
    """A model whose layer 1 goes bad at a step: in its routing, or in its gradient only."""
    model = world.model()
    bad = Poison(at)
    block = model.model.layers[1].block_sparse_moe

    def hook(module: nn.Module, args: tuple[Any, ...]) -> Any:
        if torch.is_grad_enabled():
            return (bad(args[0]), *args[1:])
        return None

    def backward(module: nn.Module, args: tuple[Any, ...]) -> Any:
        if torch.is_grad_enabled() and args[0].requires_grad:
            args[0].register_hook(bad)
        return None

    block.router.register_forward_pre_hook(hook if where == "forward" else backward)
    return model


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_step_that_is_not_finite_stops_the_run_and_names_the_layer(where: str, tmp_path: Path) -> None:
    """Oracle: where we put the NaN. The state kept is the one of the checkpoint before, finite and loadable.

    Backward, what arises at layer 1's input reaches the routers below it: layer 0's is the uppermost that is not finite.
    """
    name = "the routing of layer 1" if where == "forward" else "the gradient of layer 0"
    running = Running(log_every=2, checkpoint_every=2)
    with pytest.raises(RunError, match=rf"step 5: not finite in {name}"):
        run(tmp_path, fc(layers="all"), model=poisoned(where, 5), n=128, running=running)
    _, outcome = run(tmp_path, fc(layers="all"), n=128, running=running)
    assert all(torch.isfinite(value).all() for value in outcome.last.values())
    _, clean = run(tmp_path / "clean", fc(layers="all"), n=128, running=running)
    assert same(outcome.last, clean.last)


def test_such_steps_can_be_passed_over_and_counted(tmp_path: Path) -> None:
    """Oracle: the count, and AdamW's own step counter, which must not have seen the step."""
    running = Running(log_every=2, skip_nonfinite=True)
    _, outcome = run(tmp_path, fc(layers="all"), model=poisoned("forward", 5), n=128, running=running)
    assert outcome.skipped == 1
    assert [row["step"] for row in lines(tmp_path) if row.get("skipped")] == [5]
    assert all(torch.isfinite(value).all() for value in outcome.last.values())


def test_too_large_a_step_says_what_to_take_less_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: the step at which memory ends, by our own doing; all sixteen questions are in it. Afterwards it goes on."""

    def full(*args: Any, step: int, **kwargs: Any) -> Any:
        if step == 1:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
        return micro_loss(*args, step=step, **kwargs)

    monkeypatch.setattr(steps, "micro_loss", full)
    longest = max(len(prompt) for prompt in world.examples(16, 1).prompts)
    with pytest.raises(
        RunError, match=rf"^out of memory on 16 prompts of {longest} tokens: take a smaller --micro-batch"
    ):
        run(tmp_path, fc(), n=16)
    monkeypatch.undo()
    _, outcome = run(tmp_path, fc(), n=16)
    _, clean = run(tmp_path / "clean", fc(), n=16)
    assert same(outcome.last, clean.last)


def test_the_papers_regulariser_diverges_and_says_so(tmp_path: Path) -> None:
    """-log T has no lower bound: made to diverge by a large beta, it must be noticed, with a remedy, in log and warning."""
    config = vmoer.VariationalTemperature(layers=[1, 2], regulariser="neg_log_t", beta=5.0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run(tmp_path, config, lr=3e-2, epochs=8)
    said = [str(w.message) for w in caught if w.category is TrainingWarning]
    assert any("temperatures diverge" in text and "lognormal" in text for text in said)
    assert any("routing has become random" in text for text in said)
    assert len(said) == len(set(said)) == 2
    assert any("lognormal" in row.get("warning", "") for row in lines(tmp_path))


def test_memorised_answers_are_noticed(tmp_path: Path) -> None:
    """A model that knows its training answers: made by training it on them until it does."""
    model, train = world.model(), world.examples(32, 1)
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    batch = collate(train, range(32), CPU)
    for _ in range(40):
        loss, _ = micro_loss(model, batch, step=0, first_row=0, rows=32, tokens=1)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    with pytest.warns(TrainingWarning, match="memorised.*held-out"):
        stage2(model, train, world.examples(64, 2), fc(), Plan(epochs=1), folder=tmp_path, running=Running())


def test_telemetry_has_every_step_with_temperatures_and_entropy(tmp_path: Path) -> None:
    """Oracle: the record of the first step, made by hand; T starts at 1 exactly."""
    config = vmoer.VariationalTemperature(layers=[1])
    run(tmp_path, config, n=48)
    steps = [row for row in lines(tmp_path) if "loss" in row]
    assert [row["step"] for row in steps] == [1, 2, 3, 4, 5, 6]
    assert steps[0]["temperature_q05"] == steps[0]["temperature_q95"] == pytest.approx(1.0)
    model, examples = vmoer.attach(world.model(), config), world.examples(48, 1)
    entropies = []
    for row in epoch_batches(examples.lengths, 16, 0, 0)[0]:
        with record(model, step=0) as rec:
            model(input_ids=torch.tensor([examples.prompts[row]]))
        entropies.append(rec.signals["gate_entropy"].reshape(-1))
    assert steps[0]["gate_entropy"] == pytest.approx(float(torch.cat(entropies).mean()), rel=1e-4)


# -- resuming ----------------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:.*snapshots fit")
@pytest.mark.parametrize("key", ["vglr-fc", "swag"])
@pytest.mark.parametrize("at", [1, 4, 8])
def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(
    at: int, key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: the run that was never stopped: both states, the history and the telemetry."""
    config = vmoer.methods()[key](layers=[1])
    running = Running(log_every=2, checkpoint_every=2)
    whole = run(tmp_path / "whole", config, epochs=3, running=running)[1]
    real, made = Steps.take, 0

    def dies(*args: Any, **kwargs: Any) -> Any:
        nonlocal made
        made += 1
        if made == at:
            raise KeyboardInterrupt
        return real(*args, **kwargs)

    monkeypatch.setattr(Steps, "take", dies)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "cut", config, epochs=3, running=running)
    monkeypatch.setattr(Steps, "take", real)
    cut = run(tmp_path / "cut", config, epochs=3, running=running)[1]
    assert same(whole.last, cut.last)
    assert same(whole.best, cut.best)
    assert whole.state == cut.state
    assert lines(tmp_path / "whole") == lines(tmp_path / "cut")


def test_a_folder_goes_on_only_with_its_own_settings(tmp_path: Path) -> None:
    run(tmp_path, fc(), epochs=1)
    with pytest.raises(InputError, match=r"stage2.safetensors was begun with plan="):
        run(tmp_path, fc(), epochs=2)


@pytest.mark.parametrize("where", [0, 3, 20, 0.2, 0.5, 0.8, -1, "cut", "empty", "other shape"])
def test_a_damaged_state_is_named_and_the_stage_starts_again(where: Any, tmp_path: Path) -> None:
    """One bit anywhere in the file, a cut, a parameter of another shape: the result is that of a whole run."""
    whole = run(tmp_path / "whole", fc(), epochs=1)[1]
    path = tmp_path / "whole" / "stage2.safetensors"
    data = bytearray(path.read_bytes())
    if where == "cut":
        data = data[:-100]
    elif where == "empty":
        data = bytearray()
    elif where == "other shape":
        tensors = load_file(path)
        name = next(name for name in tensors if name.startswith("param/") and tensors[name].dim() == 2)
        save_file({**tensors, name: tensors[name][:1].clone()}, path)
        data = bytearray(path.read_bytes())
    else:
        data[where if isinstance(where, int) else int(where * len(data))] ^= 4
    path.write_bytes(data)
    with pytest.warns(UserWarning, match=r"stage2.safetensors is damaged \(.*\): the stage starts again"):
        again = run(tmp_path / "whole", fc(), epochs=1)[1]
    assert same(whole.last, again.last)
    assert same(whole.best, again.best)


def test_early_stopping_keeps_the_best_and_stops(tmp_path: Path) -> None:
    """Oracle: the validation NLL of the state left on the model, evaluated anew."""
    model, valid = world.model(), world.examples(16, 2)
    plan = Plan(epochs=12, lr=5e-2, patience=2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TrainingWarning)
        outcome = stage2(model, world.examples(32, 1), valid, fc(), plan, folder=tmp_path, running=Running())
    assert outcome is not None
    history = [row["validation_nll"] for row in outcome.state.history]
    assert outcome.state.best_epoch == history.index(min(history))
    assert len(history) - 1 == min(12, outcome.state.best_epoch + 2)
    again = metrics.nll(evaluate(model, valid, Workers()).numpy(), valid.answers)
    assert again == pytest.approx(min(history), abs=1e-12)


def test_presets() -> None:
    """Oracle: the paper's appendix D.2."""
    paper: Any = PAPER.config("vglr-fc")
    assert (paper.beta, paper.samples, paper.sampling, paper.prior_scale) == (0.01, 35, "mc", 1.0)
    vtsr: Any = PAPER.config("vtsr")
    assert (vtsr.beta, vtsr.regulariser) == (0.05, "neg_log_t")
    assert (PAPER.layers, PAPER.stage2_data) == ("susceptible:10", "train")
    assert (PAPER.stage2.epochs, PAPER.stage2.lr, PAPER.stage2.batch_size, PAPER.stage2.warmup) == (10, 1e-4, 16, 0.05)
    default: Any = DEFAULT.config("vglr-mf", samples=8)
    assert (default.beta, default.samples, DEFAULT.stage2_data, DEFAULT.layers) == (0.001, 8, "held-out:0.2", "all")
    with pytest.raises(InputError, match="no setting 'gamma'"):
        DEFAULT.config("vtsr", gamma=1)
    assert copy.deepcopy(DEFAULT) == DEFAULT
