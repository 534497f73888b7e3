"""Predictions over a tiny random MoE.

Oracles: a hand-written loop over single questions with the bare model's own logits; `vmoer.record` over one prompt;
and the answers of one question at a time, whatever the batch and its padding.
"""

import functools
import json
import math
import sys
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import GraniteMoeConfig, GraniteMoeForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import vmoer
from vmoer.attach import attachment_of, sampled
from vmoer.averaging import predict, predict_passes
from vmoer.errors import InputError, RunError
from vmoer.predict import answer, by_length, collate, predict_task
from vmoer.predictions import SIGNALS
from vmoer.tasks import LETTERS, Question
from vmoer.tasks.prompt import prompt

WORDS = ("red", "seven", "wet sand", "a cold day", "iron", "two moons", "tea")


def tiny_tokenizer() -> Any:
    """Characters, and the letters with a space before them: the token that follows `Answer:`."""
    pieces = ["<unk>", "▁", "\n", *map(chr, range(33, 127)), *(f"▁{letter}" for letter in LETTERS)]
    merges = [("▁", letter) for letter in LETTERS]
    core = Tokenizer(models.BPE(vocab={p: i for i, p in enumerate(pieces)}, merges=merges, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    return PreTrainedTokenizerFast(tokenizer_object=core, unk_token="<unk>")


def tiny_model(seed: int = 0, **changes: Any) -> Any:
    torch.manual_seed(seed)
    sizes: dict[str, Any] = {
        "vocab_size": 128,
        "hidden_size": 32,
        "intermediate_size": 24,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_local_experts": 6,
        "num_experts_per_tok": 2,
        "max_position_embeddings": 2048,
        "initializer_range": 0.2,
    }
    return GraniteMoeForCausalLM(GraniteMoeConfig(**sizes | changes)).eval()


def save_tiny(folder: Path, **changes: Any) -> Path:
    tiny_model(**changes).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def some_questions(n: int = 12) -> list[Question]:
    """Two to ten options, lengths that differ, two tasks."""
    out = []
    for i in range(n):
        choices = tuple(f"{WORDS[(i + j) % 7]} {j}" for j in range(2 + i % 9))
        stem = f"Which is number {i}? " + "Think of it. " * (i * 5 % 7)
        out.append(Question(f"q{i}", stem, choices, i % len(choices), "near" if i < 8 else "far", "test"))
    return out


TOKENIZER, QUESTIONS = tiny_tokenizer(), some_questions()
LETTER_IDS = TOKENIZER.convert_tokens_to_ids([f"▁{letter}" for letter in LETTERS])
PROMPTS = [TOKENIZER(prompt(TOKENIZER, q))["input_ids"] for q in QUESTIONS]


def noisy(config: Any = None) -> Any:
    """A model with a posterior that is not its prior, fitted so that it knows novelty."""
    model = vmoer.attach(tiny_model(), config or vmoer.FullCovariance(samples=8))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if ".vmoer." in name:
                p.add_(0.3 * torch.randn(p.shape, generator=generator))
    return vmoer.fit(model, [collate(PROMPTS[:4], model)])


def read(path: Path) -> list[dict[str, Any]]:
    return pq.read_table(path).to_pylist()


def test_the_module_does_not_hide_the_function() -> None:
    assert vmoer.predict is predict


def test_map_is_a_plain_loop_over_questions(tmp_path: Path) -> None:
    model = tiny_model()
    path = predict_task(model, TOKENIZER, QUESTIONS, folder=tmp_path, batch_tokens=700)
    assert attachment_of(model) is None
    for row, question, ids in zip(read(path), QUESTIONS, PROMPTS, strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([ids])).logits[0, -1].double()
        logits = logits[LETTER_IDS[: len(question.choices)]]
        expected = [float(x - logits.logsumexp(0)) for x in logits]
        assert row["log_probs"] == pytest.approx(expected, abs=1e-5)
        assert row["predictive_entropy"] == pytest.approx(-sum(math.exp(x) * x for x in expected), abs=1e-5)
        assert {k: row[k] for k in ("id", "task", "split", "method", "seed", "answer", "prompt_tokens")} == {
            **{k: getattr(question, k) for k in ("id", "task", "split", "answer")},
            "method": "map",
            "seed": 0,
            "prompt_tokens": len(ids),
        }
        assert row["gate_entropy"] > 0
        assert [k for k in SIGNALS if row[k] is None] == [
            *("logit_variance", "temperature", "mc_logit_variance", "novelty", "mutual_information")
        ]
    schema = pq.read_schema(path)
    assert {str(schema.field(name).type) for name in SIGNALS} == {"double"}
    assert not (tmp_path / ".parts").exists()


@pytest.mark.parametrize("config", [vmoer.FullCovariance(samples=8), vmoer.VariationalTemperature(layers=(0, 2))])
def test_signals_and_experts_are_those_of_one_recorded_prompt(tmp_path: Path, config: Any) -> None:
    model = noisy(config)
    predict_task(model, TOKENIZER, QUESTIONS, folder=tmp_path, batch_tokens=900, routing=True)
    routing = read(tmp_path / "routing.parquet")
    layers = attachment_of(model).layers
    assert [(r["id"], r["layer"]) for r in routing] == [(q.id, layer) for q in QUESTIONS for layer in layers]
    for i, (row, ids) in enumerate(zip(read(tmp_path / "predictions.parquet"), PROMPTS, strict=True)):
        with vmoer.record(model) as rec, torch.no_grad():
            model(torch.tensor([ids]))
        for name in SIGNALS[:5]:
            found = rec.signals.get(name)
            expected = None if found is None else pytest.approx(found[:, 0, -1].mean().item(), abs=1e-4, rel=1e-4)
            assert row[name] == expected
        sets = [sorted(x) for x in rec.experts[:, 0, -1].tolist()]
        assert [r["experts"] for r in routing[i * len(layers) : (i + 1) * len(layers)]] == sets


@pytest.mark.parametrize("averaging", ["answer", "full"])
def test_answers_are_averaged_over_their_own_letters(tmp_path: Path, averaging: Any) -> None:
    """By hand: each pass's softmax over the question's letters, their mean, and what the passes disagree by."""
    model = noisy()
    path = predict_task(model, TOKENIZER, QUESTIONS, folder=tmp_path, averaging=averaging, passes=3, batch_tokens=2000)
    for row, question, ids in zip(read(path), QUESTIONS, PROMPTS, strict=True):
        letters = LETTER_IDS[: len(question.choices)]
        one = {"input_ids": torch.tensor([ids])}
        p_MV = predict_passes(model, one, averaging=averaging, passes=3, tokens=letters)[:, 0].exp()
        assert row["log_probs"] == pytest.approx(p_MV.mean(0).log().tolist(), abs=1e-4)
        entropy = torch.distributions.Categorical(p_MV).entropy().mean().item()
        together = torch.distributions.Categorical(p_MV.mean(0)).entropy().item()
        assert row["mutual_information"] == pytest.approx(together - entropy, abs=1e-5)
        assert row["predictive_entropy"] == pytest.approx(together, abs=1e-4)
        assert row["mc_logit_variance"] is None


def test_signals_of_full_averaging_are_the_mean_over_passes(tmp_path: Path) -> None:
    model = noisy()
    path = predict_task(model, TOKENIZER, QUESTIONS[:2], folder=tmp_path, averaging="full", passes=3)
    for row, ids in zip(read(path), PROMPTS, strict=False):
        found = []
        for number in range(3):
            with sampled(model, number), vmoer.record(model) as rec, torch.no_grad():
                model(torch.tensor([ids]))
            found.append(rec.signals["gate_entropy"][:, 0, -1].mean().item())
        assert row["gate_entropy"] == pytest.approx(sum(found) / 3, abs=1e-5)


@functools.cache
def alone(averaging: Any) -> tuple[Any, list[dict[str, list[Any]]]]:
    model = noisy()
    counts = [len(q.choices) for q in QUESTIONS]
    return model, [
        answer(model, collate([ids], model), LETTER_IDS, [n], averaging, 2)
        for ids, n in zip(PROMPTS, counts, strict=True)
    ]


@pytest.mark.parametrize("averaging", ["router", "answer", "full"])
@settings(max_examples=30)
@given(data=st.data())
def test_batches_and_padding_change_nothing(averaging: Any, data: st.DataObject) -> None:
    model, expected = alone(averaging)
    rows = data.draw(st.lists(st.integers(0, len(PROMPTS) - 1), min_size=1, max_size=6, unique=True))
    left, extra = data.draw(st.booleans()), data.draw(st.integers(0, 9))
    width = max(len(PROMPTS[r]) for r in rows) + extra
    ids_BT, mask_BT = torch.zeros(len(rows), width, dtype=torch.long), torch.zeros(len(rows), width, dtype=torch.long)
    for i, r in enumerate(rows):
        n = len(PROMPTS[r])
        span = slice(width - n, width) if left else slice(0, n)
        ids_BT[i, span], mask_BT[i, span] = torch.tensor(PROMPTS[r]), 1
    batch = {"input_ids": ids_BT, "attention_mask": mask_BT}
    found = answer(model, batch, LETTER_IDS, [len(QUESTIONS[r].choices) for r in rows], averaging, 2)
    for i, r in enumerate(rows):
        assert found["log_probs"][i] == pytest.approx(expected[r]["log_probs"][0], abs=1e-4)
        for name in SIGNALS:
            value = expected[r][name][0]
            assert found[name][i] == (None if value is None else pytest.approx(value, abs=1e-4, rel=1e-4))


@given(st.lists(st.integers(1, 50), min_size=1, max_size=40), st.integers(1, 200))
def test_batches_hold_every_row_once_within_the_budget(lengths: list[int], budget: int) -> None:
    batches = by_length(lengths, budget)
    assert sorted(row for rows in batches for row in rows) == list(range(len(lengths)))
    assert all(len(rows) == 1 or len(rows) * max(lengths[r] for r in rows) <= budget for rows in batches)


def test_twice_the_same_bytes_and_nothing_of_the_machine(tmp_path: Path) -> None:
    """Also for a method that draws fresh noise on every call, whatever was drawn before."""
    names = ("predictions.parquet", "routing.parquet", "meta.json")
    found = []
    for name in "ab":
        torch.manual_seed(ord(name))
        model = noisy(vmoer.MeanField(sampling="mc", samples=4))
        predict_task(model, TOKENIZER, QUESTIONS, folder=tmp_path / name, routing=True, batch_tokens=900, seed=3)
        found.append([(tmp_path / name / file).read_bytes() for file in names])
    assert found[0] == found[1]
    meta = json.loads(found[0][2])
    assert (meta["source_task"], meta["ood_tasks"], meta["split"]) == ("near", ["far"], "test")
    assert (meta["method"], meta["seed"], meta["averaging"], meta["passes"]) == ("vglr-mf", 3, "router", 1)
    assert meta["config"]["layers"] == [0, 1, 2]
    assert set(meta["versions"]) == {"vmoer", "torch", "transformers", "python"}
    assert str(tmp_path) not in found[0][2].decode()


class Killed(BaseException):
    pass


def dies_at(call: int, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """`answer` stops the run at that call; the sizes of the batches it was asked for are counted."""
    calls: list[int] = []

    def counted(model: Any, batch: Any, *rest: Any) -> Any:
        calls.append(len(batch["input_ids"]))
        if len(calls) == call:
            raise Killed
        return answer(model, batch, *rest)

    monkeypatch.setattr(sys.modules["vmoer.predict"], "answer", counted)
    return calls


def test_a_stopped_run_goes_on_and_ends_with_the_same_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, options = tiny_model(), {"batch_tokens": 700}
    predict_task(model, TOKENIZER, QUESTIONS, folder=tmp_path / "whole", **options)
    batches = by_length([len(p) for p in PROMPTS], 700)
    dies_at(3, monkeypatch)
    with pytest.raises(Killed):
        predict_task(model, TOKENIZER, QUESTIONS, folder=tmp_path / "cut", **options)
    assert attachment_of(model) is None
    assert [p.name for p in (tmp_path / "cut").iterdir()] == [".parts"]
    calls = dies_at(0, monkeypatch)
    predict_task(model, TOKENIZER, QUESTIONS, folder=tmp_path / "cut", **options)
    assert calls == [len(rows) for rows in batches[2:]]
    for name in ("predictions.parquet", "meta.json"):
        assert (tmp_path / "cut" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


@pytest.mark.parametrize("what", ["weights", "questions", "averaging", "seed"])
def test_parts_of_other_work_are_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    dies_at(2, monkeypatch)
    with pytest.raises(Killed):
        predict_task(tiny_model(), TOKENIZER, QUESTIONS, folder=tmp_path / "a", batch_tokens=700)
    monkeypatch.undo()
    model = tiny_model()
    if what == "weights":  # one that the fingerprint of the routers does not see
        model.model.embed_tokens.weight.data[5] += 1
    questions = QUESTIONS[1:] if what == "questions" else QUESTIONS
    options: Any = {"averaging": {"averaging": "full", "passes": 2}, "seed": {"seed": 1}}.get(what, {})
    for name in "ab":
        predict_task(model, TOKENIZER, questions, folder=tmp_path / name, batch_tokens=700, **options)
    assert (tmp_path / "a/predictions.parquet").read_bytes() == (tmp_path / "b/predictions.parquet").read_bytes()


def test_what_cannot_be_answered_is_said_in_one_line(tmp_path: Path) -> None:
    model = tiny_model()

    def ask(model: Any = model, questions: Any = QUESTIONS, **options: Any) -> None:
        predict_task(model, TOKENIZER, questions, **{"folder": tmp_path, **options})

    with pytest.raises(InputError, match="no questions"):
        ask(questions=[])
    with pytest.raises(InputError, match="averaging='mean': choose one of router, answer, full"):
        ask(averaging="mean")
    with pytest.raises(InputError, match="passes=0"):
        ask(averaging="full", passes=0)
    with pytest.raises(InputError, match="batch_tokens=0"):
        ask(batch_tokens=0)
    with pytest.raises(InputError, match="routing does not go with averaging='full'"):
        ask(averaging="full", routing=True)
    with pytest.raises(InputError, match="longer than the model's context of 100"):
        ask(tiny_model(max_position_embeddings=100))
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match="is a file"):
        ask(folder=tmp_path / "file")
    dense = LlamaForCausalLM(
        LlamaConfig(vocab_size=128, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
    )
    with pytest.raises(InputError, match="LlamaForCausalLM has no MoE router"):
        ask(dense)
    model.lm_head.weight.data[:] = float("nan")
    with pytest.raises(RunError, match=r"question 'q\d+' of (near|far): the model's logits are not finite"):
        ask()
    assert not (tmp_path / "predictions.parquet").exists()
