"""What makes it calibrate: a table of every level under every kind of averaging, and a forest plot of the same."""

from collections.abc import Sequence

from vmoer.evaluation.scores import Row
from vmoer.report import figures
from vmoer.report.figures import Figure
from vmoer.report.page import Section
from vmoer.report.rows import interval, only, values
from vmoer.report.tables import Entry, Table, number

AVERAGING = ("router", "answer", "full")
METRICS = {
    "nll": "NLL",
    "brier": "Brier",
    "debiased_ece": "dECE",
    "accuracy": "accuracy",
    "tempered_nll": "tempered NLL",
}


def _entry(rows: Sequence[Row], metric: str, baseline: str = "map") -> Entry:
    """A difference with its interval; coloured where the interval excludes zero."""
    found = only(rows, metric=f"{metric}_minus_{baseline}")
    return interval(found[0], rising=metric == "accuracy") if found else Entry("-")


def _levels(rows: Sequence[Row]) -> list[tuple[str, str]]:
    return list(dict.fromkeys((row["factor"], row["level"]) for row in rows))


def table(rows: Sequence[Row]) -> Table:
    body = []
    for factor, level in _levels(rows):
        for averaging in AVERAGING:
            own = only(rows, factor=factor, level=level, averaging=averaging)
            if not own:
                continue
            nll = only(own, metric="nll")[0]
            labels = [Entry(factor), Entry(level), Entry(averaging)]
            line = [*labels, number(nll["value"]), *(_entry(own, metric) for metric in METRICS)]
            body.append([*line, _entry(own, "nll", "default")])
    seeds = sorted({row["seeds"] for row in rows if row.get("seeds")})
    notes = [
        "Differences are to the map model of the same seed and the same stage-1 questions, paired over questions and seeds "
        f"({', '.join(map(str, seeds))} seed{'s' if seeds[-1:] > [1] else ''}), on the half of validation that neither "
        "stopping nor any other choice has seen; intervals are 95%.",
        "Every level changes one thing about the default; `paper` is the paper's protocol. The last column is the "
        "difference to the default averaged in the router.",
        "Tempered: both with an output temperature, fitted on one half of these questions and read on the other. What is left "
        "there is what the level does besides choosing a temperature.",
    ]
    if measured := only(rows, metric="logit_spread"):
        mean = sum(row["value"] for row in measured) / len(measured)
        notes.append(f"The spread of the logits, which prior scales are multiples of, is {mean:.3g} here.")
    columns = ["factor", "level", "averaged in", "NLL", *(f"{name} - map" for name in METRICS.values())]
    columns.append("NLL - default")
    return Table("factors", "One factor at a time", columns, body, notes, labels=3)


def forest(rows: Sequence[Row], metric: str) -> Figure:
    """Each level's change against map, a mark for each kind of averaging."""
    lines = {
        f"{factor}: {level}": {row["averaging"]: row for row in found}
        for factor, level in _levels(rows)
        if (found := only(rows, metric=f"{metric}_minus_map", factor=factor, level=level))
    }
    about = f"Change of {METRICS[metric]} against map, by level and by where samples are averaged; left is better."
    return figures.forest(f"factors-{metric}", lines, about, f"{METRICS[metric]} - map")


def section(rows: list[Row]) -> Section:
    scored = [row for row in rows if row.get("averaging")]
    measured = [row for row in rows if not row.get("averaging")]
    text = (
        "Which of the choices around variational routing move calibration: each is changed by itself, all others as in the "
        "default preset. Judged on validation, so that test stays out of the choice."
    )
    drawn = [forest(scored, metric) for metric in ("nll", "debiased_ece") if only(scored, metric=f"{metric}_minus_map")]
    tables = [table([*scored, *measured])] if values(scored, "level") else []
    return Section("factors", "What makes it calibrate", [text], tables, drawn)
