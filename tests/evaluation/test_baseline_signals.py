"""Signals that need no router, and ensembles. Oracles: the model's own hidden states, words counted by hand, and a mean."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from tiny_letters import TOKENIZER, tiny_model

import vmoer
from vmoer.errors import InputError
from vmoer.evaluation import predictions
from vmoer.evaluation.answers import answer_questions, predict_task
from vmoer.evaluation.baseline_signals import (
    NAMES,
    background_novelty,
    baseline_signals,
    last,
    outside_letters,
    unseen_words,
)
from vmoer.evaluation.ensembles import ensemble, other_answers
from vmoer.evaluation.temperatures import load
from vmoer.files import SEAL
from vmoer.metrics import distances
from vmoer.tasks import Question
from vmoer.tasks.batches import padded
from vmoer.tasks.prompt import letter_ids, prompt

WORDS = ("red", "seven", "sand", "cold", "iron", "moons", "tea")


def some(n: int, split: str = "test", first: int = 0, options: int = 4) -> list[Question]:
    return [
        Question(
            *(f"{split}{i}", f"What is {WORDS[i % 7]} {i}?", tuple(f"{w} {i}" for w in WORDS[:options]), i % options),
            "task",
            split,
        )
        for i in range(first, first + n)
    ]


def test_last_states_and_logits_are_the_models_own() -> None:
    """Oracle: output_hidden_states of one prompt at a time, and its logits."""
    model, questions = tiny_model(), [*some(3), *some(2, options=3)]
    found = last(model, TOKENIZER, questions, batch_tokens=400)
    for i, question in enumerate(questions):
        ids = torch.tensor([TOKENIZER(prompt(TOKENIZER, question))["input_ids"]])
        with torch.no_grad():
            out = model(ids, output_hidden_states=True)
        assert found.states_nD[i] == pytest.approx(out.hidden_states[-1][0, -1].numpy(), abs=1e-4)
        own = out.logits[0, -1, letter_ids(TOKENIZER, len(question.choices))].numpy()
        assert found.logits_nC[i, : len(own)] == pytest.approx(own, abs=1e-4)
        assert np.isneginf(found.logits_nC[i, len(own) :]).all()


def test_the_loss_over_the_vocabulary_is_that_over_the_letters_and_what_these_leave_out() -> None:
    """Oracle: the softmax over all of the model's logits, one prompt at a time."""
    model, questions = tiny_model(), [*some(3), *some(2, options=3)]
    beside = outside_letters(model, TOKENIZER, questions, batch_tokens=400)["outside_letters"]
    found = last(model, TOKENIZER, questions)
    for i, question in enumerate(questions):
        ids = torch.tensor([TOKENIZER(prompt(TOKENIZER, question))["input_ids"]])
        with torch.no_grad():
            log_probs = model(ids).logits[0, -1].log_softmax(-1)
        expected = -float(log_probs[letter_ids(TOKENIZER, 4)[question.answer]])
        letters = np.logaddexp.reduce(found.logits_nC[i]) - found.logits_nC[i, question.answer]
        assert letters + beside[i] == pytest.approx(expected, abs=1e-4)


def test_columns_of_every_question(tmp_path: Path) -> None:
    """Oracle: each score from `last` by itself; they stand in the file, and files have AUROC of them like of any signal."""
    model, train, valid, test = tiny_model(), some(30, "train"), some(20, "validation", 50), some(6, "test", 90)
    asked = [*test, *valid]
    found = baseline_signals(model, TOKENIZER, asked, train, valid)
    assert tuple(found) == NAMES
    known, chosen, own = (last(model, TOKENIZER, qs) for qs in (train, valid, asked))
    gaussians = distances.classes(known.states_nD, [q.answer for q in train])
    assert found["last_mahalanobis"] == pytest.approx(gaussians.mahalanobis(own.states_nD), rel=1e-6)
    assert found["energy"] == pytest.approx(-np.log(np.exp(own.logits_nC).sum(1)), abs=1e-9)
    fitted, held = distances.probe(chosen.states_nD, chosen.logits_nC.argmax(1) != [q.answer for q in valid])
    assert found["probe"] == pytest.approx([*fitted(own.states_nD[:6]), *held])
    predict_task(model, TOKENIZER, asked, folder=tmp_path, signals=found, run={"seen": {"training": 30}})
    assert pq.read_table(tmp_path / "predictions.parquet")["probe"].to_pylist() == found["probe"]
    (group,) = predictions.load(tmp_path)
    assert all(set(NAMES) <= set(cell.signals) for cell in group.cells.values())
    assert predictions.read_meta(tmp_path / "meta.json")["seen"] == {"training": 30}


