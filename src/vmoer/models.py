"""Opening a model by its name: a hub id, a local folder, a GGUF file, `demo`, or a run of `vmoer train`."""

import copy
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from vmoer import deepseek
from vmoer.demo import model_path
from vmoer.errors import InputError
from vmoer.live.attach import routers_of
from vmoer.saved import fetch
from vmoer.saved.calibrator import Stored, of
from vmoer.saved.store import Saved, put_on, read_folder, read_run, with_adapter
from vmoer.tasks.prompt import ask_with

KEEP_MODELS = int(os.environ.get("VMOER_KEEP_MODELS", "0"))
"""How many opened models, adapters included, this process keeps in memory: a study opens a few of them again and again.
Files that change meanwhile are not noticed."""
_kept: dict[tuple[Any, ...], tuple[Any, Any]] = {}
_tokenizers: dict[tuple[str, str | None], Any] = {}
"""One for all adapters of a base, where models are kept: what it has encoded is remembered with it (tasks/prompt.py)."""


class Opened(NamedTuple):
    model: Any
    tokenizer: Any
    name: str
    """The base model's name, as the user or the run wrote it."""
    run: dict[str, Any] | None
    """The content of `run.json`, where a run folder was opened."""
    calibrator: Stored | None = None
    """The run's own, where it has one."""


def open_model(
    name: str | Path,
    *,
    device: str | torch.device | None = None,
    dtype: torch.dtype | str | None = None,
    revision: str | None = None,
) -> Opened:
    """Load a model and its tokenizer in evaluation mode; from a run, or any saved router, the adapter and the routers too.

    Args:
        device: by default the first GPU where there is one, else the CPU.
        dtype: by default bfloat16 on a GPU and float32 on a CPU.
        revision: of `name` on the hub.
    """
    fetch.check_path(str(name))
    folder = _router_folder(name, revision)
    saved = read_folder(folder) if folder else None
    base = str(name)
    if saved:
        base, revision = _base_of(saved), None
    device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if dtype is None:
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    model, tokenizer = _with_adapter(base, revision, device, dtype, saved)
    run = saved.run if saved else None
    ask_with(tokenizer, (run or {}).get("system_prompt"))  # always: a kept tokenizer may have another run's
    if saved:
        model = put_on(model, saved).eval()
        for router in routers_of(model).values():
            router.requires_grad_(False)
    return Opened(model, tokenizer, base, run, of(saved) if saved else None)


def _with_adapter(
    base: str, revision: str | None, device: torch.device, dtype: torch.dtype | str, saved: Saved | None
) -> tuple[Any, Any]:
    """The base model on its device, inside its adapter, and the tokenizer. A kept model is answered by a copy."""
    key: tuple[Any, ...] = (base, revision, device.type, device.index or 0, dtype)
    if saved is not None and saved.adapter is not None:
        key += (saved.adapter.key,)
    if key in _kept:
        _kept[key] = model, tokenizer = _kept.pop(key)  # the one used last goes last
        return copy.deepcopy(model), tokenizer
    model, tokenizer = _base(base, dtype, revision)
    with suppress(ValueError):  # some quantised models cannot be moved, and transformers has placed them already
        model = model.to(device)
    model = model.eval()
    if saved is not None:
        model = with_adapter(model, saved).eval()
    if KEEP_MODELS:
        while len(_kept) >= KEEP_MODELS:
            _kept.pop(next(iter(_kept)))
        _kept[key] = model, tokenizer
        model = copy.deepcopy(model)
    return model, tokenizer


def _router_folder(name: str | Path, revision: str | None) -> Path | None:
    """The folder of a run or of saved routers, here or on the hub; None where the name is a model's."""
    folder = Path(name)
    if isinstance(name, str) and embedded(name):
        return None
    if folder.exists():
        routers = (folder / "router.json").exists() and not (folder / "config.json").exists()
        return folder if routers or (folder / "run.json").exists() else None
    return None if isinstance(name, Path) else fetch.find(name, revision)


def _base_of(saved: Saved) -> str:
    """The base model that `run.json`, or else `router.json`, names."""
    named = saved.run["model"] if saved.run else saved.description["base_model"]
    if not named:
        raise InputError(
            f"{saved.folder / 'router.json'} does not name its base model: load that, then vmoer.load(model, folder)"
        )
    return str(named)


def embedded(name: str) -> str | None:
    """The folder of the embedded model, where the name is one of its stages."""
    return str(model_path(fetch.DEMO[name])) if name in fetch.DEMO else None


def _base(name: str, dtype: torch.dtype | str, revision: str | None = None) -> tuple[Any, Any]:
    path, found, more = _place(name, revision)
    with _one_line(name):
        if found:
            model = deepseek.open_checkpoint(path, found, dtype, revision)
        else:
            if "gguf_file" in more and hasattr(
                transformers, "GgufConfig"
            ):  # weights that stay packed cannot be trained
                more = more | {"quantization_config": transformers.GgufConfig(dequantize=True)}
            model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, trust_remote_code=False, **more)
        tokenizer = _tokenizer(path, found, _place(name, revision)[2])
    if KEEP_MODELS:
        tokenizer = _tokenizers.setdefault((name, revision), tokenizer)
    model.config._name_or_path = name  # as the user wrote it, not the folder on this machine
    return model, tokenizer


def skeleton(name: str) -> Any:
    """The model of a name, or the base of a run folder, without its weights: its configuration alone is read."""
    run = Path(name) / "run.json"
    with torch.device("meta"):
        return _configured(str(read_run(run.parent)["model"]) if run.exists() and not embedded(name) else name)


def random_model(name: str, device: torch.device, dtype: torch.dtype | str) -> tuple[Any, Any]:
    """A model of the same configuration with random weights, and the tokenizer: as fast as the model, without its files."""
    with torch.device(device):
        model = _configured(name, dtype=dtype)
    with _one_line(name):
        return model.eval(), _tokenizer(*_place(name))


def _configured(name: str, **settings: Any) -> Any:
    path, found, more = _place(name)
    with _one_line(name):
        config = (
            deepseek.configuration(found)
            if found
            else AutoConfig.from_pretrained(path, trust_remote_code=False, **more)
        )
        return AutoModelForCausalLM.from_config(config, trust_remote_code=False, **settings)


def _place(name: str, revision: str | None = None) -> tuple[str, dict[str, Any] | None, dict[str, Any]]:
    """Where a model is, what its `config.json` says where it is one of DeepSeek's layout, and options of `from_pretrained`."""
    if name.endswith(".gguf") and Path(name).is_file():
        return str(Path(name).parent), None, {"gguf_file": Path(name).name}
    fetch.check_path(name)
    path = embedded(name) or name
    return path, deepseek.described(path, revision), {} if revision is None else {"revision": revision}


def _tokenizer(path: str, found: dict[str, Any] | None, more: dict[str, Any]) -> Any:
    return (
        deepseek.open_tokenizer(path, **more)
        if found
        else AutoTokenizer.from_pretrained(path, trust_remote_code=False, **more)
    )


@contextmanager
def _one_line(name: str) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError, ImportError) as error:
        first = str(error).strip().splitlines()[0]
        raise InputError(f"cannot load the model {name!r}: {first}") from None
