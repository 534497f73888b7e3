"""From what a user names to a model in memory: a hub id, a local folder, `demo`, or a run folder of `vmoer train`."""

import json
from pathlib import Path
from typing import Any, NamedTuple

import torch

from vmoer.attach import routers_of
from vmoer.errors import InputError
from vmoer.store import load


class Opened(NamedTuple):
    model: Any
    tokenizer: Any
    name: str
    """The base model as it was named."""
    run: dict[str, Any] | None
    """What `run.json` says, where a run folder was opened."""


def open_model(
    name: str | Path, *, device: str | torch.device | None = None, dtype: torch.dtype | str | None = None
) -> Opened:
    """Load a model and its tokenizer in evaluation mode; from a run folder the adapter and the routers too.

    Without `device` the first GPU is taken where there is one; without `dtype` bfloat16 on a GPU and float32 on a CPU.
    """
    folder = Path(name)
    run = read_run(folder) if (folder / "run.json").exists() else None
    base = str(run["model"]) if run else str(name)
    device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if dtype is None:
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    model, tokenizer = _base(base, dtype)
    model = model.to(device).eval()
    if run and (folder / "router.json").exists():
        model = load(model, folder).eval()
        for router in routers_of(model).values():
            router.requires_grad_(False)
    elif run and (folder / "adapter_config.json").exists():
        from peft import PeftModel

        model = PeftModel.from_pretrained(model, str(folder)).eval()
    return Opened(model, tokenizer, base, run)


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


def _base(name: str, dtype: torch.dtype | str) -> tuple[Any, Any]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path = embedded(name) or name
    try:
        model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
        return model, AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError, ImportError) as error:
        first = str(error).strip().splitlines()[0]
        raise InputError(f"cannot load the model {name!r}: {first}") from None