def test_backgrounds_of_novelty() -> None:
    """Oracle: vmoer.fit on each background by itself; of the training questions that is novelty as it was."""
    model = vmoer.attach(tiny_model(), vmoer.Deterministic())
    train, others, asked = some(20, "train"), some(12, "other", 60), some(5, "test", 90)
    answers = partial(answer_questions, model, TOKENIZER, asked)

    def fitted(questions: list[Question], tokens: Any) -> list[float]:
        ids = [TOKENIZER(prompt(TOKENIZER, q))["input_ids"] for q in questions]
        vmoer.fit(model, [padded(ids, torch.device("cpu"))], tokens=tokens, rank="full")
        return [one.signals["novelty"] for one in answers()]

    tokens = sum(len(TOKENIZER(prompt(TOKENIZER, q))["input_ids"]) for q in train)
    by_hand = np.array(fitted(train, "all")) * tokens / len(train)
    of_others = np.array(fitted(others, "last")) * len(others) / len(train)
    own = fitted(train, "last")
    found = background_novelty(model, TOKENIZER, asked, train, others)
    assert found["novelty_tokens"] == pytest.approx(by_hand, rel=1e-3)
    assert found["novelty_others"] == pytest.approx(of_others, rel=1e-3)
    assert [one.signals["novelty"] for one in answers()] == own  # as it was
    assert background_novelty(model, TOKENIZER, asked, train, train)["novelty_others"] == pytest.approx(own, rel=1e-3)


def test_unseen_words_are_counted() -> None:
    """Oracle: two of the five words are new."""
    question = Question("q", "Red SAND?", ("red", "two moons"), 0, "t", "test")
    assert unseen_words([question], {"red", "sand"}) == pytest.approx([2 / 5])


def members(folder: Path, n: int) -> list[Path]:
    out = []
    for seed in range(n):
        out.append(folder / f"m{seed}")
        asked, own = [*some(8), *some(3, "validation", 40)], {"own": [0.5] * 11} if seed == 0 else {}
        predict_task(tiny_model(seed), TOKENIZER, asked, folder=out[-1], method=f"m{seed}", signals=own)
    return out


def test_an_ensemble_is_the_mean_of_its_members(tmp_path: Path) -> None:
    """Oracle: probabilities averaged by hand; it has validation answers, so that a temperature can be fitted."""
    three = members(tmp_path, 3)
    ensemble(three, tmp_path / "all", method="ens3", seed=4)
    tables = [pq.read_table(folder / "predictions.parquet").to_pylist() for folder in three]
    for row, *theirs in zip(pq.read_table(tmp_path / "all" / "predictions.parquet").to_pylist(), *tables, strict=True):
        mean = np.mean([np.exp(own["log_probs"]) for own in theirs], 0)
        assert np.exp(row["log_probs"]) == pytest.approx(mean, abs=1e-12)
        assert row["gate_entropy"] == pytest.approx(np.mean([own["gate_entropy"] for own in theirs]))
        entropies = [-np.sum(np.exp(own["log_probs"]) * own["log_probs"]) for own in theirs]
        assert row["mutual_information"] == pytest.approx(-np.sum(mean * np.log(mean)) - np.mean(entropies), abs=1e-7)
        assert "own" not in row  # which one member alone has
        assert (row["method"], row["seed"], row["id"]) == ("ens3", 4, theirs[0]["id"])
    meta = predictions.read_meta(tmp_path / "all" / "meta.json", required=True)
    assert (meta["members"], meta["passes"]) == (["m0", "m1", "m2"], 3)
    (group,) = load(tmp_path / "all")
    assert {key.method for key in group.cells} == {"ens3", "ens3+ts"}


def test_members_must_have_answered_the_same(tmp_path: Path) -> None:
    first: Any = members(tmp_path, 1)
    predict_task(tiny_model(), TOKENIZER, some(5), folder=tmp_path / "other")
    with pytest.raises(InputError, match="different questions"):
        ensemble([*first, tmp_path / "other"], tmp_path / "all", method="e", seed=0)
    with pytest.raises(InputError, match="at least two"):
        ensemble(first, tmp_path / "all", method="e", seed=0)


def test_members_that_came_out_of_a_pack_are_averaged_like_others(tmp_path: Path) -> None:
    """Oracle: the same members as they were written. A pack holds float32."""
    import pyarrow as pa

    own = members(tmp_path, 2)
    whole = pq.read_table(ensemble(own, tmp_path / "whole", method="e", seed=0))
    path = own[1] / "predictions.parquet"
    table = pq.read_table(path)
    halves = {pa.float64(): pa.float32(), pa.list_(pa.float64()): pa.list_(pa.float32())}
    schema = pa.schema([field.with_type(halves.get(field.type, field.type)) for field in table.schema])
    pq.write_table(table.cast(schema), path)
    meta = predictions.read_json(own[1] / "meta.json")
    (own[1] / "meta.json").write_text(
        json.dumps(predictions.meta_of(own[1], {k: v for k, v in meta.items() if k != SEAL}))
    )
    found = pq.read_table(ensemble(own, tmp_path / "mixed", method="e", seed=0))
    assert found.schema == whole.schema
    assert found["gate_entropy"].to_numpy() == pytest.approx(whole["gate_entropy"].to_numpy(), abs=1e-6)
    other = pq.read_table(other_answers(own[1], tmp_path / "o", whole["log_probs"].to_pylist(), method="o"))
    assert other.schema.field("gate_entropy").type == pa.float64()
