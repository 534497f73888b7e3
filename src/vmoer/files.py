"""Files appear whole or not at all, are read only where they are plain files of a sane size, and say where they were changed."""

import gzip
import hashlib
import io
import json
import os
import re
import secrets
import stat
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn

from vmoer.errors import InputError, RunError

try:
    import fcntl
except ImportError:  # Windows has none; there a folder is not locked
    fcntl = None  # type: ignore[assignment]

JSON_LIMIT = 2**26
"""Bytes of the largest JSON file that is read."""
ROWS_LIMIT = 2**28
"""The same for a list of rows, unpacked."""


def write_bytes(path: Path, data: bytes, scratch: Path | None = None) -> None:
    """Write beside the target, make sure it is on disk, then rename: a killed process leaves the old file as it was.

    The file beside it has a random name. It is gone afterwards, also where writing fails; only a process that is killed leaves
    it: in `scratch`, where given, so that it goes with that folder.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = (scratch or path.parent) / f".{path.name}.{secrets.token_hex(8)}"
    try:  # a signal may come as soon as the file is there
        with temporary.open("xb") as file:  # "x": refused where anything of that name exists, a link included
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except FileExistsError:  # somebody else's
        raise
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        if isinstance(error, OSError):
            error.filename, error.filename2 = str(path), None  # a full disk does not say which file it was
        raise


def write_text(path: Path, text: str) -> None:
    write_bytes(path, text.encode())


def write_json(path: Path, value: Any) -> None:
    write_text(path, json.dumps(value, indent=1, allow_nan=False) + "\n")


def write_rows(path: Path, rows: Sequence[Any]) -> None:
    """A JSON list, a row a line: small, and readable as a difference."""
    write_text(path, "[\n" + ",\n".join(json.dumps(row, allow_nan=False) for row in rows) + "\n]\n")


def stored(path: Path) -> Path:
    """The file itself, or `path.gz` where only that is there: results are kept compressed."""
    packed = path.with_name(f"{path.name}.gz")
    return packed if packed.exists() and not path.exists() else path


def read_rows(path: Path) -> Any:
    """What `write_rows` wrote, compressed or not; InputError where it is not JSON."""
    path = stored(path)
    data = read_regular(path, ROWS_LIMIT)
    if path.suffix == ".gz":
        try:
            data = gzip.GzipFile(fileobj=io.BytesIO(data)).read(ROWS_LIMIT + 1)
        except (OSError, EOFError, zlib.error) as error:
            raise InputError(f"not a whole gzip file: {error}") from None
        if len(data) > ROWS_LIMIT:
            raise InputError(f"{path} unpacks to more than {ROWS_LIMIT} bytes")
    return parse_json(data, path)


# -- reading what may be anything --------------------------------------------------------------------------------------


def read_regular(path: Path, limit: int, inside: Path | None = None) -> bytes:
    """The content of a plain file of at most `limit` bytes; anything else is an InputError that names it.

    Pipes and devices are never waited for. With `inside`, a link must not lead out of that folder; the files of the hub's cache
    are links to its own store, and are read.
    """
    if inside is not None and not _leads_inside(path, inside):
        raise InputError(f"{path} is a link that leads out of its folder")
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        raise InputError(f"{path}: no such file") from None
    except (OSError, ValueError) as error:
        raise InputError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from None
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise InputError(f"{path} is not a plain file")
        if found.st_size > limit:
            raise InputError(f"{path} has {found.st_size} bytes, and at most {limit} are read")
        with os.fdopen(descriptor, "rb", closefd=False) as file:
            return file.read(found.st_size)
    finally:
        os.close(descriptor)


def _leads_inside(path: Path, folder: Path) -> bool:
    root, target = folder.resolve(), path.resolve()
    store = root.parent.parent / "blobs" if root.parent.name == "snapshots" else root
    return target.is_relative_to(root) or target.is_relative_to(store)


def parse_json(data: bytes | str, name: object) -> Any:
    """The value of a JSON text; one line that begins with `name` where it is none, or is made to break a reader."""
    try:
        return json.loads(data, parse_constant=_no_constant)
    except RecursionError:
        raise InputError(f"{name}: not valid JSON: it is nested too deeply") from None
    except ValueError as error:
        reason = "a number has too many digits" if "int_max_str_digits" in str(error) else str(error).splitlines()[0]
        raise InputError(f"{name}: not valid JSON: {reason}") from None


def _no_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is not a number of JSON")


def read_json(path: Path, inside: Path | None = None) -> Any:
    return parse_json(read_regular(path, JSON_LIMIT, inside), path)


# -- files that say whether they were changed --------------------------------------------------------------------------

SEAL = "sha256"


def digest(value: Any) -> str:
    """SHA-256 of a value, written as JSON in the one way that does not depend on order or space."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def sealed(content: Mapping[str, Any]) -> dict[str, Any]:
    """The content with a digest of its own as the last entry."""
    content = json.loads(json.dumps({key: value for key, value in content.items() if key != SEAL}))
    return {**content, SEAL: digest(content)}


def unsealed(found: Any, name: object) -> dict[str, Any]:
    """What `sealed` was given; InputError where anything of it was changed since."""
    if not isinstance(found, dict):
        raise InputError(f"{name} is not a JSON object")
    content = {key: value for key, value in found.items() if key != SEAL}
    if found.get(SEAL) != digest(content):
        raise InputError(f"{name} was changed: its checksum is not that of its content")
    return content


# -- one process a folder ----------------------------------------------------------------------------------------------

LOCK = ".lock"
_LEFT = re.compile(r"\..+\.[0-9a-f]{16}|\.ray-[0-9a-f]{32}")


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Inside the block no other process that asks for this folder gets it: it is told so, in one line, at once.

    The kernel holds the lock, on the file `.lock`, and lets go of it however the process ends. What a killed process left half
    written is swept on the way in. A folder that was made here and stays empty is gone afterwards.
    """
    made = _made(folder)
    descriptor = _locked(folder)
    try:
        sweep(folder)
        yield
    finally:
        (folder / LOCK).unlink(missing_ok=True)
        os.close(descriptor)
        for path in made:
            with suppress(OSError):  # it is not empty, and stays
                path.rmdir()


def _made(folder: Path) -> list[Path]:
    """Make a folder, and say which folders on its path were not there before, the innermost first."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        raise InputError(f"{folder} is a file, or lies below one; give a folder") from None
    except OSError as error:
        raise RunError(f"{folder} cannot be made: {error.strerror}") from None
    return missing


def _locked(folder: Path) -> int:
    path = folder / LOCK
    while True:
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | getattr(os, "O_NOFOLLOW", 0), 0o644)
        except OSError as error:
            raise RunError(f"{folder} cannot be written: {error.strerror}") from None
        try:
            if fcntl is not None:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if path.exists() and os.path.samestat(os.fstat(descriptor), path.stat()):
                return descriptor
            os.close(descriptor)  # its last owner removed it in between
        except BlockingIOError:
            os.close(descriptor)
            raise RunError(
                f"{folder} is in use by another vmoer: wait until it ends, or choose another folder"
            ) from None
        except OSError as error:
            os.close(descriptor)
            raise RunError(f"{folder} cannot be locked: {error.strerror}") from None


def sweep(folder: Path) -> None:
    """Remove what `write_bytes` left where its process was killed, but for subfolders that another process has locked."""
    for path in folder.rglob(".*"):
        between = [parent for parent in path.parents if parent.is_relative_to(folder) and parent != folder]
        if _LEFT.fullmatch(path.name) and path.is_file() and not any((parent / LOCK).exists() for parent in between):
            path.unlink(missing_ok=True)
