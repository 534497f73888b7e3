"""The paper's tables as it prints them: in each cell ours, what is printed, and the difference with its interval.

Rows of the study `paper` (vmoer/studies/paper.py) have `table`, `printed`, `printed_std`, `difference`, `difference_low`,
`difference_high` and `doubt`; what the paper shows in figures alone has `said`, the words of its text, in their place.
"""

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from vmoer.evaluation.scores import Row
from vmoer.report.page import Section
from vmoer.report.rows import only, paper_models, values
from vmoer.report.tables import Entry, Table, number

MARK = "†"
_DIFFERENCE = (
    "The difference is ours less the printed value. Its interval is that of ours: the printed value counts as a constant. Its "
    "own spread over runs, in parentheses where the paper prints one, is not in the interval."
)
_RANGES = "Brackets: the lowest and highest seed; of one seed the interval over prompts, where there is one."


class Layout(NamedTuple):
    """How one of the tables is laid out: what its lines and its columns are told apart by."""

    name: str
    title: str
    lines: dict[str, str]
    """Keys of a row, with the heading of each."""
    across: str
    """The key whose values are columns."""
    headings: dict[Any, str]
    note: str = ""


_METRICS = {"accuracy": "ACC", "nll": "NLL", "ece": "ECE", "mce": "MCE"}
_SHIFTS = {"arc_easy": "ARC-E", "arc_challenge": "ARC-C", "medmcqa": "Med", "mmlu_law": "Law", "average": "average"}
_GAMMAS = {gamma: f"{gamma:g}" for gamma in (0.001, 0.002, 0.005, 0.01)}
_COSTS = {"parameters": "parameters", "parameters_percent_of_paper": "% of 800M"}
_COSTS |= {"macs": "MACs", "macs_percent_of_paper": "% of 0.897 G"}
_DIGITS = {"parameters": 0, "macs": 0, "parameters_percent_of_paper": 2, "macs_percent_of_paper": 2}
_PLACES = {"jaccard_minus_map": "Jaccard - map", "ece": "ECE", "auroc": "AUROC"}


def layouts(rows: Sequence[Row]) -> list[tuple[Layout, list[Row]]]:
    """Each table that has rows, and its rows."""
    method, found = {"method": "method"}, []
    for task in values(only(rows, table="1"), "task"):
        title = f"Table 1, {task}: calibration"
        found.append((Layout(f"paper-1-{task}", title, method, "metric", _METRICS), only(rows, table="1", task=task)))
    for metric in ("auroc", "auprc"):
        title = f"Table 2: detection of shifts from openbookqa, {metric.upper()}"
        note = "The average's interval has the mean of the four bounds: as wide as if their errors were all alike."
        signals = Layout(f"paper-2-{metric}", title, method | {"signal": "signal"}, "task", _SHIFTS, note=note)
        found.append((signals, only(rows, table="2", metric=metric)))
    title = "Table 3: Jaccard of expert sets under noise, fresh noise in every pass"
    found.append((Layout("paper-3", title, method, "gamma", _GAMMAS, note=_RANGES), only(rows, table="3")))
    title = "Table 4: parameters and arithmetic at Granite's shape, counted"
    found.append((Layout("paper-4", title, method, "metric", _COSTS), only(rows, table="4")))
    lines = method | {"layers": "layers"}
    placed = Layout("paper-ablation", "Ablation B: which layers", lines, "metric", _PLACES, note=_RANGES)
    found.append((placed, [row for row in only(rows, table="ablation") if "said" not in row]))
    return [(layout, own) for layout, own in found if own]


