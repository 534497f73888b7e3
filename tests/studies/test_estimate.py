"""What `--dry-run` says: times of finished cells where there are any like those left, else a count of what is to be done."""

import json
import shutil
import time
from collections import Counter
from functools import partial
from pathlib import Path

import pytest

from vmoer.cli import run
from vmoer.demo import model_path
from vmoer.files import sealed
from vmoer.studies import Study, _estimate, _grid, grid
from vmoer.training.run import Plan


def store(cell: _grid.Cell, out: Path, seconds: float | None) -> None:
    cell.path(out).parent.mkdir(parents=True, exist_ok=True)
    timed = {} if seconds is None else {"seconds": seconds}
    cell.path(out).write_text(json.dumps(sealed({"key": cell.key, **timed, "rows": []})))


def cell(study: str, method: str, seed: int, **shared: object) -> _grid.Cell:
    return _grid.Cell(study, {"method": method, "seed": seed, **shared}, list)


def test_a_cell_takes_as_long_as_those_like_it(tmp_path: Path) -> None:
    """Oracle: the means by hand. Another study, other settings and files without a time count for nothing."""
    store(cell("toy", "a", 0, limit=5), tmp_path, 10.0)
    store(cell("toy", "a", 1, limit=5), tmp_path, 20.0)
    store(cell("toy", "b", 0, limit=5), tmp_path, 60.0)
    store(cell("toy", "a", 2, limit=None), tmp_path, 1000.0)
    store(cell("other", "a", 2, limit=5), tmp_path, 1000.0)
    store(cell("toy", "b", 1, limit=5), tmp_path, None)
    asked = [cell("toy", m, s, limit=5) for m, s in (("a", 0), ("a", 2), ("c", 0), ("b", 1))]
    found = _estimate.expected([*asked, cell("third", "a", 0)], tmp_path)
    assert [(one.done, one.seconds) for one in found] == [
        (True, 10.0),
        (False, 15.0),
        (False, 30.0),
        (True, None),
        (False, None),
    ]
    study = Study(model="demo", task="demo", out=tmp_path)
    said = _estimate.sentence(found, study, workers=3)
    assert said.startswith("about 15 s in 3 processes for 2 of the 3 cells left (by the times of finished cells)")
    assert _estimate.sentence(found[:1], study) == "every cell is done"
    assert "no estimate" in _estimate.sentence(found[-1:], study)


def test_a_finished_cell_holds_its_seconds_and_the_table_does_not(tmp_path: Path) -> None:
    def work(wait: float) -> list[_grid.Row]:
        time.sleep(wait)
        return [_grid.row("toy", "value", wait)]

    slow = _grid.Cell("toy", {"n": 1}, partial(work, 0.3))
    _grid.run([slow], tmp_path, say=lambda line: None)
    assert 0.3 <= json.loads(slow.path(tmp_path).read_text())["seconds"] < 30
    assert "seconds" not in (tmp_path / "toy.json").read_text()


def test_the_count_of_question_passes(tmp_path: Path) -> None:
    """Oracle: by hand. 20 test and 20 validation questions and 20 of one shift are answered, twice over for +full; stage 2
    makes 3 epochs over 20 held-out questions, each three passes and a validation; Temp-Scale validates nine temperatures."""
    study = Study(
        model="demo",
        task="demo",
        out=tmp_path,
        ood=("demo-far",),
        methods=("map", "vglr-fc", "vglr-fc+full", "temp-scale"),
        passes=2,
        limit=20,
        stage1=Plan(epochs=0),
        stage2=Plan(epochs=3),
        stage2_data="split:heldout",
    )
    answered, trained = 60, 3 * (3 * 20 + 20)
    cells = {one.key["method"]: one for one in grid("calibration", study)}
    assert _estimate.question_passes(study, [cells["map"]]) == answered
    assert _estimate.question_passes(study, [cells["vglr-fc"]]) == answered + trained
    assert _estimate.question_passes(study, [cells["vglr-fc+full"], cells["vglr-fc"]]) == 3 * answered + trained
    assert _estimate.question_passes(study, [cells["temp-scale"]]) == answered + 9 * 20
    (tmp_path / "runs" / "vglr-fc-s0").mkdir(parents=True)
    (tmp_path / "runs" / "vglr-fc-s0" / "manifest.json").write_text("{}")
    assert _estimate.question_passes(study, [cells["vglr-fc"]]) == answered


def test_a_dry_run_gives_an_estimate_before_anything_was_timed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = [
        "study",
        "calibration",
        "--model",
        "demo",
        "--task",
        "demo",
        "--out",
        str(tmp_path / "none"),
        "--dry-run",
    ]
    assert run([*command, "--methods", "map,map-early", "--limit", "40"]) == 0
    said = capsys.readouterr().out
    assert "for the 2 cells left (by a batch timed now" in said
    assert not (tmp_path / "none").exists()
    assert run(["demo", "--dry-run", "--out", str(tmp_path / "none"), "--workers", "1"]) == 0
    assert "timed yet" in capsys.readouterr().out
    assert not (tmp_path / "none").exists()


def test_a_dry_run_opens_no_weights(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: a folder that has none, of a model with eight MoE layers: cells by hand. A large model needs no tokenizer."""
    bare = tmp_path / "bare"
    shutil.copytree(model_path("map"), bare, ignore=shutil.ignore_patterns("*.safetensors"))
    assert {file.suffix for file in bare.iterdir()} == {".json", ".jinja"}
    more = ["--task", "demo", "--ood", "demo-far", "--methods", "map,vglr-fc", "--limit", "40", "--dry-run"]

    def said(study: str) -> tuple[Counter[str], str]:
        assert run(["study", study, "--model", str(bare), "--out", str(tmp_path / "none"), *more]) == 0
        out = capsys.readouterr().out
        return Counter(line.split()[0] for line in out.splitlines() if line.startswith("  ") and line.strip()), out

    found, text = said("all")
    assert found["temperature-sweep"] == 1 + 8
    assert found["layer-count"] == 3 * len((1, 2, 4, 8))
    assert found["calibration"] == 2
    assert "by a batch timed now" in text
    assert said("factors")[0]["factors"] > 10
    monkeypatch.setattr(_estimate, "LARGEST", 1000)
    (bare / "tokenizer.json").unlink()
    again, text = said("all")
    assert again == found
    assert "no estimate" in text


def test_of_a_large_model_the_questions_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: 20 test and 20 validation questions are answered by each of the two states, as they are trained already."""
    monkeypatch.setattr(_estimate, "LARGEST", 1000)
    study = Study(
        model="demo", task="demo", out=tmp_path, methods=("map", "map-early"), limit=20, stage1=Plan(epochs=0)
    )
    found = _estimate.expected(grid("calibration", study), tmp_path)
    said = _estimate.sentence([*found, _estimate.Expected(cell("toy", "a", 0), False, 12.0)], study)
    assert said.startswith(
        "about 12 s for 1 of the 3 cells left (by the times of finished cells); none like the other 2"
    )
    assert said.endswith("; 2 of them put 80 questions through the model, which is too large to be tried out")
    assert "so there is no estimate; 2 of them put 80 questions" in _estimate.sentence(found, study)
