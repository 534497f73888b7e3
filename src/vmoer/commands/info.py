"""`vmoer info MODEL`: the MoE layers found, and what can be attached."""

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vmoer.commands._shared import Json, quiet, table
from vmoer.errors import InputError

if TYPE_CHECKING:
    from vmoer.gates import Found


def info(
    model: Annotated[str, typer.Argument(help="A hub id, a local folder, a run folder, or demo.")],
    as_json: Json = False,
) -> None:
    """The MoE layers of a model: router class, scoring rule, experts, top-k, and whether each can be attached."""
    from vmoer import gates

    quiet()
    found = gates.find(_skeleton(model))
    if not found:
        raise InputError(f"{model} has no MoE router: it is a dense model, or its routers are unknown here")
    rows = [_describe(f) for f in found]
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


def _skeleton(name: str) -> Any:
    """The model without its weights, from its configuration alone."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from vmoer.models import embedded, read_run

    path = str(read_run(Path(name))["model"]) if (Path(name) / "run.json").exists() else name
    path = embedded(path) or path
    try:
        config = AutoConfig.from_pretrained(path)
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(config)
    except (OSError, ValueError, ImportError) as error:
        raise InputError(f"cannot load the model {name!r}: {str(error).strip().splitlines()[0]}") from None


def _describe(found: "Found") -> dict[str, Any]:
    from vmoer.errors import AttachError
    from vmoer.gates import Gate
    from vmoer.gates.rules import lookup

    row: dict[str, Any] = dict.fromkeys(("score", "normalise", "groups", "bias", "scale", "experts", "top_k"))
    row = {"layer": found.layer, "path": found.path, "class": found.kind, **row, "reason": found.reason or None}
    if found.reason or found.rule is None:
        return row
    try:
        gate = Gate.probe(found)
    except AttachError as error:
        return row | {"reason": str(error)}
    scoring, bias = gate.scoring, found.rule.bias
    return row | {
        "score": "sparsemixer" if found.rule.mixer else scoring.score,
        "normalise": scoring.normalise,
        "groups": scoring.groups,
        "bias": bias if bias and lookup(bias, found.router, found.block) is not None else None,
        "scale": scoring.scale,
        "experts": gate.num_experts,
        "top_k": scoring.k,
    }


def _scoring(row: dict[str, Any]) -> str:
    if row["score"] is None:
        return ""
    groups = f"best {row['groups'][1]} of {row['groups'][0]} groups" if row["groups"] else ""
    scale = f"times {row['scale']:g}" if row["scale"] != 1 else ""
    said = (row["score"], "bias" if row["bias"] else "", groups, "normalised" if row["normalise"] else "", scale)
    return ", ".join(filter(None, said))
