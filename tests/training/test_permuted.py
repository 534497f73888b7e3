"""Options in new orders every epoch. Oracles: the questions themselves, counts of orders, and a run that was never stopped."""

import hashlib
import itertools
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_letters import TOKENIZER
from train_workers import world

from vmoer import tasks
from vmoer.errors import InputError
from vmoer.evaluation import scores
from vmoer.evaluation.answers import predict_task
from vmoer.live.attach import attach, attached, detach, routers_of
from vmoer.models import open_model
from vmoer.report.summaries import calibration_table, settings
from vmoer.tasks import Question
from vmoer.tasks.prompt import prompt
from vmoer.training.data import encode_questions
from vmoer.training.run import PRESETS, Data, Plan, Running, Stages, Workers, train
from vmoer.training.stages import validation_nll
from vmoer.training.steps import Steps

OPTIONS = ("red", "green", "blue", "grey")
QUESTIONS = [Question(f"q{i}", f"Which is {i}?", OPTIONS, i % 4, "t", "train") for i in range(200)]
Seen = list[tuple[tuple[int, ...], int]]


def test_every_epoch_has_every_question_with_its_answer_in_a_new_order() -> None:
    """Oracle: each prompt is that of the question with its options permuted, found by trying all 24 orders."""
    found = encode_questions(TOKENIZER, QUESTIONS[:20], 500, orders=(2, 7))
    assert found.prompts == encode_questions(TOKENIZER, QUESTIONS[:20], 500).prompts
    orders: list[list[tuple[int, ...]]] = []
    for epoch in range(3):
        now = found.at(epoch)
        assert (now.prompts, now.answers) == (found.at(epoch).prompts, found.at(epoch).answers)
        orders.append([])
        for question, ids, answer in zip(QUESTIONS, now.prompts, now.answers, strict=False):
            texts = {order: question.ordered(order) for order in itertools.permutations(range(4))}
            fits = [order for order, q in texts.items() if TOKENIZER(prompt(TOKENIZER, q))["input_ids"] == ids]
            assert len(fits) == 1
            assert fits[0][answer] == question.answer
            orders[-1] += fits
    assert all(sum(a == b for a, b in zip(x, y, strict=True)) < 6 for x, y in itertools.combinations(orders, 2))
    alone = encode_questions(TOKENIZER, QUESTIONS[5:6], 500, orders=(2, 7)).at(1)
    assert alone.prompts[0] == found.at(1).prompts[5]  # whatever other questions there are
    for other in ((1, 7), (2, 8)):
        assert encode_questions(TOKENIZER, QUESTIONS[:20], 500, orders=other).at(0).answers != found.at(0).answers


def test_orders_are_uniform() -> None:
    """Oracle: a chi-square of the counts of all 24 orders, whose 99.9% point at 23 degrees of freedom is 49.7."""
    counts = Counter(q.shuffled(2, 0, epoch).choices for q in QUESTIONS for epoch in range(12))
    expected = len(QUESTIONS) * 12 / 24
    assert len(counts) == 24
    assert sum((n - expected) ** 2 / expected for n in counts.values()) < 49.7


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    return world.save(tmp_path_factory.mktemp("world"), n=40)


def go(place: tuple[str, str], out: Path, preset: str = "permuted", **data: Any) -> dict[str, Any]:
    stages = Stages(stage1=Plan(epochs=2, lr=1e-3), stage2=Plan(epochs=2, lr=1e-3), rank=2)
    how: dict[str, Any] = {"running": Running(checkpoint_every=1, log_every=1), "layers": "all", "preset": preset}
    return train(place[0], "sciq", "vglr-mf", out=out, stages=stages, data=Data(root=place[1], **data), **how)


