"""The state of an unfinished stage, in one safetensors file that appears whole or not at all.

Tensors: what is trained, AdamW's moments, the best state so far, and a method's own buffers. The counters and the
settings are JSON in the file's header, and so is a checksum of all of it. One file and one rename: after kill -9 there is the
old state or the new one.
"""

import hashlib
import json
import warnings
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save as to_bytes
from torch import Tensor, nn

from vmoer.errors import InputError
from vmoer.files import read_regular, write_bytes
from vmoer.live.attach import routers_of
from vmoer.training.workers import Workers, assign, whole

LIMIT = 2**40
"""Bytes of the largest state that is read."""


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
        state = json.dumps(counters)
        write_bytes(path, to_bytes(tensors, metadata={"state": state, "sha256": _digest(state, tensors)}))


def _digest(state: str, tensors: dict[str, Tensor]) -> str:
    found = hashlib.sha256(state.encode())
    for name, value in sorted(tensors.items()):
        found.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
        found.update(value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def _read(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]] | None:
    """Counters and tensors; None where the file is damaged, which is said: the stage then starts again."""
    try:
        tensors = load_tensors(data := read_regular(path, LIMIT))
        header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])["__metadata__"]
        if header["sha256"] != _digest(header["state"], tensors):
            raise InputError("its checksum is not that of its content")
        return json.loads(header["state"]), tensors
    except (SafetensorError, InputError, KeyError, ValueError, TypeError, RuntimeError, RecursionError) as error:
        reason = " ".join(str(error).split())
        warnings.warn(f"{path} is damaged ({reason}): the stage starts again", stacklevel=2)
        return None


def load(
    path: Path, model: nn.Module, trainable: dict[str, nn.Parameter], optimizer: torch.optim.Optimizer
) -> tuple[dict[str, Any], dict[str, Tensor]] | None:
    """Put a saved state back; returns its counters and the best state, or None where there is no file, or a damaged one."""
    if not path.exists() or (read := _read(path)) is None:
        return None
    counters, tensors = read
    ours = {f"param/{name}": tuple(p.shape) for name, p in trainable.items()}
    if {name: tuple(value.shape) for name, value in tensors.items() if name.startswith("param/")} != ours:
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


def sweep(run: Path) -> None:
    """Remove the states of a run's stages once it is whole: a process may have been killed after it had written the last file."""
    for path in (*run.glob("stage[12].safetensors"), *run.glob("search/*/stage2.safetensors")):
        path.unlink(missing_ok=True)
