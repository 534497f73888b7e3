"""One neutral table, and its renderings: terminal, Markdown, CSV, LaTeX. (HTML is the page's template.)"""

import csv
import io
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

_LATEX = {
    **{character: f"\\{character}" for character in "&%$#_{}"},
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "→": r"$\rightarrow$",
    "†": r"\textdagger{}",
}


class Entry(NamedTuple):
    """What stands in one place of a table; numbers are kept beside their text, for CSV."""

    text: str
    detail: str = ""
    value: float | None = None
    low: float | None = None
    high: float | None = None
    best: bool = False
    tone: str = ""  # "better" or "worse": a colour on the page, never the only sign of it


class Table(NamedTuple):
    """A table with its notes; the first `labels` columns are text, the others numbers."""

    name: str
    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Entry]]
    notes: Sequence[str] = ()
    labels: int = 1


def number(value: float | None, low: float | None = None, high: float | None = None, digits: int = 3) -> Entry:
    """An entry `value [low, high]`; a dash where there is no value."""
    if value is None:
        return Entry("-")
    detail = "" if low is None or high is None else f"[{_fixed(low, digits)}, {_fixed(high, digits)}]"
    return Entry(_fixed(value, digits), detail, value, low, high)


def _fixed(value: float, digits: int) -> str:
    text = f"{value:.{digits}f}"
    return text.removeprefix("-") if float(text) == 0 else text  # no "-0.000"


def to_terminal(table: Table, width: int | None = None, colour: bool = False) -> str:
    """Through rich: intervals below their values, the best marked * (and bold where there is colour).

    Columns that do not fit beside the others stand below them, after the labels once more.
    """
    from rich.console import Console
    from rich.text import Text

    stream = io.StringIO()
    # A set width, not the terminal's: wide enough for any table of ours unless the caller knows better.
    console = Console(file=stream, width=width or 200, force_terminal=colour, no_color=not colour, legacy_windows=False)
    console.print(Text(table.title, style="bold"))  # not the grid's own title, which it folds to its width
    for columns in _side_by_side(table, width or 200):
        console.print(_rich(table, columns))
    for note in table.notes:
        console.print(Text(f"  {note}"))
    return "\n".join(line.rstrip() for line in stream.getvalue().splitlines()).strip("\n") + "\n"


def _side_by_side(table: Table, width: int) -> list[list[int]]:
    """The numbers of the columns in each block of a table, as many as fit without being folded. Where its labels alone do not
    fit, the first of them stands before each block."""

    def wide(i: int) -> int:
        cells = [row[i] for row in table.rows]
        return 3 + max(len(table.columns[i]), *(max(len(c.text) + c.best, len(c.detail)) for c in cells), 0)

    labels = [*range(table.labels)]
    if sum(map(wide, labels)) + 2 > width:
        labels = labels[:1]
    blocks, left = [[*labels]], width - sum(map(wide, labels)) - 2
    room = left
    for i in range(len(labels), len(table.columns)):
        if wide(i) > room and len(blocks[-1]) > len(labels):
            blocks.append([*labels])
            room = left
        blocks[-1].append(i)
        room -= wide(i)
    return blocks


def _rich(table: Table, columns: Sequence[int]) -> Any:
    """Some columns of a table as rich has it."""
    from rich import box
    from rich.table import Table as Rich
    from rich.text import Text

    grid = Rich(box=box.SIMPLE_HEAD)
    for i in columns:
        grid.add_column(Text(table.columns[i]), justify="left" if i < table.labels else "right", overflow="fold")
    for row in table.rows:
        texts = []
        for entry in (row[i] for i in columns):
            text = Text(entry.text + "*" * entry.best, style="bold" if entry.best else "")
            texts.append(text.append(f"\n{entry.detail}", style="not bold dim") if entry.detail else text)
        grid.add_row(*texts)
    return grid


