"""The paper's tables: each is a list of cells of the other studies, and its printed values stand beside ours.

    1            calibration of seven methods on four tasks      4            parameters and arithmetic, counted
    2            the same predictions on four shifts             ablation     which layers, and how many
    3            routing under noise                             motivation   brittleness; experts sampled at a temperature

    OUT/<task>/                 runs and predictions of a task; `vmoer report` reads this folder by itself, too
    OUT/cells, metrics.json     those of all tasks, and the comparison: rows of the study `paper`

On the embedded model its own task and shifts stand in for OpenBookQA, ARC-Challenge and MMLU-Law.
"""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from vmoer.errors import InputError, unknown
from vmoer.evaluation.scores import Row
from vmoer.report.rows import mean, only, paper, paper_models, values
from vmoer.routers import method as method_named
from vmoer.studies import (
    brittleness,
    calibration,
    efficiency,
    layer_count,
    layer_placement,
    stability,
    temperature_sweep,
)
from vmoer.studies._grid import Cell, row
from vmoer.studies._variants import Study
from vmoer.training.presets import PAPER

STUDY = "paper"
TABLES = ("1", "2", "3", "4", "ablation", "motivation")
SEEDS = (0, 1, 2, 3, 4)
SOURCE = "openbookqa"
TASKS = {task: task for task in (SOURCE, "arc_challenge", "sciq", "medmcqa")}
SHIFTS = {task: task for task in ("arc_easy", "arc_challenge", "medmcqa", "mmlu_law")}
DEMO_TASKS = {SOURCE: "demo"}
DEMO_SHIFTS = {"arc_challenge": "demo-near", "mmlu_law": "demo-far"}
"""The paper's tasks and shifts, and what is asked in their place."""
METHODS = ("map", "temp-scale", "mcdr", "swag", "vglr-mf", "vglr-fc", "vtsr")
STABLE = ("mcdr", "vglr-fc", "vtsr")
COUNTED = ("mcdr", "swag", "vglr-mf", "vglr-fc", "vtsr")
SIGNALS = {
    "gate-ent": "gate_entropy",
    "mc-logit-var": "mc_logit_variance",
    "inf-logit-var": "logit_variance",
    "inf-temp": "temperature",
}
BRITTLE = (0, 1, *range(5, 9), 19, 20, *range(28, 32))
"""Granite's layers that the paper's text calls unstable."""


def model_named(name: str) -> str:
    """The hub's name of one of the paper's models; any other name as it is."""
    return name if Path(name).exists() else paper_models().get(name, name)


def tasks_of(model: str) -> tuple[dict[str, str], dict[str, str]]:
    """The paper's tasks and shifts, each with what a model is asked."""
    return (DEMO_TASKS, DEMO_SHIFTS) if model == "demo" else (TASKS, SHIFTS)


def on(study: Study, task: str) -> Study:
    """The study on one task, in a folder of its own. The source's shifts are answered along: they are Table 2."""
    tasks, shifts = tasks_of(study.model)
    return dataclasses.replace(
        study,
        task=task,
        out=study.out / task,
        ood=tuple(shifts.values()) if task == tasks[SOURCE] else (),
        preset=PAPER.name,
        methods=tuple(f"{key}@{PAPER.name}" for key in METHODS),
        transfer_from=None if study.transfer_from is None else study.transfer_from / task,
    )


def asked(study: Study) -> list[str]:
    """The tasks of Table 1, or those of them that `task` names."""
    tasks = tuple(tasks_of(study.model)[0].values())
    found = [name.strip() for name in study.task.split(",") if name.strip()]
    if wrong := [name for name in found if name not in tasks]:
        raise unknown("task of the paper's Table 1", wrong[0], tasks)
    return found or list(tasks)


