"""Publishing saved routers. Only the files named here are ever uploaded.

vmoer.saved.hub.push_to_hub("run/", "user/repo")
vmoer.load(base, "user/repo", revision="v1")             as from the folder, with the same checks
"""

import json
import shutil
import tempfile
import warnings
from pathlib import Path
from typing import Any

from torch import nn

from vmoer._version import __version__
from vmoer.errors import InputError, RunError, first_line
from vmoer.files import read_json, write_json, write_text
from vmoer.saved.card import card, known
from vmoer.saved.fetch import FETCHED, is_repository
from vmoer.saved.manifest import seal
from vmoer.saved.store import read_folder, save

FILES = (*FETCHED, "metrics.json", "README.md")


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
    """Publish routers. Files of ours that the repository held before are replaced; anything else in it stays.

    Args:
        source: an attached model, or a folder that `vmoer.save` or `vmoer train` wrote.
        repo_id: `user/name`.
        base_model: the base model's name on the hub, where it was loaded from a local folder.
        metrics: a folder of `vmoer eval`, whose numbers the card quotes. With this or `base_model` the card is written
            anew; without, the folder's own README.md is published.

    Returns:
        The URL of the commit.
    """
    if not is_repository(repo_id):
        raise InputError(f"repo_id={repo_id!r} must be written as user/name")
    with tempfile.TemporaryDirectory() as temporary:
        staged = Path(temporary)
        if isinstance(source, nn.Module):
            save(source, staged)
        else:
            read_folder(Path(source))  # an incomplete or changed folder is not published
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
    """Name the base model in the staged files, and write the card where there is none."""
    path, run = folder / "router.json", folder / "run.json"
    description = read_json(path)
    if base_model is not None:
        description |= {"base_model": base_model}
        write_text(path, json.dumps(description, indent=2) + "\n")
        if run.exists():
            write_json(run, read_json(run) | {"model": base_model})
        seal(folder)
        (folder / "README.md").unlink(missing_ok=True)
    elif Path(description.get("base_model") or "").is_absolute():
        warnings.warn(f"{description['base_model']} is a local folder: name the base by base_model=...", stacklevel=3)
    if not (folder / "README.md").exists():
        write_text(folder / "README.md", card(description, known(folder)))


def _upload(folder: Path, repo_id: str, private: bool | None, revision: str | None, message: str, token: Any) -> str:
    from huggingface_hub import HfApi

    api = HfApi(token=token, library_name="vmoer", library_version=__version__)
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
        raise RunError(f"{repo_id} could not be published: {first_line(error)}") from error
    return str(commit.commit_url)
