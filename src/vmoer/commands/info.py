"""`vmoer info MODEL`: the MoE layers found, and what can be attached."""

import json
import re
from typing import Annotated, Any

import typer

from vmoer.commands._shared import Json, quiet, table
from vmoer.errors import InputError
from vmoer.saved.fetch import check_path


def info(
    model: Annotated[str, typer.Argument(help="A hub id, a local folder, a run folder, or demo.")],
    as_json: Json = False,
) -> None:
    """The MoE layers of a model: router class, scoring rule, experts, top-k, and whether each can be attached."""
    check_path(model)
    from vmoer.gates import find
    from vmoer.gates.describe import describe
    from vmoer.models import skeleton

    quiet()
    found = find(skeleton(model))
    if not found:
        raise InputError(f"{model} has no MoE router: it is a dense model, or its routers are unknown here")
    rows = [describe(one) for one in found]
    if as_json:
        print(json.dumps(rows, indent=2))
        return
    header = ("layers", "router", "class", "scoring", "experts", "top-k", "attach")
    table(f"{model}: {len(rows)} MoE layers", header, _grouped(rows))


def _grouped(rows: list[dict[str, Any]]) -> list[tuple[object, ...]]:
    """Layers that differ in nothing but their number share a line."""
    lines: dict[tuple[object, ...], list[int]] = {}
    for r in rows:
        path = re.sub(rf"\.{r['layer']}\.", ".N.", r["path"], count=1)
        key = (path, r["class"], _scoring(r), r["experts"], r["top_k"], r["reason"] or "yes")
        lines.setdefault(key, []).append(r["layer"])
    return [(_ranges(layers), *key) for key, layers in lines.items()]


def _ranges(numbers: list[int]) -> str:
    """0-3, 5, 7-9"""
    starts = [n for n in numbers if n - 1 not in numbers]
    ends = [n for n in numbers if n + 1 not in numbers]
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in zip(starts, ends, strict=True))


def _scoring(row: dict[str, Any]) -> str:
    if row["score"] is None:
        return ""
    groups = f"best {row['groups'][1]} of {row['groups'][0]} groups" if row["groups"] else ""
    scale = f"times {row['scale']:g}" if row["scale"] != 1 else ""
    said = (row["score"], "bias" if row["bias"] else "", groups, "normalised" if row["normalise"] else "", scale)
    return ", ".join(filter(None, said))
