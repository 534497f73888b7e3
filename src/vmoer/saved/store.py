"""Saving and loading routers: the only place that touches their files.

A folder holds `router.safetensors` and `router.json`, a model card, the LoRA adapter where the model has one, `run.json` where
`vmoer train` made it, `calibrator.json` where one was fitted, and `manifest.json`, written last: the size and checksum of each
of the others. `router.json` has the method's configuration, the version of the format, and fingerprints of what the routers
were trained on: the base model's router weights, rounded to bfloat16, all together and layer by layer, and the adapter with its
settings. Nothing but safetensors and JSON is read.

Everything is read and checked in memory first. The model is changed last, and is as it was where anything fails.
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save as save_tensors
from torch import Tensor, nn

from vmoer import gates
from vmoer._version import __version__
from vmoer.errors import InputError, is_number, short
from vmoer.files import parse_json, write_bytes, write_text
from vmoer.live.attach import attach, attached, attachment_of, routers_of
from vmoer.live.installing import overflowing
from vmoer.routers import Config, Router, method
from vmoer.saved import adapter as lora
from vmoer.saved import manifest, merged
from vmoer.saved.card import card
from vmoer.saved.fetch import locate
from vmoer.saved.fitted_for import CALIBRATOR, calibrated_for, signed
from vmoer.saved.unchanged import unchanged_on_failure
from vmoer.saved.weights import router_hash

_FIELDS = {
    "format": int,
    "vmoer": str,
    "base_model": str | None,
    "config": dict,
    "base": str,
    "router_hashes": dict,
    "adapter": str | None,
}
LONGEST = 4096  # characters of a name in run.json
SEED = 2**48  # the largest that a method takes
LARGEST = 1e6  # magnitude of a router's weight; trained ones are below 100
_SMALL = 2**28  # bytes of tensors that are read for any model; for a large one, four times its own size


class Saved(NamedTuple):
    """The content of a folder, checked."""

    folder: Path
    description: dict[str, Any]
    """Of `router.json`."""
    config: Config
    tensors: dict[str, Tensor]
    run: dict[str, Any] | None
    """Of `run.json`."""
    adapter: lora.Adapter | None
    calibrator: bytes | None = None
    """Of `calibrator.json`; `saved.calibrator.of` reads it."""
    fingerprint: dict[str, Any] | None = None
    """Of what a calibrator must have been fitted for."""


def save(
    model: nn.Module,
    folder: str | Path,
    *,
    run: Mapping[str, Any] | None = None,
    calibrator: Mapping[str, Any] | None = None,
) -> Path:
    """Write the attached routers, a model card, and the adapter where there is one. Files appear whole or not at all.

    Args:
        model: With a method attached.
        folder: Where the files go.
        run: what `vmoer train` did (model, task, preset, ...): stored as `run.json`, and quoted by the card.
        calibrator: fitted on the answers of this model: the content of `calibrator.json` (saved.calibrator.described).
    """
    attachment = attached(model)
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    data = save_tensors(router_tensors(model))
    description = {
        "format": manifest.FORMAT,
        "vmoer": __version__,
        "base_model": (run or {}).get("model") or _name(model),
        "config": attachment.config.to_dict() | {"layers": attachment.layers},
        "base": fingerprint(model),
        "router_hashes": router_hashes(model, attachment.layers),
        "adapter": adapter_fingerprint(model),
    }
    if adapters := merged.held_in(model):
        description["merged"] = adapters
    written = ["router.json", "router.safetensors"]
    write_text(folder / "README.md", card(description, run))
    if adapter := lora.parameters(model):
        lora.write(model, folder, {name: _whole(p) for name, p in adapter.items()})
        written += [lora.CONFIG, lora.TENSORS]
    write_bytes(folder / "router.safetensors", data)
    write_text(folder / "router.json", json.dumps(description, indent=2) + "\n")
    if run is not None:
        write_text(folder / "run.json", json.dumps(run, indent=2) + "\n")
        written.append("run.json")
    if calibrator is not None:
        write_bytes(folder / CALIBRATOR, signed(calibrator, description, data))
        written.append(CALIBRATOR)
    for name in set(manifest.MEMBERS) - set(written):  # of other routers that were here
        (folder / name).unlink(missing_ok=True)
    manifest.seal(folder)
    return folder


def load(model: nn.Module, folder: str | Path, *, revision: str | None = None) -> nn.Module:
    """Attach saved routers to a base model, inside its adapter where they have one. On any error the model is unchanged.

    Args:
        model: The base model that the routers were trained on. It is returned.
        folder: a local folder or, as a string, a repository on the hub: `user/repo`.
        revision: of the repository.
    """
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    return put_on(model, read_folder(locate(folder, revision), max(_SMALL, 4 * size)), folder)


def put_on(model: nn.Module, saved: Saved, name: str | Path | None = None) -> nn.Module:
    """Attach routers that were read to a base model; `name` is what errors call them."""
    name = name or saved.folder
    if attachment_of(model) is not None:
        raise InputError("a method is attached already: call vmoer.detach(model) first")
    _check_base(model, saved.config, saved.description, name)
    inside = merged.inside(saved.description, merged.held_in(model), name, "this model")
    loaded = model
    with unchanged_on_failure(model):
        if saved.adapter is not None and not inside and not lora.parameters(model):
            loaded = lora.put_on(model, saved.adapter, saved.folder)
        if adapter_fingerprint(loaded) != (None if inside else saved.description["adapter"]):
            trained = "over a LoRA adapter" if saved.description["adapter"] else "without an adapter"
            has = "another adapter" if lora.parameters(loaded) else "no adapter"
            raise InputError(f"{name} holds routers trained {trained}, and this model has {has}")
        attach(loaded, saved.config)
        fill(routers_of(loaded), saved.tensors, saved.folder)
        if path := overflowing(
            loaded, attached(loaded)
        ):  # finite weights can be so large that nothing finite comes of them
            raise InputError(
                f"{saved.folder / 'router.safetensors'}: the routing of {path} is not finite with these weights"
            )
    return loaded


def with_adapter(model: nn.Module, saved: Saved) -> nn.Module:
    """The model inside the adapter alone, where the folder has one."""
    if saved.adapter is None:
        return model
    with unchanged_on_failure(model):
        return lora.put_on(model, saved.adapter, saved.folder)


def _check_base(model: nn.Module, config: Config, description: dict[str, Any], name: str | Path) -> None:
    """Refuse a base model with other router weights; name a quantised router where that is the better reason."""
    if fingerprint(model, config.layers) == description["base"]:
        if router_hashes(model, config.layers) == description["router_hashes"]:
            return
        raise InputError(f"{name}: router_hashes of router.json are not those of the base model that it names")
    for found in gates.find(model):
        if found.reason and (config.layers == "all" or found.layer in config.layers):
            raise InputError(f"{name} does not go onto this model, {found.path} ({found.kind}): {found.reason}")
    raise InputError(f"{name} was trained on another base model: its router weights differ from this one's")


def router_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Every attached router's parameters and buffers, named `layer.name`."""
    out = {}
    for layer, router in routers_of(model).items():
        for name, value in router.state_dict().items():
            out[f"{layer}.{name}"] = _whole(value).detach().cpu().contiguous()
    return out


