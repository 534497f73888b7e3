"""Files appear whole or not at all."""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def write_bytes(path: Path, data: bytes, scratch: Path | None = None) -> None:
    """Write beside the target, make sure it is on disk, then rename: a killed process leaves the old file as it was.

    What it leaves besides is in `scratch`, where given, and goes with that folder.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = (scratch or path.parent) / f".{path.name}.{os.getpid()}"
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    write_bytes(path, text.encode())


def write_json(path: Path, value: Any) -> None:
    write_text(path, json.dumps(value, indent=1, allow_nan=False) + "\n")


def write_rows(path: Path, rows: Sequence[Any]) -> None:
    """A JSON list, a row a line: small, and readable as a difference."""
    write_text(path, "[\n" + ",\n".join(json.dumps(row, allow_nan=False) for row in rows) + "\n]\n")
