"""`vmoer study paper`: the paper's grid, printed numbers beside ours, what it costs, every table on the embedded model."""

import dataclasses
import json
import os
import re
import runpy
from collections import Counter
from pathlib import Path
from typing import Any

import hub_server
import pytest
import torch

from vmoer import cli, tasks
from vmoer.bench.geometries import GEOMETRIES
from vmoer.errors import InputError
from vmoer.report import paper as tables
from vmoer.report.rows import only, paper_models
from vmoer.report.rows import paper as printed
from vmoer.studies import Study, _paper_cost, _variants, paper
from vmoer.studies._labels import with_preset
from vmoer.training import layers, presets
from vmoer.training.plan import Plan

ROOT = Path(__file__).parents[2]
GOLDEN = Path(__file__).parent / "golden" / "paper-tables.json"
GRANITE = paper_models()["granite"]
SHAPES = dict(zip(paper_models().values(), ("granite-3b", "qwen1.5-moe", "deepseek-moe-16b"), strict=True))
UNTRAINED = ("temp-scale", "laplace", "fixed-noise")
Row = dict[str, Any]


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """The paper's models by their shapes in the benchmark, without the hub and without weights."""

    def skeleton(name: str) -> Any:
        return GEOMETRIES[SHAPES[name]].build("meta", torch.bfloat16)

    _variants.moe_layers.cache_clear()
    monkeypatch.setattr(_variants, "skeleton", skeleton)
    monkeypatch.setattr(layers, "skeleton", skeleton)
    monkeypatch.setattr("vmoer.studies.temperature_sweep.skeleton", skeleton)


def test_the_grid_is_the_papers(offline: None, tmp_path: Path) -> None:
    """Oracle: counted by hand from the paper's tables, five runs each."""
    study = Study(model=GRANITE, task="", out=tmp_path, seeds=paper.SEEDS)
    parts = paper.parts(study)
    assert {table: len(cells) // 5 for table, cells in parts.items() if table != "4"} == {
        "1": 4 * 7,
        "2": 5,
        "3": 3,
        "ablation": 3 * 4 + 7,
        "motivation": 1 + 1 + 32,
    }
    assert [cell.key["method"] for cell in parts["4"]] == ["mcdr", "swag", "vglr-mf", "vglr-fc", "vtsr"]
    assert len(paper.cells(study)) == 5 * (28 + 3 + 19 + 34) + 5  # Table 2 is among the cells of Table 1
    methods = Counter(cell.key["method"] for cell in parts["1"])
    assert methods == dict.fromkeys(
        [f"{key}@paper" for key in ("map", "temp-scale", "mcdr", "swag", "vglr-mf", "vglr-fc", "vtsr")], 20
    )
    assert {cell.key["layers"] for cell in parts["ablation"] if cell.study == "layer-placement"} == {
        f"{place}:10" for place in ("first", "middle", "last", "susceptible")
    }
    shifts = {cell.key["task"]: cell.key["ood"] for cell in parts["1"]}
    assert shifts.pop("openbookqa") == "arc_easy,arc_challenge,medmcqa,mmlu_law"
    assert set(shifts.values()) == {""}
    assert all(cell.key["preset"] == "paper" for cell in paper.cells(study) if cell.study != "efficiency")
    alone = paper.parts(dataclasses.replace(study, table="1", task="sciq"))
    assert [cell.key["task"] for cell in alone["1"]] == ["sciq"] * 35


def test_settings_are_taken_from_the_same_task_of_another_study(tmp_path: Path) -> None:
    study = Study(model="demo", task="", out=tmp_path, transfer_from=Path("out/granite"))
    assert paper.on(study, "demo").transfer_from == Path("out/granite/demo")
    assert paper.on(study, "demo").out == tmp_path / "demo"


