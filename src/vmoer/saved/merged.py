"""Which adapters lie in a model's weights, by their fingerprints, in the order of merging.

The adapter of a run changes the model and hardly ever its router weights, by which routers know their base. So both name it:

    config.json   `vmoer_adapters`, which `vmoer merge` writes: it goes wherever the weights go, to the hub and back
    router.json   `merged`, what the base held where its routers were saved; absent where it held nothing
"""

from collections.abc import Mapping
from typing import Any

from torch import nn
from transformers import PreTrainedConfig

from vmoer.errors import InputError

KEY = "vmoer_adapters"


def held(config: Any, name: object) -> list[str]:
    """The adapters that a configuration names; `name` is what errors call the model."""
    found = config.get(KEY) if isinstance(config, Mapping) else getattr(config, KEY, None)
    return [] if found is None else listed(found, f"{name}: {KEY} of config.json")


def held_in(model: nn.Module) -> list[str]:
    """The adapters in a model's weights."""
    configs = (getattr(module, "config", None) for module in model.modules())
    return next((found for config in configs if (found := held(config, type(model).__name__))), [])


def held_by(name: str) -> list[str]:
    """The adapters in the weights of a model that is not loaded: a folder, or a repository on the hub."""
    try:
        config, _ = PreTrainedConfig.get_config_dict(name)
    except (OSError, ValueError):  # whoever opens it says what is wrong
        return []
    return held(config, name)


def listed(found: Any, name: object) -> list[str]:
    """Fingerprints as they stand in a file."""
    if not isinstance(found, list) or not all(isinstance(one, str) for one in found):
        raise InputError(f"{name} is not what vmoer merge writes")
    return found


def note(model: nn.Module, description: Mapping[str, Any]) -> None:
    """Say in a model's configuration what its weights hold once the adapter of a `router.json` is merged into them."""
    if adapters := wanted(description):
        setattr(model.config, KEY, adapters)


def wanted(description: Mapping[str, Any]) -> list[str]:
    """The adapters that whole weights must hold for the routers of a `router.json`."""
    own = description["adapter"]
    return description.get("merged", []) + ([] if own is None else [own])


def inside(description: Mapping[str, Any], adapters: list[str], name: object, model: object) -> bool:
    """Whether weights hold the routers' own adapter; weights that hold others than the base did are refused."""
    if description["adapter"] is not None and adapters == wanted(description):
        return True
    if adapters != description.get("merged", []):
        raise InputError(_other(wanted(description), name, model))
    return False


def check(description: Mapping[str, Any], adapters: list[str], name: object, model: object) -> None:
    """Refuse whole weights without the adapter that the routers were trained over, or with another one."""
    if adapters == wanted(description):
        return
    if description["adapter"] is not None:
        merge = f"vmoer merge {name} --out DIR, then vmoer serve DIR --router DIR"
        raise InputError(f"{name} was trained over a LoRA adapter, which {model} does not hold: {merge}")
    raise InputError(_other(wanted(description), name, model))


def _other(wanted: list[str], name: object, model: object) -> str:
    if wanted:
        return f"{name} was trained over an adapter in the model's weights (vmoer merge), which {model} does not hold"
    return f"{name} was trained on the base model, and the weights of {model} hold an adapter (vmoer merge)"