def parts(study: Study) -> dict[str, list[Cell]]:
    """The cells of each table that is asked for."""
    tables = TABLES if study.table == "all" else (study.table,)
    if study.table not in (*TABLES, "all"):
        raise InputError(f"table={study.table!r}: choose {', '.join(TABLES)} or all")
    if study.task and "1" not in tables:
        raise InputError(f"table {study.table} has a task of its own: only Table 1 is of several, and takes --task")
    source = on(study, tasks_of(study.model)[0][SOURCE])

    def of(keys: Iterable[str]) -> Study:
        return dataclasses.replace(source, methods=tuple(f"{key}@{PAPER.name}" for key in keys))

    make: dict[str, Callable[[], list[Cell]]] = {
        "1": lambda: [cell for task in asked(study) for cell in calibration.cells(on(study, task))],
        "2": lambda: calibration.cells(of(("map", "mcdr", "vglr-mf", "vglr-fc", "vtsr"))),
        "3": lambda: stability.cells(of(STABLE)),
        "4": lambda: efficiency.counted(COUNTED),
        "ablation": lambda: [*layer_placement.cells(source), *layer_count.cells(source, ("vglr-fc",))],
        "motivation": lambda: [*brittleness.cells(source), *temperature_sweep.cells(source)],
    }
    return {table: make[table]() for table in tables}


def cells(study: Study) -> list[Cell]:
    """Each once: Table 2 is read from predictions of Table 1."""
    found = [cell for part in parts(study).values() for cell in part]
    return list({cell.path(study.out): cell for cell in found}.values())


def folders(study: Study) -> list[Path]:
    """Where predictions lie, also those of tables asked for before."""
    return [study.out / task for task in tasks_of(study.model)[0].values()]


# -- ours beside what is printed ---------------------------------------------------------------------------------------


def compare(rows: Sequence[Row], model: str) -> list[Row]:
    """A row for every cell of the paper that there is a value of ours for, with the printed one and the difference.

    The printed values are those of the same model; for any other model they are Granite's, which the report says.
    """
    own = next((short for short, hub in paper_models().items() if hub == model), None)
    out: list[Row] = []
    for cell in only(paper(), model="granite"):
        found = _ours(rows, cell, model)
        if found is None:
            continue
        same = {name: value for name, value in cell.items() if name not in ("model", "value", "std", "doubt")}
        theirs = only(paper(), **same, model="granite" if cell["study"] == "efficiency" else own or "granite")
        out.append(_beside(found, cell, theirs[0] if theirs else {}, model))
    return [*out, *_said(rows, model, own)]


def _beside(found: tuple[float, float | None, float | None], cell: Row, printed: Row, model: str) -> Row:
    """Ours less the printed value. Its interval is that of ours: the printed value counts as a constant."""
    value, low, high = found
    keys = {name: cell[name] for name in ("task", "method", "signal", "gamma", "layers") if name in cell}
    theirs = printed.get("value")
    gaps = [None if theirs is None or x is None else x - theirs for x in (value, low, high)]
    more = {"table": _table(cell), "model": model, "low": low, "high": high, "printed": theirs}
    more |= {"printed_std": printed.get("std"), "doubt": printed.get("doubt")}
    more |= dict(zip(("difference", "difference_low", "difference_high"), gaps, strict=True))
    return row(STUDY, cell["metric"], value, **keys, **more)


def _table(cell: Row) -> str:
    first = str(cell["table"]).split()[0]
    return first if first in TABLES else "ablation"


