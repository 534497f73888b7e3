"""Settings that validation chose: searched, taken from another study, and never mixed up in one folder."""

import json
from pathlib import Path

import pytest
from test_paper import smallest

from vmoer import cli
from vmoer.routers import FullCovariance, MCDropout, VariationalTemperature
from vmoer.saved import manifest

LABELS = {"vglr-mf": {"beta": 0.037}, "temp-scale": {"temperature": 0.61}}


@pytest.fixture
def elsewhere(tmp_path: Path) -> Path:
    """Another study's runs, of which nothing but the settings is read."""
    for label, config in LABELS.items():
        folder = tmp_path / "elsewhere" / "runs" / f"{label}-s0"
        folder.mkdir(parents=True)
        (folder / "run.json").write_text(json.dumps({"model": "another", "config": config}))
        manifest.seal(folder)
    return tmp_path / "elsewhere"


def study(out: Path, *more: object, name: str = "calibration") -> int:
    words = ["study", name, "--model", "demo", "--task", "demo", "--methods", ",".join(LABELS), "--limit", "8"]
    return cli.run([*words, "--out", str(out), *map(str, more)])


def test_settings_of_another_study_are_taken_and_not_searched_again(
    elsewhere: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Oracle: the numbers written above. Afterwards the folder takes no other settings, and the same ones again."""
    smallest(monkeypatch, preset="default")
    assert study(tmp_path / "out", "--transfer-from", elsewhere) == 0
    for label, config in LABELS.items():
        run = json.loads((tmp_path / "out" / "runs" / f"{label}-s0" / "run.json").read_text())
        assert config.items() <= run["config"].items()
        assert run["stage2"]["tried"] is None
    for other in ([], ["--search"]):
        capsys.readouterr()
        assert study(tmp_path / "out", *other) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert "vglr-mf-s0 was trained with beta = 0.037: give other settings another --out" in line
    assert study(tmp_path / "out", "--transfer-from", elsewhere) == 0


@pytest.mark.parametrize("name", ["calibration", "layer-count"])
def test_nothing_to_transfer_is_said_before_anything_is_trained(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert study(out, "--transfer-from", tmp_path / "none", "--ood", "demo-far", name=name) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "nothing to transfer: " in line
    assert not (out / "runs").exists()


def test_a_search_tries_the_methods_own_beta() -> None:
    """Oracle: the smaller value that the paper names for each, which its preset takes."""
    temperature, gaussian = VariationalTemperature(beta=0.05).search, FullCovariance(beta=0.01).search
    assert temperature is not None
    assert gaussian is not None
    assert temperature.values == (0.0001, 0.001, 0.01, 0.05, 0.1)
    assert gaussian.values == (0.0001, 0.001, 0.01, 0.1)
    assert MCDropout().search is None
