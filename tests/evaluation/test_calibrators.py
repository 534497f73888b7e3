"""`vmoer calibrate` and what uses its file. Oracles: the predictions of `vmoer eval` put through the map by hand, the files of an
undisturbed run, and edits of `calibrator.json` that must be refused in one line."""

import json
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from test_cli import fails

import vmoer
from vmoer import metrics as m
from vmoer.cli import run
from vmoer.errors import InputError
from vmoer.evaluation.calibrators import settings
from vmoer.metrics.calibrators import KINDS
from vmoer.models import open_model
from vmoer.saved import manifest
from vmoer.saved.calibrator import Stored, checked, of
from vmoer.saved.store import read_folder

CPU = ("--device", "cpu")


@pytest.fixture(scope="module")
def calibrated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The embedded model as a run, with the calibrator that 120 validation questions choose."""
    out = tmp_path_factory.mktemp("calibrated") / "run"
    assert run(["calibrate", "demo", "--task", "demo", "--limit", "120", "--out", str(out), *CPU]) == 0
    return out


@pytest.fixture
def copied(calibrated: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(calibrated, tmp_path / "run"))


def rewritten(folder: Path, **changes: Any) -> None:
    """Change the file and the manifest with it: what a checksum does not notice."""
    found = json.loads((folder / "calibrator.json").read_text())
    (folder / "calibrator.json").write_text(json.dumps(found | changes))
    manifest.seal(folder)


def evaluated(folder: Path, out: Path, *more: str) -> tuple[list[dict[str, Any]], Any]:
    command = ["eval", str(folder), "--task", "demo", "--limit", "30", "--out", str(out), *CPU, *more]
    assert run(command) == 0
    rows = pq.read_table(out / "predictions.parquet").to_pylist()
    return json.loads((out / "metrics.json").read_text()), [r for r in rows if r["split"] == "test"]


def value(rows: list[dict[str, Any]], metric: str, method: str) -> float:
    (row,) = [r for r in rows if (r["metric"], r["method"], r["signal"]) == (metric, method, None)]
    assert metric != "nll" or row["low"] < row["value"] < row["high"]
    return float(row["value"])


def test_eval_has_a_row_of_calibrated_answers_and_keeps_the_raw_ones(calibrated: Path, tmp_path: Path) -> None:
    rows, answers = evaluated(calibrated, tmp_path / "with")
    log_probs, right = m.pad([r["log_probs"] for r in answers]), [r["answer"] for r in answers]
    file = json.loads((calibrated / "calibrator.json").read_text())
    parameters = {k: tuple(v) if isinstance(v, list) else v for k, v in file["parameters"].items()}
    mapped = KINDS[file["kind"]](**parameters).apply(log_probs)
    assert file["kind"] != "none"
    assert value(rows, "nll", "map") == pytest.approx(m.nll(log_probs, right))
    assert value(rows, "nll", "map+cal") == pytest.approx(m.nll(mapped, right))
    without, plain = evaluated(calibrated, tmp_path / "without", "--no-calibrator")
    assert [r["log_probs"] for r in plain] == [r["log_probs"] for r in answers]
    assert not [r for r in without if r["method"] == "map+cal"]


def test_validation_itself_is_not_scored_by_what_was_fitted_on_it(calibrated: Path, tmp_path: Path) -> None:
    rows, _ = evaluated(calibrated, tmp_path, "--split", "validation")
    assert {r["method"] for r in rows} == {"map"}


def test_the_file_says_what_it_is_for(calibrated: Path) -> None:
    saved = read_folder(calibrated)
    stored = of(saved)
    assert stored is not None
    file = stored.file
    assert (file["task"], file["questions"], file["options"]) == ("demo", 120, [4])
    assert (file["averaging"], file["passes"], file["method"]) == ("router", 1, "map")
    assert file["fingerprint"]["base"] == saved.description["base"]
    tried = {kind: nll for kind, nll in file["cross_validated_nll"].items() if nll is not None}
    assert tried.keys() == KINDS.keys()
    assert file["kind"] == min(tried, key=lambda kind: tried[kind])


def test_ask_gives_calibrated_probabilities(calibrated: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Oracle: the raw probabilities of the same question through the map."""
    asked = ["ask", str(calibrated), "amuses Quita Rossi"]
    asked += [word for name in ("Rossi", "Quita", "Anna", "Bob") for word in ("--choice", name)]
    said = {}
    for more in ((), ("--no-calibrator",)):
        assert run([*asked, "--json", *CPU, *more]) == 0
        said[more] = json.loads(capsys.readouterr().out)
    stored = of(read_folder(calibrated))
    assert stored is not None
    expected = np.exp(stored.apply(np.log([said[("--no-calibrator",)]["probabilities"]])))[0]
    assert said[()]["probabilities"] == pytest.approx(expected.tolist(), abs=1e-9)
    entropy = -sum(p * math.log(p) for p in expected)
    assert said[()]["value"] == pytest.approx(entropy)
    assert said[()]["calibrator"]["task"] == "demo"
    assert run([*asked, *CPU]) == 0
    assert "fitted on 120 validation questions of demo" in capsys.readouterr().out


