"""Rows of what reading the uncertainty costs: a line, a table, and overhead against tokens as a figure."""

from collections.abc import Sequence
from typing import Any

from vmoer.report.figures import Figure, canvas, style
from vmoer.report.tables import grid

Row = dict[str, Any]
FLAT = 1.25
"""A plain pass of more tokens that takes up to so many times the smallest one's time waits for the host."""


def line(row: Row) -> str:
    what = (
        f"{row['geometry']} {row['part']} {row['launch']} {row['tokens']}x{row['batch']} {row['method']} {row['mode']}"
    )
    if row["ratio"] is None:
        return f"{what}: {row.get('error')}"
    low, high = (100 * (row[key] - 1) for key in ("low", "high"))
    memory = "" if row.get("memory") is None else f", memory {100 * (row['memory'] - 1):+.2f}%"
    return f"{what}: {100 * (row['ratio'] - 1):+.2f}% [{low:+.2f}, {high:+.2f}] of {1e3 * row['plain_seconds']:.1f} ms{memory}"


def table(rows: list[Row]) -> str:
    """Percent over the plain model, a table for each geometry and part."""
    lines = [
        "# What reading the uncertainty costs",
        "",
        "Percent over the plain model: medians and quartiles of rounds.",
    ]
    for geometry, part in dict.fromkeys((row["geometry"], row["part"]) for row in rows):
        own = [row for row in rows if (row["geometry"], row["part"]) == (geometry, part)]
        lines += ["", f"## {geometry}, {part}", ""]
        if measured := [row for row in own if row["ratio"] is not None]:
            lines += _grid(measured)
        if failed := [line(row) for row in own if row.get("error")]:
            lines += ["", *failed]
    return "\n".join(lines).rstrip() + "\n"


def _grid(rows: list[Row]) -> list[str]:
    """Of one geometry and part: a line a method and mode, a column a kind of pass, and memory where that was measured."""
    columns: dict[str, dict[tuple[str, str], str]] = {}
    for row in rows:
        size = f"batch {row['batch']}" if row["part"] in ("generate", "decode") else f"{row['tokens']} tokens"
        middle, low, high = (f"{100 * (row[key] - 1):+.2f}" for key in ("ratio", "low", "high"))
        columns.setdefault(f"{size}, {row['launch']}", {})[row["method"], row["mode"]] = f"{middle} [{low}, {high}]"
    for row in rows:
        if row.get("memory") is not None:
            memory = f"{100 * (row['memory'] - 1):+.2f}"
            columns.setdefault(f"memory at {row['tokens']}", {})[row["method"], row["mode"]] = memory
    names = dict.fromkeys((row["method"], row["mode"]) for row in rows)
    return grid(
        ["method", "mode", *columns], [[*name, *[own.get(name, "-") for own in columns.values()]] for name in names]
    )


def launch_bound(rows: Sequence[Row]) -> int | None:
    """The most tokens at which the plain model still waits for the host: its time has hardly grown; None if it grows at once."""
    times: dict[int, float] = {}
    for row in sorted(rows, key=lambda row: row["tokens"]):
        times.setdefault(row["tokens"], row["plain_seconds"])
    if not times:
        return None
    bound = [tokens for tokens, seconds in times.items() if seconds <= FLAT * min(times.values())]
    return max(bound) if len(bound) > 1 else None


def figure(rows: Sequence[Row], geometry: str) -> Figure | None:
    """Overhead against tokens in the pass, a colour a method: recorded in lines, attached in dots; None without a sweep."""
    own = [row for row in rows if (row["geometry"], row["part"]) == (geometry, "sweep") and row["ratio"] is not None]
    if not own:
        return None
    methods, described = list(dict.fromkeys(row["method"] for row in own)), []
    with canvas(f"reading-{geometry}", (4.6, 3.2)) as drawn:
        axes, edge = drawn.axes[0], launch_bound(own)
        smallest = min(row["tokens"] for row in own)
        if edge is not None:
            axes.axvspan(smallest, edge, alpha=0.15, linewidth=0, color=style(7)["color"])
        for i, method in enumerate(methods):
            for mode, look in (("recorded", {"marker": "o"}), ("attached", {"linestyle": ":"})):
                curve = sorted(
                    (row["tokens"], 100 * (row["ratio"] - 1))
                    for row in own
                    if (row["method"], row["mode"]) == (method, mode)
                )
                name = method if mode == "recorded" else None
                axes.plot(*zip(*curve, strict=True), label=name, markersize=3, **(style(i) | look))
                described.append(f"{method} {mode} {', '.join(f'{y:+.1f} at {x}' for x, y in curve)}")
        axes.axhline(0, linewidth=0.6, color=style(7)["color"])
        axes.set(xscale="log", xlabel="tokens in the pass", ylabel="added time, %")
        drawn.drawing.legend(loc="outside lower center", ncols=min(5, len(methods)))
        shaded = "" if edge is None else f"; shaded, up to {edge} tokens: the plain model waits for the host"
        caption = f"{geometry}: added time, recorded (lines) and attached (dots){shaded}"
        return drawn.figure(caption, f"{caption}. {'; '.join(described)}.")
