"""What determines the numbers of predictions: `meta.json`, whose digest names the files of finished batches."""

import hashlib
import json
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

from vmoer._version import __version__
from vmoer.live.attach import attached
from vmoer.saved.store import adapter_fingerprint, fingerprint
from vmoer.tasks import Question


def meta_of_answers(
    model: Any,
    name: str | None,
    method: str | None,
    seed: int,
    choices: dict[str, Any],
    questions: Sequence[Question],
    tokens: object,
) -> dict[str, Any]:
    """The content of `meta.json` before anything is answered; `tokens` is all that the model is shown."""
    attachment, parameter = attached(model), next(model.parameters())
    source, *others = dict.fromkeys(q.task for q in questions)
    asked = [(q.id, q.task, q.split, q.answer, len(q.choices)) for q in questions]
    return {
        "model": _plain(name or str(getattr(model.config, "name_or_path", ""))),
        "method": method or attachment.config.key,
        "config": attachment.config.to_dict() | {"layers": attachment.layers},
        "seed": seed,
        **choices,
        "split": questions[0].split,
        "source_task": source,
        "ood_tasks": others,
        "questions": digest_of(asked, tokens),
        "fingerprint": {
            "base": fingerprint(model),
            "adapter": adapter_fingerprint(model),
            "weights": _checksum(model),
        },
        "dtype": str(parameter.dtype).removeprefix("torch."),
        "device": parameter.device.type,
        "versions": {
            "vmoer": __version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "python": platform.python_version(),
        },
    }


def of_run(run: Mapping[str, Any]) -> dict[str, Any]:
    """What `meta.json` keeps of `run.json`."""
    moved = (run.get("stage2") or {}).get("moved")
    found = {"seen": run.get("seen"), "moved": moved if run.get("method") != "map" else None}
    return {name: value for name, value in found.items() if value is not None}


def _plain(name: str) -> str:
    """A hub id, or the last name of a local folder: files say nothing about the machine they were made on."""
    path = Path(name)
    return path.resolve().name if path.is_absolute() or path.is_dir() else name


def digest_of(*values: object) -> str:
    """A digest of values as JSON."""
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def _checksum(model: Any) -> str:
    """A hash of the sums of every weight's bits, base and routers: it takes no longer than reading them."""
    integers = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    sums = []
    for name, value in sorted(model.state_dict().items()):
        bits = value.detach().contiguous().view(-1).view(integers[value.element_size()])
        sums.append([name, list(value.shape), str(value.dtype), int(bits.sum(dtype=torch.int64))])
    settings = {k: v for k, v in model.config.to_dict().items() if k not in ("_name_or_path", "transformers_version")}
    return digest_of(sums, json.dumps(settings, sort_keys=True, default=str))
