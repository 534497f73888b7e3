"""What several commands share: their options, their tables, and silence from the libraries."""

import shutil
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vmoer.errors import InputError

if TYPE_CHECKING:
    from vmoer.report import Table as ReportTable

Json = Annotated[bool, typer.Option("--json", help="Print JSON in place of a table.")]
Device = Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1, mps; by default a GPU where there is one.")]
Dtype = Annotated[str | None, typer.Option(help="float32, bfloat16, float16; by default bfloat16 on a GPU.")]
DataRoot = Annotated[
    Path | None, typer.Option(help="Read DIR/<task>/<split>.jsonl in place of the hub (or set VMOER_DATA).")
]
PaperSplits = Annotated[bool, typer.Option("--paper-splits", help="Subsample each split to the paper's size.")]


def check_device(device: str | None, dtype: str | None) -> None:
    import torch

    if dtype not in (None, "float32", "bfloat16", "float16"):
        raise InputError(f"dtype={dtype!r}: choose one of float32, bfloat16, float16")
    try:
        torch.empty(1, device=device or "cpu")
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise InputError(f"device={device!r} cannot be used: {str(error).strip().splitlines()[0]}") from None


def listed(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


def numbers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in listed(text))
    except ValueError:
        raise InputError(f"seeds={text!r}: whole numbers separated by commas") from None


def table(title: str, header: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """A table as wide as the terminal; into a pipe or a file, as wide as it needs."""
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(width=None if sys.stdout.isatty() else 240)
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    for name in header:
        table.add_column(name, overflow="fold")
    for row in rows:
        table.add_row(*(Text("" if cell is None else str(cell)) for cell in row))
    console.print(table)


def print_tables(tables: "Iterable[ReportTable]") -> None:
    from vmoer.report import to_terminal

    terminal = sys.stdout.isatty()
    width = shutil.get_terminal_size().columns if terminal else None
    for table in tables:
        if table.rows:
            print(to_terminal(table, width, colour=terminal))


def quiet() -> None:
    """For commands that open a model: what is wrong comes as an exception; the rest of what the libraries say is left out."""
    import transformers
    from huggingface_hub import logging
    from huggingface_hub.utils.tqdm import disable_progress_bars

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    logging.set_verbosity_error()
    disable_progress_bars()