def test_another_number_of_options_is_one_line(calibrated: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ("ask", calibrated, "amuses Quita Rossi", "--choice", "a", "--choice", "b", *CPU)
    code, line = fails(capsys, *asked)
    assert code == 2
    assert "fitted on questions with 4 options, and one has 2: give --no-calibrator" in line
    assert run([str(word) for word in (*asked, "--no-calibrator")]) == 0
    stored = of(read_folder(calibrated))
    assert stored is not None
    with pytest.raises(InputError, match="4 options, and one has 3"):
        stored.apply(np.log(np.full((1, 3), 1 / 3)))


def test_another_averaging_is_one_line(calibrated: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    choices = [word for name in "abcd" for word in ("--choice", name)]
    code, line = fails(capsys, "ask", calibrated, "amuses Quita Rossi", *choices, "--passes", "2", *CPU)
    assert code == 2
    assert "fitted for averaging router, and this is full over 2 passes: give --no-calibrator" in line
    rows, _ = evaluated(calibrated, tmp_path, "--averaging", "full", "--passes", "2")
    assert capsys.readouterr().err.startswith("note: without the run's calibrator: the calibrator was fitted for")
    assert not [r for r in rows if r["method"] == "map+cal"]


def test_without_being_told_answers_are_averaged_as_the_calibrator_wants(copied: Path) -> None:
    rewritten(copied, averaging="full", passes=3)
    stored = of(read_folder(copied))
    assert settings(stored, None, None) == ("full", 3)
    assert settings(stored, "answer", None) == ("answer", 8)
    assert settings(None, None, None) == ("router", 8)


@pytest.mark.parametrize("method", ["vector", "isotonic"])
def test_too_few_questions_are_one_line(method: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ("calibrate", "demo", "--task", "demo", "--limit", "49", "--method", method, "--out", tmp_path, *CPU)
    code, line = fails(capsys, *command)
    assert code == 2
    assert f"{method} calibration needs at least 50 validation questions, and there are 49" in line


def test_a_damaged_file_is_one_line_and_calibrate_makes_it_again(
    copied: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good = {path.name: path.read_bytes() for path in copied.iterdir()}
    path = copied / "calibrator.json"
    again = ["calibrate", str(copied), "--task", "demo", "--limit", "120", *CPU]
    for damage in (lambda: path.write_bytes(good[path.name][:-9]), path.unlink):
        damage()
        code, line = fails(capsys, "ask", copied, "x", *CPU)
        assert code == 2
        assert "calibrator.json" in line
        assert line.endswith("run vmoer calibrate again")
        assert run(again) == 0
        assert {p.name: p.read_bytes() for p in copied.iterdir()} == good
        capsys.readouterr()


def test_values_are_checked_before_use(copied: Path) -> None:
    good = json.loads((copied / "calibrator.json").read_text())
    temperature = {"kind": "temperature", "parameters": {"temperature": 2.0}}
    assert isinstance(checked(good | temperature, "x"), Stored)
    wrong: list[dict[str, Any]] = [
        {"format": 2},
        {"kind": "pickle"},
        {"parameters": {"temperature": 1e9}},
        {"parameters": {"temperature": "2"}},
        {"parameters": {"__class__": 1}},
        {"options": []},
        {"options": [10**9]},
        {"options": [True]},
        {"averaging": "mean"},
        {"passes": 0},
        {"questions": "many"},
        {"kind": "vector", "parameters": {"temperature": 1.0, "biases": [0.0]}},
        {"kind": "isotonic", "parameters": {"confidences": [0.9, 0.1], "accuracies": [0.1, 0.9]}},
    ]
    for change in wrong:
        rewritten(copied, **good | temperature | change)
        with pytest.raises(InputError, match="run vmoer calibrate again"):
            of(read_folder(copied))
    rewritten(copied, **good | {"fingerprint": good["fingerprint"] | {"routers": "0" * 64}})
    with pytest.raises(InputError, match="was fitted for other routers"):
        of(read_folder(copied))


def test_where_it_may_be_written(calibrated: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "is not a folder of a run: give --out" in fails(capsys, "calibrate", "demo", "--task", "demo")[1]
    line = fails(capsys, "calibrate", calibrated, "--task", "demo", "--out", tmp_path / "x")[1]
    assert "keeps its calibrator itself" in line
    other = tmp_path / "other"
    model = vmoer.attach(open_model("demo", device="cpu").model, vmoer.MeanField(layers=[2]))
    vmoer.save(model, other, run={"model": "demo", "method": "vglr-mf"})
    line = fails(capsys, "calibrate", "demo", "--task", "demo", "--out", other)[1]
    assert "holds another run: choose another folder" in line


def test_other_routers_in_the_folder_have_no_calibrator(copied: Path) -> None:
    vmoer.save(vmoer.attach(open_model("demo", device="cpu").model, vmoer.MeanField(layers=[2])), copied)
    assert not (copied / "calibrator.json").exists()
    assert of(read_folder(copied)) is None


def test_threshold_and_ask_agree_on_the_calibrator(
    copied: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    evaluated(copied, tmp_path / "eval")
    command = ["threshold", str(tmp_path / "eval"), "--risk", "0.9", "--json"]
    capsys.readouterr()
    assert run(command) == 0
    chosen = json.loads(capsys.readouterr().out)
    stored = of(read_folder(copied))
    assert stored is not None
    assert chosen["calibrator"] == stored.digest
    assert "temperature" not in chosen
    choices = [word for name in "abcd" for word in ("--choice", name)]
    asked = ("ask", copied, "amuses Quita Rossi", *choices, "--abstain-above", tmp_path / "eval", *CPU)
    assert run([str(word) for word in asked]) == 0
    capsys.readouterr()
    rewritten(copied, questions=121)
    assert "chosen with another calibrator" in fails(capsys, *asked)[1]
    assert run([*command, "--no-calibrator"]) == 0
    assert "temperature" in json.loads(capsys.readouterr().out)
