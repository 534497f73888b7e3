"""`vmoer eval RUN_OR_MODEL --task T`: predictions, then metrics from the predictions alone."""

from __future__ import annotations

import json
import re
import shlex
import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from vmoer.commands._shared import (
    DataRoot,
    Device,
    Dtype,
    Json,
    NoCalibrator,
    PaperSplits,
    Replace,
    SkipLong,
    check_device,
    fitting,
    print_tables,
    progress,
    quiet,
    sentence,
)
from vmoer.errors import InputError
from vmoer.files import locked, read_json
from vmoer.saved.fetch import check_path
from vmoer.tasks import Question, is_file, load, shift

if TYPE_CHECKING:
    from vmoer.models import Opened
    from vmoer.saved.calibrator import Stored


def eval_(
    run_or_model: Annotated[str, typer.Argument(help="A run folder of `vmoer train`, a hub id, a folder, or demo.")],
    task: Annotated[str, typer.Option(help="A built-in task, or the path of a JSONL file.")],
    out: Annotated[Path, typer.Option(help="Where predictions.parquet, meta.json and metrics.json go.")],
    ood: Annotated[str, typer.Option(help="Out-of-distribution tasks, separated by commas.")] = "",
    split: Annotated[str, typer.Option(help="Which split of the task; validation is answered too.")] = "test",
    averaging: Annotated[
        str | None,
        typer.Option(
            help="router, answer, full, orders or orders+routing; by default what the run's calibrator is for, or router."
        ),
    ] = None,
    passes: Annotated[int | None, typer.Option(help="Passes that are averaged; 8 by default.")] = None,
    seed: Annotated[int | None, typer.Option(help="By default that of the run, or 0.")] = None,
    data_root: DataRoot = None,
    paper_splits: PaperSplits = False,
    limit: Annotated[int | None, typer.Option(help="At most this many questions of each split.")] = None,
    batch_tokens: Annotated[int, typer.Option(help="Prompt tokens in a batch, padding included.")] = 8192,
    device: Device = None,
    dtype: Dtype = None,
    routing: Annotated[bool, typer.Option("--routing", help="Write routing.parquet: the experts selected.")] = False,
    system_prompt: Annotated[
        str | None, typer.Option(help="In place of our own; a run has the one that it was trained with.")
    ] = None,
    no_calibrator: NoCalibrator = False,
    no_base: Annotated[bool, typer.Option("--no-base", help="Leave out the same model without its routers.")] = False,
    skip_long: SkipLong = False,
    replace: Replace = False,
    as_json: Json = False,
) -> None:
    """Answer a task's questions, and those of out-of-distribution tasks; write predictions, then metrics from them.

    A run's questions are answered a second time without its routers: what it is held against. Killed and started again it goes
    on where it was.
    """
    check_path(run_or_model)
    asked = {"data_root": data_root, "paper_splits": paper_splits, "limit": limit}
    questions = _questions(task, split, [name for name in ood.split(",") if name], asked)
    check_device(device)
    from vmoer.evaluation.calibrators import settings
    from vmoer.models import open_model
    from vmoer.tasks.prompt import ask_with

    quiet()
    opened = open_model(run_or_model, device=device, dtype=dtype)
    if system_prompt is not None:
        ask_with(opened.tokenizer, system_prompt)
    if skip_long:
        questions = fitting(opened, questions)
    run = opened.run or {}
    said: dict[str, Any] = {"name": opened.name, "method": run.get("method")}
    said |= {"seed": run.get("seed", 0) if seed is None else seed}
    calibrator = None if no_calibrator else opened.calibrator
    averaging, passes = settings(calibrator, averaging, passes)
    said |= {"averaging": averaging, "passes": passes, "batch_tokens": batch_tokens, "routing": routing}
    said |= {"replace": replace}
    said |= {"calibrator": _fitting(calibrator, questions, averaging, passes)}
    said |= {"run": opened.run}
    rows = _answered(opened, questions, out, said, base=not no_base)
    if is_file(task) and split != "all":
        print(f"note: {split} is a part of {task}, by a fixed cut; --split all takes all of it", file=sys.stderr)
    if as_json:
        print(json.dumps(rows, indent=2))
    else:
        _show(rows, out, run)


