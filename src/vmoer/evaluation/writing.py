"""Writing predictions. A finished batch is a file in `.parts/`; the last one joins them, and writes `meta.json` last."""

import hashlib
import io
import json
import shutil
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from vmoer.errors import InputError, short
from vmoer.evaluation.predictions import KEYS, PART, in_order, meta_of, read_meta, read_parquet
from vmoer.files import write_bytes
from vmoer.tasks import Question

_SEALED = "vmoer.sha256"


_IDENTITY = (
    *("model", "method", "seed", "averaging", "passes"),
    *("split", "source_task", "ood_tasks", "questions", "fingerprint"),
)
"""What finished answers must share with new ones to be replaced by them without being asked."""


class Batch(NamedTuple):
    """The answers to a batch of questions."""

    log_probs: list[list[float]]
    signals: dict[str, list[float]]
    experts: list[list[list[int]]] | None
    """[question][layer][K]; None where there was more than one pass."""


def write_part(path: Path, rows: list[int], found: Batch, routing: bool) -> None:
    """One batch as a file; `rows` are the numbers of its questions."""
    import pyarrow as pa

    columns = {"row": pa.array(rows, pa.int64()), "log_probs": pa.array(found.log_probs, pa.list_(pa.float64()))}
    for name in in_order(found.signals):
        columns[name] = pa.array(found.signals.get(name, [None] * len(rows)), pa.float64())
    if routing:
        columns["experts"] = pa.array(found.experts, pa.list_(pa.list_(pa.int32())))
    table = pa.table(columns)
    write_bytes(path, parquet(table.replace_schema_metadata({_SEALED: _content(table)})))


def read_part(path: Path, rows: list[int], options: Sequence[int]) -> Any:
    """The batch of a file, as it was written, for these questions; None where there is none, or a damaged one."""
    import pyarrow as pa

    if not path.exists():
        return None
    try:
        table = read_parquet(path)
        found = (table.schema.metadata or {}).get(_SEALED.encode(), b"").decode()
        whole = found == _content(table) and table["row"].to_pylist() == rows
        if whole and [len(row) for row in table["log_probs"].to_pylist()] == list(options):
            return table
        reason = "its content is not what was written"
    except (InputError, pa.ArrowException, KeyError, ValueError, TypeError) as error:
        reason = str(error).splitlines()[0]
    warnings.warn(f"{path} is damaged ({reason}): its questions are answered again", stacklevel=2)
    return None


def _content(table: Any) -> str:
    """A digest of the values, whatever way they are stored."""
    return hashlib.sha256(json.dumps(table.to_pydict()).encode()).hexdigest()


def refuse_other(folder: Path, meta: dict[str, Any]) -> None:
    """Refuse a folder of finished answers to something else; the error names the first difference."""
    try:
        theirs = read_meta(folder / "meta.json")
    except InputError:  # none there, or none that is whole
        return
    here = json.loads(json.dumps(meta))
    for name in _IDENTITY:
        if theirs.get(name) != here.get(name):
            old, new = short(theirs.get(name)), short(here.get(name))
            differ = (
                "was made with other weights" if name == "fingerprint" else f"has {name}={old}, and now it is {new}"
            )
            raise InputError(f"{folder} {differ}: choose another folder, or give --replace")


def finish(
    folder: Path,
    scratch: Path,
    tables: list[Any],
    questions: Sequence[Question],
    lengths: list[int],
    meta: dict[str, Any],
    more: Mapping[str, Sequence[float]],
) -> None:
    """Join the parts into one table in the order of the questions. `more` are further columns. `scratch`,
    the folder of the parts, is gone afterwards."""
    import pyarrow as pa

    n = len(questions)
    found = pa.concat_tables([table.replace_schema_metadata(None) for table in tables]).sort_by("row")
    keys = pa.table({name: pa.array([getattr(q, name) for q in questions], pa.string()) for name in KEYS})
    columns = {name: keys[name] for name in KEYS}
    columns["method"] = pa.array([meta["method"]] * n, pa.string())
    columns["seed"] = pa.array([meta["seed"]] * n, pa.int64())
    columns["answer"] = pa.array([q.answer for q in questions], pa.int64())
    columns["log_probs"] = found["log_probs"]
    columns["prompt_tokens"] = pa.array(lengths, pa.int64())
    columns |= {name: found[name] for name in found.column_names if name not in PART}
    columns |= {name: pa.array(values, pa.float64()) for name, values in more.items()}
    for name in ("meta.json", "routing.parquet", "metrics.json"):  # of other predictions
        (folder / name).unlink(missing_ok=True)
    write_bytes(folder / "predictions.parquet", parquet(pa.table(columns)), scratch)
    if meta["routing"]:
        layers = meta["config"]["layers"]
        of_layers = keys.take([row for row in range(n) for _ in layers])
        columns = {name: of_layers[name] for name in KEYS}
        columns["layer"] = pa.array([*layers] * n, pa.int32())
        columns["experts"] = pa.chunked_array([chunk.flatten() for chunk in found["experts"].chunks])
        write_bytes(folder / "routing.parquet", parquet(pa.table(columns)), scratch)
    meta = meta_of(folder, meta)
    write_bytes(folder / "meta.json", (json.dumps(meta, indent=2) + "\n").encode(), scratch)
    shutil.rmtree(scratch)


def parquet(table: Any) -> bytes:
    """A table as the bytes of a file."""
    import pyarrow.parquet as pq

    buffer = io.BytesIO()
    pq.write_table(table, buffer)
    return buffer.getvalue()
