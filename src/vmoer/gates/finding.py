"""Finding the MoE routers of a model, and saying why one cannot be attached."""

import re
from dataclasses import dataclass

import torch
from torch import nn

from vmoer.gates.rules import Rule
from vmoer.gates.table import REFUSED, RULES

_LOOKS_LIKE_A_ROUTER = re.compile(r"(Router|Gating|Gate)$")


@dataclass(frozen=True)
class FoundRouter:
    """A router in a model: where it is and whether it can be attached."""

    path: str
    layer: int
    router: nn.Module
    block: nn.Module
    """The module around the router, which also holds the experts."""
    decoder: nn.Module
    """The module whose list of layers the router is in."""
    rule: Rule | None
    reason: str
    """Why it cannot be attached; empty where it can."""

    @property
    def kind(self) -> str:
        return type(self.router).__name__


def find(model: nn.Module) -> list[FoundRouter]:
    """Every MoE router of the model, in order. A router that cannot be attached is listed with the reason."""
    modules = dict(model.named_modules())
    found = []
    for path, module in modules.items():
        kind = type(module).__name__
        block = modules.get(path.rpartition(".")[0])
        known = kind in RULES or kind in REFUSED
        beside_experts = block is not None and hasattr(block, "experts")
        plain = isinstance(module, nn.Linear) and path.rpartition(".")[2] in ("router", "gate")
        if block is None or not (known or (beside_experts and (plain or _LOOKS_LIKE_A_ROUTER.search(kind)))):
            continue
        index = re.search(r"^(.*?)\.?(\w+)\.(\d+)\.", path)
        if index is None:
            continue
        reason = _reason(kind, plain) or _quantised(module, block)
        decoder = modules[index.group(1)]
        found.append(FoundRouter(path, int(index.group(3)), module, block, decoder, RULES.get(kind), reason))
    return found


def _reason(kind: str, plain: bool) -> str:
    """Why a router of this class cannot be attached; empty where it can."""
    if kind in REFUSED or kind in RULES:
        return REFUSED.get(kind, "")
    if plain:
        return "it is a plain linear layer and the block around it chooses the experts; newer transformers may not"
    return "its class is unknown: add a row to vmoer/gates/table.py"


def _quantised(router: nn.Module, block: nn.Module) -> str:
    """Why quantisation forbids attaching; empty where the router itself is in full precision, as it mostly is."""
    if type(getattr(block, "experts", None)).__name__ == "Mxfp4GptOssExperts":
        return (
            "its MXFP4 block routes by a kernel of its own and never calls it: load with Mxfp4Config(dequantize=True)"
        )
    full = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
    kind = next((p.dtype for p in router.parameters() if p.dim() > 1 and p.dtype not in full), None)
    if kind is None:
        return ""
    return f"its weight is quantised ({str(kind).removeprefix('torch.')}): leave routers out (modules_to_not_convert)"