def _ours(rows: Sequence[Row], cell: Row, model: str) -> tuple[float, float | None, float | None] | None:
    """Our value of a cell of the paper and its interval, or None where there is none."""
    label, metric, study = f"{cell['method']}@{PAPER.name}", cell["metric"], cell["study"]
    tasks, shifts = tasks_of(model)
    if study == "calibration":
        return _pooled(only(rows, study=None, task=tasks.get(cell["task"]), source=None, method=label, metric=metric))
    if study == "ood":
        keys = {"study": None, "source": tasks[SOURCE], "method": label, "metric": metric}
        wanted = list(shifts.values()) if cell["task"] == "average" else [shifts.get(cell["task"])]
        each = [_pooled(only(rows, **keys, task=task, signal=SIGNALS[cell["signal"]])) for task in wanted]
        return _average([one for one in each if one is not None], len(SHIFTS) if cell["task"] == "average" else 1)
    if study == "stability":
        noisy = [f"{label} (fresh noise)", label]
        named = ["map at the layers of vglr-fc@paper"] if cell["method"] == "map" else noisy
        found = [only(rows, study=study, method=name, metric=metric, gamma=cell["gamma"]) for name in named]
        return _pooled(next((own for own in found if own), []))
    if study == "efficiency":
        return _pooled(only(rows, study=study, method=cell["method"], metric=metric))
    signal = method_named(cell["method"]).signal if metric == "auroc" else None
    own = only(rows, study=study, method=label, metric=metric, signal=signal)
    return _pooled([one for one in own if one["layers"].partition(":")[0] == cell["layers"].partition("-")[0]])


def _pooled(rows: Sequence[Row]) -> tuple[float, float | None, float | None] | None:
    """The row over seeds; else the mean with the lowest and highest seed; of one seed its own interval."""
    rows = [one for one in rows if one["value"] is not None]
    rows = only(rows, seed=None) or rows
    if len(rows) < 2:
        return (rows[0]["value"], rows[0]["low"], rows[0]["high"]) if rows else None
    each = [one["value"] for one in rows]
    return sum(each) / len(each), min(each), max(each)


def _average(
    found: Sequence[tuple[float, float | None, float | None]], wanted: int
) -> tuple[float, float | None, float | None] | None:
    """The mean over shifts, with the mean of their bounds: as wide as if their errors were all alike."""
    if len(found) < wanted:
        return None
    low, value, high = ([one[i] for one in found if one[i] is not None] for i in (1, 0, 2))
    n = len(found)
    bounds = [sum(x for x in bound if x is not None) / n if len(bound) == n else None for bound in (low, high)]
    return sum(x for x in value if x is not None) / n, bounds[0], bounds[1]


def _said(rows: Sequence[Row], model: str, own: str | None) -> list[Row]:
    """What the paper shows in figures alone: our values, and its text's words."""
    out: list[Row] = []

    def add(table: str, metric: str, found: Sequence[Row], said: str, **keys: Any) -> None:
        if found:
            more = {"table": table, "model": model, "said": said, "printed": None, "doubt": None}
            out.append(row(STUDY, metric, mean(found), **more, **keys))

    counts = only(rows, study="layer-count", metric="ece", method=f"vglr-fc@{PAPER.name}")
    for layers in values(counts, "layers"):
        said = "the best trade-off" if layers == "susceptible:10" else ""
        add("ablation", "ece", only(counts, layers=layers), said, layers=layers)
    noisy = only(rows, study="brittleness", metric="jaccard")
    for gamma in sorted(values(noisy, "gamma")):
        add("motivation", "jaccard", only(noisy, gamma=gamma), "a sharp drop" * (gamma >= 0.005), gamma=gamma)
    for layer in sorted(values(only(noisy, gamma=0.01), "layer")):
        said = "unstable" if own == "granite" and layer in BRITTLE else ""
        add("motivation", "jaccard", only(noisy, gamma=0.01, layer=layer), said, layer=layer)
    drawn = only(rows, study="temperature-sweep")
    line = {name: mean(only(drawn, method="map", metric=name)) for name in ("accuracy", "ece")}
    later = [one for one in drawn if (one.get("layer") or 0) > 1]
    for temperature in sorted(values(later, "temperature")):
        for name, base in line.items():
            at = [
                one | {"value": one["value"] - (base or 0.0)}
                for one in only(later, temperature=temperature, metric=name)
            ]
            said = {"accuracy": "kept", "ece": "lower"}[name] if temperature == 0.3 else ""
            add("motivation", f"{name}_minus_map", at, said, temperature=temperature)
    return out
