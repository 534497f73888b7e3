"""benchmarks/rehearsal.py on small models of the full geometries: every stage and method is in its table."""

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))

import rehearsal

from vmoer.bench.geometries import GEOMETRIES

QUICK = ["--tiny", "--batch", "2", "--questions", "4", "--words", "4"]


def test_a_small_geometry_is_the_same_but_for_its_size() -> None:
    """Oracle: the full configuration: the routers choose as many of as many experts, the same layers are dense."""
    for name in rehearsal.NAMES:
        full, small = GEOMETRIES[name], rehearsal.shrunk(GEOMETRIES[name])
        assert small.kind == full.kind
        for key, value in full.config.items():
            assert small.config[key] == value or key in rehearsal.TINY
        assert small.config["hidden_size"] == 32


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*snapshots fit")
@pytest.mark.parametrize(
    ("name", "methods"),
    [("granite-3b", rehearsal.METHODS), ("qwen1.5-moe", ("map", "vglr-fc")), ("deepseek-moe-16b", ("vtsr@paper",))],
)
def test_every_stage_of_every_method_is_measured(name: str, methods: tuple[str, ...], tmp_path: Path) -> None:
    """Oracle: what the calibration study consists of, written out."""
    assert rehearsal.main([*QUICK, "--out", str(tmp_path), "--geometries", name, "--methods", *methods]) == 0
    result = json.loads((tmp_path / "rehearsal.json").read_text())
    done = {(row["method"], row["stage"]) for row in result["rows"]}
    assert {("-", "build"), ("map", "stage 1"), ("map", "merge"), ("map", "layers")} <= done
    for method in methods:
        expected = {"fit", "predict (router)"}
        if method != "map":
            expected |= {"stage 2"}
        if method not in ("map", "mean-only"):
            expected |= {"predict (answer)", "predict (full)"}
        assert expected <= {stage for label, stage in done if label == method}, method
    trained = {row["method"]: row["trained_parameters"] for row in result["rows"] if row["stage"] == "stage 2"}
    assert all(trained[m] > 0 for m in methods if m in ("mcdr", "swag", "vglr-mf", "vglr-fc", "vglr-lr", "vtsr"))
    assert result["peaks"] == {name: None}  # a CPU has no such counter
    assert f"| {name} | {methods[-1]} |" in (tmp_path / "rehearsal.md").read_text()


@pytest.mark.slow
def test_geometries_can_be_measured_one_after_the_other(tmp_path: Path) -> None:
    """Oracle: the rows of each alone; under other settings a file is begun anew."""
    place = [*QUICK, "--out", str(tmp_path), "--methods", "map", "--geometries"]

    def geometries(*names: str) -> list[str]:
        assert rehearsal.main([*place, *names]) == 0
        rows = json.loads((tmp_path / "rehearsal.json").read_text())["rows"]
        assert len(rows) == 6 * len({row["geometry"] for row in rows})  # build, stage 1, merge, layers, fit, predict
        return sorted({row["geometry"] for row in rows})

    assert geometries("granite-3b") == ["granite-3b"]
    assert geometries("qwen1.5-moe") == ["granite-3b", "qwen1.5-moe"]
    assert geometries("granite-3b") == ["granite-3b", "qwen1.5-moe"]
    assert rehearsal.main([*place, "granite-3b", "--methods", "laplace"]) == 0
    rows = json.loads((tmp_path / "rehearsal.json").read_text())["rows"]
    assert {row["method"] for row in rows if row["geometry"] == "granite-3b"} == {"-", "map", "laplace"}
    assert geometries("qwen1.5-moe", "--questions", "3") == ["qwen1.5-moe"]
