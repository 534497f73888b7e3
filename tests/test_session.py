"""A first session on the command line: train, eval, ask, in a small world. Oracles stand in each test."""

import json
import re
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from test_cli import fails
from train_workers import world

from vmoer import tasks
from vmoer.cli import run
from vmoer.evaluation.ask import answer_choice
from vmoer.models import open_model

STAGES = ["--rank", "2", "--stage1-epochs", "2", "--stage1-lr", "1e-3", "--stage2-epochs", "2"]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    return world.save(tmp_path_factory.mktemp("world"))


@pytest.fixture(scope="module")
def trained(place: tuple[str, str], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, str]:
    """A run, and what `vmoer train` printed on stdout and on stderr."""
    out = tmp_path_factory.mktemp("runs") / "a run"
    capture = pytest.MonkeyPatch()
    printed: dict[str, list[str]] = {"stdout": [], "stderr": []}
    with capture.context() as patch:
        for name, lines in printed.items():
            patch.setattr(f"sys.{name}", _Kept(lines))
        command = ["train", place[0], "--task", "sciq", "--data-root", place[1], "--out", str(out), "--device", "cpu"]
        assert run([*command, *STAGES]) == 0, printed
    return out, "".join(printed["stdout"]), "".join(printed["stderr"])


class _Kept:
    """A stream that is no terminal and keeps what is written."""

    encoding = "utf-8"

    def __init__(self, lines: list[str]) -> None:
        self.lines = lines

    def write(self, text: str) -> int:
        self.lines.append(text)
        return len(text)

    def flush(self) -> None: ...

    def isatty(self) -> bool:
        return False


@pytest.fixture(scope="module")
def evaluated(trained: tuple[Path, str, str]) -> Path:
    """The folder of the command that `vmoer train` ends with, run as it was printed."""
    words = shlex.split(trained[1].splitlines()[-1])
    assert words[:2] == ["vmoer", "eval"]
    assert run(words[1:]) == 0
    return Path(words[words.index("--out") + 1])


def test_training_shows_each_validation_and_ends_with_before_and_after(trained: tuple[Path, str, str]) -> None:
    """Oracle: the history in run.json."""

    def when(row: dict[str, Any]) -> str:
        return f"epoch {row['epoch']}:" if row["epoch"] else "before:"

    out, printed, told = trained
    said = json.loads((out / "run.json").read_text())
    for number in (1, 2):
        for row in said[f"stage{number}"]["history"]:
            (line,) = (line for line in told.splitlines() if line.startswith(f"stage {number}, {when(row)}"))
            numbers = f"{row['validation_nll']:.3f}, accuracy {row['validation_accuracy']:.3f}"
            assert re.search(rf"validation( NLL)? {numbers}", line)
            assert ("training NLL" in line) == (row["epoch"] > 0)
            assert len(line) <= 80
    first, last = said["stage1"]["history"][0], said["stage1"]["history"][-1]
    best = min(said["stage2"]["history"], key=lambda row: row["validation_nll"])
    for row, words in ((first, "stage 1, the model before"), (last, "the model after"), (best, "vglr-fc after")):
        (line,) = (line for line in printed.splitlines() if words in line)
        assert line.split()[-3:] == [
            str(row["epoch"]),
            f"{row['validation_nll']:.3f}",
            f"{row['validation_accuracy']:.3f}",
        ]


