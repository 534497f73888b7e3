"""Predictions over a tiny random MoE.

Oracles: a hand-written loop over single questions with the bare model's own logits; `vmoer.record` over one prompt;
and the answers of one question at a time, whatever the batch and its padding.
"""

import functools
import json
import math
import sys
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import roc_auc_score
from tiny_letters import TOKENIZER, tiny_model
from transformers import LlamaConfig, LlamaForCausalLM

import vmoer
from vmoer.errors import InputError, RunError
from vmoer.evaluation import predictions, scores
from vmoer.evaluation.answers import answer, answer_questions, predict_task
from vmoer.evaluation.predictions import SIGNALS
from vmoer.evaluation.views import views as views_of
from vmoer.evaluation.writing import Batch
from vmoer.gates import find
from vmoer.inference.averaging import predict_passes
from vmoer.inference.orders import orders
from vmoer.live.attach import attached, attachment_of, sampled
from vmoer.report import report
from vmoer.routers import Config, Posterior, Router, Routing
from vmoer.tasks import LETTERS, Question
from vmoer.tasks.batches import by_length, padded
from vmoer.tasks.prompt import prompt

WORDS = ("red", "seven", "wet sand", "a cold day", "iron", "two moons", "tea")


def some_questions(n: int = 12) -> list[Question]:
    """Two to ten options, lengths that differ, two tasks."""
    out = []
    for i in range(n):
        choices = tuple(f"{WORDS[(i + j) % 7]} {j}" for j in range(2 + i % 9))
        stem = f"Which is number {i}? " + "Think of it. " * (i * 5 % 7)
        out.append(Question(f"q{i}", stem, choices, i % len(choices), "near" if i < 8 else "far", "test"))
    return out


QUESTIONS = some_questions()
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
    return vmoer.fit(model, [padded(PROMPTS[:4], next(model.parameters()).device)])


def read(path: Path) -> list[dict[str, Any]]:
    return pq.read_table(path).to_pylist()


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
    layers = attached(model).layers
    assert [(r["id"], r["layer"]) for r in routing] == [(q.id, layer) for q in QUESTIONS for layer in layers]
    for i, (row, ids) in enumerate(zip(read(tmp_path / "predictions.parquet"), PROMPTS, strict=True)):
        with vmoer.record(model, signals="all") as rec, torch.no_grad():
            model(torch.tensor([ids]))
        for name in SIGNALS[:5]:
            found = rec.signals.get(name)
            expected = None if found is None else pytest.approx(found[:, 0, -1].mean().item(), abs=1e-4, rel=1e-4)
            assert row[name] == expected
        sets = [sorted(x) for x in rec.experts[:, 0, -1].tolist()]
        assert [r["experts"] for r in routing[i * len(layers) : (i + 1) * len(layers)]] == sets