def table(layout: Layout, rows: Sequence[Row]) -> Table:
    present = [key for key in layout.headings if only(rows, **{layout.across: key})]
    body, doubts = [], dict[str, list[str]]()
    for line in dict.fromkeys(tuple(row.get(key) for key in layout.lines) for row in rows):
        keys = dict(zip(layout.lines, line, strict=True))
        entries = [Entry(str(part)) for part in line]
        for key in present:
            own = only(rows, **keys, **{layout.across: key})
            entries += _cell(own[0]) if own else [Entry("-")] * 3
            for one in own:
                if one["doubt"]:
                    doubts.setdefault(one["doubt"], []).append(f"{' '.join(map(str, line))} {layout.headings[key]}")
        body.append(entries)
    columns = [*layout.lines.values()]
    for key in present:
        columns += [layout.headings[key], "paper", "difference"]
    notes = [_DIFFERENCE, *([layout.note] if layout.note else [])]
    if doubts:
        why = "; ".join(f"{', '.join(cells)}: {doubt}" for doubt, cells in doubts.items())
        notes.append(f"{MARK} compare with care (docs/paper.md): {why}.")
    return Table(layout.name, layout.title, columns, body, notes, labels=len(layout.lines))


def _cell(row: Row) -> list[Entry]:
    digits = _DIGITS.get(row["metric"], 3)
    printed = number(row["printed"], digits=digits)
    if row["doubt"]:
        printed = printed._replace(text=f"{printed.text}{MARK}")
    if row.get("printed_std") is not None:
        printed = printed._replace(detail=f"({row['printed_std']:.3f})")
    gap = number(row["difference"], row["difference_low"], row["difference_high"], digits)
    return [number(row["value"], digits=digits), printed, gap]


_SAID = (
    ("paper-layer-count", "Ablation A: how many layers (vglr-fc, ECE)", "layers", ("ece",)),
    ("paper-noise", "Motivation: Jaccard against noise, mean over layers", "gamma", ("jaccard",)),
    ("paper-layers", "Motivation: Jaccard at gamma 0.01, layer by layer", "layer", ("jaccard",)),
    ("paper-sampling", "Motivation: experts of one layer sampled, less the deterministic model", "temperature", ()),
)


def _figures(rows: Sequence[Row]) -> list[Table]:
    """What the paper shows in figures, whose numbers it does not print: ours beside the words of its text."""
    made = []
    for name, title, key, metrics in _SAID:
        own = [row for row in rows if "said" in row and row.get(key) is not None]
        metrics = metrics or tuple(values(own, "metric"))
        body = []
        for value in values(own, key):
            entries = [Entry(f"{value:g}" if isinstance(value, float) else str(value))]
            for metric in metrics:
                (one,) = only(own, **{key: value}, metric=metric)
                entries += [number(one["value"]), Entry(one["said"] or "-")]
            body.append(entries)
        columns = [
            key,
            *(text for metric in metrics for text in (metric.replace("_minus_map", " - map"), "paper's text")),
        ]
        notes = ["The paper has a figure and no numbers; in its place stands what its text says of it."]
        notes += ["Mean over the layers from the third on, one at a time."] * (key == "temperature")
        made.append(Table(name, title, columns, body, notes))
    return [table for table in made if table.rows]


def section(rows: list[Row]) -> Section:
    model = rows[0]["model"]
    text = [
        "The paper's protocol (the labels @paper), cell by cell; docs/reproduce.md says what differs from its text and why.",
    ]
    if model not in paper_models().values():
        text.append(
            f"{model} is none of the paper's models: the printed numbers are Granite's, and a difference says nothing of "
            "whether they can be reproduced."
        )
    if model == "demo":
        text.append("Its own task stands in for OpenBookQA, its near and its far shift for ARC-Challenge and MMLU-Law.")
    tables = [table(layout, own) for layout, own in layouts(rows)]
    return Section("paper", f"The paper's tables: {model}", text, [*tables, *_figures(rows)])


def one_of(section: Section, model: str) -> Section:
    """A model's section beside those of other models: its tables are called by the model too."""
    part = re.sub(r"[^\w.-]", "_", model.rstrip("/").rsplit("/", 1)[-1])
    tables = [table._replace(name=f"{table.name}-{part}", title=f"{table.title}, {model}") for table in section.tables]
    return section._replace(id=f"{section.id}-{part}", tables=tables)
