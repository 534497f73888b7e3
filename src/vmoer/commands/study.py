"""`vmoer study NAME` and `vmoer demo`: grids of cells, then the page."""

import os
from collections.abc import Callable
from pathlib import Path

from vmoer.errors import RunError
from vmoer.report import report
from vmoer.studies import Study, grid, run_study
from vmoer.train import Plan

# what the demo shows in a few minutes, and everything for --full
QUICK = ("vglr-fc", "vglr-fc@paper", "vtsr", "mcdr", "mean-only", "temp-scale", "map", "map-early", "laplace")
FULL = (*QUICK, "swag", "vglr-mf", "vglr-lr", "vtsr@paper", "vglr-mf@paper", "fixed-noise")
# the embedded model has its stage 1 behind it, and a split of questions that stage 1 never saw
EMBEDDED = {"stage1": Plan(epochs=0), "stage2_data": "split:heldout"}


def demo_study(out: Path, full: bool) -> Study:
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
        **EMBEDDED,  # type: ignore[arg-type]
    )


def demo(out: Path, full: bool, say: Callable[[str], object] = print) -> Path:
    """The whole story on the embedded model: brittleness, training, calibration, OoD, stability, efficiency, the page."""
    import torch

    torch.set_num_threads(1)  # matrices this small only lose by being shared out
    study = demo_study(out, full)
    names = ("all",) if full else ("brittleness", "calibration", "stability", "efficiency")
    failed = []
    for name in names:
        failed += run_study(name, study, workers=min(2, os.cpu_count() or 1), say=say).failed
    page = report(out)
    if failed:
        raise RunError(
            f"{len(failed)} cells failed, the first: {failed[0][0].name}: {failed[0][1]} (the rest is in {page})"
        )
    return page


def dry_run(name: str, study: Study) -> list[tuple[str, str, bool]]:
    """The grid: each cell's study, name, and whether it is done."""
    return [(cell.study, cell.name, cell.path(study.out).exists()) for cell in grid(name, study)]
