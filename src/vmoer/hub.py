"""The hub: the card beside a saved router, publishing a folder, finding one. Only the files named here ever travel.

    vmoer.hub.push_to_hub("run/", "user/repo")         a folder of `vmoer.save` or `vmoer train`, or an attached model
    vmoer.load(base, "user/repo", revision="v1")       the same as from the folder

What is fetched is safetensors and JSON, and checked as a local folder is: checksum, format, fingerprint of the base.
"""

import json
import re
import shutil
import tempfile
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

import vmoer
from vmoer.errors import InputError, RunError
from vmoer.files import write_json, write_text

LOADED = ("router.json", "router.safetensors", "run.json", "adapter_config.json", "adapter_model.safetensors")
FILES = (*LOADED, "metrics.json", "README.md")
_REPOSITORY = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
TAGS = ("vmoer", "mixture-of-experts", "uncertainty", "calibration", "variational-routing")
CARD = """---
{matter}
---

# {method} routers for {base}

Variational routers for chosen layers of a Mixture-of-Experts language model: calibrated answers, and a signal for each token that
flags unfamiliar input. Everything else of the base model is unchanged.

| | |
|---|---|
{rows}

```python
import vmoer
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained("{base}")
model = vmoer.load(model, "REPOSITORY_OR_FOLDER")  # refused on any other base model
```
"""
METRICS = ("accuracy", "nll", "brier", "ece", "ece_floor", "debiased_ece")


# -- the card ----------------------------------------------------------------------------------------------------------


def card(description: Mapping[str, Any], about: Mapping[str, Any] | None = None) -> str:
    """The README of a saved router: what `router.json` says, and what is known of its run and its metrics.

    `about` is what `run.json` holds (model, task, preset, seed, stage2); its `metrics` map names to numbers.
    """
    about = about or {}
    config = dict(description["config"])
    method, layers = config.pop("method"), config.pop("layers")
    base = description.get("base_model")
    matter = [f"base_model: {base}"] if _is_repository(base) else []
    matter += ["library_name: vmoer", "tags:", *(f"- {tag}" for tag in TAGS)]
    facts = {
        "base model": f"`{base}`" if base else "not named; recognised by the fingerprint of its router weights",
        "method": f"`{method}`",
        "layers": ", ".join(map(str, layers)),
        "settings": ", ".join(f"{name} = {value}" for name, value in config.items()),
        "adapter": "a LoRA adapter is part of this folder" if description["adapter"] else "none",
        "task": about.get("task"),
        "preset": about.get("preset"),
        "validation NLL": _number((about.get("stage2") or {}).get("best_validation_nll")),
        "library": f"vmoer {description['vmoer']}",
    }
    facts |= {f"metric: {name}": _number(value) for name, value in (about.get("metrics") or {}).items()}
    rows = "\n".join(f"| {name} | {value} |" for name, value in facts.items() if value)
    return CARD.format(matter="\n".join(matter), method=method, base=base or "BASE", rows=rows)


def _number(value: Any) -> str | None:
    return None if value is None else f"{value:.4g}"


def _is_repository(name: Any) -> bool:
    return isinstance(name, str) and bool(_REPOSITORY.fullmatch(name)) and not Path(name).exists()


def _known(folder: Path) -> dict[str, Any]:
    """What the folder itself says of the run and of its test metrics."""
    about: dict[str, Any] = {}
    if (folder / "run.json").exists():
        about = json.loads((folder / "run.json").read_text())
    if (folder / "metrics.json").exists():
        rows = json.loads((folder / "metrics.json").read_text())
        own = [row for row in rows if row["method"] == about.get("method") and row["metric"] in METRICS]
        about["metrics"] = {f"{row['metric']} ({row['task']})": row["value"] for row in own if row["value"] is not None}
    return about


# -- there and back ----------------------------------------------------------------------------------------------------


