"""`vmoer demo`: the whole story on the embedded model, then the page."""

import os
from pathlib import Path
from typing import Annotated

import typer

from vmoer.commands._shared import quiet, sentence, waiting
from vmoer.commands.ask import show, shown_choice
from vmoer.commands.study import raise_failures, show_plan
from vmoer.files import locked
from vmoer.tasks import load

CAPITALS = ["Paris", "Rome", "Berlin", "Madrid"]


def demo(
    out: Annotated[Path, typer.Option(help="Where everything goes.")] = Path("out/demo"),
    full: Annotated[bool, typer.Option("--full", help="All methods and studies, three seeds.")] = False,
    workers: Annotated[int, typer.Option(help="Processes that cells are handed to; 0: one a core.", min=0)] = 0,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the grid, with an estimate of its time, and stop.")
    ] = False,
) -> None:
    """The whole story on a small embedded MoE, without network or GPU, in a few minutes."""
    workers = workers or _cores()
    if dry_run:
        from vmoer.studies import demo as story

        quiet()
        show_plan(story.names(full), story.study(out, full), workers)
        return
    with locked(out), waiting("vmoer demo") as bars:
        from vmoer.report import read, report
        from vmoer.report.studies import BUILDERS
        from vmoer.report.verdict import verdict
        from vmoer.studies import demo as story

        quiet()
        failed = story.run(out, full, workers, bars.print)
        bars.print("the report: tables and figures")
        page = report(out).page
    raise_failures(failed, f" (the rest is in {page})")
    print()
    if said := verdict([row for row in read(out) if row.get("study") not in BUILDERS]):
        sentence(said)
    sentence(
        "The routers were trained on questions that the plain model never saw: this is no comparison at equal data."
    )
    if (out / story.ASKED).is_dir():
        _ask(out / story.ASKED)
    print(f"\n{page}")


def _ask(run: Path) -> None:
    """Three questions to a trained run: one as in training, one of a shifted task, one of another world."""
    from vmoer.evaluation.ask import answer_choice
    from vmoer.models import open_model

    opened = open_model(run, device="cpu")
    known = [load(task, "test", limit=1)[0] for task in ("demo", "demo-near")]
    asked = [*((one.question, list(one.choices)) for one in known), ("What is the capital of France?", CAPITALS)]
    print(f"\nThree questions to {run}, which had one like the first in training and none like the others:")
    for question, options in asked:
        print(f"\n> {question} ({', '.join(options)})")
        show(shown_choice(answer_choice(opened, question, options), options, None))


def _cores() -> int:
    """The number of cores that this process may use: in a container fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
