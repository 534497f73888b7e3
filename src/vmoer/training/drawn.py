"""Runs whose adapter was drawn in stage 1: what is kept of them beside the plain adapter, and how they are opened to answer.

    RUN/map/adapter_noise.safetensors    what was trained beside A (BLoB's G); its checksum stands in run.json

A run is opened with its adapter drawn once a pass, so that `averaging="full"` averages answers over M samples of it.
"""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save as to_bytes
from torch import nn

from vmoer.errors import InputError
from vmoer.files import read_regular, write_bytes
from vmoer.live import adapters
from vmoer.live.adapters import AdapterNoise
from vmoer.models import Opened, open_model
from vmoer.saved.adapter import tensors_of
from vmoer.saved.manifest import LIMIT
from vmoer.saved.store import read_run
from vmoer.training.blob import BLoB
from vmoer.training.lora import fold_quickly
from vmoer.training.lora_dropout import LoRADropout
from vmoer.training.workers import Workers

FILE = "adapter_noise.safetensors"
KINDS: dict[str, type[AdapterNoise]] = {LoRADropout.key: LoRADropout, BLoB.key: BLoB}


@contextmanager
def kept_apart(model: nn.Module, folder: Path, workers: Workers) -> Iterator[dict[str, Any]]:
    """Write what was trained beside A, where there is any. Inside the block the adapter is the plain one, which can be saved.

    Gives what `run.json` says of stage 1 besides.
    """
    said = {}
    if found := adapters.own_tensors(model):
        data = to_bytes(found)
        said["adapter_noise"] = hashlib.sha256(data).hexdigest()
        if workers.main:
            write_bytes(folder / FILE, data)
    with adapters.taken_off(model):
        yield said


def open_drawn(
    run: Path, *, seed: int = 0, device: str | torch.device | None = None, dtype: torch.dtype | str | None = None
) -> Opened:
    """A run whose stage 1 had a drawn adapter, its adapter drawn in every pass that asks for a sample."""
    opened = open_model(run, device=device, dtype=dtype)
    state = run / "map"
    stage1 = read_run(state)["stage1"]
    said = dict(stage1.get("adapter") or {})
    kind = KINDS.get(str(said.pop("kind", None)))
    if kind is None:
        raise InputError(f"{run} has a plain adapter: train it with Stages(adapter=...), such as BLoB()")
    fold_quickly(opened.model)
    adapters.draw(opened.model, kind(**said), seed=seed)
    if (wanted := stage1.get("adapter_noise")) is not None:
        data = read_regular(state / FILE, LIMIT, state)
        if hashlib.sha256(data).hexdigest() != wanted:
            raise InputError(f"{state / FILE} was changed: its checksum is not the one in run.json")
        adapters.fill(opened.model, tensors_of(data, state / FILE), state / FILE)
    return opened