def push_to_hub(
    source: nn.Module | str | Path,
    repo_id: str,
    *,
    base_model: str | None = None,
    metrics: str | Path | None = None,
    private: bool | None = None,
    revision: str | None = None,
    message: str = "Upload routers",
    token: str | None = None,
) -> str:
    """Publish an attached model's routers, or a folder that `vmoer.save` or `vmoer train` wrote; returns the commit's URL.

    `base_model` names the base on the hub where it was loaded from a local folder; `metrics` is a folder of `vmoer eval` for
    the card to quote. With either the card is written anew; otherwise the folder's README.md goes along as it is. What the
    repository held before under our names is replaced; anything else in it stays.
    """
    from vmoer import store

    if not _REPOSITORY.fullmatch(repo_id):
        raise InputError(f"repo_id={repo_id!r} must be written as user/name")
    with tempfile.TemporaryDirectory() as temporary:
        staged = Path(temporary)
        if isinstance(source, nn.Module):
            store.save(source, staged)
        else:
            store._read(Path(source))  # whole and unchanged, or not published
            for name in FILES:
                if (Path(source) / name).exists():
                    shutil.copyfile(Path(source) / name, staged / name)
        if metrics is not None:
            if not (Path(metrics) / "metrics.json").exists():
                raise InputError(f"{metrics} has no metrics.json: vmoer eval writes one")
            shutil.copyfile(Path(metrics) / "metrics.json", staged / "metrics.json")
            (staged / "README.md").unlink()
        _name_base(staged, base_model)
        return _upload(staged, repo_id, private, revision, message, token)


def _name_base(folder: Path, base_model: str | None) -> None:
    """Say in the staged files where the base is to be had, and write the card where there is none."""
    path, run = folder / "router.json", folder / "run.json"
    description = json.loads(path.read_text())
    if base_model is not None:
        description |= {"base_model": base_model}
        write_text(path, json.dumps(description, indent=2) + "\n")
        if run.exists():
            write_json(run, json.loads(run.read_text()) | {"model": base_model})
        (folder / "README.md").unlink(missing_ok=True)
    elif Path(description.get("base_model") or "").is_absolute():
        warnings.warn(f"{description['base_model']} is a local folder: name the base by base_model=...", stacklevel=3)
    if not (folder / "README.md").exists():
        write_text(folder / "README.md", card(description, _known(folder)))


def _upload(folder: Path, repo_id: str, private: bool | None, revision: str | None, message: str, token: Any) -> str:
    from huggingface_hub import HfApi

    api = HfApi(token=token, library_name="vmoer", library_version=vmoer.__version__)
    try:
        api.create_repo(repo_id, private=private, exist_ok=True)
        if revision is not None:
            api.create_branch(repo_id, branch=revision, exist_ok=True)
        commit = api.upload_folder(
            repo_id=repo_id,
            folder_path=folder,
            revision=revision,
            commit_message=message,
            delete_patterns=list(FILES),
        )
    except Exception as error:  # whatever the network brings
        raise RunError(f"{repo_id} could not be published: {_first_line(error)}") from error
    return str(commit.commit_url)


def locate(name: str | Path, revision: str | None = None) -> Path:
    """The folder of a saved router: a local one as it is, `user/repo` fetched from the hub or found in its cache."""
    folder = Path(name)
    if folder.is_dir():
        if revision is not None:
            raise InputError(f"revision={revision!r} is for repositories on the hub, and {name} is a local folder")
        return folder
    if isinstance(name, Path) or not _REPOSITORY.fullmatch(name):
        raise InputError(f"{name} is not a folder with a saved router")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError

    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=list(LOADED)))
    except Exception as error:
        reason = f"it could not be fetched ({_first_line(error)})"
        if isinstance(error, GatedRepoError):
            reason = "its owner must grant access first"
        elif isinstance(error, RepositoryNotFoundError):
            reason = "there is no such repository, or it is private"
        elif isinstance(error, RevisionNotFoundError):
            reason = f"it has no revision {revision!r}"
        raise InputError(f"{name} is no local folder, and on the hub {reason}") from error


def find(name: str, revision: str | None = None) -> Path | None:
    """The folder of a router repository; None where the name is that of a model, or of nothing that can be reached."""
    if not _REPOSITORY.fullmatch(name):
        return None
    from huggingface_hub import HfApi, try_to_load_from_cache

    try:
        there = "router.json" in {file.rfilename for file in HfApi().model_info(name, revision=revision).siblings or ()}
    except Exception:
        there = isinstance(try_to_load_from_cache(name, "router.json", revision=revision), str)
    return locate(name, revision) if there else None


def _first_line(error: Exception) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
