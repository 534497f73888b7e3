"""examples/short_answers.py on the embedded model. Oracles: scikit-learn, counts over its own rows, and cases by hand."""

import importlib.util
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from sklearn.kernel_ridge import KernelRidge
from sklearn.metrics import roc_auc_score

import vmoer
from vmoer import tasks
from vmoer.cli import run
from vmoer.models import open_model

PATH = Path(__file__).parent.parent / "examples" / "short_answers.py"
spec = importlib.util.spec_from_file_location("short_answers", PATH)
assert spec is not None
assert spec.loader is not None
short = importlib.util.module_from_spec(spec)
spec.loader.exec_module(short)

COMMON = ["--task", "demo", "--instruction", "", "--max-new-tokens", "4", "--device", "cpu"]


@pytest.mark.parametrize(
    ("said", "gold", "verdict"),
    [
        ("Oxidants.", "oxidants", True),
        (" The answer is an oxidant\nor not", "oxidant", True),
        ("It is\noxidants", "oxidants", False),
        ("antioxidants", "oxidants", False),
        ("gravity of the Earth", "the gravity of earth", True),
        ("gravity of Mars and Earth", "gravity of Earth", False),
        ("5–7 days", "5-7 days", True),
        ("", "oxidants", False),
        ("a", "A", True),
    ],
)
def test_the_rule_by_hand(said: str, gold: str, verdict: bool) -> None:
    assert short.right(said, gold) is verdict


def test_any_of_several_answers_is_right() -> None:
    assert short.right("It was Conchita Martínez!", "Martinez", "conchita martínez")
    assert not short.right("It was Conchita", "Martinez", "conchita martínez")
    assert not short.right("anything", "?!")


def test_prompts_with_and_without_a_template() -> None:
    shots = [short.Asked("s", "What is wet?", ("water", "rain"))]
    plain = short.prompt(SimpleNamespace(chat_template=None), "What is hot?", shots, "Be brief.")
    assert plain == "Be brief.\n\nQuestion: What is wet?\nAnswer: water\n\nQuestion: What is hot?\nAnswer:"
    chat = short.prompt(SimpleNamespace(chat_template="x"), "What is hot?", shots, "Be brief.")
    assert [m["role"] for m in chat] == ["user", "assistant", "user"]
    assert [m["content"] for m in chat] == ["Be brief.\n\nWhat is wet?", "water", "What is hot?"]


def test_scores_of_samples_by_hand() -> None:
    """Four samples a question: entropies of the shares 3/4 and 1/4, and of 1."""

    def said(*texts: str) -> list[Any]:
        return [SimpleNamespace(text=text) for text in texts]

    drawn = said("The cat.", "cat\nor so", "a dog", " CAT", "x", "x!", "x", "x")
    found = short.of_samples(said("cat", "y"), drawn)
    entropy = -(0.75 * np.log(0.75) + 0.25 * np.log(0.25))
    assert found["semantic_entropy"] == [pytest.approx(entropy), 0]
    assert found["self_consistency"] == [0.25, 1]


def test_the_control_is_kernel_ridge_regression() -> None:
    """Oracle: scikit-learn's, on kernels of indicator vectors; each validation question by a fit without it."""
    words = ["red", "green", "blue", "fish", "bird"]
    rng = np.random.default_rng(0)
    x = {split: rng.random((n, len(words))) < 0.5 for split, n in (("validation", 12), ("test", 5))}
    texts = {split: [" ".join(w for w, on in zip(words, row, strict=True) if on) for row in x[split]] for split in x}
    errors = {split: (rng.random(len(x[split])) < 0.4).astype(float) for split in x}
    unit = {s: v / np.sqrt(np.maximum(1, v.sum(1, keepdims=True))) for s, v in x.items()}
    found = short.text_only(texts, errors, "validation")

    def predicted(own: Any, e: Any, new: Any) -> Any:
        # no intercept in scikit-learn's: errors are centred by all validation questions, as ours are
        mean = errors["validation"].mean()
        return KernelRidge(alpha=1.0, kernel="linear").fit(own, e - mean).predict(new) + mean

    own, e = unit["validation"], errors["validation"]
    assert found["test"] == pytest.approx(predicted(own, e, unit["test"]))
    alone = [predicted(np.delete(own, i, 0), np.delete(e, i), own[i : i + 1])[0] for i in range(len(own))]
    assert found["validation"] == pytest.approx(alone)


