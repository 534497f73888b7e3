"""`vmoer merge RUN --out DIR`: a run as one folder without an adapter, for engines that want whole weights."""

import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from safetensors import SafetensorError

from vmoer.errors import InputError, RunError
from vmoer.files import locked
from vmoer.models import open_model
from vmoer.saved import merged
from vmoer.saved.fetch import locate
from vmoer.saved.store import read_folder, save


def merge(run: str, out: Path, *, dtype: str | None = None) -> Path:
    """Write the base model with the run's adapter added to its weights, its tokenizer, and the routers.

    `from_pretrained(out)` and then `vmoer.load(model, out)` open it. The folder appears whole or not at all.

    Args:
        run: a folder that `vmoer train` or `vmoer.save` wrote, or a repository of one.
        out: must not be there yet, or be empty.
        dtype: of the weights; by default that of the base model's files.
    """
    saved = read_folder(locate(run))
    with _beside(out.resolve()) as scratch:
        if out.exists() and (not out.is_dir() or any(out.iterdir())):
            raise InputError(f"{out} is not empty: give a new folder")
        opened = open_model(run, device="cpu", dtype=dtype or "auto")
        # PEFT hands back the model itself, routers included
        model = opened.model.merge_and_unload() if hasattr(opened.model, "merge_and_unload") else opened.model
        merged.note(model, saved.description)
        model.save_pretrained(scratch)  # the routers' parameters stay out of it
        opened.tokenizer.save_pretrained(scratch)
        save(model, scratch, calibrator=opened.calibrator and opened.calibrator.file)
        os.replace(scratch, out.resolve())
    return out


@contextmanager
def _beside(out: Path) -> Iterator[Path]:
    """A name for what becomes `out`, in a folder beside it that one process has at a time. What a killed one left there goes."""
    place = out.with_name(f".{out.name}.merge")
    scratch = place / secrets.token_hex(8)
    if place.is_symlink():
        raise InputError(f"{place} is a link: remove it")
    try:
        with locked(place):
            try:
                for left in place.glob("[0-9a-f]" * 16):
                    shutil.rmtree(left)
                yield scratch
            except SafetensorError as error:  # how a full disk is told
                raise RunError(f"{out} cannot be written: {' '.join(str(error).split())}") from None
            finally:
                shutil.rmtree(scratch, ignore_errors=True)
    finally:
        with suppress(OSError):  # another has it
            place.rmdir()
