"""Looking up rows of `metrics.json`, averaging them over seeds, and looking up what the paper prints."""

import json
from collections.abc import Iterable, Sequence
from functools import cache
from importlib.resources import files
from typing import Any

import numpy as np

from vmoer.evaluation.scores import Row
from vmoer.report.tables import Entry, number


@cache
def _paper() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((files("vmoer.report") / "paper.json").read_text())
    return found


def paper() -> list[Row]:
    """The paper's tables as data, each value with the number of its table; `doubt` says why one cannot be right."""
    return list(_paper()["rows"])


def paper_models() -> dict[str, str]:
    """The paper's models: their short names, and what they are called on the hub."""
    return dict(_paper()["models"])


def papers_value(study: str, method: str, metric: str, model: str = "granite", **keys: Any) -> float | None:
    """What the paper prints for Granite, or None."""
    wanted = {"study": study, "method": method, "metric": metric, "model": model, **keys}
    return next((row["value"] for row in paper() if all(row.get(k) == v for k, v in wanted.items())), None)


def only(rows: Iterable[Row], **keys: Any) -> list[Row]:
    """The rows that have these values."""
    return [row for row in rows if all(row.get(k) == v for k, v in keys.items())]


def values(rows: Iterable[Row], key: str) -> list[Any]:
    """The distinct values of a key, in the order of the rows."""
    return list(dict.fromkeys(row[key] for row in rows if row.get(key) is not None))


def mean(rows: Sequence[Row]) -> float | None:
    return float(np.mean([row["value"] for row in rows])) if rows else None


def spread(rows: Sequence[Row]) -> Entry:
    """Mean over seeds with the lowest and highest; for one seed the interval of the row itself, where it has one."""
    if len(rows) == 1:
        return interval(rows[0])
    found = [row["value"] for row in rows]
    return number(mean(rows), min(found, default=None), max(found, default=None))


def interval(row: Row, digits: int = 3, rising: bool | None = None) -> Entry:
    """A value with its interval; `rising` says whether more is better, and colours an interval that excludes zero."""
    value, low, high = (row.get(name) for name in ("value", "low", "high"))
    entry = number(value, low, high, digits)
    if rising is None or low is None or high is None or low <= 0 <= high:
        return entry
    return entry._replace(tone="better" if (low > 0) == rising else "worse")


def printed(found: Sequence[float | None]) -> str:
    """Values of the paper in one place of a table, a dash for each that it does not print."""
    return " / ".join("-" if value is None else f"{value:.3f}" for value in found)