def fingerprint(model: nn.Module, layers: Any = "all") -> str:
    """A hash of the base model's router weights at the attached layers, in bfloat16: a cast or a device does not change it."""
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


def router_hashes(model: nn.Module, layers: Any = "all") -> dict[str, str]:
    """The hash of W_r by layer, for engines with other names; a router without one linear map has none."""
    hashes = {}
    for found in gates.find(model):
        if found.rule is None or found.rule.weight is None or (layers != "all" and found.layer not in layers):
            continue
        weight = gates.rules.lookup(found.rule.weight, found.router)
        if isinstance(weight, Tensor):
            hashes[str(found.layer)] = router_hash(_whole(weight))
    return hashes


def adapter_fingerprint(model: nn.Module) -> str | None:
    """A hash of the adapter's weights and of its settings; None where there is no adapter."""
    adapter = lora.parameters(model)
    if not adapter:
        return None
    digest = hashlib.sha256(lora.settings_of(model).encode())
    for name, value in sorted(adapter.items()):
        _absorb(digest, name, value)
    return digest.hexdigest()


def _name(model: nn.Module) -> str | None:
    """The name by which the base model was loaded."""
    names = (getattr(getattr(module, "config", None), "_name_or_path", None) for module in model.modules())
    return next((str(name) for name in names if name), None)


def _whole(value: Tensor) -> Tensor:
    """The whole of a tensor of which FSDP2 gives each process a part. All processes must take part in the gathering."""
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def _absorb(digest: Any, name: str, value: Tensor) -> None:
    rounded = _whole(value).detach().to("cpu", torch.bfloat16).contiguous()
    digest.update(name.encode())
    digest.update(rounded.view(torch.uint8).numpy().tobytes())


