"""`vmoer train MODEL --task T --method M --out RUN`: stage 1 and stage 2."""

from __future__ import annotations

import json
import shlex
import sys
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vmoer.commands._shared import (
    Bars,
    DataRoot,
    Device,
    Dtype,
    Json,
    Recompute,
    SkipLong,
    check_device,
    progress,
    quiet,
    table,
)
from vmoer.files import locked
from vmoer.routers import method as method_named
from vmoer.routers import methods
from vmoer.saved.fetch import check_path
from vmoer.tasks import check_name
from vmoer.training.plan import held_out_share
from vmoer.training.presets import preset_named

if TYPE_CHECKING:
    from vmoer.training import presets
    from vmoer.training.run import Workers

Method = Annotated[str, typer.Option(help=" or ".join(", ".join(methods()).rsplit(", ", 1)) + ".")]
Layers = Annotated[str | None, typer.Option(help="all, susceptible:10, first:4, middle:4, last:4, or 0,3,5.")]
Preset = Annotated[
    str, typer.Option(help="default, permuted, permuted-both; paper: its protocol; printed, printed-best and others.")
]
Beta = Annotated[float | None, typer.Option(help="Weight of the KL, in place of the preset's.")]
Objective = Annotated[str, typer.Option(help="elbo, or predictive: log of the passes' mean likelihood.")]
Stage2Data = Annotated[
    str | None, typer.Option(help="train, held-out:0.2, split:NAME; permuted: stage 1's, their options in new orders.")
]
Stage1Orders = Annotated[bool | None, typer.Option(help="Options of stage 1's questions in new orders every epoch.")]
NoisyStage1 = Annotated[bool, typer.Option("--noisy-stage1", help="The router's noise in stage 1 already.")]
Patience = Annotated[int | None, typer.Option(help="Epochs of stage 2 without a better state until it stops.")]
Keep = Annotated[str | None, typer.Option(help="Of stage 2: best, trained (not epoch 0), or last.")]
MicroBatch = Annotated[int | None, typer.Option(help="Questions a pass; the rest is accumulated.")]
SkipNonfinite = Annotated[bool, typer.Option("--skip-nonfinite", help="Pass over such steps and count them.")]
SystemPrompt = Annotated[str | None, typer.Option(help="In place of our own; whatever opens the run asks with it too.")]


def train(
    model: Annotated[str, typer.Argument(help="A hub id, a local folder, or demo.")],
    task: Annotated[str, typer.Option(help="A built-in task, or the path of a JSONL file.")],
    out: Annotated[Path, typer.Option(help="The run folder.")],
    method: Method = "vglr-fc",
    layers: Layers = None,
    preset: Preset = "default",
    beta: Beta = None,
    objective: Objective = "elbo",
    passes: Annotated[int, typer.Option(help="Passes of the predictive objective.")] = 4,
    stage2_data: Stage2Data = None,
    stage1_orders: Stage1Orders = None,
    noisy_stage1: NoisyStage1 = False,
    search: Annotated[bool, typer.Option("--search", help="Choose beta on validation.")] = False,
    from_map: Annotated[Path | None, typer.Option(help="Take stage 1 from this run.")] = None,
    rank: Annotated[int, typer.Option(help="Rank of the LoRA adapter of stage 1.")] = 16,
    stage1_epochs: int = 3,
    stage1_lr: float = 1e-4,
    stage2_epochs: int | None = None,
    stage2_lr: float | None = None,
    patience: Patience = None,
    keep: Keep = None,
    batch_size: Annotated[int, typer.Option(help="Questions a step, over all processes.")] = 16,
    micro_batch: MicroBatch = None,
    recompute: Recompute = False,
    skip_nonfinite: SkipNonfinite = False,
    system_prompt: SystemPrompt = None,
    seed: int = 0,
    data_root: DataRoot = None,
    limit: Annotated[int | None, typer.Option(help="At most this many training questions.")] = None,
    skip_long: SkipLong = False,
    device: Device = None,
    dtype: Dtype = None,
    as_json: Json = False,
) -> None:
    """Stage 1 (LoRA MAP) and stage 2 (variational routers); killed and started again it goes on where it was."""
    chosen = preset_named(preset)
    method_named(method)
    check_name(task)
    check_path(model)
    check_device(device)
    held_out_share(stage2_data or "train")
    from vmoer.training.run import Data, Plan, Running, Stages, Workers
    from vmoer.training.run import train as run_train

    quiet()
    workers = Workers.launched(device)
    shape: dict[str, Any] = {"batch_size": batch_size, "micro_batch": micro_batch}
    second: dict[str, Any] = {"epochs": stage2_epochs, "lr": stage2_lr, "keep": keep, "patience": patience}
    how: dict[str, Any] = {"rank": rank, "objective": objective, "passes": passes, "noisy_stage1": noisy_stage1}
    stages = Stages(
        stage1=Plan(epochs=stage1_epochs, lr=stage1_lr, **shape),
        stage2=replace(chosen.stage2, **shape, **{k: v for k, v in second.items() if v is not None}),
        search=search,
        from_map=from_map,
        **how,
    )
    asked: dict[str, Any] = {"limit": limit, "stage1_orders": stage1_orders, "stage2": stage2_data}
    data = Data(root=data_root, **asked, system_prompt=system_prompt, skip_long=skip_long)
    layers = _layers(layers, chosen, model, workers)
    config = method if beta is None else chosen.config(method, beta=beta)
    with locked(out) if workers.main else nullcontext(), progress() as show:
        steps: dict[str, Any] = {"recompute": recompute, "skip_nonfinite": skip_nonfinite, "progress": show}
        running = Running(workers=workers, tensorboard=True, told=partial(_tell, show), **steps)
        how = {"layers": layers, "seed": seed, "dtype": dtype, "running": running}
        found = run_train(model, task, config, out=out, preset=chosen, stages=stages, data=data, **how)
    if workers.main:
        _end(found, out, task, as_json, {"--data-root": data_root, "--device": device, "--dtype": dtype})


