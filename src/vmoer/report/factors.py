"""What makes it calibrate: a table of every level under every kind of averaging, and a forest plot of the same."""

from collections.abc import Sequence

from vmoer.report.figures import Figure, canvas, style
from vmoer.report.page import Section
from vmoer.report.rows import Row, only, values
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
    if not found:
        return Entry("-")
    value, low, high = (found[0][name] for name in ("value", "low", "high"))
    up, down = ("better", "worse") if metric == "accuracy" else ("worse", "better")
    return number(value, low, high)._replace(tone=up if low > 0 else down if high < 0 else "")


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
        "Every level changes one thing about the default; `paper` is the protocol as printed. The last column is the "
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


def forest(rows: Sequence[Row]) -> Figure:
    """Each level's change of NLL and of debiased ECE against map, a mark for each kind of averaging."""
    shown = [key for key in _levels(rows) if only(rows, metric="nll_minus_map", factor=key[0], level=key[1])]
    told = []
    with canvas("factors", (7.2, 0.24 * len(shown) + 1.1)) as drawn:
        drawn.drawing.clear()
        panels = drawn.drawing.subplots(1, 2, sharey=True)
        for axes, metric in zip(panels, ("nll", "debiased_ece"), strict=True):
            axes.axvline(0, linewidth=0.8, alpha=0.6, color=style(7)["color"])
            for place, (factor, level) in enumerate(shown):
                for i, averaging in enumerate(AVERAGING):
                    found = only(rows, metric=f"{metric}_minus_map", factor=factor, level=level, averaging=averaging)
                    for row in found:
                        y = place + 0.22 * (i - 1)
                        axes.plot([row["low"], row["high"]], [y, y], linewidth=1, color=style(i)["color"])
                        label = averaging if (factor, level) == shown[0] or row["level"] == "default" else None
                        axes.plot([row["value"]], [y], marker="o", markersize=3, color=style(i)["color"], label=label)
                        if metric == "nll" and averaging == "router":
                            told.append(f"{factor} {level} {row['value']:+.3f}")
            axes.set(xlabel=f"{METRICS[metric]} - map")
        panels[0].set(yticks=range(len(shown)), yticklabels=[f"{factor}: {level}" for factor, level in shown])
        panels[0].set_ylim(len(shown) - 0.4, -0.6)
        marks = {label: mark for mark, label in zip(*panels[0].get_legend_handles_labels(), strict=True)}
        drawn.drawing.legend(marks.values(), marks.keys(), loc="outside lower center", ncols=3)
        caption = (
            "Change of NLL and debiased ECE against map, by level and by where samples are averaged; left is better"
        )
        return drawn.figure(caption, f"Change of NLL against map, averaged in the router: {', '.join(told)}.")


def section(rows: list[Row]) -> Section:
    scored = [row for row in rows if row.get("averaging")]
    measured = [row for row in rows if not row.get("averaging")]
    text = (
        "Which of the choices around variational routing move calibration: each is changed by itself, all others as in the "
        "default preset. Judged on validation, so that test stays out of the choice."
    )
    figures = [forest(scored)] if any(row["metric"] == "nll_minus_map" for row in scored) else []
    tables = [table([*scored, *measured])] if values(scored, "level") else []
    return Section("factors", "What makes it calibrate", [text], tables, figures)
