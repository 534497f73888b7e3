"""The tables of results/smolmoe/README.md, from its metrics.

    python examples/smolmoe/table.py results/smolmoe [TASK ...]

Markdown, a row a label: accuracy, NLL and debiased ECE on the task's own test questions, the paired differences of NLL to map and
to map+ts with their intervals, and for a task with shifts the NLL on each.
"""

import argparse
from pathlib import Path
from typing import Any

from vmoer.files import read_rows
from vmoer.report.tables import grid

LABELS = """
map map+ts map-early mean-only mean-only+ts fixed-noise fixed-noise+full tuned-noise tuned-noise+full tuned-noise+full+ts
vglr-fc vglr-fc+ts vglr-fc+full vglr-fc+full+ts vglr-mf vglr-mf+ts vglr-mf+full vglr-mf+full+ts vglr-lr vglr-lr+ts
vtsr vtsr+full vtsr+full+ts mcdr mcdr+full mcdr+full+ts swag swag+ts laplace temp-scale
map@paper vglr-fc@paper vglr-mf@paper vglr-mf@paper+full vtsr@paper
""".split()  # noqa: SIM905


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path)
    parser.add_argument("tasks", nargs="*", metavar="TASK", help="all, if none is given")
    given = parser.parse_args(arguments)
    rows = read_rows(given.results / "metrics.json")
    found = {key(row): row for row in rows if row["study"] is None and row["split"] == "test" and row["seed"] is None}
    for task in given.tasks or sorted({source for source, *_ in found}):
        print("\n".join(table(found, task)) + "\n")
    return 0


def key(row: dict[str, Any]) -> tuple[str, str, str, str]:
    return row.get("source") or row["task"], row["task"], row["method"], row["metric"]


def table(found: dict[tuple[str, str, str, str], dict[str, Any]], task: str) -> list[str]:
    shifts = sorted({to for source, to, *_ in found if source == task != to})
    heads = [task, "accuracy", "NLL", "debiased ECE", "NLL - map", "NLL - map+ts", *shifts]
    body = []
    for label in LABELS:
        if (task, task, label, "nll") not in found:
            continue
        own = [short(found[task, task, label, name]["value"]) for name in ("accuracy", "nll", "debiased_ece")]
        own += [interval(found.get((task, task, label, f"nll_minus_{other}"))) for other in ("map", "map_ts")]
        own += [short(found[task, shift, label, "nll"]["value"]) for shift in shifts]
        body.append([label, *own])
    return grid(heads, body)


def short(value: float, signed: bool = False) -> str:
    """.579, -.010, +.026: no zero before the point."""
    text = f"{value:+.3f}" if signed or value < 0 else f"{value:.3f}"
    return text.replace("0.", ".", 1) if abs(value) < 1 else text


def interval(row: dict[str, Any] | None) -> str:
    if row is None:
        return ""
    return f"{short(row['value'], True)} [{short(row['low'], True)}, {short(row['high'], True)}]"


if __name__ == "__main__":
    raise SystemExit(main())
