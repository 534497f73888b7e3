"""What attaching costs in time and memory, measured: bars and a table.

Rows `{geometry, method, phase, launch, tokens, batch, time_ratio, low, high, memory_ratio}` come from `DIR/overhead.json`,
which `vmoer bench` writes. Without that file they are the times of the efficiency study. Ratios are to the plain model.
"""

from collections.abc import Sequence
from pathlib import Path

from vmoer.errors import InputError
from vmoer.evaluation.scores import Row
from vmoer.files import read_json
from vmoer.report.figures import Figure, canvas, style
from vmoer.report.page import Section
from vmoer.report.tables import Entry, Table, number

PLAIN = "map"
NEEDED = {"geometry", "method", "phase", "tokens", "batch", "time_ratio"}


def read(directory: Path, rows: Sequence[Row]) -> tuple[list[Row], str]:
    """The measured rows and where they are from."""
    path = Path(directory) / "overhead.json"
    if not path.exists():
        return [_as_measured(row) for row in rows if row.get("metric") == "time_ratio"], "metrics.json"
    try:
        found = read_json(path)
        machine = found.get("machine", {}) if isinstance(found, dict) else {}
        measured = found["rows"] if isinstance(found, dict) else found
        whole = bool(measured) and all(row.keys() >= NEEDED for row in measured)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(f"{path}: not a list of overhead rows ({error})") from error
    if not whole:
        raise InputError(f"{path}: must be a list of rows with {', '.join(sorted(NEEDED))}")
    where = ", ".join(str(machine[key]) for key in ("device", "dtype") if machine.get(key))
    return list(measured), f"overhead.json ({where})" if where else "overhead.json"


def _as_measured(row: Row) -> Row:
    kept = {name: row.get(name) for name in ("method", "phase", "tokens", "batch", "low", "high")}
    return kept | {"geometry": row["model"], "time_ratio": row["value"]}


def _name(row: Row) -> str:
    graph = ", CUDA graph" if row.get("launch") == "graph" else ""
    size = f"{row['tokens']} tokens" if row["phase"] == "prefill" else f"batch {row['batch']}"
    return f"{row['phase']}, {size}{graph}"


def _percent(ratio: float | None) -> float | None:
    return None if ratio is None else 100 * (ratio - 1)


def _shown(rows: Sequence[Row]) -> list[str]:
    """The names of what the bars show: the largest prefill and the largest decode batch, by CUDA graph if measured."""
    names = []
    for phase in ("prefill", "decode"):
        own = [row for row in rows if row["phase"] == phase and row["time_ratio"] is not None]
        if own:
            names.append(_name(max(own, key=lambda row: row["tokens"])))
    return names


def bars(geometry: str, rows: Sequence[Row]) -> Figure:
    """Added time of each method in percent, a bar for prefill and one for decode; quartiles as a line."""
    methods = list(dict.fromkeys(row["method"] for row in rows if row["method"] != PLAIN))
    shown = _shown(rows)
    with canvas(f"overhead-{geometry}", (3.4, 0.9 + 0.42 * len(methods))) as drawn:
        axes, described = drawn.axes[0], []
        height = 0.8 / max(1, len(shown))
        for i, name in enumerate(shown):
            own = {row["method"]: row for row in rows if _name(row) == name and row["time_ratio"] is not None}
            at = [(len(methods) - 1 - n) + 0.4 - height * (i + 0.5) for n in range(len(methods))]
            values = [_percent(own[method]["time_ratio"]) if method in own else None for method in methods]
            axes.barh(at, [value or 0.0 for value in values], height, label=name, color=style(i)["color"], alpha=0.8)
            for y, method in zip(at, methods, strict=True):
                if method in own and own[method].get("low") is not None:
                    spread = [_percent(own[method][end]) for end in ("low", "high")]
                    axes.hlines(y, *spread, color="#7f8c8d", linewidth=1)
            listed = [
                f"{method} {value:+.1f}" for method, value in zip(methods, values, strict=True) if value is not None
            ]
            described.append(f"{name}: {', '.join(listed)}")
        axes.axvline(0, linewidth=0.6, color=style(7)["color"])
        axes.axvline(1, linewidth=0.8, linestyle=":", color=style(1)["color"])
        axes.set(yticks=range(len(methods)), yticklabels=methods[::-1], xlabel="added time, %")
        drawn.drawing.legend(loc="outside lower center")
        caption = f"{geometry}: added time in percent; dotted: one percent; grey: quartiles"
        return drawn.figure(caption, f"Added time in percent on {geometry}. {'; '.join(described)}.")


def table(rows: Sequence[Row]) -> Table:
    """A line for each geometry and method: added time of each phase and size, added peak memory of the largest prefill."""
    columns = list(dict.fromkeys(_name(row) for row in rows))
    weighed = any(row.get("memory_ratio") is not None for row in rows)
    body = []
    for geometry, method in dict.fromkeys((row["geometry"], row["method"]) for row in rows if row["method"] != PLAIN):
        own = {_name(row): row for row in rows if (row["geometry"], row["method"]) == (geometry, method)}
        line = [Entry(str(geometry)), Entry(method)]
        for name in columns:
            value, low, high = (_percent(own.get(name, {}).get(key)) for key in ("time_ratio", "low", "high"))
            line.append(number(value, low, high, digits=1))
        memory = [row for row in own.values() if row.get("memory_ratio") is not None]
        most = max(memory, key=lambda row: row["tokens"])["memory_ratio"] if memory else None
        body.append([*line, *[number(_percent(most), digits=1)] * weighed])
    notes = ["Percent over the plain model: median of paired rounds, quartiles in brackets."]
    notes += ["Memory: peak of the largest prefill."] * weighed
    columns = ["geometry", "method", *columns, *["memory"] * weighed]
    return Table("overhead", "Measured overhead, %", columns, body, notes, labels=2)


def sections(directory: Path, rows: Sequence[Row]) -> list[Section]:
    """The section, where anything was measured."""
    measured, source = read(directory, rows)
    if not any(row["method"] != PLAIN and row["time_ratio"] is not None for row in measured):
        return []
    text = [f"Time against the plain model, measured; from {source}."]
    if source == "metrics.json":
        text.append(
            "Timed on the machine that ran the study, on the study's own model: where that is small, launching operations is "
            "most of its time, and the share grows accordingly."
        )
    geometries = list(dict.fromkeys(row["geometry"] for row in measured))
    drawn = [bars(str(g), [row for row in measured if row["geometry"] == g]) for g in geometries]
    return [Section("overhead", "Measured overhead", text, [table(measured)], drawn)]