def to_markdown(table: Table) -> str:
    """GitHub's tables, the best in bold."""

    def write(entry: Entry) -> str:
        text = entry.text.replace("|", "\\|")
        return " ".join(filter(None, [f"**{text}**" if entry.best else text, entry.detail]))

    header = [column.replace("|", "\\|") for column in table.columns]
    lines = grid(header, ([write(entry) for entry in row] for row in table.rows), table.labels)
    notes = ["", *(f"- {note}" for note in table.notes)] if table.notes else []
    return "\n".join([f"### {table.title}", "", *lines, *notes]) + "\n"


def grid(header: Sequence[str], rows: Iterable[Sequence[str]], labels: int | None = None) -> list[str]:
    """The lines of a table in GitHub's Markdown; given `labels`, the columns after so many are aligned to the right."""

    def line(cells: Sequence[str]) -> str:
        return f"| {' | '.join(cells)} |"

    rule = "|---" * len(header) + "|"
    if labels is not None:
        rule = line([":---" if i < labels else "---:" for i in range(len(header))])
    return [line(header), rule, *map(line, rows)]


def to_csv(table: Table) -> str:
    """For programs: each number in its own column, as `X`, `X low`, `X high`; `X best` is 1 for the best within noise."""
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    spread = [any(row[i].low is not None for row in table.rows) for i in range(len(table.columns))]
    marked = [any(row[i].best for row in table.rows) for i in range(len(table.columns))]
    words = [any(row[i].tone for row in table.rows) for i in range(len(table.columns))]
    header: list[str] = []
    for i, column in enumerate(table.columns):
        header += [column]
        header += [f"{column} low", f"{column} high"] * spread[i] + [f"{column} best"] * marked[i]
        header += [f"{column} verdict"] * words[i]
    writer.writerow(map(_inert, header))
    for row in table.rows:
        line: list[str] = []
        for i, entry in enumerate(row):
            plain = [_exact(entry.low), _exact(entry.high)]
            line += [entry.text if entry.value is None else _exact(entry.value)]
            line += plain * spread[i] + [str(int(entry.best))] * marked[i] + [entry.text] * words[i]
        writer.writerow(map(_inert, line))
    return stream.getvalue()


def _inert(cell: str) -> str:
    """A cell that no spreadsheet takes for a formula: names that begin like one get a quote before them, numbers do not."""
    if not cell.lstrip().startswith(("=", "+", "-", "@")) or cell == "-":
        return cell
    try:
        float(cell)
    except ValueError:
        return f"'{cell}"
    return cell


def _exact(value: float | None) -> str:
    return "" if value is None else f"{value:.6g}"


def latex_escape(text: str) -> str:
    """Text as LaTeX shows it."""
    return "".join(_LATEX.get(character, character) for character in text)


def to_latex(table: Table) -> str:
    """A `table` environment with booktabs rules, intervals on a line below their values, notes in small print."""

    def line(cells: Iterable[str]) -> str:
        return " & ".join(cells) + r" \\"

    def value(entry: Entry) -> str:
        text = latex_escape(entry.text)
        return rf"\textbf{{{text}}}" if entry.best else text

    def detail(entry: Entry) -> str:
        return rf"{{\scriptsize {latex_escape(entry.detail)}}}" if entry.detail else ""

    lines = [r"\begin{table}", r"\centering\small", rf"\caption{{{latex_escape(table.title)}}}"]
    lines += [rf"\label{{tab:{table.name}}}"]
    alignment = "l" * table.labels + "r" * (len(table.columns) - table.labels)
    lines += [rf"\begin{{tabular}}{{@{{}}{alignment}@{{}}}}", r"\toprule"]
    lines += [line(map(latex_escape, table.columns)), r"\midrule"]
    for row in table.rows:
        lines.append(line(map(value, row)))
        lines += [line(map(detail, row))] if any(entry.detail for entry in row) else []
    lines += [r"\bottomrule", r"\end{tabular}"]
    lines += [rf"\par\smallskip{{\footnotesize {latex_escape(note)}}}" for note in table.notes]
    return "\n".join([*lines, r"\end{table}"]) + "\n"
