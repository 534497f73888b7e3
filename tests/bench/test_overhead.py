"""`vmoer bench` on a model of two layers: every row that the results need, ratios within a round, geometries that stay."""

import copy
import json
import sys
from pathlib import Path

import pytest
import torch
from tiny import GEOMETRY

from vmoer.bench import measure, overhead
from vmoer.bench.measure import between, ratio

METHODS = {"map", "vglr-mf", "vglr-fc", "vglr-lr", "vtsr", "mcdr", "listing", "swag"}


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU the true geometries are measured")
def test_every_row_is_there_and_geometries_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overhead, "KNOWN", {"one": GEOMETRY, "two": GEOMETRY})
    monkeypatch.setattr(overhead.transformers.masking_utils, "find_packed_sequence_indices", lambda ids: None)
    out = tmp_path / "cpu.json"
    overhead.run(["one"], out, True, lambda text: None)
    first = json.loads(out.read_text())
    overhead.run(["two"], out, True, lambda text: None)
    report = json.loads(out.read_text())
    assert [row for row in report["rows"] if row["geometry"] == "one"] == first["rows"]
    assert {row["geometry"] for row in report["rows"]} == {"one", "two"}
    for row in first["rows"]:
        assert row.get("error") is None, row
        assert {"method", "phase", "tokens", "batch", "time_ratio", "memory_ratio"} <= row.keys()
        assert row["time_ratio"] > 0
        assert row["low"] <= row["time_ratio"] <= row["high"]
        assert row["method"] != "map" or row["time_ratio"] == 1
    by_phase = {
        phase: {r["method"] for r in first["rows"] if r["phase"] == phase} for phase in ("prefill", "decode", "answer")
    }
    assert by_phase == {
        "prefill": METHODS | {"novelty"},
        "decode": METHODS,
        "answer": {"map", "vglr-fc", "answer-32"},
    }
    floors = {row["method"]: row["floor_seconds"] for row in first["routers"]}
    assert floors["vglr-fc"] > floors["vglr-mf"] > floors["vtsr"] > 0
    assert floors["mcdr"] is None
    text = out.with_suffix(".md").read_text()
    assert "## one" in text
    assert "## two" in text
    assert "answer-32" in text
    overhead.run(["one"], out, True, lambda text: None, ["novelty"])
    again = json.loads(out.read_text())
    assert {place(row) for row in again["rows"]} == {place(row) for row in report["rows"]}
    assert (again["routers"], again["ceilings"]) == (report["routers"], report["ceilings"])
    changed = [row for row in again["rows"] if row not in report["rows"]]
    assert {(row["geometry"], row["method"]) for row in changed} == {("one", "novelty")}


def place(row: dict[str, object]) -> tuple[object, ...]:
    return tuple(row[key] for key in ("geometry", "method", "phase", "launch", "tokens"))


def test_ratios_are_taken_within_a_round() -> None:
    """Oracle by hand: rounds in which everything is ten times slower leave the ratios as they are."""
    base, times = [1.0, 10.0, 1.0], [1.5, 11.0, 1.2]
    assert ratio(times, base) == (pytest.approx(1.2), pytest.approx(1.15), pytest.approx(1.35))  # type: ignore[comparison-overlap]


def test_a_clock_that_drifts_leaves_the_ratios_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything takes one percent longer with every run; what takes 1.5 and 3 times the base's time is still seen to."""
    runs = iter(range(1000))
    cost = {"base": 1.0, "a": 1.5, "b": 3.0}
    monkeypatch.setattr(measure, "seconds", lambda work, device, repeats=1: cost[work()] * (1 + 0.01 * next(runs)))
    pairs = between({name: lambda name=name: name for name in "ab"}, lambda: "base", "cpu", rounds=4)  # type: ignore[misc]
    for name, values in pairs.items():
        assert len(values) == 4
        for own, around in values:
            assert own / around == pytest.approx(cost[name], rel=1e-9)


def test_the_committed_results_hold_every_bound_and_a_worse_one_would_not() -> None:
    root = Path(__file__).parent.parent.parent
    sys.path.insert(0, str(root / "benchmarks"))
    import overhead_claims

    report = json.loads((root / "results" / "overhead" / "h200.json").read_text())
    assert all(passed for passed, _ in overhead_claims.lines(report))
    for row in report["rows"]:
        if (row["geometry"], row["method"], row["phase"]) == ("granite-3b", "vglr-fc", "prefill"):
            worse = copy.deepcopy(report)
            worse["rows"][report["rows"].index(row)]["time_ratio"] = 1.02
            failed = [line for passed, line in overhead_claims.lines(worse) if not passed]
            assert [line.split(":")[0] for line in failed] == (
                ["vglr-fc, prefill", "listing over vglr-fc", "mcdr over vglr-fc"] if row["tokens"] == 16384 else []
            )
