"""The whole story on the embedded model, without network or GPU: the grids that `vmoer demo` computes.

The embedded model has its stage 1 behind it, and a split of questions that stage 1 never saw.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from vmoer.studies import Cell, Study, run_study
from vmoer.training.run import Plan

QUICK = ("vglr-fc", "vglr-fc@paper", "vtsr", "mcdr", "mean-only", "temp-scale", "map", "map-early", "laplace")
FULL = (*QUICK, "swag", "vglr-mf", "vglr-lr", "vtsr@paper", "vglr-mf@paper", "fixed-noise")
EMBEDDED: dict[str, Any] = {"stage1": Plan(epochs=0), "stage2_data": "split:heldout"}
"""Settings of every study on the embedded model."""
ASKED = Path("runs") / "vglr-fc-s0"
"""The run in the demo's folder that can be asked."""


def names(full: bool) -> tuple[str, ...]:
    return ("all",) if full else ("brittleness", "calibration", "stability", "efficiency")


def study(out: Path, full: bool) -> Study:
    """A few minutes' worth; or, `full`, all methods and averagings over three seeds."""
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
        **EMBEDDED,
    )


def run(out: Path, full: bool, workers: int, say: Callable[[str], object] = print) -> list[tuple[Cell, str]]:
    """Compute every grid; returns the cells that failed, with the reason."""
    torch.set_num_threads(1)  # matrices this small only lose by being shared out
    asked = study(out, full)
    return [cell for name in names(full) for cell in run_study(name, asked, workers=workers, say=say).failed]
