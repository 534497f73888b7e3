"""save and load: the only place that touches router files.

A run folder holds `router.safetensors` and `router.json`, a model card, and the LoRA adapter where the model has one. The JSON
carries the method's configuration, the file format's version, a checksum of the tensors and fingerprints of what the routers were
trained on: the base model's router weights, rounded to bfloat16, and the adapter. Only safetensors and JSON are ever read.
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor, nn

import vmoer
from vmoer import gates, hub
from vmoer.attach import attach, attached, attachment_of, detach, routers_of
from vmoer.errors import InputError
from vmoer.files import write_bytes, write_text
from vmoer.routers import Config, method

FORMAT = 1
_PICKLES = (".bin", ".pt", ".pth", ".pkl", ".ckpt")


def save(model: nn.Module, folder: str | Path, *, about: Mapping[str, Any] | None = None) -> Path:
    """Write the attached routers, a model card, and the adapter where there is one. Files appear whole or not at all.

    `about` is what the card should say beyond that: task, preset, metrics, as `run.json` of `vmoer train` has them.
    """
    attachment = attached(model)
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    if adapter := _adapter(model):
        if not hasattr(model, "peft_config"):
            raise InputError("save needs the PEFT model itself, not the model inside it, to store the adapter too")
        cast(Any, model).save_pretrained(str(folder), state_dict={name: _whole(p) for name, p in adapter.items()})
    data = save_tensors(router_tensors(model))
    description = {
        "format": FORMAT,
        "vmoer": vmoer.__version__,
        "base_model": (about or {}).get("model") or _name(model),
        "config": attachment.config.to_dict() | {"layers": attachment.layers},
        "sha256": hashlib.sha256(data).hexdigest(),
        "base": fingerprint(model),
        "adapter": adapter_fingerprint(model),
    }
    write_text(folder / "README.md", hub.card(description, about))  # in place of the adapter's own
    write_bytes(folder / "router.safetensors", data)
    write_text(folder / "router.json", json.dumps(description, indent=2) + "\n")
    return folder


def load(model: nn.Module, folder: str | Path, *, revision: str | None = None) -> nn.Module:
    """Attach saved routers to a base model, its adapter first where the run has one. On any error the model is unchanged.

    `folder` is a local one or, as a string, a repository on the hub: `user/repo`, at `revision` where given.
    """
    name, folder = folder, hub.locate(folder, revision)
    description, tensors = _read(folder)
    config = _config(description, folder)
    if attachment_of(model) is not None:
        raise InputError("a method is attached already: call vmoer.detach(model) first")
    if fingerprint(model, config.layers) != description["base"]:
        for found in gates.find(model):
            if found.reason and (
                config.layers == "all" or found.layer in config.layers
            ):  # quantised: the better reason
                raise InputError(f"{name} does not go onto this model, {found.path} ({found.kind}): {found.reason}")
        raise InputError(f"{name} was trained on another base model: its router weights differ from this one's")
    loaded = model
    wrapped = description["adapter"] is not None and not _adapter(model) and (folder / "adapter_config.json").exists()
    if wrapped:
        loaded = with_adapter(model, folder)
    try:
        if adapter_fingerprint(loaded) != description["adapter"]:
            trained = "over a LoRA adapter" if description["adapter"] else "without an adapter"
            has = "another adapter" if _adapter(loaded) else "no adapter"
            raise InputError(f"{name} holds routers trained {trained}, and this model has {has}")
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


def with_adapter(model: nn.Module, folder: Path) -> nn.Module:
    """The model inside its LoRA adapter, which is read from safetensors alone."""
    if not (folder / "adapter_model.safetensors").exists():
        raise InputError(f"{folder} has no adapter_model.safetensors: an adapter is read from nothing else")
    from peft import PeftModel

    return cast(nn.Module, PeftModel.from_pretrained(cast(Any, model), str(folder)))


def router_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Every attached router's parameters and buffers, named `layer.name`."""
    out = {}
    for layer, router in routers_of(model).items():
        for name, value in router.state_dict().items():
            out[f"{layer}.{name}"] = _whole(value).detach().cpu().contiguous()
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


def _name(model: nn.Module) -> str | None:
    """What the base model was loaded as."""
    names = (getattr(getattr(module, "config", None), "_name_or_path", None) for module in model.modules())
    return next((str(name) for name in names if name), None)


def _whole(value: Tensor) -> Tensor:
    """The tensor of which FSDP2 gives each process a part; gathering it takes all of them."""
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def _absorb(digest: Any, name: str, value: Tensor) -> None:
    rounded = _whole(value).detach().to("cpu", torch.bfloat16).contiguous()
    digest.update(name.encode())
    digest.update(rounded.view(torch.uint8).numpy().tobytes())


def _read(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """What a folder's `router.json` says, and its tensors: whole and as they were written, or an error."""
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
