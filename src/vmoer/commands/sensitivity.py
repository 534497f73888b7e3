"""`vmoer sensitivity MODEL --task T`: how brittle each layer's routing is, and which layers to take."""

from pathlib import Path
from typing import Any

from vmoer import tasks
from vmoer.files import write_json
from vmoer.layers import DIAGNOSTIC, Brittleness, brittleness
from vmoer.models import open_model
from vmoer.predict import collate
from vmoer.tasks.prompt import encode


def sensitivity(
    model: str, task: str, *, questions: int, data_root: Path | None, device: str | None, dtype: str | None, seed: int
) -> tuple[Brittleness, list[dict[str, Any]]]:
    """Brittleness on a task's test prompts, and the same as metrics rows."""
    opened = open_model(model, device=device, dtype=dtype)
    asked = tasks.load(task, "test", data_root=data_root, limit=questions)
    prompts = sorted(encode(opened.tokenizer, asked, 2**31), key=len)
    batches = [collate(prompts[i : i + 16], opened.model) for i in range(0, len(prompts), 16)]
    result = brittleness(opened.model, batches, seed=seed)
    return result, result.to_rows(model=opened.name, task=asked[0].task, split="test", method="map")


def write(out: Path, result: Brittleness, rows: list[dict[str, Any]]) -> None:
    """`brittleness.json`, the ranking, and the two figures of appendix B.1."""
    from vmoer.files import write_bytes
    from vmoer.report.studies import brittleness_curve, brittleness_layers

    write_json(out / "brittleness.json", rows)
    write_json(out / "ranking.json", {"gamma": DIAGNOSTIC, "layers": [int(layer) for layer in result.ranking()]})
    quantiles = result.quantile_rows(rows[0])
    for figure in (brittleness_curve(rows), brittleness_layers([*rows, *quantiles])):
        write_bytes(out / f"{figure.name}.svg", figure.svg.encode())
