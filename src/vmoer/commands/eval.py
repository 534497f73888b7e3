"""`vmoer eval RUN_OR_MODEL --task T`: predictions, then metrics from the predictions alone."""

import json
import re
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from vmoer.commands._shared import DataRoot, Device, Dtype, Json, PaperSplits, check_device, print_tables, quiet
from vmoer.errors import InputError

if TYPE_CHECKING:
    from vmoer.tasks import Question


def eval_(
    run_or_model: Annotated[str, typer.Argument(help="A run folder of `vmoer train`, a hub id, a folder, or demo.")],
    task: Annotated[str, typer.Option(help="A built-in task, or the path of a JSONL file.")],
    out: Annotated[Path, typer.Option(help="Where predictions.parquet, meta.json and metrics.json go.")],
    ood: Annotated[str, typer.Option(help="Out-of-distribution tasks, separated by commas.")] = "",
    split: Annotated[str, typer.Option(help="Which split of the task; validation is answered too.")] = "test",
    averaging: Annotated[str, typer.Option(help="What is averaged over routing: router, answer or full.")] = "router",
    passes: Annotated[int, typer.Option(help="Passes of answer and full averaging.")] = 8,
    seed: Annotated[int | None, typer.Option(help="By default that of the run, or 0.")] = None,
    data_root: DataRoot = None,
    paper_splits: PaperSplits = False,
    limit: Annotated[int | None, typer.Option(help="At most this many questions of each split.")] = None,
    batch_tokens: Annotated[int, typer.Option(help="Prompt tokens in a batch, padding included.")] = 8192,
    device: Device = None,
    dtype: Dtype = None,
    routing: Annotated[bool, typer.Option("--routing", help="Write routing.parquet: the experts selected.")] = False,
    as_json: Json = False,
) -> None:
    """Answer a task's questions, and those of out-of-distribution tasks; write predictions, then metrics from them.

    Killed and started again it goes on where it was.
    """
    from vmoer import scores
    from vmoer.models import open_model
    from vmoer.predict import predict_task
    from vmoer.report import summaries

    quiet()
    asked = {"data_root": data_root, "paper_splits": paper_splits, "limit": limit}
    questions = _questions(task, split, [name for name in ood.split(",") if name], asked)
    check_device(device, dtype)
    opened = open_model(run_or_model, device=device, dtype=dtype)
    run = opened.run or {}
    predict_task(
        opened.model,
        opened.tokenizer,
        questions,
        folder=out,
        name=opened.name,
        method=run.get("method"),
        seed=run.get("seed", 0) if seed is None else seed,
        averaging=cast(Any, averaging),
        passes=passes,
        batch_tokens=batch_tokens,
        routing=routing,
        progress=True,
    )
    rows = json.loads(scores.write(out).read_text())
    if as_json:
        print(json.dumps(rows, indent=2))
    else:
        found = summaries.settings(rows)
        print_tables([summaries.calibration_table(scored) for scored in found])
        print_tables([summaries.detection_table(scored) for scored in found if scored.setting.shifted])
        print(f"{out / 'predictions.parquet'}, {out / 'metrics.json'}; all tables and figures: vmoer report {out}")


def _questions(task: str, split: str, ood: list[str], asked: dict[str, Any]) -> "list[Question]":
    """The task's split, its validation split (for temperature scaling of the output), each OoD task's test split."""
    from vmoer.tasks import load

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
        sets.append(load(name, "test", **asked))
        if sets[-1][0].task in sources:
            raise InputError(f"the task {sets[-1][0].task} is named twice")
        sources.append(sets[-1][0].task)
    return [question for questions in sets for question in questions]
