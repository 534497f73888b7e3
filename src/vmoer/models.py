"""From what a user names to a model in memory: a hub id, a local folder, a GGUF file, `demo`, or a run of `vmoer train`."""

import copy
import hashlib
import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch

from vmoer import hub
from vmoer.attach import routers_of
from vmoer.errors import InputError
from vmoer.store import load, with_adapter

KEPT = int(os.environ.get("VMOER_KEEP_MODELS", "0"))
"""How many models this process keeps in memory, adapters included, for the next time they are opened: a study opens few of them
again and again. Files that change meanwhile are not noticed."""
_kept: dict[tuple[Any, ...], tuple[Any, Any]] = {}


class Opened(NamedTuple):
    model: Any
    tokenizer: Any
    name: str
    """The base model as it was named."""
    run: dict[str, Any] | None
    """What `run.json` says, where a run folder was opened."""


def open_model(
    name: str | Path,
    *,
    device: str | torch.device | None = None,
    dtype: torch.dtype | str | None = None,
    revision: str | None = None,
) -> Opened:
    """Load a model and its tokenizer in evaluation mode; from a run, or any saved router, the adapter and the routers too.

    Without `device` the first GPU is taken where there is one; without `dtype` bfloat16 on a GPU and float32 on a CPU.
    `revision` is that of the name given, on the hub.
    """
    folder = _router_folder(name, revision)
    run = read_run(folder) if folder and (folder / "run.json").exists() else None
    base = str(name)
    if folder:
        base, revision = str(run["model"]) if run else _base_of(folder), None
    device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if dtype is None:
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    adapter = folder if folder and (folder / "adapter_config.json").exists() else None
    model, tokenizer = _with_adapter(base, revision, device, dtype, adapter)
    if folder and (folder / "router.json").exists():
        model = load(model, folder).eval()
        for router in routers_of(model).values():
            router.requires_grad_(False)
    return Opened(model, tokenizer, base, run)


def _with_adapter(
    base: str, revision: str | None, device: torch.device, dtype: torch.dtype | str, adapter: Path | None
) -> tuple[Any, Any]:
    """The base model on its device inside its adapter, and the tokenizer; a copy of what is kept, where it is."""
    key: tuple[Any, ...] = (base, revision, device.type, device.index or 0, dtype)
    if KEPT and adapter is not None and (adapter / "adapter_model.safetensors").exists():
        key += (hashlib.sha256((adapter / "adapter_model.safetensors").read_bytes()).hexdigest(),)
    if key in _kept:
        _kept[key] = model, tokenizer = _kept.pop(key)  # the one used last goes last
        return copy.deepcopy(model), tokenizer
    model, tokenizer = _base(base, dtype, revision)
    with suppress(ValueError):  # some quantised ones cannot be moved; transformers put them where they belong
        model = model.to(device)
    model = model.eval()
    if adapter is not None:
        model = with_adapter(model, adapter).eval()
    if KEPT:
        while len(_kept) >= KEPT:
            _kept.pop(next(iter(_kept)))
        _kept[key] = model, tokenizer
        model = copy.deepcopy(model)
    return model, tokenizer


def _router_folder(name: str | Path, revision: str | None) -> Path | None:
    """The folder of a run or of saved routers, here or on the hub; None where the name is a model's."""
    folder = Path(name)
    if folder.exists():
        routers = (folder / "router.json").exists() and not (folder / "config.json").exists()
        return folder if routers or (folder / "run.json").exists() else None
    return None if isinstance(name, Path) or embedded(name) else hub.find(name, revision)


def _base_of(folder: Path) -> str:
    named = json.loads((folder / "router.json").read_text()).get("base_model")
    if not named:
        raise InputError(
            f"{folder / 'router.json'} does not name its base model: load that, then vmoer.load(model, folder)"
        )
    return str(named)


def read_run(folder: Path) -> dict[str, Any]:
    try:
        run = json.loads((folder / "run.json").read_text())
    except ValueError as error:
        raise InputError(f"{folder / 'run.json'} is not valid JSON: {error}") from None
    if not isinstance(run, dict) or "model" not in run:
        raise InputError(f"{folder / 'run.json'} does not name its base model")
    return run


DEMO = {"demo": "map", "demo-base": "base", "demo-map-early": "map-early"}
"""Names of the embedded model's stages."""


def embedded(name: str) -> str | None:
    """The folder of the embedded model, where the name is one of its stages."""
    if name not in DEMO:
        return None
    from vmoer.demo import model_path

    return str(model_path(DEMO[name]))


def _base(name: str, dtype: torch.dtype | str, revision: str | None = None) -> tuple[Any, Any]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path, more = embedded(name) or name, {} if revision is None else {"revision": revision}
    if name.endswith(".gguf") and Path(name).is_file():
        path, more = str(Path(name).parent), {"gguf_file": Path(name).name}
    try:
        model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, **more)
        tokenizer = AutoTokenizer.from_pretrained(path, **more)
    except (OSError, ValueError, ImportError) as error:
        first = str(error).strip().splitlines()[0]
        raise InputError(f"cannot load the model {name!r}: {first}") from None
    model.config._name_or_path = name  # as it was named, not where this machine keeps it
    return model, tokenizer
