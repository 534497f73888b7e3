"""The LoRA adapter beside saved routers: what it may say, checked before PEFT sees any of it.

Only a plain LoRA is taken: known settings inside bounds, modules by name, tensors called lora_A and lora_B. Every other setting
of PEFT's must be as PEFT has it by default, because each can change what the weights mean, or read and allocate more.
"""

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor, nn

from vmoer.errors import InputError, is_number, short
from vmoer.files import parse_json, write_bytes

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
RANK = 1024
"""The highest rank of an adapter that is read."""
_SAYS_NOTHING = (
    "auto_mapping",
    "base_model_name_or_path",
    "inference_mode",
    "init_lora_weights",
    "peft_version",
    "revision",
)
"""Settings that do not change what the adapter computes. They are not read."""
_OURS = (
    "peft_type",
    "task_type",
    "r",
    "lora_alpha",
    "lora_dropout",
    "use_rslora",
    "target_modules",
    "target_parameters",
)
_PLAIN_NAME = re.compile(r"[A-Za-z0-9_]+(\.[A-Za-z0-9_]+)*")
_TENSOR = re.compile(r"base_model\.model\.[A-Za-z0-9_.]+\.lora_[AB]\.weight")


class Adapter(NamedTuple):
    settings: dict[str, Any]
    tensors: dict[str, Tensor]
    key: str
    """A hash of both."""


def parse(config: bytes, tensors: bytes, folder: Path) -> Adapter:
    """An adapter from the content of its two files; one line where it is not a plain LoRA."""
    settings = checked(parse_json(config, folder / CONFIG), folder / CONFIG)
    found = _tensors(tensors, settings["r"], folder / TENSORS)
    return Adapter(settings, found, hashlib.sha256(config + tensors).hexdigest())


def checked(found: Any, name: object) -> dict[str, Any]:
    """The settings of a plain LoRA; InputError for anything else."""

    def refuse(key: str, wanted: str) -> InputError:
        return InputError(f"{name}: {key}={short(found.get(key))} is refused, it must be {wanted}")

    if not isinstance(found, dict):
        raise InputError(f"{name} is not a JSON object")
    if found.get("peft_type") != "LORA":
        raise refuse("peft_type", "LORA: no other adapter is read")
    defaults = _defaults()
    for key, value in found.items():
        if key not in defaults:
            raise InputError(f"{name}: {short(key)} is no setting of a LoRA adapter that this version knows")
        if key not in (*_OURS, *_SAYS_NOTHING) and value != defaults[key]:
            raise refuse(key, f"{defaults[key]!r}: adapters that set it are not read")
    settings = {key: found.get(key, defaults[key]) for key in _OURS}
    if not is_number(settings["r"], whole=True) or not 1 <= settings["r"] <= RANK:
        raise refuse("r", f"a whole number from 1 to {RANK}")
    if not is_number(settings["lora_alpha"]) or not 0 < settings["lora_alpha"] <= 1e6:
        raise refuse("lora_alpha", "a positive number")
    if not is_number(settings["lora_dropout"]) or not 0 <= settings["lora_dropout"] < 1:
        raise refuse("lora_dropout", "at least 0 and below 1")
    if not isinstance(settings["use_rslora"], bool):
        raise refuse("use_rslora", "true or false")
    if settings["task_type"] not in (None, "CAUSAL_LM"):
        raise refuse("task_type", "CAUSAL_LM or null")
    if not _names(settings["target_modules"]):
        raise refuse("target_modules", "a list of module names")
    if settings["target_parameters"] is not None and not _names(settings["target_parameters"]):
        raise refuse("target_parameters", "a list of parameter names or null")
    return settings


def peft() -> Any:
    """The library that adapters are read, put on and written with; one line where it is not installed."""
    try:
        import peft
    except ModuleNotFoundError as absent:
        raise InputError(f"LoRA adapters need {absent.name}: pip install 'vmoer[train]'") from None
    return peft


def _defaults() -> dict[str, Any]:
    return _as_json(peft().LoraConfig().to_dict())


def _names(value: Any) -> bool:
    if not isinstance(value, list) or not 1 <= len(value) <= 256:
        return False
    return all(isinstance(name, str) and len(name) < 256 and _PLAIN_NAME.fullmatch(name) for name in value)


