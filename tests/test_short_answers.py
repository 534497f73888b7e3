"""examples/short_answers.py on the embedded model. Oracles: scikit-learn, counts over its own rows, and cases by hand."""

import importlib.util
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from sklearn.metrics import roc_auc_score

import vmoer
from vmoer.cli import run
from vmoer.models import open_model
from vmoer.tasks import Question

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


def test_prompts_with_and_without_a_template() -> None:
    shots = [Question("s", "What is wet?", ("water", "fire"), 0, "t", "train")]
    plain = short.prompt(SimpleNamespace(chat_template=None), "What is hot?", shots, "Be brief.")
    assert plain == "Be brief.\n\nQuestion: What is wet?\nAnswer: water\n\nQuestion: What is hot?\nAnswer:"
    chat = short.prompt(SimpleNamespace(chat_template="x"), "What is hot?", shots, "Be brief.")
    assert [m["role"] for m in chat] == ["user", "assistant", "user"]
    assert [m["content"] for m in chat] == ["Be brief.\n\nWhat is wet?", "water", "What is hot?"]


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
