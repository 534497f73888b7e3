"""`vmoer calibrate RUN_OR_MODEL --task T`: a calibrator fitted on validation, stored with the run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vmoer.commands._shared import (
    DataRoot,
    Device,
    Dtype,
    Json,
    SkipLong,
    check_device,
    fitting,
    progress,
    quiet,
    table,
)
from vmoer.files import locked
from vmoer.saved import manifest
from vmoer.saved.fetch import check_path
from vmoer.tasks import load

if TYPE_CHECKING:
    from vmoer.evaluation.calibrators import Calibrated


def calibrate(
    run_or_model: Annotated[str, typer.Argument(help="A run folder of `vmoer train`, a hub id, a folder, or demo.")],
    task: Annotated[str, typer.Option(help="A built-in task, or the path of a JSONL file.")],
    out: Annotated[Path | None, typer.Option(help="The folder to write; a run keeps its calibrator itself.")] = None,
    method: Annotated[str, typer.Option(help="auto, none, temperature, vector or isotonic.")] = "auto",
    averaging: Annotated[
        str, typer.Option(help="What is averaged: router, answer, full, orders or orders+routing.")
    ] = "router",
    passes: Annotated[int, typer.Option(help="Passes that are averaged.")] = 8,
    data_root: DataRoot = None,
    limit: Annotated[int | None, typer.Option(help="At most this many validation questions.")] = None,
    batch_tokens: Annotated[int, typer.Option(help="Prompt tokens in a batch, padding included.")] = 8192,
    device: Device = None,
    dtype: Dtype = None,
    skip_long: SkipLong = False,
    as_json: Json = False,
) -> None:
    """Fit a calibrator on a task's validation questions; eval, ask and threshold then use it without being asked.

    A model that is no run is written to --out as one. Killed and started again it goes on where it was.
    """
    check_path(run_or_model)
    questions = load(task, "validation", data_root=data_root, limit=limit)
    check_device(device)
    from vmoer.evaluation.calibrators import calibrate as fit
    from vmoer.evaluation.calibrators import target_of
    from vmoer.models import open_model
    from vmoer.saved import calibrator

    quiet()
    folder = target_of(run_or_model, out)
    how: dict[str, Any] = {"averaging": averaging, "passes": passes, "kind": method, "batch_tokens": batch_tokens}
    with locked(folder):
        if manifest.complete(folder):
            calibrator.renew(folder)
        opened = open_model(run_or_model, device=device, dtype=dtype)
        if skip_long:
            questions = fitting(opened, questions)
        with progress() as show:
            found = fit(run_or_model, opened, questions, folder=folder, progress=show, **how)
    if as_json:
        said = {"calibrator": found.stored.file, "before": found.before, "after": found.after}
        print(json.dumps(said | {"difference": found.difference}, indent=2))
    else:
        _show(found, folder)


def _show(found: Calibrated, folder: Path) -> None:
    from vmoer.saved.calibrator import NAME

    file = found.stored.file
    rows = [(kind, "too few questions" if v is None else f"{v:.4f}") for kind, v in file["cross_validated_nll"].items()]
    table(f"{file['method']} on {file['task']}: cross-validated NLL of each calibrator", ("calibrator", "NLL"), rows)
    scores = {"NLL": "nll", "Brier": "brier", "debiased ECE": "debiased_ece"}
    cells = []
    for name, score in scores.items():
        change = found.difference.get(score)
        cells.append((name, *map(_interval, (found.before[score], found.after[score], change))))
    title = f"Before and after, {file['questions']} validation questions, each by a map fitted without it"
    table(title, ("score", "before", "after", "change"), cells)
    numbers = ", ".join(f"{name} {value:.3g}" for name, value in file["parameters"].items() if isinstance(value, float))
    print(f"{folder / NAME}: {file['kind']}{f' ({numbers})' if numbers else ''}")


def _interval(numbers: Any) -> str:
    return "" if numbers is None else f"{numbers[0]:.4f} [{numbers[1]:.4f}, {numbers[2]:.4f}]"
