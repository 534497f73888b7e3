"""What can be said of a router that was found: its class, its scoring rule, its sizes, and whether it can be attached."""

from typing import Any

from vmoer.errors import AttachError
from vmoer.gates import FoundRouter, Gate
from vmoer.gates.rules import lookup


def describe(found: FoundRouter) -> dict[str, Any]:
    """A row for one router; `reason` says why it cannot be attached, None where it can."""
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
