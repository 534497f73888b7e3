"""Who imports whom: `python docs/picture.py` draws docs/assets/ladder.svg from the sources.

A row is an entry of the tree in docs/architecture.md, in its order.
A dark arrow goes from a package up to one that it imports. An arrow is pale
where dark ones lead to the same place, and red where it goes down, which the import contract does not allow.
tests/test_docs.py checks that the picture is current.
"""

import ast
import re
from collections.abc import Iterator
from html import escape
from pathlib import Path

ROOT = Path(__file__).parent.parent
EVERYWHERE = ("errors", "files")  # imported by nearly all: arrows would say nothing
ROW, NAMES, TEXT, WIDTH, TOP = 31, 192, 318, 1000, 12
DARK, PALE, RED = "#1f6f78", "#d5dbdd", "#c62828"

Edges = set[tuple[str, str]]


def rungs() -> dict[str, str]:
    """The entries of the tree in docs/architecture.md and what it says of each, the lowest first."""
    block = (ROOT / "docs" / "architecture.md").read_text().partition("src/vmoer/ ")[2].partition("```")[0]
    return {
        name: what for line in block.splitlines()[1:] for name, what in re.findall(r"^ +(\w+)(?:/|\.py) +(.+)$", line)
    }


def imports(package: Path, names: list[str]) -> Edges:
    """Pairs of entries of which the first imports the second, anywhere in a file."""
    found = set()
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package).with_suffix("").parts
        for target in _imported(path, (package.name, *parts[:-1])):
            if parts[0] in names and target in names and target != parts[0]:
                found.add((parts[0], target))
    return found


def _imported(path: Path, folder: tuple[str, ...]) -> Iterator[str]:
    """The entries of the package that a file names; `folder` is where it lies, from the package down."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            full = [alias.name.split(".") for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            start = [*folder[: len(folder) + 1 - node.level]] if node.level else []
            start += node.module.split(".") if node.module else []
            full = [[*start, alias.name] for alias in node.names]
        else:
            continue
        yield from (parts[1] for parts in full if parts[0] in ("vmoer", folder[0]) and len(parts) > 1)


def implied(edges: Edges) -> Edges:
    """Those that a way through others says already."""

    def reached(start: str, first: tuple[str, str]) -> set[str]:
        seen: set[str] = set()
        todo = [start]
        while todo:
            here = todo.pop()
            new = {b for a, b in edges if a == here and (a, b) != first} - seen
            seen |= new
            todo += new
        return seen

    return {(a, b) for a, b in edges if b in reached(a, (a, b))}


def svg() -> str:
    """The picture as text, the same for the same sources."""
    what = rungs()
    order = [*what]
    edges = {(a, b) for a, b in imports(ROOT / "src" / "vmoer", order) if b not in EVERYWHERE}
    pale = implied(edges)
    height = TOP * 2 + ROW * len(order)
    label = "The packages of vmoer, one a row; arrows lead from each to those above it that it imports"
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{label}" '
        f'font-family="system-ui, sans-serif" font-size="15">',
        f'<rect width="{WIDTH}" height="{height}" rx="8" fill="#ffffff"/>',
    ]

    def y(name: str) -> float:
        return TOP + ROW * (order.index(name) + 0.5)

    def arrow(a: str, b: str, colour: str) -> str:
        reach = 26 + 14.5 * abs(order.index(a) - order.index(b))
        start, end = y(a) - 4, y(b) + 4
        curve = f"M{NAMES} {start}C{NAMES - reach:g} {start} {NAMES - reach:g} {end} {NAMES - 6} {end}"
        tip = f"M{NAMES} {end}l-8 -3.5v7z"
        return f'<path d="{curve}" fill="none" stroke="{colour}" stroke-width="1.4"/><path d="{tip}" fill="{colour}"/>'

    def colour(a: str, b: str) -> str:
        return RED if order.index(b) > order.index(a) else PALE if (a, b) in pale else DARK

    drawn = sorted(edges, key=lambda edge: ([PALE, DARK, RED].index(colour(*edge)), edge))
    lines += [arrow(a, b, colour(a, b)) for a, b in drawn]
    for name, said in what.items():
        middle, wide = y(name), TEXT - NAMES - 14
        lines += [
            f'<rect x="{NAMES}" y="{middle - 11}" width="{wide}" height="22" rx="4" fill="#eef4f4" stroke="{DARK}"/>',
            f'<text x="{NAMES + wide / 2:g}" y="{middle + 4.5}" text-anchor="middle" fill="#102a2d">{name}</text>',
            f'<text x="{TEXT}" y="{middle + 4.5}" fill="#444444" font-size="13.5">{escape(said)}</text>',
        ]
    return "\n".join([*lines, "</svg>"]) + "\n"


if __name__ == "__main__":
    (ROOT / "docs" / "assets" / "ladder.svg").write_text(svg())
