"""What reading the uncertainty may cost, line by line, by what benchmarks/signals.py leaves on a GPU: exit code 1 on failure.

python benchmarks/signals_claims.py results/signals              the bounds
python benchmarks/signals_claims.py --table results/signals      every row, as Markdown

Overheads are medians of paired rounds, in percent over the plain model. A line whose rows were not measured is shown with a dash
and does not hold.
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "src"))

from vmoer.bench import reading_rows

GEOMETRIES = ("granite-3b", "qwen1.5-moe", "deepseek-moe-16b", "qwen3-30b-a3b")
FIRST = "granite-3b"
METHODS = ("vglr-fc", "vglr-mf", "vglr-lr", "vtsr", "map")
LARGE, SMALL, NEW = 16384, 1024, 64

Line = tuple[bool, str]
Row = dict[str, Any]


def lines(rows: list[Row]) -> list[Line]:
    def ratio(geometry: str, method: str, mode: str, value: str = "ratio", **keys: Any) -> float | None:
        wanted = {"geometry": geometry, "method": method, "mode": mode, **keys}
        found = [row for row in rows if all(row.get(name) == given for name, given in wanted.items())]
        number = found[-1].get(value) if found else None
        return None if number is None else 100 * (float(number) - 1)

    def at_most(bound: float, what: str, values: list[float | None]) -> Line:
        known = [value for value in values if value is not None]
        missing = f", {len(values) - len(known)} of {len(values)} not measured" if len(known) < len(values) else ""
        shown = f"{max(known):.2f}" if known else "-"
        return bool(known) and not missing and max(known) <= bound, f"{what}: {shown}, at most {bound:g}{missing}"

    def over(methods: tuple[str, ...], mode: str, geometries: tuple[str, ...], **keys: Any) -> list[float | None]:
        return [ratio(g, m, mode, **keys) for g in geometries for m in methods]

    large: dict[str, Any] = {"part": "prefill", "tokens": LARGE, "launch": "eager"}
    small: dict[str, Any] = {"part": "prefill", "tokens": SMALL}
    found = [
        at_most(1.5, "vglr-fc recorded, 16k prefill", over(("vglr-fc",), "recorded", GEOMETRIES, **large)),
        at_most(1.0, "the others recorded, 16k prefill", over(METHODS[1:], "recorded", GEOMETRIES, **large)),
        at_most(0.5, "memory recorded, 16k prefill", over(METHODS, "recorded", GEOMETRIES, value="memory", **large)),
        at_most(4.0, "attached, 1k prefill, eager", over(METHODS, "attached", GEOMETRIES, launch="eager", **small)),
        at_most(6.0, "recorded, 1k prefill, eager", over(METHODS, "recorded", GEOMETRIES, launch="eager", **small)),
        at_most(2.0, "recorded, 1k prefill, graph", over(METHODS, "recorded", GEOMETRIES, launch="graph", **small)),
    ]
    for batch in (1, 16):
        made: dict[str, Any] = {"part": "generate", "tokens": NEW, "batch": batch}
        eager, compiled = made | {"launch": "eager"}, made | {"launch": "compiled"}
        found += [
            at_most(6.0, f"generate, batch {batch}, attached", over(METHODS, "attached", (FIRST,), **eager)),
            at_most(10.0, f"generate, batch {batch}, recorded", over(METHODS, "recorded", (FIRST,), **eager)),
            at_most(
                3.0, f"generate compiled, batch {batch}, recorded", over(METHODS, "recorded", (FIRST,), **compiled)
            ),
            faster(rows, batch),
        ]
    fits = [ratio(FIRST, METHODS[0], "fit", part="fit")]
    return [*found, at_most(30.0, "fit over one forward pass, 5,000 prompts", fits)]


def faster(rows: list[Row], batch: int) -> Line:
    """The compiled recorded generation against the eager plain one, both in seconds."""
    own = [row for row in rows if (row["part"], row["batch"], row["geometry"]) == ("generate", batch, FIRST)]
    recorded = [
        row["seconds"] for row in own if (row["launch"], row["mode"]) == ("compiled", "recorded") and row["ratio"]
    ]
    plain = [row["seconds"] for row in own if row["method"] == "eager plain" and row["ratio"]]
    if not recorded or not plain:
        return False, f"generate compiled and recorded against eager plain, batch {batch}: -"
    shown = f"{max(recorded):.2f} s against {plain[-1]:.2f} s"
    return max(recorded) < plain[-1], f"generate compiled and recorded against eager plain, batch {batch}: {shown}"


def table(rows: list[Row], say: Callable[[str], object] = print) -> bool:
    found = lines(rows)
    for passed, line in found:
        say(f"{'holds' if passed else 'FAILS':6} {line}")
    return all(passed for passed, _ in found)


def main() -> int:
    given = [Path(name) for name in sys.argv[1:] if name != "--table"]
    files = [file for path in given for file in (sorted(path.glob("*.json")) if path.is_dir() else [path])]
    if not files or not all(path.is_file() for path in files):
        print(
            "usage: python benchmarks/signals_claims.py FILE_OR_FOLDER...    (of benchmarks/signals.py, on a GPU)",
            file=sys.stderr,
        )
        return 2
    rows = [row for path in files for row in json.loads(path.read_text())["rows"]]
    if "--table" in sys.argv:
        order = [*METHODS, "eager plain"]
        rows.sort(
            key=lambda row: (GEOMETRIES.index(row["geometry"]), row["part"], order.index(row["method"]), row["mode"])
        )
        print(reading_rows.table(rows), end="")
        return 0
    return 0 if table(rows) else 1


if __name__ == "__main__":
    raise SystemExit(main())
