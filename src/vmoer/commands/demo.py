"""`vmoer demo`: the whole story on the embedded model, then the page."""

import os
from pathlib import Path
from typing import Annotated

import typer

from vmoer.commands._shared import quiet
from vmoer.commands.study import raise_failures, show_plan
from vmoer.files import locked
from vmoer.report import read, report
from vmoer.report.studies import BUILDERS
from vmoer.report.verdict import verdict
from vmoer.studies import demo as story


def demo(
    out: Annotated[Path, typer.Option(help="Where everything goes.")] = Path("out/demo"),
    full: Annotated[bool, typer.Option("--full", help="All methods and studies, three seeds.")] = False,
    workers: Annotated[int, typer.Option(help="Processes that cells are handed to; 0: one a core.", min=0)] = 0,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the grid, with an estimate of its time, and stop.")
    ] = False,
) -> None:
    """The whole story on a small embedded MoE, without network or GPU, in a few minutes."""
    quiet()
    workers = workers or _cores()
    if dry_run:
        show_plan(story.names(full), story.study(out, full), workers)
        return
    with locked(out):
        failed = story.run(out, full, workers)
        page = report(out).page
    raise_failures(failed, f" (the rest is in {page})")
    print()
    if sentence := verdict([row for row in read(out) if row.get("study") not in BUILDERS]):
        print(sentence)
    print(f"\n{page}")


def _cores() -> int:
    """The number of cores that this process may use: in a container fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
