"""The studies on the embedded model: a few questions, a few steps, every section of the page."""

from pathlib import Path

import pytest
import torch

from vmoer.cli import run
from vmoer.errors import InputError
from vmoer.report import read, report
from vmoer.studies import Study, grid, run_study
from vmoer.studies._variants import parse
from vmoer.train import Plan


def small(out: Path, **changes: object) -> Study:
    settings = {
        "model": "demo",
        "task": "demo",
        "ood": ("demo-near", "demo-far"),
        "methods": ("map", "map-early", "vglr-fc", "vtsr", "mean-only"),
        "averaging": ("router", "full"),
        "passes": 2,
        "limit": 48,
        "stage1": Plan(epochs=0),
        "stage2": Plan(epochs=1, batch_size=16, lr=1e-3),
        "stage2_data": "split:heldout",
    }
    return Study(out=out, **{**settings, **changes})  # type: ignore[arg-type]


@pytest.mark.slow
def test_every_study_and_the_page(tmp_path: Path) -> None:
    """All of them on 48 questions; the page has a section for each; run again nothing is computed and no byte changes."""
    torch.set_num_threads(1)
    study = small(tmp_path)
    for name in (
        "brittleness",
        "temperature-sweep",
        "calibration",
        "stability",
        "layer-placement",
        "topk-bias",
        "efficiency",
    ):
        outcome = run_study(name, study, say=lambda line: None)
        assert not outcome.failed, outcome.failed
    rows = read(tmp_path)
    methods = {row["method"] for row in rows if row["metric"] == "nll" and row["study"] is None}
    assert {"map", "map+ts", "map-early", "vglr-fc", "vglr-fc+full", "vtsr", "vtsr+full", "mean-only"} <= methods
    page = report(tmp_path).read_text()
    for section in ("brittleness", "temperature-sweep", "stability", "layer-placement", "topk-bias", "efficiency"):
        assert f'id="{section}"' in page
    stable = [row for row in rows if row["study"] == "stability" and row["metric"] == "jaccard" and row["gamma"] == 0]
    fixed = [row["value"] for row in stable if "fresh" not in row["method"]]
    assert fixed == [1.0] * len(fixed)
    assert all(row["value"] < 1 for row in stable if "fresh" in row["method"] and "vtsr" in row["method"])
    before = (tmp_path / "metrics.json").read_bytes()
    said: list[str] = []
    run_study("calibration", study, say=said.append)
    assert said == ["7 of 7 cells are done already"]
    assert (tmp_path / "metrics.json").read_bytes() == before


def test_an_impossible_cell_leaves_the_rest_and_exits_with_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The far shift is missing from the data root: the cells that need it fail, those before are there."""
    torch.set_num_threads(1)
    command = [
        "study",
        "calibration",
        "--model",
        "demo",
        "--task",
        "demo",
        "--out",
        str(tmp_path),
        "--methods",
        "map,map-early",
    ]
    assert run([*command, "--limit", "20", "--ood", "demo-faar"]) == 1
    assert "demo-far" in capsys.readouterr().err
    assert run([*command, "--limit", "20", "--ood", "demo-far"]) == 0


def test_dry_run_prints_the_grid(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["study", "stability", "--model", "demo", "--task", "demo", "--out", str(tmp_path / "none"), "--dry-run"]
    assert run([*command, "--methods", "map,vglr-fc,vtsr", "--seeds", "0,1"]) == 0
    out = capsys.readouterr().out
    assert "4 cells" in out
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize(
    ("label", "message"),
    [("vglr-xx", "unknown method"), ("vglr-fc@papre", "no preset"), ("vglr-fc+fulll", "averaging is")],
)
def test_bad_labels(label: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        parse(label)


def test_unknown_study(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="did you mean stability"):
        grid("stabilty", small(tmp_path))


def test_sensitivity_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.set_num_threads(1)
    assert run(["sensitivity", "demo", "--task", "demo", "--questions", "16", "--out", str(tmp_path)]) == 0
    assert "most brittle first" in capsys.readouterr().out
    assert {p.name for p in tmp_path.iterdir()} == {
        "brittleness.json",
        "ranking.json",
        "brittleness-curve.svg",
        "brittleness-layers.svg",
    }
