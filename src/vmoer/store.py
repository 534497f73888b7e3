"""save and load: the only place that touches router files.

A run folder holds `router.safetensors` and `router.json`, beside the LoRA adapter where the model has one. The JSON carries the
method's configuration, the file format's version, a checksum of the tensors and fingerprints of what the routers were trained
on: the base model's router weights, rounded to bfloat16, and the adapter. Only safetensors and JSON are ever read.
"""

import hashlib
import json
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor, nn

import vmoer
from vmoer import gates
from vmoer.attach import attach, attached, attachment_of, detach, routers_of
from vmoer.errors import InputError
from vmoer.files import write_bytes
from vmoer.routers import Config, method

FORMAT = 1
_PICKLES = (".bin", ".pt", ".pth", ".pkl", ".ckpt")


def save(model: nn.Module, folder: str | Path) -> Path:
    """Write the attached routers, and the adapter where there is one. Files appear whole or not at all."""
    attachment = attached(model)
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    if _adapter(model):
        if not hasattr(model, "peft_config"):
            raise InputError("save needs the PEFT model itself, not the model inside it, to store the adapter too")
        cast(Any, model).save_pretrained(str(folder))
    data = save_tensors(router_tensors(model))
    description = {
        "format": FORMAT,
        "vmoer": vmoer.__version__,
        "config": attachment.config.to_dict() | {"layers": attachment.layers},
        "sha256": hashlib.sha256(data).hexdigest(),
        "base": fingerprint(model),
        "adapter": adapter_fingerprint(model),
    }
    write_bytes(folder / "router.safetensors", data)
    write_bytes(folder / "router.json", (json.dumps(description, indent=2) + "\n").encode())
    return folder


def load(model: nn.Module, folder: str | Path) -> nn.Module:
    """Attach saved routers to a base model, its adapter first where the run has one. On any error the model is unchanged."""
    folder = Path(folder)
    description, tensors = _read(folder)
    config = _config(description, folder)
    if attachment_of(model) is not None:
        raise InputError("a method is attached already: call vmoer.detach(model) first")
    if fingerprint(model, config.layers) != description["base"]:
        raise InputError(f"{folder} was trained on another base model: its router weights differ from this one's")
    loaded = model
    wrapped = description["adapter"] is not None and not _adapter(model) and (folder / "adapter_config.json").exists()
    if wrapped:
        from peft import PeftModel

        loaded = PeftModel.from_pretrained(model, str(folder))
    try:
        if adapter_fingerprint(loaded) != description["adapter"]:
            trained = "over a LoRA adapter" if description["adapter"] else "without an adapter"
            has = "another adapter" if _adapter(loaded) else "no adapter"
            raise InputError(f"{folder} holds routers trained {trained}, and this model has {has}")
        attach(loaded, config)
        try:
            _fill(loaded, tensors, folder)
        except BaseException:
            detach(loaded)
            raise
    except BaseException:
        if wrapped:
            cast(Any, loaded).unload()
        raise
    return loaded


def router_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Every attached router's parameters and buffers, named `layer.name`."""
    out = {}
    for layer, router in routers_of(model).items():
        for name, value in router.state_dict().items():
            value = value.full_tensor() if hasattr(value, "full_tensor") else value
            out[f"{layer}.{name}"] = value.detach().cpu().contiguous()
    return out


def fingerprint(model: nn.Module, layers: Any = "all") -> str:
    """Of the base model's router weights in bfloat16 at the attached layers, so that a cast or a device does not matter."""
    attachment = attachment_of(model)
    wanted = attachment.layers if attachment else layers
    digest = hashlib.sha256()
    for found in gates.find(model):
        if wanted != "all" and found.layer not in wanted:
            continue
        for name, value in sorted(found.router.state_dict().items()):
            if not name.startswith("vmoer."):
                _absorb(digest, f"{found.kind}.{found.layer}.{name}", value)
    return digest.hexdigest()


def adapter_fingerprint(model: nn.Module) -> str | None:
    adapter = _adapter(model)
    if not adapter:
        return None
    digest = hashlib.sha256()
    for name, value in sorted(adapter.items()):
        _absorb(digest, name, value)
    return digest.hexdigest()


def _adapter(model: nn.Module) -> dict[str, Tensor]:
    return {name: p for name, p in model.named_parameters() if ".lora_" in name or ".modules_to_save." in name}


def _absorb(digest: Any, name: str, value: Tensor) -> None:
    value = value.full_tensor() if hasattr(value, "full_tensor") else value
    rounded = value.detach().to("cpu", torch.bfloat16).contiguous()
    digest.update(name.encode())
    digest.update(rounded.view(torch.uint8).numpy().tobytes())


def _read(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    if not folder.is_dir():
        raise InputError(f"{folder} is not a folder with a saved router")
    path = folder / "router.json"
    if not path.exists():
        pickles = [p.name for p in folder.iterdir() if p.suffix in _PICKLES]
        hint = f"; {pickles[0]} is a pickle, and only safetensors are read" if pickles else ""
        raise InputError(f"{folder} has no router.json{hint}")
    try:
        description = json.loads(path.read_text())
        missing = {"format", "config", "sha256", "base", "adapter"} - set(description)
    except (ValueError, TypeError) as error:
        raise InputError(f"{path} is not valid: {error}") from None
    if missing:
        raise InputError(f"{path} lacks {', '.join(sorted(missing))}")
    if description["format"] != FORMAT:
        raise InputError(f"{path} has format {description['format']}, and this version of vmoer reads format {FORMAT}")
    tensors = folder / "router.safetensors"
    if not tensors.exists():
        raise InputError(f"{folder} has no router.safetensors")
    data = tensors.read_bytes()
    if hashlib.sha256(data).hexdigest() != description["sha256"]:
        raise InputError(f"{tensors} is truncated or was changed: its checksum is not the one in router.json")
    try:
        return description, load_tensors(data)
    except SafetensorError as error:
        raise InputError(f"{tensors} is not a safetensors file: {error}") from None


def _config(description: dict[str, Any], folder: Path) -> Config:
    fields = dict(description["config"])
    try:
        return method(fields.pop("method"))(**fields)
    except (TypeError, KeyError) as error:
        raise InputError(f"{folder / 'router.json'} has a configuration this version does not know: {error}") from None


def _fill(model: nn.Module, tensors: dict[str, Tensor], folder: Path) -> None:
    routers = routers_of(model)
    expected = {f"{layer}.{name}" for layer, router in routers.items() for name in router.state_dict()}
    if expected != set(tensors):
        odd = sorted(expected ^ set(tensors))[0]
        raise InputError(f"{folder / 'router.safetensors'} does not fit its configuration: {odd} is missing or unknown")
    for layer, router in routers.items():
        state = router.state_dict(keep_vars=True)
        for name, ours in state.items():
            theirs = tensors[f"{layer}.{name}"].to(device=ours.device, dtype=ours.dtype)
            if name.startswith("novelty_"):  # sized by the data they were fitted on
                setattr(router, name, theirs)
            elif ours.shape != theirs.shape:
                raise InputError(f"{folder / 'router.safetensors'}: {layer}.{name} has shape {tuple(theirs.shape)}")
            else:
                with torch.no_grad():
                    ours.copy_(theirs)
