"""`manifest.json`: every file of a folder of saved routers, by name, size and SHA-256. It is written last and read first.

Whatever is not as the manifest says is refused: a changed byte, a file that is missing, one of ours that is not listed. The
manifest ends with a digest of its own content, and its bytes must be those that `seal` writes.
"""

import hashlib
import json
import os
from pathlib import Path
from typing import Any

from vmoer.errors import InputError, short
from vmoer.files import JSON_LIMIT, parse_json, read_regular, sealed, unsealed, write_bytes, write_text

NAME = "manifest.json"
FORMAT = 3
MEMBERS = (
    "router.json",
    "router.safetensors",
    "run.json",
    "adapter_config.json",
    "adapter_model.safetensors",
    "calibrator.json",
)
"""The files that a manifest may list. `threshold.json`, which may come later, has a checksum of its own."""
LIMIT = 2**36
"""Bytes of the largest file of tensors, where the model that it is for is not known."""
_PICKLES = (".bin", ".pt", ".pth", ".pkl", ".ckpt")


def seal(folder: Path) -> None:
    """Write the manifest over the files that are there."""
    listed = {}
    for name in MEMBERS:
        if os.path.lexists(folder / name):
            listed[name] = _about(read_regular(folder / name, LIMIT, folder))
    _write(folder, listed)


def put(folder: Path, name: str, data: bytes | None) -> None:
    """Write one file of a finished folder, or remove it, then the manifest, in which nothing else changes.

    Other files are not read: one that was damaged is not sealed by this. Killed between the two, the folder is refused until
    the file is put again.
    """
    listed = {key: about for key, about in listed_in(folder).items() if key != name}
    if data is None:
        (folder / name).unlink(missing_ok=True)
    else:
        write_bytes(folder / name, data)
        listed[name] = _about(data)
    _write(folder, {key: listed[key] for key in MEMBERS if key in listed})


def _write(folder: Path, listed: dict[str, Any]) -> None:
    write_text(folder / NAME, _text(sealed({"format": FORMAT, "files": listed})))


def _about(data: bytes) -> dict[str, Any]:
    return {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}


def complete(folder: Path) -> bool:
    """Whether the folder was finished: its manifest is there. `read` tells whether the rest is."""
    return (folder / NAME).exists()


def read(folder: Path, limit: int = LIMIT) -> dict[str, bytes]:
    """The content of every file that the manifest lists, checked. `limit` is that of the files of tensors."""
    listed = listed_in(folder)
    for name in MEMBERS:
        if name not in listed and os.path.lexists(folder / name):
            raise InputError(
                f"{folder / name} is not in the folder's manifest: it was added after the routers were saved"
                + _renewing(name)
            )
    return {name: _member(folder, name, about, limit) for name, about in listed.items()}


def read_member(folder: Path, name: str) -> bytes:
    """One file that the manifest lists, checked."""
    listed = listed_in(folder)
    if name not in listed:
        raise InputError(f"{folder} has no {name}")
    return _member(folder, name, listed[name], LIMIT)


def _member(folder: Path, name: str, about: Any, limit: int) -> bytes:
    path, most = folder / name, limit if name.endswith(".safetensors") else JSON_LIMIT
    if not os.path.lexists(path):
        raise InputError(f"{folder} has no {name}, which its manifest lists{_renewing(name)}")
    data = read_regular(path, most, folder)
    if _about(data) != about:
        raise InputError(f"{path} is truncated or was changed: its checksum is not the one in {NAME}{_renewing(name)}")
    return data


def _renewing(name: str) -> str:
    """What to do about a file that can be made again from the others."""
    return "; run vmoer calibrate again" if name == "calibrator.json" else ""


def listed_in(folder: Path) -> dict[str, Any]:
    """The size and checksum of each file by its name, as the manifest has them."""
    if not folder.is_dir():
        raise InputError(f"{folder} is not a folder with a saved router")
    path = folder / NAME
    if not os.path.lexists(path):
        raise InputError(_without(folder))
    data = read_regular(path, 2**16, folder)
    found = parse_json(data, path)
    content = unsealed(found, path)
    if content.get("format") != FORMAT:
        raise InputError(other_format(path, content.get("format")))
    listed = content.get("files")
    if _text(found).encode() != data or not isinstance(listed, dict) or not set(listed) <= set(MEMBERS):
        raise InputError(f"{path} is not a manifest as vmoer writes it")
    return listed


def other_format(path: Path, found: Any) -> str:
    """Why a file of another format is refused, and what renews it."""
    earlier = isinstance(found, int) and found < FORMAT
    cure = f"an earlier version wrote it; {_again(path.parent)}" if earlier else "a later version may read it"
    return f"{path} has format {short(found)}, and this version of vmoer reads format {FORMAT}: {cure}"


def _again(folder: Path) -> str:
    """What writes the folder anew."""
    if (folder / "run.json").exists():
        return "remove the folder and run the vmoer train command that wrote it again"
    return "train again, then vmoer.save(model, folder)"


def _without(folder: Path) -> str:
    """Why there is no manifest, and what to do about it."""
    again = _again(folder)
    if (folder / "run.json").exists():
        return f"{folder} has no {NAME}: its writing was cut short, or an earlier version of vmoer wrote it; {again}"
    if (folder / "router.json").exists():
        return f"{folder} has no {NAME}: an earlier version of vmoer wrote it; {again}"
    pickles = sorted(p.name for p in folder.iterdir() if p.suffix in _PICKLES)
    hint = f"; {pickles[0]} is a pickle, and only safetensors are read" if pickles else ""
    return f"{folder} has no router.json{hint}"


def _text(content: Any) -> str:
    return json.dumps(content, indent=1) + "\n"
