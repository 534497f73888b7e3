"""The studies on the embedded model: a few questions, a few steps, every section of the page."""

import re
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from vmoer.cli import run
from vmoer.errors import InputError
from vmoer.report import read, report
from vmoer.studies import Study, _variants, grid, run_study
from vmoer.studies._labels import parse
from vmoer.training.run import Plan


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
        "layer-count",
        "layer-placement",
        "topk-bias",
        "efficiency",
    ):
        outcome = run_study(name, study, say=lambda line: None)
        assert not outcome.failed, outcome.failed
    rows = read(tmp_path)
    methods = {row["method"] for row in rows if row["metric"] == "nll" and row["study"] is None}
    assert {"map", "map+ts", "map-early", "vglr-fc", "vglr-fc+full", "vtsr", "vtsr+full", "mean-only"} <= methods
    page = report(tmp_path).page.read_text()
    sections = (
        "brittleness",
        "temperature-sweep",
        "stability",
        "layer-count",
        "layer-placement",
        "topk-bias",
        "efficiency",
    )
    for section in (*sections, "overhead"):
        assert f'<details id="{section}"' in page
    figures = {
        "brittleness-curve",
        "brittleness-layers",
        "stability-curves",
        "layer-count",
        "overhead-demo",
        "risk-demo",
    }
    assert figures <= set(re.findall(r'<figure id="([^"]+)"', page))
    counts = {(row["method"], row["layers"]) for row in rows if row["study"] == "layer-count"}
    assert counts == {(m, f"susceptible:{n}") for m in ("mcdr", "vglr-fc", "vtsr") for n in (1, 2, 4, 8)}
    # all eight layers are the default preset's own run, which the calibration study has trained already
    assert not list((tmp_path / "runs").glob("*susceptible8*"))
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


def test_cells_side_by_side_train_a_run_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four cells want one run at the same moment: one trains while the others wait, and nobody trains it again."""
    inside, most, trained = 0, 0, 0

    def train(*args: object, out: Path, **settings: object) -> None:
        nonlocal inside, most, trained
        inside += 1
        most = max(most, inside)
        time.sleep(0.05)
        if not (out / "manifest.json").exists():
            trained += 1
            out.mkdir(parents=True)
            (out / "manifest.json").write_text("{}")
        inside -= 1

    monkeypatch.setattr(_variants, "train", train)
    study, out = small(tmp_path), tmp_path / "runs" / "vglr-fc-s0"
    cells = [
        threading.Thread(target=_variants.train_label, args=(study, "vglr-fc"), kwargs={"out": out, "seed": 0})
        for _ in range(4)
    ]
    for cell in cells:
        cell.start()
    for cell in cells:
        cell.join()
    assert (most, trained) == (1, 1)


def test_what_trains_comes_before_what_averages(tmp_path: Path) -> None:
    """Side by side, a cell that averages a run's answers should find the run made."""
    labels = [(cell.key["method"], cell.key["seed"]) for cell in grid("calibration", small(tmp_path, seeds=(0, 1)))]
    averaged = ["+" in method for method, _ in labels]
    assert averaged == sorted(averaged)
    assert len(labels) == len(set(labels)) == 2 * 7  # five methods, of which two draw


def test_who_answers_validation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that come with an output temperature, which is fitted there; nothing reads the others' answers to these questions."""
    asked: dict[str, set[tuple[str, str]]] = {}
    monkeypatch.setattr(
        _variants,
        "prepare",
        lambda *args, **kwargs: type("Opened", (), {"model": None, "tokenizer": None, "run": None}),
    )
    monkeypatch.setattr(
        _variants,
        "predict_task",
        lambda model, tokenizer, questions, *, method, **more: asked.update(
            {method: {(q.task, q.split) for q in questions}}
        ),
    )
    tempered, others = ("map", "mean-only", "vglr-fc", "vglr-fc+full"), ("mcdr", "vglr-fc@paper", "vglr-fc+answer")
    for label in (*tempered, *others):
        _variants.predict_label(small(tmp_path, limit=4), label, 0, tmp_path / label)
    everywhere = {("demo", "test"), ("demo-near", "test"), ("demo-far", "test")}
    everything = everywhere | {("demo", "validation")}
    assert asked == dict.fromkeys(tempered, everything) | dict.fromkeys(others, everywhere)


def claims(rows: list[dict[str, object]]) -> dict[str, bool]:
    sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
    import demo_claims

    found = demo_claims.Rows(rows)
    lines = [demo_claims.key_line(found), *demo_claims.stable(found)]
    return {claim.partition(":")[0] + str(i): passed for i, (passed, claim, _) in enumerate(lines)}


def claimed(
    method: str, seed: int | None, metric: str, value: float, low: float, high: float, **more: object
) -> dict[str, object]:
    keys = {"study": None, "task": "demo", "split": "test", "method": method, "seed": seed, "metric": metric}
    return keys | {"value": value, "low": low, "high": high} | more


@pytest.mark.parametrize(
    ("method", "accuracy", "high", "seeds", "passes"),
    [
        ("vglr-fc+full", -0.009, -0.001, (0, 1, 2), True),
        ("vglr-fc", -0.011, -0.001, (0, 1, 2), False),  # more than a point of accuracy
        ("vglr-fc", 0.0, 0.0001, (0, 1, 2), False),  # an interval that includes zero
        ("vglr-fc", 0.0, -0.001, (0, 1), False),  # a seed is missing
        ("vglr-fc@paper", 0.0, -0.001, (0, 1, 2), False),  # not the library's defaults
        ("mean-only", 0.0, -0.001, (0, 1, 2), False),  # a control
    ],
)
def test_the_key_claim_is_read_from_the_intervals(
    method: str, accuracy: float, high: float, seeds: tuple[int, ...], passes: bool
) -> None:
    rows = []
    for seed in seeds:
        for metric in ("nll", "brier", "debiased_ece"):
            rows.append(
                claimed(method, seed, f"{metric}_minus_map", -0.02, -0.03, high if metric == "brier" else -0.01)
            )
        rows.append(claimed(method, seed, "accuracy_minus_map", accuracy, -0.02, 0.01))
    assert next(iter(claims(rows).values())) is passes


def test_stability_claims() -> None:
    """An interval over seeds that reaches zero passes; below it, or a floor that is not exactly one, it fails."""

    def rows(high: float, floor: float) -> list[dict[str, object]]:
        about = {"study": "stability", "gamma": 0.005}
        out = [
            claimed("vglr-fc", s, "jaccard_minus_map", -0.001, -0.003, h) | about
            for s, h in ((0, -0.001), (None, high))
        ]
        out += [
            claimed(name, 0, "jaccard", v, v, v, gamma=0) | {"study": "stability"}
            for name, v in (("vglr-fc", floor), ("vglr-fc (fresh noise)", 0.8))
        ]
        return out

    assert list(claims(rows(0.0005, 1.0)).values())[1:] == [True, True, True]
    assert list(claims(rows(-0.002, 1.0)).values())[1:] == [True, False, True]
    assert list(claims(rows(0.0005, 0.999999)).values())[1:] == [False, True, True]


def test_dry_run_prints_the_grid(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["study", "stability", "--model", "demo", "--task", "demo", "--out", str(tmp_path / "none"), "--dry-run"]
    assert run([*command, "--methods", "map,vglr-fc,vtsr", "--seeds", "0,1"]) == 0
    out = capsys.readouterr().out
    assert "4 cells" in out
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize(
    ("label", "message"),
    [("vglr-xx", "unknown method"), ("vglr-fc@papre", "unknown preset"), ("vglr-fc+fulll", "averaging is")],
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
