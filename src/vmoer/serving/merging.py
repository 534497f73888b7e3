"""`vmoer merge RUN --out DIR`: a run as one folder without an adapter, for engines that want whole weights."""

import os
import secrets
import shutil
from pathlib import Path

from vmoer.errors import InputError
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
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise InputError(f"{out} is not empty: give a new folder")
    opened = open_model(run, device="cpu", dtype=dtype or "auto")
    # PEFT hands back the model itself, routers included
    model = opened.model.merge_and_unload() if hasattr(opened.model, "merge_and_unload") else opened.model
    out.parent.mkdir(parents=True, exist_ok=True)
    scratch = out.with_name(f".{out.name}.{secrets.token_hex(8)}")
    try:
        model.save_pretrained(scratch)  # the routers' parameters stay out of it
        opened.tokenizer.save_pretrained(scratch)
        merged.note(scratch, saved)
        save(model, scratch)
        os.replace(scratch, out)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return out