def watched(monkeypatch: pytest.MonkeyPatch, stop_after: int | None = None) -> list[tuple[int, Seen]]:
    """By step the number of parameters in training, which tells the stages apart, and what was trained on."""
    seen: list[tuple[int, Seen]] = []
    real = Steps.take

    def take(self: Steps, rows: Any, lr: float, step: int) -> Any:
        if len(seen) == stop_after:
            raise KeyboardInterrupt
        seen.append((len(self.parameters), [(tuple(self.train.prompts[r]), self.train.answers[r]) for r in rows]))
        return real(self, rows, lr, step)

    monkeypatch.setattr(Steps, "take", take)
    return seen


@pytest.mark.parametrize("preset", ["permuted", "permuted-both"])
def test_both_stages_see_all_questions(
    preset: str, place: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: what the optimiser was given, and the questions of the file."""
    seen = watched(monkeypatch)
    said = go(place, tmp_path, preset)
    wanted = encode_questions(*_asked(place))
    kinds = [kind for kind, _ in seen]
    first, second = ([rows for kind, rows in seen if kind == one] for one in dict.fromkeys(kinds))
    per_epoch = len(first) // 2
    for steps, moved in ((first, preset == "permuted-both"), (second, True)):
        epochs = [[row for rows in part for row in rows] for part in (steps[:per_epoch], steps[per_epoch:])]
        for epoch in epochs:
            assert {ids for ids, _ in epoch} == {tuple(ids) for ids in wanted.prompts}
            own = {(tuple(ids), answer) for ids, answer in zip(wanted.prompts, wanted.answers, strict=True)}
            assert (set(epoch) <= own) != moved
        assert (set(epochs[0]) == set(epochs[1])) != moved
    assert said["stage1"]["held_out"] == 0
    assert said["stage2"]["data"] == "permuted"


def _asked(place: tuple[str, str]) -> tuple[Any, list[Question], int]:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(place[0]), tasks.load("sciq", "train", data_root=place[1]), 128


def test_a_resumed_run_sees_the_orders_of_the_uninterrupted_one(
    place: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: the files and the steps of a run that was never stopped; this one is stopped in the second epoch of each stage."""
    for stop_after in (4, 3, None):  # three steps an epoch: in stage 1, in stage 2, and to the end
        with monkeypatch.context() as patch:
            watched(patch, stop_after)
            if stop_after is None:
                go(place, tmp_path / "stopped", "permuted-both")
            else:
                with pytest.raises(KeyboardInterrupt):
                    go(place, tmp_path / "stopped", "permuted-both")
    go(place, tmp_path / "whole", "permuted-both")
    for name in ("router.safetensors", "map/adapter_model.safetensors", "telemetry.jsonl"):
        found = [hashlib.sha256((tmp_path / run / name).read_bytes()).hexdigest() for run in ("stopped", "whole")]
        assert found[0] == found[1], name


def test_a_run_is_not_taken_for_another(place: tuple[str, str], tmp_path: Path) -> None:
    """A folder that was begun with other orders is refused by name."""
    go(place, tmp_path)
    with pytest.raises(InputError, match="stage1_orders"):
        go(place, tmp_path, stage1_orders=True)
    with pytest.raises(InputError, match="permuted"):
        go(place, tmp_path, stage2="train")


def test_presets_go_together() -> None:
    """Oracle: the docs, written out: permuted is the default but for its data; printed is the paper's without epoch 0."""
    assert PRESETS["permuted"].config("vglr-mf") == PRESETS["default"].config("vglr-mf")
    assert (PRESETS["permuted"].stage2_data, PRESETS["permuted"].stage1_orders) == ("permuted", False)
    assert PRESETS["permuted-both"].stage1_orders
    for name, lr, keep in (("printed", 1e-4, "last"), ("printed-fast-best", 1e-3, "trained")):
        plan = PRESETS[name].stage2
        assert (plan.lr, plan.keep, plan.patience, plan.epochs, plan.batch_size) == (lr, keep, None, 10, 16)
        assert PRESETS[name].config("vglr-fc") == PRESETS["paper"].config("vglr-fc")
        assert PRESETS[name].paper_splits
    listing = PRESETS["printed-listing"]
    assert (listing.stage2, listing.config("vtsr")) == (PRESETS["printed"].stage2, PRESETS["paper"].config("vtsr"))
    assert listing.config("vglr-fc") == replace(PRESETS["paper"].config("vglr-fc"), mean_start="listing")  # type: ignore[call-arg]


@pytest.mark.filterwarnings("ignore::vmoer.training.run.TrainingWarning")
@pytest.mark.parametrize("keep", ["best", "trained", "last"])
def test_which_state_is_kept(keep: Any, place: tuple[str, str], tmp_path: Path) -> None:
    """Oracle: the history of validation, of which the opened folder's NLL is the least, the least but epoch 0's, or the last."""
    stages = Stages(stage1=Plan(epochs=0), stage2=Plan(epochs=3, lr=0.4, keep=keep), rank=2)
    how: dict[str, Any] = {"layers": "all", "preset": "permuted", "data": Data(root=place[1])}
    said = train(place[0], "sciq", "vglr-mf", out=tmp_path, stages=stages, seed=7, **how)
    history = [row["validation_nll"] for row in said["stage2"]["history"]]
    wanted = {"best": min(history), "trained": min(history[1:]), "last": history[-1]}
    assert len(set(wanted.values())) == 3
    opened = open_model(tmp_path, device="cpu")
    valid = encode_questions(opened.tokenizer, tasks.load("sciq", "validation", data_root=place[1]), 128)
    assert validation_nll(opened.model, valid, Workers()) == pytest.approx(wanted[keep], abs=1e-5)
    _check_moved(said["stage2"]["moved"], opened.model, history.index(wanted[keep]))
    predict_task(
        opened.model, opened.tokenizer, tasks.load("sciq", "test", data_root=place[1]), folder=tmp_path / "e", run=said
    )
    (scored,) = settings(scores.score(tmp_path / "e", draws=10))
    notes = " ".join(calibration_table(scored).notes)
    assert ("Untrained routers, since validation kept epoch 0 of at least one seed: vglr-mf." in notes) == (
        keep == "best"
    )


def _check_moved(moved: dict[str, Any], model: Any, epoch: int) -> None:
    """Oracle: the kept parameters less those of the same method newly attached to the same model; N s0^2 at first."""
    kept = [p.detach().double() for router in routers_of(model).values() for p in router.parameters()]
    config: Any = attached(model).config
    fresh = attach(detach(model), config)
    start = [p.detach().double() for router in routers_of(fresh).values() for p in router.parameters()]
    changes = torch.cat([(a - b).flatten() for a, b in zip(kept, start, strict=True)])
    assert moved["parameters"] == pytest.approx(changes.square().mean().sqrt().item(), rel=1e-5, abs=1e-12)
    assert moved["kept_epoch"] == epoch
    assert moved["logit_variance"][0] == pytest.approx(8 * config.prior_scale**2, rel=1e-2)
    assert (moved["logit_variance"][0] == moved["logit_variance"][1]) == (epoch == 0)
    assert (moved["beta_kl"][1] > 10 * moved["beta_kl"][0]) == (epoch > 0)


def test_a_run_asks_with_the_system_prompt_it_was_trained_with(place: tuple[str, str], tmp_path: Path) -> None:
    """Oracle: the prompt of whoever opens the run, or its stage 1, and that of the base model."""
    go(place, tmp_path, system_prompt="Say a letter.")
    question = QUESTIONS[0]
    for name, theirs in ((tmp_path, True), (tmp_path / "map", True), (place[0], False)):
        opened = open_model(name, device="cpu")
        assert prompt(opened.tokenizer, question).startswith("Say a letter.") == theirs
    with pytest.raises(InputError, match="system_prompt"):
        go(place, tmp_path)