def test_the_printed_value_stands_beside_ours() -> None:
    """Oracle: the paper's own pages, by hand: accuracies on OpenBookQA of .746 (Granite) and .804 (Qwen), an AUROC of .834."""

    def ours(model: str, **keys: Any) -> Row:
        base = dict.fromkeys(("study", "split", "signal", "seed")) | {"model": model, "low": 0.70, "high": 0.80}
        return base | {"task": "openbookqa", "method": "map@paper", "metric": "accuracy", "value": 0.75} | keys

    (found,) = paper.compare([ours(GRANITE)], GRANITE)
    assert (found["table"], found["printed"], found["doubt"]) == ("1", 0.746, None)
    assert found["difference"] == pytest.approx(0.004)
    assert (found["difference_low"], found["difference_high"]) == pytest.approx((-0.046, 0.054))
    qwen = paper_models()["qwen"]
    assert paper.compare([ours(qwen)], qwen)[0]["printed"] == 0.804
    assert paper.compare([ours("some/model")], "some/model")[0]["printed"] == 0.746
    keys = {"task": "mmlu_law", "source": "openbookqa", "method": "vglr-fc@paper", "metric": "auroc"}
    (law,) = paper.compare([ours(GRANITE, signal="logit_variance", **keys)], GRANITE)
    assert (law["table"], law["printed"], law["signal"]) == ("2", 0.834, "inf-logit-var")
    four = [
        ours(GRANITE, signal="logit_variance", **keys | {"task": task, "value": value})
        for task, value in zip(("arc_easy", "arc_challenge", "medmcqa", "mmlu_law"), (0.1, 0.2, 0.3, 0.6), strict=True)
    ]
    (average,) = [one for one in paper.compare(four, GRANITE) if one["task"] == "average"]
    assert (average["value"], average["printed"]) == (pytest.approx(0.3), 0.749)
    over = [ours(GRANITE, seed=0, value=0.1), ours(GRANITE, seed=1, value=0.3), ours(GRANITE, value=0.2)]
    assert paper.compare(over, GRANITE)[0]["value"] == 0.2
    noisy = {"study": "stability", "metric": "jaccard", "gamma": 0.01}
    both = [ours(GRANITE, method=name, value=value, **noisy) for name, value in
            (("vtsr@paper", 1.0), ("vtsr@paper (fresh noise)", 0.5), ("map at the layers of vglr-fc@paper", 0.4))]  # fmt: skip
    assert {one["method"]: (one["value"], one["printed"]) for one in paper.compare(both, GRANITE)} == {
        "map": (0.4, 0.422),
        "vtsr": (0.5, 0.692),
    }


def test_every_printed_number_of_tables_1_and_2_has_its_place() -> None:
    """Oracle: the paper's rows themselves, 202 of each model, against the texts in the columns named `paper`."""
    shown = 0
    for short, hub in paper_models().items():
        theirs = [row for row in printed() if row["model"] == short and row["study"] in ("calibration", "ood")]
        ours = [
            dict.fromkeys(("study", "split", "signal", "seed", "low", "high", "source"))
            | {"model": hub, "value": 0.5, "method": f"{row['method']}@paper"}
            | {name: row[name] for name in ("task", "metric")}
            | ({"source": "openbookqa", "signal": paper.SIGNALS[row["signal"]]} if row["study"] == "ood" else {})
            for row in theirs
        ]
        found = []
        for table in tables.section(paper.compare(ours, hub)).tables:
            places = [i for i, name in enumerate(table.columns) if name == "paper"]
            found += [line[i].text.rstrip(tables.MARK) for line in table.rows for i in places]
        assert Counter(found) == Counter(f"{row['value']:.3f}" for row in theirs), short
        shown += len(found)
    assert shown == 606


def test_the_ablation_is_marked_where_it_is_not_what_table_3_says() -> None:
    """Oracle: Granite at noise 0.005 in the full version of Table 3, its most susceptible layers in the ablation."""
    noisy = {row["method"]: row["value"] for row in only(printed(), study="stability", model="granite", gamma=0.005)}
    for row in only(printed(), study="layer-placement", layers="susceptible", metric="jaccard_minus_map"):
        gap = noisy[row["method"]] - noisy["map"]
        assert (row.get("doubt") is None) == (abs(gap - row["value"]) < 0.0011)
        assert row.get("doubt") in (None, f"the full version of Table 3 gives {gap:.3f}")