def _tensors(data: bytes, rank: int, path: Path) -> dict[str, Tensor]:
    tensors = tensors_of(data, path)
    for name, value in tensors.items():
        if not _TENSOR.fullmatch(name):
            raise InputError(f"{path}: {short(name)} is refused, only lora_A and lora_B weights are read")
        inner = value.shape[0 if ".lora_A." in name else -1] if value.dim() == 2 else 0
        if not inner or inner % rank:
            raise InputError(f"{path}: {name} has shape {tuple(value.shape)}, which does not fit rank {rank}")
    return tensors


def tensors_of(data: bytes, path: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file, all of them finite."""
    try:
        tensors = load_tensors(data)
    except (SafetensorError, KeyError, ValueError, TypeError, RuntimeError) as error:
        raise InputError(f"{path} is not a safetensors file: {' '.join(str(error).split())}") from None
    for name, value in tensors.items():
        if value.is_complex() or value.element_size() < 2 or not bool(torch.isfinite(value.float()).all()):
            raise InputError(f"{path}: {short(name)} has values that are not finite numbers")
    return tensors


# -- on a model --------------------------------------------------------------------------------------------------------


def put_on(model: nn.Module, adapter: Adapter, folder: Path) -> nn.Module:
    """The model inside its adapter, in evaluation mode. The caller restores the model where this fails."""
    library = peft()
    settings = {key: value for key, value in adapter.settings.items() if key != "peft_type"}
    try:
        wrapped = library.get_peft_model(model, library.LoraConfig(**settings, inference_mode=True))
        unknown = library.set_peft_model_state_dict(wrapped, adapter.tensors).unexpected_keys
    except (ValueError, RuntimeError, TypeError, KeyError, AttributeError, IndexError) as error:
        reason = " ".join(str(error).split())[:200]
        raise InputError(f"{folder / TENSORS} does not fit this model: {reason}") from None
    if unknown:
        raise InputError(f"{folder / TENSORS} does not fit this model: it has no {short(unknown[0])}")
    return cast(nn.Module, wrapped.eval())


def write(model: nn.Module, folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """The adapter's two files, each whole or not at all. An adapter that would not be read again is not written."""
    if not hasattr(model, "peft_config"):
        raise InputError("save needs the PEFT model itself, not the model inside it, to store the adapter too")
    names = list(cast(Any, model).peft_config)
    if names != ["default"]:
        raise InputError(f"save stores one adapter, called default, and this model has {', '.join(names)}")
    config, data = _as_files(model, tensors)
    try:
        parse(config, data, Path("this model"))
    except InputError as error:
        raise InputError(f"only a plain LoRA adapter can be saved: {error}") from None
    write_bytes(folder / CONFIG, config)
    write_bytes(folder / TENSORS, data)


def _as_files(model: Any, tensors: Mapping[str, Tensor]) -> tuple[bytes, bytes]:
    """What PEFT's `save_pretrained` writes, made in memory: a process that is killed leaves nothing in another folder."""
    told = _as_json(model.peft_config["default"].to_dict()) | {"inference_mode": True}
    if told["task_type"] is None:  # by which PEFT finds the class of the base model
        kind = type(model.get_base_model())
        told["auto_mapping"] = {"base_model_class": kind.__name__, "parent_library": kind.__module__}
    own = peft().get_peft_model_state_dict(model, state_dict=dict(tensors))
    data = save_tensors({name: value.detach().cpu().contiguous() for name, value in own.items()}, {"format": "pt"})
    return (json.dumps(told, indent=2, sort_keys=True) + "\n").encode(), data


def parameters(model: nn.Module) -> dict[str, Tensor]:
    return {name: p for name, p in model.named_parameters() if ".lora_" in name or ".modules_to_save." in name}


def settings_of(model: nn.Module) -> str:
    """All settings of a model's adapters that change what they compute, as text."""
    found: Any = next((m.peft_config for m in model.modules() if hasattr(m, "peft_config")), {})
    defaults, told = _defaults(), {}
    for name, config in found.items():
        said = _as_json(config.to_dict()).items()
        changed = {key: value for key, value in said if key in _OURS or value != defaults.get(key)}
        told[name] = {key: value for key, value in changed.items() if key not in _SAYS_NOTHING}
    return json.dumps(told, sort_keys=True)


def _as_json(value: Any) -> Any:
    """Plain values: sets sorted, enumerations by their value."""
    if isinstance(value, dict):
        return {str(key): _as_json(one) for key, one in value.items()}
    if isinstance(value, set | frozenset):
        return sorted(map(str, value))
    if isinstance(value, Iterable) and not isinstance(value, str):
        return [_as_json(one) for one in value]
    return getattr(value, "value", value)