def test_questions_that_never_had_options(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The embedded world's questions with their right options as `answers`: the same answers are right as with options."""
    for split in ("validation", "test", "train"):
        path = tmp_path / "data" / "quiz" / f"{split}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        asked = tasks.load("demo", split, limit=60)
        rows = [{"id": q.id, "question": q.question, "answers": ["zz", q.choices[q.answer]]} for q in asked]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    quiz = ["demo", *COMMON[2:], "--task", "quiz", "--data-root", str(tmp_path / "data"), "--passes", "0"]
    assert short.main([*quiz, "--samples", "4", "--draws", "10", "--out", str(tmp_path / "out")]) == 0
    assert "0 passes and 4 samples a question (greedy answers and passes: " in capsys.readouterr().out
    rows = pq.read_table(tmp_path / "out" / "answers.parquet").to_pylist()
    golds = {q.id: q.choices[q.answer] for split in ("validation", "test") for q in tasks.load("demo", split, limit=60)}
    assert len(rows) == 120
    assert all(row["correct"] == (golds[row["id"]] in row["text"].split()) for row in rows)
    result = json.loads((tmp_path / "out" / "short_answers.json").read_text())
    measured = {row["score"]: row["auroc"][0] for row in result["splits"]["test"]["rows"]}
    mine = [row for row in rows if row["split"] == "test"]
    for name in ("self_consistency", "semantic_entropy", "text_only"):
        assert measured[name] == pytest.approx(
            roc_auc_score([not row["correct"] for row in mine], [row[name] for row in mine])
        )
    assert {4 * row["self_consistency"] for row in mine} <= {0, 1, 2, 3, 4}
    (tmp_path / "data" / "quiz" / "test.jsonl").write_text('{"id": "a", "question": "b", "answers": []}\n')
    assert short.main([*quiz, "--out", str(tmp_path / "none")]) == 2
    assert "test.jsonl:1: a question without options has" in capsys.readouterr().err


def curve(values: np.ndarray, wrong: np.ndarray) -> float:
    """AURC by its definition; exact where no two values are equal."""
    assert len(set(values)) == len(values)
    sorted_wrong = wrong[np.argsort(values)]
    return float(np.mean(np.cumsum(sorted_wrong) / np.arange(1, len(wrong) + 1)))


def test_its_numbers_are_those_of_its_answers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_folder = tmp_path / "run"
    vmoer.save(vmoer.attach(open_model("demo", device="cpu").model, vmoer.MeanField(layers=[2, 5])), run_folder)
    command = ["demo", "--router", str(run_folder), "--limit", "120", "--passes", "2", "--draws", "60"]
    assert short.main([*command, *COMMON, "--out", str(tmp_path / "out")]) == 0
    out = capsys.readouterr().out
    assert out.rstrip() == (tmp_path / "out" / "short_answers.md").read_text().rstrip()
    result = json.loads((tmp_path / "out" / "short_answers.json").read_text())
    rows = pq.read_table(tmp_path / "out" / "answers.parquet").to_pylist()
    assert {(r["method"], r["task"]) for r in rows} == {("vglr-mf", "demo")}
    assert all(r["correct"] == (r["gold"] in r["text"].split()) for r in rows)
    for split in ("validation", "test"):
        mine = [r for r in rows if r["split"] == split]
        wrong = np.array([not r["correct"] for r in mine])
        found = result["splits"][split]
        assert (found["questions"], found["accuracy"]) == (120, pytest.approx(1 - wrong.mean()))
        measured: dict[str, Any] = {row["score"]: row for row in found["rows"]}
        assert {"nll", "sequence_nll", "marginal_sequence_nll", "max_mutual_information", "answer_tokens"} <= set(
            measured
        )
        auroc = {name: roc_auc_score(wrong, [r[name] for r in mine]) for name in measured}
        for name, row in measured.items():
            assert row["auroc"][0] == pytest.approx(auroc[name])
            assert row["auroc"][1] <= row["auroc"][0] <= row["auroc"][2]
            if name != "nll":
                assert row["auroc_minus_nll"][0] == pytest.approx(auroc[name] - auroc["nll"])
        aurc = {name: curve(np.array([r[name] for r in mine]), wrong) for name in ("nll", "mean_predictive_entropy")}
        assert measured["nll"]["aurc"][0] == pytest.approx(aurc["nll"])
        difference = aurc["mean_predictive_entropy"] - aurc["nll"]
        assert measured["mean_predictive_entropy"]["aurc_minus_nll"][0] == pytest.approx(difference)
        assert measured["nll"]["auroc"][0] > 0.6  # the embedded model knows what it was never told
    best = max(result["splits"]["validation"]["rows"], key=lambda row: row["auroc"][0])["score"]
    assert result["named"] == {"default": "sequence_nll", "best on validation": best}
    # a threshold for `vmoer ask` can be chosen on what it wrote
    assert run(["threshold", str(tmp_path / "out"), "--risk", "0.6", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["form"], said["passes"], said["test"]["questions"]) == ("text", 2, 120)


def test_half_precision_and_no_passes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["demo", "--limit", "40", "--passes", "0", "--draws", "10", "--dtype", "bfloat16", *COMMON]
    assert short.main([*command, "--out", str(tmp_path)]) == 0
    assert "marginal" not in capsys.readouterr().out


def test_what_cannot_be_measured_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """All wrong: the answers are kept, and there is nothing to rank. Bad input: code 2, nothing written."""
    quiz = tmp_path / "quiz.jsonl"
    rows = [{"id": f"q{i}", "question": f"Say {i}", "choices": ["zebra crossing", "b"], "answer": 0} for i in range(20)]
    quiz.write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = ["demo", *COMMON, "--passes", "0", "--out", str(tmp_path / "out")]
    assert short.main([*command, "--task", str(quiz)]) == 1
    assert capsys.readouterr().err.splitlines()[-1] == "all 2 answers are wrong: there is nothing to tell apart"
    assert len(pq.read_table(tmp_path / "out" / "answers.parquet")) == 6
    pointing = [row | {"question": f"Which of the following is {row['id']}?"} for row in rows]
    quiz.write_text("".join(json.dumps(row) + "\n" for row in pointing))
    assert short.main([*command[:-1], str(tmp_path / "none"), "--task", str(quiz)]) == 2
    assert "no question can be asked without its options" in capsys.readouterr().err
    assert short.main([*command[:-1], str(tmp_path / "none"), "--task", "luck"]) == 2
    assert not (tmp_path / "none").exists()