def test_a_damaged_part_is_named_and_answered_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Flipped, cut, other rows under its name: the predictions have the bytes of an undisturbed run."""
    model = noisy()

    def stopped(*args: Any, **more: Any) -> None:
        raise KeyboardInterrupt

    expected = predict_task(model, TOKENIZER, QUESTIONS, folder=tmp_path / "whole", batch_tokens=700).read_bytes()
    for damage in ("flip", "cut", "other rows", "other values"):
        with monkeypatch.context() as patched:
            patched.setattr("vmoer.evaluation.answers.finish", stopped)
            with pytest.raises(KeyboardInterrupt):
                predict_task(model, TOKENIZER, QUESTIONS, folder=tmp_path / damage, batch_tokens=700)
        first, second, *_ = sorted((tmp_path / damage / ".parts").iterdir())
        data = first.read_bytes()
        if damage == "flip":
            first.write_bytes(data[:30] + bytes(byte ^ 1 for byte in data[30:400]) + data[400:])
        elif damage == "cut":
            first.write_bytes(data[:-1])
        elif damage == "other rows":
            first.write_bytes(second.read_bytes())
        else:
            table = pq.read_table(first)
            values = [0.5] * len(table)
            pq.write_table(table.set_column(2, table.column_names[2], [values]), first)
        with pytest.warns(UserWarning, match=r"is damaged \(.*\): its questions are answered again"):
            path = predict_task(model, TOKENIZER, QUESTIONS, folder=tmp_path / damage, batch_tokens=700)
        assert path.read_bytes() == expected


def test_predictions_that_were_changed_or_lost_are_an_error(tmp_path: Path) -> None:
    """Every hundredth bit of the table and of meta.json; and a table that is gone does not take its method with it."""
    for method in ("a", "b"):
        predict_task(tiny_model(), TOKENIZER, QUESTIONS[:2], folder=tmp_path / method, method=method, routing=True)
    before = scores.score(tmp_path)
    for name in ("predictions.parquet", "routing.parquet", "meta.json"):
        path = tmp_path / "a" / name
        data = path.read_bytes()
        for bit in range(0, 8 * len(data), 397):
            flipped = bytearray(data)
            flipped[bit // 8] ^= 1 << bit % 8
            path.write_bytes(flipped)
            said = ""
            try:
                assert scores.score(tmp_path) == before
                assert name == "meta.json"  # its own seal lost its name: nothing else changed
            except InputError as error:
                said = str(error)
            assert "\n" not in said
        path.write_bytes(data[:-2])
        with pytest.warns(UserWarning, match="the questions are answered again"):
            assert not predictions.whole(tmp_path / "a")
        path.write_bytes(data)
    (tmp_path / "a" / "predictions.parquet").unlink()
    with pytest.raises(InputError, match=r"a/predictions.parquet is missing"):
        scores.score(tmp_path)


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


@dataclass(frozen=True)
class MarginPosterior(Posterior):
    """A toy: how far the second logit lies below the first, negated, so that larger means less certain."""

    logits_TN: torch.Tensor
    name: str = "margin"

    def divergence(self) -> torch.Tensor:
        return torch.zeros(len(self.logits_TN))

    def signals(self) -> dict[str, torch.Tensor]:
        first, second = self.logits_TN.float().topk(2, -1).values.unbind(-1)
        return {self.name: second - first}


class MarginRouter(Router):
    def forward(self, u_TD: Any, logits_TN: Any, call: Any, weight_ND: Any) -> Routing:
        return Routing(logits_TN, logits_TN, MarginPosterior(logits_TN, self.config.signal))


@dataclass(frozen=True, kw_only=True)
class Margin(Config):
    key: ClassVar[str] = "margin"
    router: ClassVar[type[Router]] = MarginRouter
    signal: str = "margin"  # type: ignore[misc]


def test_a_new_signal_reaches_the_file_the_metrics_and_the_report(tmp_path: Path) -> None:
    """Oracle: the margin of the router's own logits, by hooks on the bare model; scikit-learn's AUROC of it."""
    model, expected = tiny_model(), []
    for ids in PROMPTS:
        seen: list[float] = []

        def look(router: Any, args: Any, out: Any, seen: list[float] = seen) -> None:
            first, second = (args[0][-1].float() @ router.weight.float().T).topk(2).values
            seen.append((second - first).item())

        with ExitStack() as hooks, torch.no_grad():
            for found in find(model):
                hooks.enter_context(found.router.register_forward_hook(look))
            model(torch.tensor([ids]))
        expected.append(sum(seen) / len(seen))
    path = predict_task(vmoer.attach(model, Margin()), TOKENIZER, QUESTIONS, folder=tmp_path, batch_tokens=700)
    assert pq.read_schema(path).names[-8:] == [*SIGNALS, "margin"]
    assert [row["margin"] for row in read(path)] == pytest.approx(expected, abs=1e-4)
    scores.write(tmp_path, draws=20)
    (row,) = [
        r
        for r in json.loads((tmp_path / "metrics.json").read_text())
        if (r["signal"], r["metric"]) == ("margin", "auroc")
    ]
    assert row["value"] == pytest.approx(
        roc_auc_score([q.task == "far" for q in QUESTIONS], [r["margin"] for r in read(path)])
    )
    report(tmp_path)
    assert "| margin | margin |" in (tmp_path / "report" / "tables.md").read_text()


def test_a_signal_cannot_take_the_name_of_a_column(tmp_path: Path) -> None:
    model = vmoer.attach(tiny_model(), Margin(signal="answer"))
    with pytest.raises(InputError, match="a signal cannot be called answer"):
        predict_task(model, TOKENIZER, QUESTIONS, folder=tmp_path)


@functools.cache
def alone(averaging: Any) -> tuple[Any, list[Batch]]:
    model = noisy()
    counts = [len(q.choices) for q in QUESTIONS]
    return model, [
        answer(model, padded([ids], next(model.parameters()).device), LETTER_IDS, [n], averaging, 2)
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
        assert found.log_probs[i] == pytest.approx(expected[r].log_probs[0], abs=1e-4)
        assert list(found.signals) == list(expected[r].signals)
        for name, values in found.signals.items():
            assert values[i] == pytest.approx(expected[r].signals[name][0], abs=1e-4, rel=1e-4)


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

    monkeypatch.setattr(sys.modules["vmoer.evaluation.answers"], "answer", counted)
    return calls


def test_a_stopped_run_goes_on_and_ends_with_the_same_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model()
    options: Any = {"batch_tokens": 700}
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


def by_hand(model: Any, question: Question, order: tuple[int, ...], number: int | None) -> torch.Tensor:
    """The answer to a question whose options were moved by hand, one prompt at a time, as the options stood before."""
    moved = Question("x", question.question, tuple(question.choices[i] for i in order), 0, "t", "test")
    batch = padded([TOKENIZER(prompt(TOKENIZER, moved))["input_ids"]], torch.device("cpu"))
    with ExitStack() as stack:
        if number is not None:
            stack.enter_context(sampled(model, number))
        shown = predict_passes(model, batch, tokens=LETTER_IDS[: len(order)])[0, 0].double()
    back = torch.empty(len(order), dtype=torch.float64)
    for place, option in enumerate(order):
        back[option] = shown[place]
    return back


@pytest.mark.parametrize("averaging", ["orders", "orders+routing"])
def test_orders_are_prompts_permuted_by_hand_and_answers_mapped_back(averaging: Any, tmp_path: Path) -> None:
    """Oracle: the loop above; information by hand; the same whatever the batches; files say what memory does."""
    model, mine = noisy(), [QUESTIONS[0], QUESTIONS[2], QUESTIONS[1], QUESTIONS[3]]  # 2, 4, 3 and 5 options
    found = answer_questions(model, TOKENIZER, mine, averaging=averaging, passes=4)
    for question, ours in zip(mine, found, strict=True):
        own = orders(len(question.choices), 4, again=averaging == "orders+routing")
        numbers = [None if averaging == "orders" else m for m in range(len(own))]
        passes = torch.stack([by_hand(model, question, o, m) for o, m in zip(own, numbers, strict=True)])
        mean = passes.exp().mean(0)
        assert ours.log_probs == pytest.approx(mean.log().tolist(), abs=1e-5)
        information = (passes.exp() * (passes - mean.log())).sum(-1).mean().item()
        assert ours.signals["mutual_information"] == pytest.approx(information, abs=1e-6)
        assert information > 1e-4  # something to find
    alone = [answer_questions(model, TOKENIZER, [q], averaging=averaging, passes=4)[0] for q in mine]
    for one, other in zip(alone, found, strict=True):
        assert one.log_probs == pytest.approx(other.log_probs, abs=1e-5)
        assert one.signals == pytest.approx(other.signals, abs=1e-5, rel=1e-4)
    path = predict_task(model, TOKENIZER, mine, folder=tmp_path, averaging=averaging, passes=4, batch_tokens=600)
    for row, ours in zip(read(path), found, strict=True):
        assert row["log_probs"] == pytest.approx(ours.log_probs, abs=1e-5)
        assert row["mutual_information"] == pytest.approx(ours.signals["mutual_information"], abs=1e-5)
    meta = json.loads((tmp_path / "meta.json").read_text())
    assert (meta["averaging"], meta["passes"]) == (averaging, 4)


def test_what_all_orders_begin_with_is_run_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracles: every order as a prompt of its own; tokens counted by hand. Where each order routes by itself, all are run."""
    model, mine, seen = noisy(), [QUESTIONS[2], QUESTIONS[3], QUESTIONS[1]], list[int]()
    handle = model.model.layers[0].register_forward_pre_hook(
        lambda _, args: seen.append(args[0].numel() // args[0].shape[-1])
    )

    def asked(averaging: Any = "orders") -> tuple[list[Any], int]:
        seen.clear()
        return answer_questions(model, TOKENIZER, mine, averaging=averaging, passes=8), sum(seen)

    shared, fewer = asked()
    _, apart = asked("orders+routing")
    monkeypatch.setattr("vmoer.evaluation.views.shares_prompts", lambda model: False)
    alone, all_of_them = asked()
    handle.remove()
    for one, other in zip(shared, alone, strict=True):
        assert one.log_probs == pytest.approx(other.log_probs, abs=1e-5)
        assert one.signals == pytest.approx(other.signals, abs=1e-5, rel=1e-4)
    own = [[v.prompt for v in views] for views in views_of(TOKENIZER, mine, "orders", 8, 10**6)]
    begins = [next(i for i, tokens in enumerate(zip(*ps, strict=False)) if len(set(tokens)) > 1) for ps in own]
    rows, rest = sum(map(len, own)), max(len(p) - i for ps, i in zip(own, begins, strict=True) for p in ps)
    assert fewer == len(own) * max(begins) + rows * rest  # with their padding
    assert all_of_them == rows * max(len(p) for ps in own for p in ps)
    assert apart >= all_of_them  # it may take an order again
    assert fewer < 0.8 * all_of_them


def test_orders_undo_a_letter_that_is_liked() -> None:
    """Oracle: symmetry. Over all orders of two options a question and its mirror have mirrored answers, and one pass has not."""
    model = noisy()
    one, other = answer_questions(model, TOKENIZER, [QUESTIONS[0], QUESTIONS[0].ordered((1, 0))], averaging="orders")
    assert one.log_probs == pytest.approx(other.log_probs[::-1], abs=1e-5)
    plain, turned = answer_questions(model, TOKENIZER, [QUESTIONS[0], QUESTIONS[0].ordered((1, 0))])
    assert plain.log_probs != pytest.approx(turned.log_probs[::-1], abs=1e-3)


def test_what_has_no_options_has_no_orders() -> None:
    """One clear line each: token ids, one pass, a name that is none."""
    model = noisy()
    batch = padded(PROMPTS[:1], torch.device("cpu"))
    with pytest.raises(InputError, match="token ids have none"):
        predict_passes(model, batch, averaging="orders")
    with pytest.raises(InputError, match="at least 2 orders"):
        answer_questions(model, TOKENIZER, QUESTIONS[:2], averaging="orders", passes=1)
    with pytest.raises(InputError, match="choose one of"):
        answer_questions(model, TOKENIZER, QUESTIONS[:2], averaging="order")  # type: ignore[arg-type]
