"""`merged.json`: which adapter lies in the weights of the model beside it.

The adapter of a run changes the model and hardly ever its router weights, by which routers know their base. So `vmoer merge`
leaves the adapter's fingerprint beside the weights, and who serves a run that was trained over an adapter looks for it there.
"""

from pathlib import Path

from vmoer.errors import InputError
from vmoer.files import JSON_LIMIT, parse_json, read_regular, write_json
from vmoer.saved.store import Saved

NAME = "merged.json"


def note(folder: Path, saved: Saved) -> None:
    """Say in a folder of weights that they hold a run's adapter, where it has one."""
    if (adapter := saved.description["adapter"]) is not None:
        write_json(folder / NAME, {"base_model": saved.description["base_model"], "adapter": adapter})


def adapter_in(folder: str | Path) -> str | None:
    """The fingerprint of the adapter in a folder's weights; None where there is none, or no folder."""
    path = Path(folder) / NAME
    if not path.is_file():
        return None
    found = parse_json(read_regular(path, JSON_LIMIT, Path(folder)), path)
    adapter = found.get("adapter") if isinstance(found, dict) else None
    if not isinstance(adapter, str):
        raise InputError(f"{path} is not what vmoer merge writes")
    return adapter


def check(model: str, saved: Saved) -> None:
    """Refuse a model without the adapter that the routers were trained over."""
    own, beside = saved.description["adapter"], adapter_in(saved.folder)
    if (own or beside) in (None, adapter_in(model)):
        return
    if own:
        merge = f"vmoer merge {saved.folder} --out DIR, then vmoer serve DIR --router DIR"
        raise InputError(f"{saved.folder} was trained over a LoRA adapter, which {model} does not hold: {merge}")
    raise InputError(
        f"{saved.folder} was trained over the adapter in the weights beside it, which {model} does not hold"
    )