def test_costs_are_marked_where_they_are_not_what_the_papers_formulas_give() -> None:
    """Oracle: the formulas of its appendix E by hand, in multiply-accumulates; within two percent the rest is rounding."""
    n, d, h, s = 40, 1536, 384, 35
    weight = s * d * n
    each = {"mcdr": weight, "swag": weight, "vglr-mf": d * h + 2 * h * n + s * n, "vtsr": d * h + h + n / 2}
    each["vglr-fc"] = d * h + h * n * n / 2 + s * n * n
    for row in only(printed(), study="efficiency", metric="macs"):
        macs = 10 * each[row["method"]]
        assert (row.get("doubt") is None) == (abs(row["value"] / macs - 1) < 0.02), row
        said = f"the paper's own formula gives {macs / 1e9:.4f} G, {100 * macs / 0.897e9:.2f}%"
        assert row.get("doubt") in (None, said)


def test_cells_that_cannot_be_right_are_marked() -> None:
    """Oracle: benchmarks/paper_tables.py, which computes what the metrics allow."""
    lines = runpy.run_path(str(ROOT / "benchmarks" / "paper_tables.py"))["lines"]()
    expected = {(*name.split(), why.split()[0].lower()) for name, why in (line.split(": ", 1) for line in lines)}
    marked = {
        (row["model"], row["task"], row["method"], row["metric"]): row["doubt"]
        for row in printed()
        if row["study"] == "calibration" and row.get("doubt")
    }
    alike = {key for key, doubt in marked.items() if doubt.startswith("five methods")}
    assert marked.keys() - alike == expected
    assert alike == {("granite", "openbookqa", key, "nll") for key in ("mcdr", "swag", "vglr-mf", "vglr-fc", "vtsr")}


def test_hours_and_memory_are_those_of_the_results() -> None:
    rehearsed = json.loads((ROOT / "results/rehearsal/rehearsal.json").read_text())
    recomputed = json.loads((ROOT / "results/rehearsal/recompute/rehearsal.json").read_text())
    names = {"granite": "granite-3b", "qwen": "qwen1.5-moe", "deepseek": "deepseek-moe-16b"}
    for short, geometry in names.items():
        own = only(rehearsed["rows"], geometry=geometry)
        cost = _paper_cost.COSTS[short]
        (first,), (again,) = (only(rows, geometry=geometry, stage="stage 1") for rows in (own, recomputed["rows"]))
        assert cost.stage1 == pytest.approx(min(first["seconds"], again["seconds"]) / 2, abs=0.01)
        assert cost.gb == round(first["peak_gb"], 1) == round(max(row["peak_gb"] for row in own), 1)
        rest = [row["peak_gb"] for row in own if row["stage"] != "stage 1"]
        assert cost.gb_recompute == round(max(again["peak_gb"], *rest), 1)
        trained = [
            row["seconds"] / row["steps"] for row in only(own, stage="stage 2") if row["method"] not in UNTRAINED
        ]
        assert cost.stage2 == pytest.approx(min(trained), abs=0.001)
        answered = [row["seconds"] / row["questions"] for row in only(own, stage="predict (router)")]
        assert cost.answer == pytest.approx(min(answered), abs=1e-4)


