"""The state of an unfinished stage, in one safetensors file that appears whole or not at all.

Tensors: what is trained, AdamW's moments, the best state so far, and a method's own buffers (SWAG). The counters and the
settings are JSON in the file's header. One file and one rename: after kill -9 there is the old state or the new one.
"""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as to_bytes
from torch import Tensor, nn

from vmoer.attach import routers_of
from vmoer.errors import InputError
from vmoer.files import write_bytes
from vmoer.training.workers import Workers, assign, whole


def state_of(trainable: dict[str, nn.Parameter], model: nn.Module) -> dict[str, Tensor]:
    """Copies on the CPU of what is trained and of the routers' filled buffers."""
    out = {f"param/{name}": whole(p) for name, p in trainable.items()}
    for layer, router in routers_of(model).items():
        kept = router.state_dict()  # without what is made anew: points, constants
        for name, buffer in router.named_buffers():
            if buffer.numel() and name in kept and "novelty" not in name:
                out[f"buffer/{layer}.{name}"] = whole(buffer)
    return out


def restore(state: dict[str, Tensor], trainable: dict[str, nn.Parameter], model: nn.Module) -> None:
    for name, p in trainable.items():
        assign(p, state[f"param/{name}"])
    for layer, router in routers_of(model).items():
        for name, buffer in router.named_buffers():
            if f"buffer/{layer}.{name}" in state:
                assign(buffer, state[f"buffer/{layer}.{name}"])


def save(
    path: Path,
    model: nn.Module,
    trainable: dict[str, nn.Parameter],
    optimizer: torch.optim.Optimizer,
    best: dict[str, Tensor],
    counters: dict[str, Any],
    workers: Workers,
) -> None:
    tensors = state_of(trainable, model)
    for name, p in trainable.items():
        for moment, value in optimizer.state.get(p, {}).items():
            tensors[f"adam/{moment}/{name}"] = whole(value)
    tensors |= {f"best/{name}": value for name, value in best.items()}
    if workers.main:
        write_bytes(path, to_bytes(tensors, metadata={"state": json.dumps(counters)}))


def load(
    path: Path, model: nn.Module, trainable: dict[str, nn.Parameter], optimizer: torch.optim.Optimizer
) -> tuple[dict[str, Any], dict[str, Tensor]] | None:
    """Put a saved state back; returns its counters and the best state, or None where there is no file."""
    if not path.exists():
        return None
    try:
        with safe_open(str(path), "pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            counters = json.loads((file.metadata() or {})["state"])
    except (SafetensorError, KeyError, ValueError) as error:
        raise InputError(f"{path} is not a training state of vmoer ({error}): remove it to start again") from None
    if {name for name in tensors if name.startswith("param/")} != {f"param/{name}" for name in trainable}:
        raise InputError(f"{path} holds the state of another method or model: remove it or choose another folder")
    restore(tensors, trainable, model)
    for name, p in trainable.items():
        moments = {key.split("/")[1]: key for key in tensors if key.startswith("adam/") and key.endswith(f"/{name}")}
        for moment, key in moments.items():
            value = torch.zeros_like(p) if tensors[key].dim() else tensors[key].clone()
            if value.dim():
                assign(value, tensors[key])
            optimizer.state[p][moment] = value.to(p.device) if moment == "step" and _fused(optimizer) else value
    best = {name.removeprefix("best/"): value for name, value in tensors.items() if name.startswith("best/")}
    return counters, best


def _fused(optimizer: torch.optim.Optimizer) -> bool:
    return bool(optimizer.defaults.get("fused"))
