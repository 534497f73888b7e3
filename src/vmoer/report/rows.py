"""Rows of `metrics.json` looked up, averaged over seeds, and beside what the paper prints."""

import json
from collections.abc import Iterable, Sequence
from functools import cache
from importlib.resources import files
from typing import Any

import numpy as np

from vmoer.report.tables import Entry, number

Row = dict[str, Any]


@cache
def paper() -> list[Row]:
    """The paper's tables as data, each value with the number of its table."""
    return list(json.loads((files("vmoer.report") / "paper.json").read_text())["rows"])


def papers_value(study: str, method: str, metric: str, model: str = "granite", **keys: Any) -> float | None:
    """What the paper prints for Granite, or None."""
    wanted = {"study": study, "method": method, "metric": metric, "model": model, **keys}
    return next((row["value"] for row in paper() if all(row.get(k) == v for k, v in wanted.items())), None)


def only(rows: Iterable[Row], **keys: Any) -> list[Row]:
    return [row for row in rows if all(row.get(k) == v for k, v in keys.items())]


def values(rows: Iterable[Row], key: str) -> list[Any]:
    return list(dict.fromkeys(row[key] for row in rows if row.get(key) is not None))


def mean(rows: Sequence[Row]) -> float | None:
    return float(np.mean([row["value"] for row in rows])) if rows else None


def spread(rows: Sequence[Row], digits: int = 3) -> Entry:
    """Mean over seeds with the lowest and highest; for one seed the interval of the row itself, where it has one."""
    if not rows:
        return Entry("-")
    values = [row["value"] for row in rows]
    if len(rows) == 1:
        return number(values[0], rows[0].get("low"), rows[0].get("high"), digits)
    return number(float(np.mean(values)), min(values), max(values), digits)