def _layers(asked: str | None, chosen: presets.Preset, model: str, workers: Workers) -> str:
    """The layers that are asked for, or else the preset's, with a note where these are fewer than it says."""
    if asked is not None:
        return asked
    from vmoer.training.layers import preset_layers

    layers, note = preset_layers(chosen, model)
    if note and workers.main:
        print(f"note: {note}", file=sys.stderr)
    return layers


def _end(found: dict[str, Any], out: Path, task: str, as_json: bool, given: dict[str, Any]) -> None:
    """What came of it, and the command that asks the test questions."""
    if as_json:
        print(json.dumps(found, indent=2))
        return
    _before_and_after(found)
    words = ["vmoer", "eval", str(out), "--task", task, "--out", str(out / "eval")]
    words += [word for name, value in given.items() if value is not None for word in (name, str(value))]
    print(f"{out}; did it help on test questions?\n{shlex.join(words)}")


def _tell(show: Bars, stage: str, row: dict[str, Any]) -> None:
    """The loss beside the bar, and a line for each validation."""
    if "validation_nll" not in row:
        return show.name(stage, f"{stage}, loss {row['loss']:.3f}")
    what = "before" if row["epoch"] == 0 else f"epoch {row['epoch']}"
    first = "validation NLL" if row["train_nll"] is None else f"training NLL {row['train_nll']:.3f}, validation"
    best = ", best" if row["best"] and row["epoch"] else ""
    numbers = f"{first} {row['validation_nll']:.3f}, accuracy {row['validation_accuracy']:.3f}"
    return show.say(f"{stage}, {what}: {numbers}{best}")


def _before_and_after(found: dict[str, Any]) -> None:
    """What each stage did to the validation questions, by which its epoch was chosen."""
    rows = []
    for number in (1, 2):
        part = found[f"stage{number}"]
        scored = {row["epoch"]: row for row in part.get("history") or []}
        if not scored:
            continue
        whole = found["stage2"]["map_state"] == "map" if number == 1 else methods()[found["method"]]().snapshots
        kept = max(scored) if whole else part["best_epoch"]
        what = "the model" if number == 1 else found["method"]
        rows += [(f"stage {number}, {what} before", 0, *_scores(scored[0]))]
        rows += [(f"stage {number}, {what} after", kept, *_scores(scored[kept]))]
    if rows:
        table(f"{found['method']} on {found['task']}: validation", ("", "epoch", "NLL", "accuracy"), rows)


def _scores(row: dict[str, Any]) -> tuple[str, str]:
    return f"{row['validation_nll']:.3f}", f"{row['validation_accuracy']:.3f}"
