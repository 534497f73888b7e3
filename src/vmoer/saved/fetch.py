"""From a name to a local folder. Of a saved router, only safetensors and JSON are fetched from the hub."""

import re
from pathlib import Path

from vmoer.errors import InputError, alike, first_line
from vmoer.saved.manifest import MEMBERS, NAME

FETCHED = (NAME, *MEMBERS)
DEMO = {"demo": "map", "demo-base": "base", "demo-map-early": "map-early"}
"""Names of the embedded model's stages; a folder of such a name is ./demo."""
_REPOSITORY = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")


def is_repository(name: str) -> bool:
    """Whether the name is written as a repository on the hub: `user/repo`."""
    return bool(_REPOSITORY.fullmatch(name))


def locate(name: str | Path, revision: str | None = None) -> Path:
    """The folder of a saved router: a local one as it is, `user/repo` fetched from the hub or found in its cache."""
    folder = Path(name)
    if folder.is_dir():
        if revision is not None:
            raise InputError(f"revision={revision!r} is for repositories on the hub, and {name} is a local folder")
        return folder
    if isinstance(name, Path) or not is_repository(name):
        raise InputError(f"{name} is not a folder with a saved router")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError

    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=list(FETCHED)))
    except Exception as error:
        reason = f"it could not be fetched ({first_line(error)})"
        if isinstance(error, GatedRepoError):
            reason = "its owner must grant access first"
        elif isinstance(error, RepositoryNotFoundError):
            reason = "there is no such repository, or it is private"
        elif isinstance(error, RevisionNotFoundError):
            reason = f"it has no revision {revision!r}"
        raise InputError(f"{name} is no local folder, and on the hub {reason}") from error


def find(name: str, revision: str | None = None) -> Path | None:
    """The folder of a repository with routers alone; None for the name of a model, and for what cannot be reached."""
    if not is_repository(name):
        return None
    from huggingface_hub import HfApi, try_to_load_from_cache

    try:
        files = {file.rfilename for file in HfApi().model_info(name, revision=revision).siblings or ()}
    except Exception:
        wanted = ("router.json", "config.json")
        files = {file for file in wanted if isinstance(try_to_load_from_cache(name, file, revision=revision), str)}
    return locate(name, revision) if "router.json" in files and "config.json" not in files else None


def check_path(name: str) -> None:
    """Refuse a path where nothing is, or nothing yet: the hub is asked only for names that are no path here."""
    if name in DEMO:
        return
    path = Path(name).expanduser()
    if path.is_dir() and not any((path / file).exists() for file in ("config.json", "run.json", "router.json")):
        if any((path / state).exists() for state in ("map", "telemetry.jsonl", "stage1.safetensors")):
            raise InputError(f"{name} is an unfinished run: start the same vmoer train again, and it goes on")
        if not any(path.glob("*.gguf")):
            raise InputError(f"cannot load the model {name!r}: there is no config.json, run.json or router.json in it")
    beside = path.parent.is_dir() and path.parent != Path(".")
    written = name.startswith((".", "/", "~")) or name.count("/") > 1 or name.endswith("/")
    if not path.exists() and (beside or written):
        near = [p.name for p in path.parent.iterdir()] if path.parent.is_dir() else []
        beginning = str(path.parent / "x")[:-1]
        raise InputError(f"cannot load the model {name!r}: no such folder or file{alike(path.name, near, beginning)}")
