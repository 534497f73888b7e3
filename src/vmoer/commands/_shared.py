"""What several commands share: options, tables, progress bars, and silence from the libraries."""

import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import torch
import transformers
import typer
from huggingface_hub import logging
from huggingface_hub.utils.tqdm import disable_progress_bars
from rich.console import Console
from rich.progress import Progress, TaskID

from vmoer.errors import InputError
from vmoer.report import Entry, Table, to_terminal

DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


def _dtype(name: str | None) -> str | None:
    """The long name of a dtype, however it was written."""
    name = DTYPES.get(name or "", name)
    if name not in (None, *DTYPES.values()):
        known = ", ".join((*DTYPES.values(), *DTYPES))
        raise InputError(f"dtype={name!r}: choose one of {known}")
    return name


Json = Annotated[bool, typer.Option("--json", help="Print JSON in place of a table.")]
Device = Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1, mps; by default a GPU where there is one.")]
Dtype = Annotated[
    str | None,
    typer.Option(
        callback=_dtype, help="float32, bfloat16, float16, or fp32, bf16, fp16; by default bfloat16 on a GPU."
    ),
]
DataRoot = Annotated[
    Path | None, typer.Option(help="Read DIR/<task>/<split>.jsonl in place of the hub (or set VMOER_DATA).")
]
PaperSplits = Annotated[bool, typer.Option("--paper-splits", help="Subsample each split to the paper's size.")]
NoCalibrator = Annotated[bool, typer.Option("--no-calibrator", help="Leave the run's calibrator out.")]


def check_device(device: str | None) -> None:
    """Refuse a device that this machine does not have, before anything is loaded."""
    try:
        torch.empty(1, device=device or "cpu")
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise InputError(f"device={device!r} cannot be used: {str(error).strip().splitlines()[0]}") from None


def listed(text: str) -> tuple[str, ...]:
    """The parts of a text that is separated by commas."""
    return tuple(part.strip() for part in text.split(",") if part.strip())


def numbers(text: str) -> tuple[int, ...]:
    """Seeds, separated by commas."""
    try:
        return tuple(int(part) for part in listed(text))
    except ValueError:
        raise InputError(f"seeds={text!r}: whole numbers separated by commas") from None


def table(title: str, header: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Print a table of texts."""
    entries = [[Entry("" if cell is None else str(cell)) for cell in row] for row in rows]
    print_tables([Table("", title, header, entries, labels=len(header))])


def print_tables(tables: Iterable[Table]) -> None:
    """Print tables as wide as the terminal; into a pipe or a file, as wide as they need."""
    terminal = sys.stdout.isatty()
    width = shutil.get_terminal_size().columns if terminal else None
    for table in tables:
        if table.rows:
            print(to_terminal(table, width, colour=terminal))


@contextmanager
def progress() -> Iterator[Callable[[str, int, int], None]]:
    """Bars on stderr where that is a terminal; they vanish at the end.

    Gives a function to call as work goes on: with its name, how much of it is done, and how much there is.
    """
    console = Console(stderr=True)
    with Progress(console=console, disable=not console.is_terminal, transient=True) as bars:
        tasks: dict[str, TaskID] = {}

        def show(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = bars.add_task(what, total=total)
            bars.update(tasks[what], completed=done, total=total)

        yield show


def quiet() -> None:
    """Silence transformers and the hub. What goes wrong there is raised as an exception anyway."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    logging.set_verbosity_error()
    disable_progress_bars()