def read_folder(folder: Path, limit: int = manifest.LIMIT) -> Saved:
    """Everything in a folder of saved routers, checked: against the manifest first, then value by value."""
    found = manifest.read(folder, limit)
    for name in ("router.json", "router.safetensors"):
        if name not in found:
            raise InputError(f"{folder} has no {name}")
    description = _described(parse_json(found["router.json"], folder / "router.json"), folder / "router.json")
    adapter = None
    if lora.CONFIG in found or lora.TENSORS in found:
        for name in (lora.CONFIG, lora.TENSORS):
            if name not in found:
                raise InputError(f"{folder} has no {name}, and an adapter is read from both of its files")
        if description["adapter"] is None:
            raise InputError(f"{folder} has an adapter, and its router.json says that there is none")
        adapter = lora.parse(found[lora.CONFIG], found[lora.TENSORS], folder)
    config = _config(description, folder)
    tensors = lora.tensors_of(found["router.safetensors"], folder / "router.safetensors")
    run = _run(found["run.json"], folder) if "run.json" in found else None
    own = calibrated_for(description, found["router.safetensors"])
    return Saved(folder, description, config, tensors, run, adapter, found.get(CALIBRATOR), own)


def read_run(folder: Path) -> dict[str, Any]:
    """The content of a run folder's `run.json`, which must name the base model."""
    return _run(manifest.read_member(folder, "run.json"), folder)


def _run(data: bytes, folder: Path) -> dict[str, Any]:
    path = folder / "run.json"
    run = parse_json(data, path)
    if not isinstance(run, dict) or not isinstance(run.get("model"), str):
        raise InputError(f"{path} does not name its base model")
    for name in ("model", "task", "method"):
        value = run.get(name)
        if value is not None and not (isinstance(value, str) and len(value) <= LONGEST):
            raise InputError(f"{path}: {name}={short(value)} must be a name")
    seed = run.get("seed", 0)
    if not is_number(seed, whole=True) or not 0 <= seed <= SEED:
        raise InputError(f"{path}: seed={short(seed)} must be a whole number from 0 to {SEED}")
    for stage in (run.get("stage1"), run.get("stage2")):
        if stage is not None and not (isinstance(stage, dict) and isinstance(stage.get("moved") or {}, dict)):
            raise InputError(f"{path}: what it says of a stage is not what vmoer writes there")
    return run


def _described(found: Any, path: Path) -> dict[str, Any]:
    if not isinstance(found, dict):
        raise InputError(f"{path} is not a JSON object")
    if "format" in found and found["format"] != manifest.FORMAT:
        raise InputError(manifest.other_format(path, found["format"]))
    for name, kind in _FIELDS.items():
        if name not in found:
            raise InputError(f"{path} lacks {name}")
        if not isinstance(found[name], kind):
            raise InputError(f"{path}: {name} is not what vmoer writes there")
    merged.listed(found.get("merged", []), f"{path}: merged")
    return found


def _config(description: dict[str, Any], folder: Path) -> Config:
    fields, path = dict(description["config"]), folder / "router.json"
    try:
        return method(str(fields.pop("method")))(**fields)
    except InputError as error:
        raise InputError(f"{path}: {error}") from None
    except (TypeError, KeyError) as error:
        raise InputError(f"{path} has a configuration this version does not know: {short(str(error))}") from None


def fill(routers: Mapping[int, Router], tensors: Mapping[str, Tensor], folder: Path) -> None:
    """Give routers, by layer, the tensors of a folder; all of them, and no others."""
    path = folder / "router.safetensors"
    expected = {f"{layer}.{name}" for layer, router in routers.items() for name in router.state_dict()}
    if expected != set(tensors):
        odd = sorted(expected ^ set(tensors))[0][:60]
        raise InputError(f"{path} does not fit its configuration: {odd} is missing or unknown")
    for layer, router in routers.items():
        for name, ours in router.state_dict(keep_vars=True).items():
            theirs, statistics = tensors[f"{layer}.{name}"], name.startswith("novelty_")
            if not (_fitted_shape(theirs, ours) if statistics else theirs.shape == ours.shape):
                raise InputError(f"{path}: {layer}.{name} has shape {tuple(theirs.shape)}")
            moved = theirs.to(device=ours.device, dtype=ours.dtype)
            if theirs.is_floating_point() != ours.is_floating_point() or not bool((moved.abs() <= LARGEST).all()):
                raise InputError(
                    f"{path}: {layer}.{name} has values that are not finite numbers, or beyond {LARGEST:g}"
                )
            if statistics:
                setattr(router, name, moved)
            else:
                with torch.no_grad():
                    ours.copy_(moved)


def _fitted_shape(theirs: Tensor, ours: Tensor) -> bool:
    """[R, D]: as many columns as the model's states have numbers, and no more rows than that."""
    return theirs.dim() == 2 and theirs.shape[1] == ours.shape[1] and theirs.shape[0] <= theirs.shape[1]
