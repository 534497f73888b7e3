"""A study takes from its folder what was made with the same settings, and refuses the rest in one line."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from vmoer import cli
from vmoer.demo import model_path
from vmoer.errors import InputError
from vmoer.studies import Study, paper, run_study
from vmoer.studies._made_with import NAME
from vmoer.training.run import Plan

SPLITS = ("train", "validation", "test")
SHIFT = "arc_easy"


@pytest.fixture
def study(tmp_path: Path) -> Study:
    """The plain model on eight questions, of a copy of the embedded model and a data set in files."""
    torch.set_num_threads(1)
    shutil.copytree(model_path("map"), tmp_path / "model")
    for task in ("sciq", SHIFT):
        (tmp_path / "data" / task).mkdir(parents=True)
        for split in SPLITS:
            rows = [
                {
                    "id": f"{split}{i}",
                    "question": f"which is {i}?",
                    "choices": ["red", "green", "blue"],
                    "answer": i % 3,
                }
                for i in range(12)
            ]
            text = "".join(json.dumps(row) + "\n" for row in rows)
            (tmp_path / "data" / task / f"{split}.jsonl").write_text(text)
    settings: dict[str, Any] = {"methods": ("map",), "limit": 8, "stage1": Plan(epochs=0), "ood": (SHIFT,)}
    return Study(str(tmp_path / "model"), "sciq", tmp_path / "out", data_root=str(tmp_path / "data"), **settings)


def computed(study: Study, **changes: Any) -> list[str]:
    """The metrics, after a study with these settings; what it says."""
    said: list[str] = []
    outcome = run_study("calibration", Study(**(vars(study) | changes)), say=said.append)
    assert not outcome.failed, outcome.failed
    return said


def other_weights(study: Study) -> None:
    """One weight becomes another number; names, shapes and sizes stay."""
    path = Path(study.model) / "model.safetensors"
    tensors = load_file(path)
    tensors[min(tensors)].view(-1)[0] += 1
    save_file(tensors, path, metadata={"format": "pt"})


def other_rows(split: str, task: str = "sciq") -> Callable[[Study], None]:
    """One answer becomes another; ids stay."""

    def change(study: Study) -> None:
        path = Path(study.data_root or "") / task / f"{split}.jsonl"
        path.write_text(path.read_text().replace('"answer": 0', '"answer": 1', 1))

    return change


def nothing(study: Study) -> None:
    pass


CHANGES: dict[str, tuple[Callable[[Study], None], dict[str, Any], str]] = {
    "limit": (nothing, {"limit": 4}, "limit = 8, and now it is 4"),
    "no limit": (nothing, {"limit": None}, "limit = 8, and now it is None"),
    "weights": (other_weights, {}, "other model's files"),
    "model": (nothing, {"model": "demo"}, "model = "),
    **{f"{split} rows": (other_rows(split), {}, f"other rows of sciq {split}") for split in SPLITS},
    "a shift's rows": (other_rows("test", SHIFT), {}, f"other rows of {SHIFT}, a shift"),
    "task": (nothing, {"task": SHIFT}, "task = sciq, and now it is arc_easy"),
    "passes": (nothing, {"passes": 3}, "passes = 8, and now it is 3"),
    "search": (nothing, {"search": True}, "search = False, and now it is True"),
    "plan": (nothing, {"stage2": Plan(epochs=1)}, "another plan of stage 2"),
    "preset": (nothing, {"preset": "paper"}, "preset = default, and now it is paper"),
    "dtype": (nothing, {"dtype": "bfloat16"}, "dtype = None, and now it is bfloat16"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_folder_made_with_other_settings_is_refused(name: str, study: Study) -> None:
    """Oracle: the setting that was changed by hand. Nothing in the folder changes, and the old settings go on."""
    assert computed(study) == ["[1/1] calibration: map, seed 0"]
    before = {path: path.read_bytes() for path in study.out.rglob("*.*") if path.is_file()}
    change, other, message = CHANGES[name]
    change(study)
    with pytest.raises(InputError, match=re.escape(message)) as refused:
        computed(study, **other)
    assert str(refused.value).startswith(f"{study.out} was made with ")
    assert str(refused.value).endswith("use another --out")
    assert {path: path.read_bytes() for path in before} == before
    if other:
        assert computed(study) == ["1 of 1 cells are done already"]


def test_the_same_settings_go_on(study: Study) -> None:
    """A cell that was lost is computed again, other seeds join it, and rows under another root are the same rows."""
    computed(study)
    rows = (study.out / "metrics.json").read_bytes()
    for path in (study.out / "cells").iterdir():
        path.unlink()
    moved = Path(study.data_root or "").rename(Path(study.data_root or "").with_name("moved"))
    assert computed(study, data_root=str(moved)) == ["[1/1] calibration: map, seed 0"]
    assert (study.out / "metrics.json").read_bytes() == rows
    assert computed(study, data_root=str(moved), seeds=(0, 1))[0] == "1 of 2 cells are done already"


def test_other_shifts_are_refused_before_anything_is_answered(study: Study) -> None:
    """Finished answers have none to a shift that is asked about now; they would pass for answers to it."""
    computed(study, ood=())
    with pytest.raises(InputError, match=r"map-s0 has answers to other shifts \(none\): .* use another --out"):
        computed(study)


def test_a_folder_that_does_not_say_how_it_was_made_is_refused(study: Study) -> None:
    computed(study)
    (study.out / NAME).unlink()
    with pytest.raises(InputError, match=f"no {NAME} says how they were made: use another --out"):
        computed(study)


def test_settings_of_a_folder_with_nothing_in_it_are_forgotten(study: Study) -> None:
    """Such as a study of a model whose name was mistyped."""
    study.out.mkdir()
    outcome = run_study("calibration", Study(**(vars(study) | {"model": "none/such"})), say=lambda line: None)
    assert outcome.failed
    assert computed(study) == ["[1/1] calibration: map, seed 0"]


def test_the_command_says_it_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.set_num_threads(1)
    command = ["study", "calibration", "--model", "demo", "--task", "demo", "--methods", "map", "--out", str(tmp_path)]
    assert cli.run([*command, "--limit", "8"]) == 0
    capsys.readouterr()
    assert cli.run([*command, "--limit", "4"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "was made with limit = 8, and now it is 4: " in line
    assert "use another --out" in line


@pytest.mark.filterwarnings("ignore:.*the paper takes")
def test_the_papers_tables_keep_to_one_each_task(study: Study, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each task has a folder with settings of its own, and other tasks may join."""
    monkeypatch.setattr(paper, "METHODS", ("map",))
    monkeypatch.setattr(paper, "TASKS", {"openbookqa": "sciq", SHIFT: SHIFT})
    monkeypatch.setattr(paper, "SHIFTS", {SHIFT: SHIFT})
    for task in ("sciq", SHIFT):
        one = Study(**(vars(study) | {"task": task, "table": "1", "ood": (), "methods": ()}))
        assert not run_study("paper", one, say=lambda line: None).failed
        assert json.loads((study.out / task / NAME).read_text())["task"] == task
    both = Study(**(vars(study) | {"task": "", "table": "1", "ood": (), "methods": (), "limit": 4}))
    with pytest.raises(InputError, match="limit = 8, and now it is 4"):
        run_study("paper", both, say=lambda line: None)
