"""`vmoer study NAME`: a grid of cells, then its rows."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vmoer.commands._shared import (
    DataRoot,
    Device,
    Dtype,
    Recompute,
    check_device,
    listed,
    numbers,
    quiet,
    table,
    waiting,
)
from vmoer.errors import InputError, RunError
from vmoer.files import locked

if TYPE_CHECKING:
    from vmoer.studies import Cell, Study

TABLES = "paper"  # the study of the paper's tables


def _list(asked: bool) -> None:
    """Every study, with the first line of the module that holds it."""
    if asked:
        from vmoer.studies import STUDIES, summary

        table("studies", ("name", "what it is"), [(name, summary(name)) for name in STUDIES])
        raise typer.Exit


def study(
    name: Annotated[str, typer.Argument(help="One of --list, or all.")],
    model: Annotated[str, typer.Option(help="A hub id, a local folder, demo; or granite, qwen, deepseek.")],
    out: Annotated[Path, typer.Option(help="Where cells, runs, predictions and tables go.")],
    task: Annotated[str, typer.Option(help="The source task; the study paper knows its own.")] = "",
    table_: Annotated[
        str, typer.Option("--table", help="Of the study paper: 1, 2, 3, 4, ablation, motivation or all.")
    ] = "",
    preset: Annotated[str, typer.Option(help="default; or paper: every label is taken as LABEL@paper.")] = "default",
    ood: Annotated[str, typer.Option(help="Shifted tasks, separated by commas, the farthest last.")] = "",
    methods: Annotated[str, typer.Option(help="Labels, separated by commas, such as map,vglr-fc,vglr-fc@paper.")] = "",
    seeds: Annotated[str, typer.Option(help="Separated by commas; 0 by default, and five for the study paper.")] = "",
    averaging: Annotated[
        str, typer.Option(help="router, answer, full, orders, orders+routing, separated by commas.")
    ] = "router",
    passes: int = 8,
    search: Annotated[bool, typer.Option("--search", help="Choose beta on validation.")] = False,
    transfer_from: Annotated[Path | None, typer.Option(help="Take what was searched from this study.")] = None,
    limit: Annotated[int | None, typer.Option(help="At most this many questions of each split.")] = None,
    data_root: DataRoot = None,
    device: Device = None,
    dtype: Dtype = None,
    recompute: Recompute = False,
    workers: Annotated[int, typer.Option(help="Processes that cells are handed to.")] = 1,
    backend: Annotated[
        str, typer.Option(help="processes, or ray: a cluster whose machines all see --out.")
    ] = "processes",
    ray_address: Annotated[
        str | None, typer.Option(help="host:port, auto (the one running here or in RAY_ADDRESS), local (start one).")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the grid, with an estimate of its time, and stop.")
    ] = False,
    list_: Annotated[
        bool, typer.Option("--list", help="Print the studies, and stop.", is_eager=True, callback=_list)
    ] = False,
) -> None:
    """One of the paper's experiments over methods and seeds. Finished cells are never computed again."""
    from vmoer.training.presets import preset_named

    preset = preset_named(preset).name
    _check_paper(name, task, table_, ood, methods, preset)
    wanted = numbers(seeds)
    check_device(device)
    from vmoer.studies import Study, check_backend, paper
    from vmoer.studies.demo import EMBEDDED

    quiet()
    settings: dict[str, Any] = {"passes": passes, "search": search, "transfer_from": transfer_from, "limit": limit}
    settings |= {"data_root": None if data_root is None else str(data_root), "device": device, "dtype": dtype}
    settings |= {"recompute": recompute} | (EMBEDDED if model == "demo" else {})
    check_backend(backend, workers, ray_address)
    asked = Study(
        model=paper.model_named(model),
        task=task,
        out=out,
        ood=listed(ood),
        methods=_labels(methods, preset),
        preset=preset,
        table=table_ or "all",
        seeds=wanted or (paper.SEEDS if name == TABLES else (0,)),
        averaging=listed(averaging),
        **settings,
    )
    _note_layers(name, asked)
    if dry_run:
        _show_plan(name, asked, workers)
    else:
        _run(name, asked, workers=workers, backend=backend, ray_address=ray_address)


def _note_layers(name: str, asked: Study) -> None:
    """Say so where the model has fewer layers than the paper's protocol wants."""
    from vmoer.studies import grid
    from vmoer.training.layers import preset_layers
    from vmoer.training.presets import PAPER

    if any("@paper" in str(cell.key.get("method")) for cell in grid(name, asked)):
        _, note = preset_layers(PAPER, asked.model)
        if note:
            print(f"note: {note}", file=sys.stderr)


def _run(name: str, asked: Study, **how: Any) -> None:
    from vmoer.studies import run_study

    with locked(asked.out), waiting(f"study {name}") as bars:
        failed = run_study(name, asked, say=bars.print, **how).failed
    print(f"{asked.out / 'metrics.json'}; tables and figures?\n{shlex.join(['vmoer', 'report', str(asked.out)])}")
    raise_failures(failed)


def _show_plan(name: str, asked: Study, workers: int) -> None:
    """What a study would take."""
    from vmoer.studies import _paper_cost

    if name != TABLES:
        return show_plan((name,), asked, workers)
    lines, below = _paper_cost.summary(asked)
    table(f"the paper's tables on {asked.model}", ("table", "cells", "done", "H200 h", "A100 h", "GB"), lines)
    return print(below)


def _check_paper(name: str, task: str, table: str, ood: str, methods: str, preset: str) -> None:
    """The study paper has its own tasks, shifts and methods; every other study needs a task and has no tables."""
    if name == TABLES and (ood or methods or preset != "default"):
        raise InputError(
            "the study paper has its own shifts, methods and preset: leave out --ood, --methods and --preset"
        )
    if name != TABLES and table:
        raise InputError(f"--table belongs to the study paper, not to {name}")
    if name != TABLES and not task:
        raise InputError(f"the study {name} needs a task: --task openbookqa")


def _labels(methods: str, preset: str) -> tuple[str, ...]:
    """What was asked for, or the methods of the preset: the paper's seven, or all of ours."""
    from vmoer.studies import paper
    from vmoer.studies._labels import with_preset
    from vmoer.studies.demo import FULL
    from vmoer.training.presets import PAPER

    found = listed(methods) or (paper.METHODS if preset == PAPER.name else FULL)
    return tuple(with_preset(label, preset) for label in found)


def raise_failures(failed: Sequence[tuple[Cell, str]], more: str = "") -> None:
    """End with an error where cells failed. Everything else is written by now."""
    if failed:
        raise RunError(f"{len(failed)} cells failed, the first: {failed[0][0].name}: {failed[0][1]}{more}")


def show_plan(names: tuple[str, ...], study: Study, workers: int) -> None:
    """Print the grid and how long the rest of it will take. A cell has a time where it is done, or where a cell like it is."""
    import torch

    from vmoer.studies import grid
    from vmoer.studies._estimate import expected, sentence

    if study.model == "demo":
        torch.set_num_threads(1)  # as the cells run
    found = expected([cell for name in names for cell in grid(name, study)], study.out)
    lines = [
        (
            one.cell.study,
            one.cell.name,
            "yes" if one.done else "",
            None if one.seconds is None else f"{'' if one.done else 'about '}{one.seconds:.0f}",
        )
        for one in found
    ]
    table(f"{', '.join(names)}: {len(found)} cells", ("study", "cell", "done", "seconds"), lines)
    print(sentence(found, study, workers))
