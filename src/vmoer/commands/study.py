"""`vmoer study NAME` and `vmoer demo`: grids of cells, then the page."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vmoer.commands._shared import DataRoot, Device, Dtype, check_device, listed, numbers, quiet, table
from vmoer.errors import RunError

if TYPE_CHECKING:
    from vmoer.studies import Study

# what the demo shows in a few minutes, and everything for --full
QUICK = ("vglr-fc", "vglr-fc@paper", "vtsr", "mcdr", "mean-only", "temp-scale", "map", "map-early", "laplace")
FULL = (*QUICK, "swag", "vglr-mf", "vglr-lr", "vtsr@paper", "vglr-mf@paper", "fixed-noise")


def embedded() -> dict[str, Any]:
    """The embedded model has its stage 1 behind it, and a split of questions that stage 1 never saw."""
    from vmoer.train import Plan

    return {"stage1": Plan(epochs=0), "stage2_data": "split:heldout"}


def study(
    name: Annotated[str, typer.Argument(help="calibration, ood, stability, efficiency, brittleness, ..., or all.")],
    model: Annotated[str, typer.Option(help="A hub id, a local folder, or demo.")],
    task: Annotated[str, typer.Option(help="The source task.")],
    out: Annotated[Path, typer.Option(help="Where cells, runs, predictions and tables go.")],
    ood: Annotated[str, typer.Option(help="Shifted tasks, separated by commas, the farthest last.")] = "",
    methods: Annotated[str, typer.Option(help="Labels, separated by commas, such as map,vglr-fc,vglr-fc@paper.")] = "",
    seeds: Annotated[str, typer.Option(help="Separated by commas.")] = "0",
    averaging: Annotated[str, typer.Option(help="router, answer, full, separated by commas.")] = "router",
    passes: int = 8,
    search: Annotated[bool, typer.Option("--search", help="Choose beta on validation.")] = False,
    transfer_from: Annotated[Path | None, typer.Option(help="Take what was searched from this study.")] = None,
    limit: Annotated[int | None, typer.Option(help="At most this many questions of each split.")] = None,
    data_root: DataRoot = None,
    device: Device = None,
    dtype: Dtype = None,
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
) -> None:
    """One of the paper's experiments over methods and seeds. Finished cells are never computed again."""
    from vmoer.studies import Study, run_study

    quiet()
    check_device(device, dtype)
    settings: dict[str, Any] = {"passes": passes, "search": search, "transfer_from": transfer_from, "limit": limit}
    settings |= {"data_root": None if data_root is None else str(data_root), "device": device, "dtype": dtype}
    settings |= embedded() if model == "demo" else {}
    asked = Study(
        model=model,
        task=task,
        out=out,
        ood=listed(ood),
        methods=listed(methods) or FULL,
        seeds=numbers(seeds),
        averaging=listed(averaging),
        **settings,
    )
    if dry_run:
        show_plan((name,), asked, workers)
        return
    out.mkdir(parents=True, exist_ok=True)
    failed = run_study(name, asked, workers=workers, backend=backend, ray_address=ray_address).failed
    print(f"{out / 'metrics.json'}; tables and figures: vmoer report {out}")
    if failed:
        raise RunError(f"{len(failed)} cells failed, the first: {failed[0][0].name}: {failed[0][1]}")


def demo(
    out: Annotated[Path, typer.Option(help="Where everything goes.")] = Path("out/demo"),
    full: Annotated[bool, typer.Option("--full", help="All methods and studies, three seeds.")] = False,
    workers: Annotated[int, typer.Option(help="Processes that cells are handed to; 0: one a core.", min=0)] = 0,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the grid, with an estimate of its time, and stop.")
    ] = False,
) -> None:
    """The whole story on a small embedded MoE, without network or GPU, in a few minutes."""
    from vmoer.report import read
    from vmoer.report.page import headlines
    from vmoer.report.studies import BUILDERS

    quiet()
    if dry_run:
        show_plan(demo_names(full), demo_study(out, full), workers or _cores())
        return
    page = run_demo(out, full, workers)
    print()
    for sentence in headlines([row for row in read(out) if row.get("study") not in BUILDERS]):
        print(f"- {sentence}")
    print(f"\n{page}")


def demo_study(out: Path, full: bool) -> "Study":
    from vmoer.studies import Study
    from vmoer.train import Plan

    return Study(
        model="demo",
        task="demo",
        out=out,
        ood=("demo-near", "demo-far"),
        methods=FULL if full else (*QUICK, "vglr-fc+full"),
        seeds=(0, 1, 2) if full else (0,),
        averaging=("router", "answer", "full") if full else ("router",),
        passes=8 if full else 4,
        stage2=Plan(epochs=8 if full else 4, batch_size=32, lr=2e-3, patience=4),
        **embedded(),
    )


def demo_names(full: bool) -> tuple[str, ...]:
    return ("all",) if full else ("brittleness", "calibration", "stability", "efficiency")


def run_demo(out: Path, full: bool, workers: int = 0, say: Callable[[str], object] = print) -> Path:
    """The whole story on the embedded model: brittleness, training, calibration, OoD, stability, efficiency, the page."""
    import torch

    from vmoer.report import report
    from vmoer.studies import run_study

    torch.set_num_threads(1)  # matrices this small only lose by being shared out
    study = demo_study(out, full)
    failed = []
    for name in demo_names(full):
        failed += run_study(name, study, workers=workers or _cores(), say=say).failed
    page = report(out)
    if failed:
        raise RunError(
            f"{len(failed)} cells failed, the first: {failed[0][0].name}: {failed[0][1]} (the rest is in {page})"
        )
    return page


def _cores() -> int:
    """Those this process may use, which in a container are fewer than the machine's."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def show_plan(names: tuple[str, ...], study: "Study", workers: int) -> None:
    """The grid, each cell with its time where it is done or where cells like it are, and how long the rest will take."""
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