def test_a_dry_run_says_cells_hours_and_memory(
    offline: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Oracle for OpenBookQA alone by hand: five runs of stage 1, 25 of stage 2, 5410 questions a label besides validation."""
    command = ["study", "paper", "--table", "1", "--task", "openbookqa", "--dry-run", "--out", str(tmp_path / "none")]
    assert cli.run([*command, "--model", "granite"]) == 0
    out = capsys.readouterr().out
    first, second = 5 * 3 * 5000 / 16 * 1.67, 25 * 10 * 5000 / 16 * 0.299
    answers = (35 * (500 + 2376 + 500 + 500 + 1534) + 25 * 500 + 5 * 9 * 50) * 0.0073
    hours = (first + second + answers) / 3600
    assert re.search(rf"\b1 +35 +0 +{hours:.1f} +{hours:.1f} to {3.2 * hours:.1f} +23\b", out), out
    assert cli.run([*command, "--model", "granite", "--recompute"]) == 0
    assert re.search(rf"to {3.2 * hours:.1f} +15\b", capsys.readouterr().out)
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize("limit", [None, 200, 1000])
@pytest.mark.parametrize("search", [False, True])
def test_a_dry_run_counts_the_limit_and_the_search(
    limit: int | None, search: bool, offline: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Oracle by hand: at most so many questions of each split but validation; stage 2 once for each beta. Of the three that
    have a beta two try 0.0001, 0.001, 0.01 and 0.1, `vtsr` 0.05 too; `mcdr` and `swag` have none."""
    command = ["study", "paper", "--table", "1", "--task", "openbookqa", "--dry-run", "--out", str(tmp_path / "none")]
    more = ["--search"] * search + ([] if limit is None else ["--limit", str(limit)])
    assert cli.run([*command, "--model", "granite", *more]) == 0
    most = limit or 5000
    runs = 5 * (2 + (4 + 4 + 5 if search else 3))
    steps = 5 * 3 * min(5000, most) / 16 * 1.67 + runs * 10 * min(5000, most) / 16 * 0.299
    asked = 35 * sum(min(n, most) for n in (500, 2376, 500, 500, 1534)) + runs * 10 * 50 + 5 * 9 * 50
    hours = (steps + asked * 0.0073) / 3600
    assert re.search(rf"\b1 +35 +0 +{hours:.1f} +{hours:.1f} to {3.2 * hours:.1f} +23\b", capsys.readouterr().out)


def test_every_table_costs_less_with_a_limit(offline: None, tmp_path: Path) -> None:
    """Oracle for brittleness and the temperatures: a fifth of 500 questions, half of the 200 that brittleness takes."""
    study = Study(model=GRANITE, task="", out=tmp_path, seeds=(0,))
    few = dataclasses.replace(study, limit=100)
    for table, cells in paper.parts(study).items():
        whole, part = (_paper_cost.total(found, one) for found, one in ((cells, study), (paper.parts(few)[table], few)))
        assert table == "4" or (part.answers < whole.answers), table
        assert (part.stage1 < whole.stage1) == (whole.stage1 > 0)
    motivation = _paper_cost.total(paper.parts(few)["motivation"], few)
    assert motivation.answers == 100 * (1 + 7 * 32) + 100 * (1 + 7 * 32)


@pytest.mark.parametrize("short", paper_models())
def test_a_dry_run_asks_the_hub_for_the_configuration_alone(
    short: str, hub: hub_server.Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Oracle: what the server was asked for, and the number of layers with experts in the paper's table of models."""
    name = paper_models()[short]
    kind, settings, *_ = dataclasses.astuple(GEOMETRIES[SHAPES[name]])
    hub.create(name)
    hub.commit(name, "main", {"config.json": json.dumps({"model_type": kind, **settings}).encode()})
    _variants.moe_layers.cache_clear()
    command = ["study", "paper", "--table", "motivation", "--seeds", "0", "--dry-run", "--out", str(tmp_path / "none")]
    assert cli.run([*command, "--model", short]) == 0
    cells = 2 + {"granite": 32, "qwen": 24, "deepseek": 27}[short]  # brittleness; the deterministic line; each layer
    assert re.search(rf"motivation +{cells} +0 ", capsys.readouterr().out)
    asked = {line.split("?")[0].rpartition("/")[2] for line in hub.log if "/resolve/" in line}
    assert not [file for file in asked if not file.endswith(".json")]
    assert not [file for file in asked if "safetensors" in file]


def test_recompute_is_for_stage_1_and_for_every_study(tmp_path: Path) -> None:
    study = Study(model="demo", task="demo", out=tmp_path)
    assert _variants.running(study) is None
    found = _variants.running(dataclasses.replace(study, recompute=True))
    assert found is not None
    assert (found.recompute, found.skip_nonfinite) == (True, False)


def test_the_page_has_the_hours_of_the_dry_run(offline: None, tmp_path: Path) -> None:
    """docs/reproduce.md: cell by cell what `--dry-run` prints for the three models."""
    text = (ROOT / "docs" / "reproduce.md").read_text()
    hours: dict[str, list[str]] = {}
    for model in paper_models().values():
        lines, _ = _paper_cost.summary(Study(model=model, task="", out=tmp_path, seeds=paper.SEEDS))
        for table, _cells, _done, h200, *_ in lines:
            hours.setdefault("all" if table.startswith("all") else table, []).append(h200)
    for table, each in hours.items():
        assert f"`--table {table}` | {' / '.join(each)} |" in text, table


def test_preset_paper_makes_every_label_the_papers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert with_preset("vglr-fc+full", "paper") == "vglr-fc@paper+full"
    assert with_preset("vglr-fc@default", "paper") == "vglr-fc@default"
    assert with_preset("map", "default") == "map"
    command = ["study", "calibration", "--model", "demo", "--task", "demo", "--limit", "8", "--preset", "paper"]
    assert cli.run([*command, "--dry-run", "--out", str(tmp_path)]) == 0
    shown = re.findall(r"calibration +(\S+), seed 0", capsys.readouterr().out)
    assert shown == [f"{key}@paper" for key in paper.METHODS]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["paper", "--table", "5"], "choose 1, 2, 3, 4, ablation, motivation or all"),
        (["paper", "--methods", "map"], "leave out --ood, --methods and --preset"),
        (["paper", "--table", "3", "--task", "demo"], "only Table 1 is of several, and takes --task"),
        (["paper", "--task", "arc_easy"], "unknown task of the paper's Table 1 'arc_easy'"),
        (["stability", "--table", "3", "--task", "demo"], "--table belongs to the study paper"),
        (["stability"], "the study stability needs a task"),
        (["stability", "--task", "demo", "--preset", "papre"], "did you mean paper?"),
    ],
)
def test_bad_input_is_one_line(
    more: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(["study", *more, "--model", "demo", "--out", str(tmp_path)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line


def smallest(monkeypatch: pytest.MonkeyPatch, questions: int = 12, preset: str = "paper") -> None:
    """Two steps of stage 2, and as few questions of every split."""
    load = tasks.load
    small = dataclasses.replace(presets.PRESETS[preset], stage2=Plan(epochs=2))
    monkeypatch.setitem(presets.PRESETS, preset, small)
    monkeypatch.setattr(
        tasks, "load", lambda *a, **k: load(*a, **k | {"limit": min(k.get("limit") or questions, questions)})
    )


def structure(made: list[Any]) -> dict[str, Any]:
    """Of every table what does not depend on the processor: titles, columns, labels, and the columns of the paper."""
    found = {}
    for table in made:
        kept = [i for i, name in enumerate(table.columns) if i < table.labels or name in ("paper", "paper's text")]
        lines = [[row[i].text + row[i].detail for i in kept] for row in table.rows]
        found[table.name] = {
            "title": table.title,
            "columns": list(table.columns),
            "rows": lines,
            "notes": list(table.notes),
        }
    return found


@pytest.mark.slow
def test_every_table_on_the_embedded_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The golden file has labels and printed values; ours are numbers in the range of their metric."""
    smallest(monkeypatch)
    assert cli.run(["study", "paper", "--table", "all", "--model", "demo", "--seeds", "0", "--out", str(tmp_path)]) == 0
    rows = [row for row in json.loads((tmp_path / "metrics.json").read_text()) if row["study"] == "paper"]
    assert {row["table"] for row in rows} == set(paper.TABLES)
    for row in rows:
        least = -1 if "_minus_" in row["metric"] else 0
        most = 1e8 if row["table"] == "4" else 20 if row["metric"] == "nll" else 1
        assert least <= row["value"] <= most, row
        if row["printed"] is not None:
            assert row["difference"] == pytest.approx(row["value"] - row["printed"])
    section = tables.section(rows)
    found = structure(list(section.tables))
    if os.environ.get("VMOER_REGENERATE_GOLDEN"):
        GOLDEN.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n")
    assert found == json.loads(GOLDEN.read_text())
    capsys.readouterr()
    assert cli.run(["report", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    markdown, page = (tmp_path / "report" / "tables.md").read_text(), (tmp_path / "report" / "index.html").read_text()
    for table in section.tables:
        assert " ".join(table.title.split()) in " ".join(said.split())
        assert f"### {table.title}" in markdown
        assert (tmp_path / "report" / f"{table.name}.tex").exists()
    for place in (said, markdown, page, (tmp_path / "report" / "paper-1-openbookqa.tex").read_text()):
        assert "1.380" in place  # Granite's NLL on OpenBookQA
    assert r"0.650\textdagger{}" in (tmp_path / "report" / "paper-1-openbookqa.tex").read_text()


def test_no_table_of_an_unknown_name(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="choose 1, 2, 3"):
        paper.parts(Study(model="demo", task="", out=tmp_path, table="7"))