def test_eval_of_a_run_answers_the_base_too_and_ends_with_the_verdict(
    trained: tuple[Path, str, str], evaluated: Path, place: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Oracles: RUN/map, the same model without routers, answering by itself; and the paired rows of metrics.json."""
    out = evaluated.parent / "alone"
    asked = ["--task", "sciq", "--data-root", place[1], "--device", "cpu"]
    assert run(["eval", str(trained[0] / "map"), *asked, "--out", str(out)]) == 0
    capsys.readouterr()
    ours, theirs = (pq.read_table(f / "predictions.parquet").to_pylist() for f in (evaluated / "base", out))
    assert {row["method"] for row in ours} == {"map"}
    assert [row["id"] for row in ours] == [row["id"] for row in theirs]
    for one, two in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(one["log_probs"], two["log_probs"], atol=1e-5)
    assert run(["eval", str(trained[0]), *asked, "--out", str(evaluated)]) == 0
    lines = capsys.readouterr().out.splitlines()
    rows = json.loads((evaluated / "metrics.json").read_text())
    (row,) = (r for r in rows if r["method"] == "vglr-fc+ts" and r["metric"] == "nll_minus_map_ts")
    assert lines[-1].startswith("Against the plain model with a temperature: NLL ")
    found = [float(number) for number in re.findall(r"-?\d+\.\d+", lines[-1])]
    assert found == pytest.approx([row["value"], row["low"], row["high"]], abs=6e-4)
    assert "over 24 questions" in lines[-1]
    assert "no comparison at equal data" in lines[-2]  # the preset holds a fifth back for the routers
    assert run(["threshold", str(evaluated), "--risk", "0.9999"]) == 0  # of the run's answers, not of the base's
    assert json.loads((evaluated / "threshold.json").read_text())["method"] == "vglr-fc"


def test_another_eval_does_not_replace_it_in_silence(
    trained: tuple[Path, str, str], evaluated: Path, place: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    before = (evaluated / "predictions.parquet").read_bytes()
    again = ["eval", str(trained[0]), "--task", "sciq", "--data-root", place[1], "--limit", "20", "--no-base"]
    code, line = fails(capsys, *again, "--out", evaluated)
    assert code == 2
    assert "choose another folder, or give --replace" in line
    assert (evaluated / "predictions.parquet").read_bytes() == before
    other = evaluated.parent / "other"
    for limit in ("20", "10"):
        assert run([*again[:-3], "--limit", limit, "--no-base", "--replace", "--out", str(other)]) == 0
    assert pq.read_table(other / "predictions.parquet").num_rows == 20  # ten of each split
    assert not (other / "base").exists()


def test_ask_says_how_familiar_a_question_is(
    trained: tuple[Path, str, str], place: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Oracle: novelty of every validation question, asked one by one, and the share that is smaller."""
    opened = open_model(trained[0], device="cpu")
    known = [
        answer_choice(opened, q.question, q.choices).judged["novelty"]
        for q in tasks.load("sciq", "validation", data_root=place[1])
    ]
    options = ["red", "green", "blue", "grey"]
    words = {"w1 o2": None, "filler filler filler w3 o4": None, "answer answer answer": None}
    for question in words:
        novelty = answer_choice(opened, question, options).judged["novelty"]
        share = float(np.mean(np.array(known) < novelty))
        command = ["ask", str(trained[0]), question, "--device", "cpu"]
        choices = [word for option in options for word in ("--choice", option)]
        assert run([*command, *choices, "--json"]) == 0
        rank = json.loads(capsys.readouterr().out)["ranks"]["novelty"]
        assert rank == pytest.approx(share, abs=1.5 / len(known))  # kept as 101 quantiles of few questions
        assert run([*command, *choices]) == 0
        line = capsys.readouterr().out.splitlines()[-1]
        assert line.startswith("unfamiliar: further" if rank >= 0.9 else f"familiar: {1 - rank:.0%} of validation")
        assert run([*command, *choices, "--abstain-above", "0", "--score", "novelty"]) == 0
        assert f"more than {rank:.0%} of validation questions have" in capsys.readouterr().out


def test_long_questions_are_left_out_and_counted(
    place: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Oracle: a file written here, with three questions longer than the model's 128 tokens; and the shift is the whole file."""
    rows: list[dict[str, Any]] = [
        {"id": f"q{i}", "question": "w1 " * (200 if i < 3 else 1), "choices": ["red", "blue"], "answer": i % 2}
        for i in range(20)
    ]
    file = tmp_path / "own.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    asked = ["eval", place[0], "--task", "sciq", "--data-root", place[1], "--ood", str(file), "--out"]
    code, line = fails(capsys, *asked, tmp_path / "a")
    assert code == 2
    assert "--skip-long leaves such questions out" in line
    assert run([*asked, str(tmp_path / "b"), "--skip-long"]) == 0
    assert "note: 3 of 20 questions of own left out" in capsys.readouterr().err
    answered = pq.read_table(tmp_path / "b" / "predictions.parquet").to_pylist()
    assert {row["id"] for row in answered if row["task"] == "own"} == {f"q{i}" for i in range(3, 20)}
    assert {row["split"] for row in answered if row["task"] == "own"} == {"test"}