def _answered(
    opened: Opened, questions: list[Question], out: Path, said: dict[str, Any], *, base: bool
) -> list[dict[str, Any]]:
    """The metrics of the answers, which are given with the routers and, as the `base`, without."""
    from vmoer.evaluation import scores
    from vmoer.evaluation.answers import predict_task
    from vmoer.evaluation.predictions import BASE
    from vmoer.live.attach import attached, attachment_of, detach

    with locked(out):
        with progress() as show:
            predict_task(opened.model, opened.tokenizer, questions, folder=out, progress=show, **said)
            if base and attachment_of(opened.model) and attached(opened.model).config.key != "map":
                same = "orders" if said["averaging"].startswith("orders") else "router"  # orders help any model
                plain = {"method": "map", "averaging": same, "calibrator": None, "routing": False, "run": None}
                model = detach(opened.model)
                predict_task(model, opened.tokenizer, questions, folder=out / BASE, progress=show, **said | plain)
        return cast(list[dict[str, Any]], read_json(scores.write(out)))


def _show(rows: list[dict[str, Any]], out: Path, run: dict[str, Any]) -> None:
    """Tables, then the sentence that says whether it helped."""
    from vmoer.report import summaries
    from vmoer.report.verdict import verdict

    found = summaries.settings(rows)
    print_tables([summaries.calibration_table(scored) for scored in found])
    print_tables([summaries.detection_table(scored) for scored in found if scored.setting.shifted])
    print(f"{out / 'predictions.parquet'}, {out / 'metrics.json'}; all tables and figures?")
    print(shlex.join(["vmoer", "report", str(out)]))
    if _unequal(run):
        sentence("The routers were trained on questions that the plain model never saw: no comparison at equal data.")
    if said := verdict(rows):
        sentence(said)


def _unequal(run: dict[str, Any]) -> bool:
    """Whether stage 2 of a run had questions of its own."""
    stage2 = run.get("stage2")
    return isinstance(stage2, dict) and stage2.get("data", "train") not in ("train", "permuted")


def _fitting(stored: Stored | None, questions: list[Question], averaging: str, passes: int) -> Stored | None:
    """The run's calibrator where it is for such answers; else, and for tasks that it does not fit, a note."""
    if stored is None or stored.kind == "none":
        return None
    try:
        stored.check_averaging(averaging, passes)
    except InputError as error:
        warnings.warn(f"without the run's calibrator: {error} (vmoer calibrate fits one for it)", stacklevel=1)
        return None
    for task in dict.fromkeys(question.task for question in questions):
        try:
            stored.check_options([len(question.choices) for question in questions if question.task == task])
        except InputError as error:
            warnings.warn(f"{task} without the run's calibrator: {error}", stacklevel=1)
    return stored


def _questions(task: str, split: str, ood: list[str], asked: dict[str, Any]) -> list[Question]:
    """Questions of the task's split, of its validation split (the output temperature is fitted there), and of each OoD task."""
    sets = [load(task, split, **asked)]
    if split not in ("validation", "all"):
        try:
            sets.append(load(task, "validation", **asked))
        except InputError as error:
            if not re.search(r"\b(no|for) split 'validation'", str(error)):
                raise
            warnings.warn(f"without temperature scaling of the output: {error}", stacklevel=1)
    sources = [sets[0][0].task]
    for name in ood:
        sets.append(shift(name, **asked))
        if sets[-1][0].task in sources:
            raise InputError(f"the task {sets[-1][0].task} is named twice")
        sources.append(sets[-1][0].task)
    return [question for questions in sets for question in questions]
