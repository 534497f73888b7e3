"""`vmoer sensitivity MODEL --task T`: how brittle each layer's routing is, and which layers to take."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vmoer import tasks
from vmoer.commands._shared import DataRoot, Device, Dtype, Json, check_device, quiet, table
from vmoer.files import locked, write_json, write_text
from vmoer.saved.fetch import check_path

if TYPE_CHECKING:
    from vmoer.live.brittleness import Brittleness


def sensitivity(
    model: Annotated[str, typer.Argument(help="A hub id, a local folder, a run folder, or demo.")],
    task: Annotated[str, typer.Option(help="A built-in task, or the path of a JSONL file.")],
    out: Annotated[Path | None, typer.Option(help="Where the rows, the ranking and two figures go.")] = None,
    questions: Annotated[int, typer.Option(help="How many test prompts to measure on.")] = 200,
    data_root: DataRoot = None,
    device: Device = None,
    dtype: Dtype = None,
    seed: int = 0,
    as_json: Json = False,
) -> None:
    """How brittle each layer's routing is under noise on its input, and the ranking that layer choice goes by."""
    check_path(model)
    asked = tasks.load(task, "test", data_root=data_root, limit=questions)
    check_device(device)
    quiet()
    where: dict[str, Any] = {"device": device, "dtype": dtype}
    result, rows = measure(model, asked, seed=seed, **where)
    if out is not None:
        with locked(out):
            write(out, result, rows)
    if as_json:
        print(json.dumps(rows, indent=2))
        return
    header = ("layer", *(f"{gamma:g}" for gamma in result.gammas))
    lines = [
        (layer, *(f"{value:.3f}" for value in means))
        for layer, means in zip(result.layers, result.mean_LG, strict=True)
    ]
    table(f"{model}: Jaccard of expert sets by noise level gamma", header, lines)
    print("most brittle first at gamma 0.01: " + ", ".join(str(int(layer)) for layer in result.ranking()))


def measure(
    model: str, asked: Sequence[tasks.Question], *, device: str | None, dtype: str | None, seed: int
) -> tuple[Brittleness, list[dict[str, Any]]]:
    """Brittleness on questions of one task, and its rows as in `metrics.json`."""
    from vmoer.evaluation.brittleness import mean_rows
    from vmoer.live.brittleness import brittleness
    from vmoer.models import open_model
    from vmoer.tasks.batches import padded
    from vmoer.tasks.prompt import encode

    opened = open_model(model, device=device, dtype=dtype)
    prompts = sorted(encode(opened.tokenizer, asked, 2**31), key=len)
    place = next(opened.model.parameters()).device
    batches = [padded(prompts[i : i + 16], place) for i in range(0, len(prompts), 16)]
    result = brittleness(opened.model, batches, seed=seed)
    return result, mean_rows(result, model=opened.name, task=asked[0].task, split="test", method="map")


def write(out: Path, result: Brittleness, rows: list[dict[str, Any]]) -> None:
    """Write the rows, the ranking, and the two figures of appendix B.1."""
    from vmoer.evaluation.brittleness import quantile_rows
    from vmoer.live.brittleness import DIAGNOSTIC
    from vmoer.report.robustness import brittleness_curve, brittleness_layers

    write_json(out / "brittleness.json", rows)
    write_json(out / "ranking.json", {"gamma": DIAGNOSTIC, "layers": [int(layer) for layer in result.ranking()]})
    quantiles = quantile_rows(result, rows[0])
    for figure in (brittleness_curve(rows), brittleness_layers([*rows, *quantiles])):
        write_text(out / f"{figure.name}.svg", figure.svg)
