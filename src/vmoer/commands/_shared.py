"""What several commands share: options, tables, progress bars, and silence from the libraries.

Commands import what brings torch where they use it: by then their options are read, and what needs no model is checked.
"""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from logging import getLogger as logging_of
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn

from vmoer.errors import InputError
from vmoer.tasks import Question

if TYPE_CHECKING:
    from vmoer.models import Opened
    from vmoer.report.tables import Table

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
SkipLong = Annotated[
    bool, typer.Option("--skip-long", help="Leave out questions longer than the model's context, and say how many.")
]
Recompute = Annotated[
    bool, typer.Option("--recompute", help="Less memory in stage 1, for one more forward pass: gradient checkpointing.")
]
Replace = Annotated[bool, typer.Option("--replace", help="Replace what another command left in the folder.")]
NoCalibrator = Annotated[bool, typer.Option("--no-calibrator", help="Leave the run's calibrator out.")]


def check_device(device: str | None) -> None:
    """Refuse a device that this machine does not have, before anything is loaded."""
    import torch

    try:
        torch.empty(1, device=device or "cpu")
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise InputError(f"device={device!r} cannot be used: {str(error).strip().splitlines()[0]}") from None


def fitting(opened: Opened, questions: Sequence[Question]) -> list[Question]:
    """The questions that fit into the model's context; the others are counted on stderr."""
    from vmoer.live.inputs import context_length
    from vmoer.tasks import prompt

    kept, long = prompt.fitting(opened.tokenizer, questions, context_length(opened.model))
    for task, count in long.items():
        of = sum(question.task == task for question in questions)
        print(f"note: {count} of {of} questions of {task} left out: longer than the model's context", file=sys.stderr)
    if not kept:
        raise InputError("no question fits into the model's context")
    return kept


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
    from vmoer.report.tables import Entry, Table

    entries = [[Entry("" if cell is None else str(cell)) for cell in row] for row in rows]
    print_tables([Table("", title, header, entries, labels=len(header))])


def print_tables(tables: Iterable[Table]) -> None:
    """Print tables as wide as the terminal; into a pipe or a file, as wide as they need."""
    from vmoer.report.tables import to_terminal

    terminal = sys.stdout.isatty()
    width = shutil.get_terminal_size().columns if terminal else None
    for table in tables:
        if table.rows:
            print(to_terminal(table, width, colour=terminal))


def sentence(text: str) -> None:
    """Print a sentence; a terminal's lines end between its words."""
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else len(text) + 1
    print(textwrap.fill(text, width, break_long_words=False, break_on_hyphens=False))


class Bars:
    """Progress on stderr. Called as work goes on: with its name, how much of it is done, and how much there is."""

    def __init__(self, bars: Progress) -> None:
        self.bars, self.tasks = bars, dict[str, TaskID]()

    def __call__(self, what: str, done: int, total: int) -> None:
        if what not in self.tasks:
            self.tasks[what] = self.bars.add_task(what, total=total)
        self.bars.update(self.tasks[what], completed=done, total=total)

    def name(self, what: str, words: str) -> None:
        """Other words beside a bar."""
        if what in self.tasks:
            self.bars.update(self.tasks[what], description=words)

    def say(self, line: str) -> None:
        """A line that stays, above the bars; also where stderr is no terminal."""
        if self.bars.disable:
            print(line, file=sys.stderr, flush=True)
        else:
            self.bars.console.print(line, highlight=False, markup=False)

    def print(self, line: str) -> None:
        """The same on stdout, which a terminal shows above the bars."""
        if sys.stdout.isatty() and not self.bars.disable:
            self.say(line)
        else:
            print(line, flush=True)


@contextmanager
def waiting(what: str) -> Iterator[Bars]:
    """A line that moves, with the time, while other processes work; nothing where stderr is no terminal."""
    console = Console(stderr=True)
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as bars:
        bars.add_task(what, total=None)
        yield Bars(bars)


@contextmanager
def progress() -> Iterator[Bars]:
    """Bars where stderr is a terminal; they vanish at the end."""
    console = Console(stderr=True)
    with Progress(console=console, disable=not console.is_terminal, transient=True) as bars:
        yield Bars(bars)


def quiet() -> None:
    """Silence transformers, and the hub but for its downloads. What goes wrong there is raised as an exception anyway."""
    import transformers
    from huggingface_hub import logging
    from huggingface_hub.utils.tqdm import enable_progress_bars

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    logging.set_verbosity_error()
    logging_of("bitsandbytes").setLevel("ERROR")  # it says so where a kernel of its own is missing
    if sys.stderr.isatty():  # transformers has silenced the hub with itself
        enable_progress_bars()
