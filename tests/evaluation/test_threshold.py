"""`vmoer threshold` over predictions written by hand. Oracles: counts over the rows of the file, scipy's exact intervals."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from scipy.stats import binomtest
from test_cli import fails
from test_scores import arrays, cell, save
from tiny_letters import save_tiny

import vmoer
from vmoer import metrics
from vmoer.cli import run
from vmoer.errors import InputError
from vmoer.evaluation.threshold import read_threshold
from vmoer.files import sealed

ALL = 1e300  # above every threshold but that which answers all


def doubt(one: dict[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    log_probs, answers = arrays(one)
    return 1 - np.exp(log_probs.max(1)).round(12), log_probs.argmax(1) != answers


@pytest.fixture(scope="module")
def evaluated(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    cells = {split: cell("own", split=split, n=800, scale=1.0) for split in ("validation", "test")}
    signals = {split: np.random.default_rng(0).random(800) for split in cells}
    for split, one in cells.items():
        one["novelty"] = signals[split].tolist()
    folder = save(tmp_path_factory.mktemp("eval"), *cells.values())
    return folder, cells


def test_what_the_file_says_is_what_the_rows_say(
    evaluated: tuple[Path, dict[str, Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, cells = evaluated
    command = ["threshold", str(folder), "--risk", "0.45", "--signal", "least_confidence"]
    assert run([*command, "--out", str(tmp_path / "t.json"), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    stored = json.loads((tmp_path / "t.json").read_text())
    assert said == {k: v for k, v in stored.items() if k != "sha256"} == read_threshold(tmp_path / "t.json").file
    assert (said["form"], said["signal"], said["method"], said["task"]) == ("letters", "least_confidence", "map", "own")
    assert 0 < said["threshold"] < ALL
    grid = np.geomspace(0.1, 10, 2001)  # oracle: the least NLL on a grid
    log_probs, answers = arrays(cells["validation"])
    losses = [metrics.nll(metrics.apply_temperature(log_probs, t), answers) for t in grid]
    assert said["temperature"] == pytest.approx(grid[int(np.argmin(losses))], rel=0.01)
    assert said["validation"]["risk"][0] < said["promised_risk"] <= 0.45
    for split, one in cells.items():
        values, wrong = doubt(one)
        taken = values <= said["threshold"]
        counts = [800, int(taken.sum()), int(wrong[taken].sum())]
        assert [said[split][name] for name in ("questions", "answered", "errors")] == counts
        interval = binomtest(counts[2], counts[1]).proportion_ci(0.95, method="exact")
        assert said[split]["risk"] == pytest.approx([counts[2] / counts[1], interval.low, interval.high])
        assert said[split]["coverage"][0] == pytest.approx(counts[1] / 800)
        assert said[split]["risk_of_all"] == pytest.approx(wrong.mean())


def test_the_table_and_the_default_signal(
    evaluated: tuple[Path, dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    folder, _ = evaluated
    assert run(["threshold", str(folder), "--risk", "0.45"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert "map on own: answer where predictive_entropy <=" in out
    assert "validation" in out
    assert "test" in out
    assert f"--abstain-above {folder / 'threshold.json'}" in out
    assert read_threshold(folder).file["signal"] == "predictive_entropy"
    (folder / "threshold.json").unlink()


def test_a_wanted_risk_that_everything_keeps_answers_everything(
    evaluated: tuple[Path, dict[str, Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["threshold", str(evaluated[0]), "--risk", "0.9", "--out", str(tmp_path / "t.json")]) == 0
    assert "predictive_entropy <= any value" in capsys.readouterr().out
    assert read_threshold(tmp_path / "t.json").file["test"]["answered"] == 800


def test_bad_input_is_one_line_and_code_2(
    evaluated: tuple[Path, dict[str, Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, cells = evaluated
    for message, arguments in {
        "predictive_entropy: no threshold promises risk 0.001 with confidence 0.95 on 800 questions": (
            "--risk",
            "0.001",
        ),
        "novelty: no threshold promises risk 0.1": ("--signal", "novelty"),
        "risk=0 must lie between 0 and 1": ("--risk", "0"),
        "confidence=1 must lie between 0 and 1": ("--confidence", "1"),
        "signal='luck': choose one of": ("--signal", "luck"),
        "there is only map seed 0 on own": ("--method", "vtsr"),
    }.items():
        code, line = fails(capsys, "threshold", folder, *arguments)
        assert code == 2
        assert message in line
    assert not (folder / "threshold.json").exists()
    (tmp_path / "empty").mkdir()
    for message, where in {
        "no such folder": tmp_path / "nowhere",
        "no predictions.parquet": tmp_path / "empty",
        "has no validation answers": save(tmp_path / "tested", cells["test"]),
        "choose by --method and --seed from map seed 0 on own, map seed 1 on own": save(
            tmp_path / "two", cell("own", split="validation"), cell("own", split="validation", seed=1)
        ),
    }.items():
        code, line = fails(capsys, "threshold", where)
        assert code == 2
        assert message in line


def test_of_two_seeds_the_one_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cells = [cell("own", split="validation", seed=seed, n=800) for seed in (0, 1)]
    save(tmp_path, *cells)
    command = ["threshold", str(tmp_path), "--seed", "1", "--risk", "0.6", "--signal", "least_confidence", "--json"]
    assert run(command) == 0
    said = json.loads(capsys.readouterr().out)
    values, wrong = doubt(cells[1])
    assert said["seed"] == 1
    assert said["validation"]["errors"] == wrong[values <= said["threshold"]].sum()
    assert "test" not in said


def test_free_answers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A good score promises what a useless one cannot; the file says how such answers are made."""
    rng, rows = np.random.default_rng(0), []
    for split in ("validation", "test"):
        for i, score in enumerate(rng.random(1500)):
            row: dict[str, Any] = {
                "id": f"{split}{i}",
                "task": "quiz",
                "split": split,
                "method": "vtsr",
                "seed": 0,
                "text": "x",
            }
            row |= {"correct": bool(rng.random() > score**2), "sequence_nll": score, "nll": rng.random()}
            rows.append(row)
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "answers.parquet")
    (tmp_path / "meta.json").write_text(json.dumps({"model": "m", "passes": 8, "score": "sequence_nll"}))
    assert run(["threshold", str(tmp_path), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["form"], said["signal"], said["passes"], said["method"]) == ("text", "sequence_nll", 8, "vtsr")
    taken = [r for r in rows if r["split"] == "test" and r["sequence_nll"] <= said["threshold"]]
    assert said["test"]["errors"] == sum(not r["correct"] for r in taken)
    assert said["threshold"] ** 2 / 3 < 0.1  # its true risk
    code, line = fails(capsys, "threshold", tmp_path, "--signal", "nll")
    assert code == 2
    assert line.startswith("nll: no threshold promises")
    (tmp_path / "answers.parquet").write_bytes(b"no")
    assert "not a readable parquet file" in fails(capsys, "threshold", tmp_path)[1]


def test_a_run_that_was_not_evaluated_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from vmoer.models import open_model

    quiz = tmp_path / "quiz.jsonl"
    rows = [{"id": f"q{i}", "question": f"Number {i}?", "choices": ["1", "2"], "answer": i % 2} for i in range(200)]
    quiz.write_text("".join(json.dumps(row) + "\n" for row in rows))
    base, folder = save_tiny(tmp_path / "tiny"), tmp_path / "run"
    model = vmoer.attach(open_model(base, device="cpu").model, vmoer.MeanField(layers=[1], samples=4))
    vmoer.save(model, folder, run={"model": str(base), "method": "vglr-mf", "seed": 7, "task": str(quiz)})
    assert (
        run(["threshold", str(folder), "--risk", "0.9", "--signal", "logit_variance", "--json", "--device", "cpu"]) == 0
    )
    said = json.loads(capsys.readouterr().out)
    assert (said["method"], said["seed"], said["test"]["questions"]) == ("vglr-mf", 7, 40)
    assert said == read_threshold(folder).file
    assert (folder / "eval" / "predictions.parquet").exists()


def test_files_that_are_no_thresholds(tmp_path: Path) -> None:
    good = {"format": 2, "form": "text", "signal": "nll", "threshold": 1.0}
    for text, message in {
        "{": "not valid JSON",
        "[]": "not a threshold file",
        json.dumps(sealed({**good, "format": 1})): "not a threshold file of this version of vmoer: run vmoer threshold",
        json.dumps(sealed({k: v for k, v in good.items() if k != "threshold"})): "not a threshold file",
        json.dumps(good): "was changed",
        json.dumps({**sealed(good), "threshold": 2.0}): "was changed",
        json.dumps(sealed({**good, "temperature": 0})): "no number for a temperature",
        json.dumps(sealed(good)).replace("1.0", "NaN"): "NaN is not a number",
        json.dumps(sealed(good)).replace("1.0", "Infinity"): "Infinity is not a number",
        json.dumps(sealed(good)).replace("1.0", "1e999"): "was changed",
    }.items():
        (tmp_path / "threshold.json").write_text(text)
        with pytest.raises(InputError, match=message):
            read_threshold(tmp_path)
    (tmp_path / "threshold.json").write_text(json.dumps(sealed(good)))
    assert read_threshold(tmp_path).value == 1
    with pytest.raises(InputError, match="no such file"):
        read_threshold(tmp_path / "other.json")
