"""Predictions as files: `predictions.parquet`, `routing.parquet` and `meta.json`, their checking and reading.

    id, task, split, method, seed     which question, answered by what
    answer, log_probs                 the right letter, and the logarithms over the question's own letters
    prompt_tokens, a signal each      a signal is null where the method has none

`meta.json` is written last, with the checksums of the tables, so that it never describes other files (writing.py).
"""

import hashlib
import warnings
from collections.abc import Iterable, Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from vmoer import metrics as m
from vmoer.errors import InputError
from vmoer.files import SEAL, read_json, read_regular, sealed, unsealed
from vmoer.saved.calibrator import Stored, checked

SIGNALS = (
    "gate_entropy",
    "logit_variance",
    "temperature",
    "mc_logit_variance",
    "novelty",
    "mutual_information",
    "predictive_entropy",
)
"""The signals that have a column in every file. Others that a method records follow them by name."""
KEYS = ("id", "task", "split")
BASE = "base"
"""The folder of the plain model's answers, beside those of a run."""
TABLES = ("predictions.parquet", "routing.parquet")
TEXTS = "answers.parquet"
"""Free answers with their scores, from whatever made them; `vmoer threshold` reads them."""
LIMIT = 2**36
"""Bytes of the largest table that is read."""
PART = ("row", "log_probs", "experts")
_TEXT, _WHOLE = (*KEYS, "method"), ("seed", "answer", "prompt_tokens")

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


def in_order(signals: Iterable[str]) -> list[str]:
    """The columns of signals: those of every file, then those of this method alone."""
    own = sorted(set(signals) - set(SIGNALS))
    if taken := [name for name in own if name in (*PART, *_TEXT, *_WHOLE)]:
        raise InputError(f"a signal cannot be called {taken[0]}: predictions have a column of that name")
    return [*SIGNALS, *own]


# -- checking ----------------------------------------------------------------------------------------------------------


def meta_of(folder: Path, meta: Mapping[str, Any]) -> dict[str, Any]:
    """`meta.json` with the size and checksum of the parquet files beside it, and with a checksum of its own."""
    tables = [folder / name for name in TABLES if (folder / name).exists()]
    return sealed({**meta, "files": {path.name: _described(path.read_bytes()) for path in tables}})


def _described(data: bytes) -> dict[str, Any]:
    return {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}


def whole(folder: Path) -> bool:
    """Whether a folder has finished predictions. Damaged ones are named, and count as missing."""
    if not (folder / "meta.json").exists():
        return False
    try:
        read_meta(folder / "meta.json", required=True)
        return True
    except InputError as error:
        warnings.warn(f"{error}; the questions are answered again", stacklevel=2)
        return False


def read_meta(path: Path, required: bool = False) -> dict[str, Any]:
    """The content of a `meta.json`, with what it says of the files beside it checked.

    One without checksums, beside predictions from elsewhere, is taken as it is, unless they are `required`.
    """
    meta = read_json(path)
    if not isinstance(meta, dict):
        raise InputError(f"{path}: must be a JSON object with source_task")
    if SEAL not in meta and not required:
        return meta
    meta = unsealed(meta, path)
    files = meta.get("files")
    if not isinstance(files, dict) or not set(files) <= set(TABLES) or TABLES[0] not in files:
        raise InputError(f"{path} does not list its predictions")
    for name, about in files.items():
        if not (path.parent / name).exists():
            raise InputError(f"{path.parent / name} is missing, and meta.json says that it was written")
        if _described(read_regular(path.parent / name, LIMIT)) != about:
            raise InputError(f"{path.parent / name} was changed: its checksum is not the one in meta.json")
    return meta


# -- reading -----------------------------------------------------------------------------------------------------------


class Key(NamedTuple):
    """Which predictions: one method and seed on one split of one task."""

    task: str
    split: str
    method: str
    seed: int


class Answered(NamedTuple):
    """The predictions of one `Key`, ordered by question id."""

    ids: tuple[str, ...]
    log_probs: Floats
    answers: Ints
    prompt_tokens: Ints
    signals: dict[str, Floats]
    """Those that have a value for every question."""


class Predictions(NamedTuple):
    """All predictions of one model fine-tuned on one task."""

    study: str | None
    model: str | None
    source_task: str
    ood_tasks: tuple[str, ...]
    cells: dict[Key, Answered]
    split: str = "test"
    """The split of the source task that is scored. Of the shifted tasks it is always test."""
    calibrators: dict[tuple[str, int], Stored] = {}  # noqa: RUF012  never changed: `load` makes one for each
    """By method and seed: those of the runs that answered."""
    moved: dict[tuple[str, int], float] = {}  # noqa: RUF012  likewise
    """By method and seed: how far training moved the routers' parameters (training/moved.py)."""

    def split_of(self, task: str) -> str:
        return self.split if task == self.source_task else "test"

    def scores(self, key: Key) -> bool:
        return key.split == self.split_of(key.task)


def files(directory: Path) -> list[Path]:
    """`DIR/predictions.parquet` and that of the plain model beside it, in `DIR/base`; or else all `DIR/*/predictions.parquet`."""
    directory = Path(directory)
    single = directory / "predictions.parquet"
    beside = [path for path in (directory / BASE / single.name,) if path.exists()]
    found = [single, *beside] if single.exists() else sorted(directory.glob("*/predictions.parquet"))
    for meta in (directory / "meta.json", *sorted(directory.glob("*/meta.json"))):
        if single not in found and meta.parent / single.name not in found and _lists(meta):
            raise InputError(
                f"{meta.parent / single.name} is missing, and the meta.json beside it says that it was written"
            )
    if not found:
        raise InputError(f"{directory}: no predictions.parquet there, nor in its subdirectories")
    return found


def _lists(meta: Path) -> bool:
    """Whether a `meta.json` says that there are predictions beside it."""
    return meta.exists() and "files" in read_json(meta)


def read_parquet(path: Path) -> Any:
    """A table from a plain file, or from a folder of several (results/keep.py); the bytes that are parsed are those read."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    parts = sorted(path.glob("*.parquet")) if path.is_dir() else [path]
    try:
        tables = [pq.read_table(pa.BufferReader(read_regular(part, LIMIT))) for part in parts]
        return tables[0] if len(tables) == 1 else pa.concat_tables(tables)
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: not a readable parquet file ({str(error).splitlines()[0]})") from error


def _table(path: Path) -> Any:
    """The columns of a parquet file with their types, checked, sorted by key, then id."""
    try:
        import pyarrow as pa
    except ModuleNotFoundError as error:
        raise InputError("reading predictions needs pyarrow: pip install 'vmoer[eval]'") from error
    wanted = dict.fromkeys(_TEXT, pa.string()) | dict.fromkeys(_WHOLE, pa.int64())
    wanted["log_probs"] = pa.list_(pa.float64())
    table = read_parquet(path)
    if missing := [name for name in wanted if name not in table.column_names]:
        raise InputError(f"{path}: missing column {', '.join(missing)}")
    if not table.num_rows:
        raise InputError(f"{path}: no predictions, the file has no rows")
    others = [field for field in table.schema if field.name not in (*wanted, *PART)]
    signals = [field.name for field in others if field.name in SIGNALS or pa.types.is_floating(field.type)]
    cast = {}
    for name, kind in (wanted | dict.fromkeys(in_order(signals), pa.float64())).items():
        if name not in table.column_names:
            continue
        try:
            cast[name] = table[name].cast(kind)
        except pa.ArrowException as error:
            raise InputError(f"{path}: column {name} must be {kind}, not {table.schema.field(name).type}") from error
        if name in KEYS and "" in cast[name].to_pylist():
            raise InputError(f"{path}: column {name} has an empty name")
        if name in wanted and cast[name].null_count:
            raise InputError(f"{path}: column {name} has {cast[name].null_count} missing values")
    return pa.table(cast).sort_by([(name, "ascending") for name in (*Key._fields, "id")]).combine_chunks()


def _columns(path: Path) -> dict[str, Any]:
    """The columns as arrays, log_probs padded, [n, C]; the answers are checked."""
    table = _table(path)
    log_probs = table["log_probs"].combine_chunks()
    options = np.diff(log_probs.offsets.to_numpy())
    padded = np.full((len(options), max(options.max(), 1)), -np.inf)
    padded[np.arange(padded.shape[1]) < options[:, None]] = log_probs.values.to_numpy(zero_copy_only=False)
    columns = {name: table[name].to_numpy() for name in table.column_names if name != "log_probs"}
    try:
        m.nll_per_question(padded, columns["answer"])
    except InputError as error:
        raise InputError(f"{path}: {error} (rows counted in the order {', '.join(Key._fields)}, id)") from error
    return columns | {"log_probs": padded}


def _answered(path: Path) -> Iterator[tuple[Key, Answered]]:
    columns = _columns(path)
    keys = [Key(*key) for key in zip(*(columns[name].tolist() for name in Key._fields), strict=True)]
    starts = [i for i, key in enumerate(keys) if i == 0 or key != keys[i - 1]]
    for start, end in zip(starts, [*starts[1:], len(keys)], strict=True):
        key, own = keys[start], {name: column[start:end] for name, column in columns.items()}
        ids = tuple(own["id"].tolist())
        if len(set(ids)) < len(ids):
            twice = next(a for a, b in pairwise(ids) if a == b)
            raise InputError(f"{path}: question {twice} is there twice for {name_of(key)}")
        signals = {}
        for name, values in own.items():
            if name in (*_TEXT, *_WHOLE, "log_probs"):
                continue
            lacking = np.isnan(values).sum()
            if lacking == 0:
                signals[name] = values
            elif lacking < len(ids):
                raise InputError(f"{path}: column {name} lacks {lacking} of {len(ids)} values for {name_of(key)}")
        signals.setdefault("predictive_entropy", entropy(own["log_probs"]))
        yield key, Answered(ids, own["log_probs"], own["answer"], own["prompt_tokens"], signals)


def name_of(key: Key) -> str:
    return f"{key.method} seed {key.seed} on {key.task} {key.split}"


def entropy(log_probs: Floats) -> Floats:
    """The entropy of each question's probabilities, rounded as confidence is, so that every machine sees the same ties."""
    finite = np.where(np.isneginf(log_probs), 0.0, log_probs)
    return np.asarray(-(np.exp(log_probs) * finite).sum(1).round(12), dtype=np.float64)


def load(directory: Path) -> list[Predictions]:
    """The predictions under a directory, one entry per model and source task."""
    groups: dict[tuple[str | None, str], Predictions] = {}
    for path in files(directory):
        own = path.parent / "meta.json"
        meta_path = own if own.exists() else Path(directory) / "meta.json"
        meta = read_meta(meta_path)
        source = meta.get("source_task")
        if not isinstance(source, str):
            raise InputError(f"{meta_path}: must be a JSON object with source_task beside {path.name}")
        fresh = Predictions(meta.get("study"), meta.get("model"), source, (), {}, meta.get("split") or "test", {}, {})
        group = groups.setdefault((fresh.model, source), fresh)
        for key, cell in _answered(path):
            if key in group.cells:
                raise InputError(f"{path}: {name_of(key)} is already in another file of {directory}")
            group.cells[key] = cell
        if meta.get("calibrator") is not None:
            stored = checked(meta["calibrator"], f"{meta_path}, calibrator")
            group.calibrators[str(meta.get("method")), int(meta.get("seed") or 0)] = stored
        if isinstance(moved := (meta.get("moved") or {}).get("parameters"), float):
            group.moved[str(meta.get("method")), int(meta.get("seed") or 0)] = moved
        listed = meta.get("ood_tasks") or {key.task for key in group.cells}
        shifts = tuple(sorted({*group.ood_tasks, *listed} - {source}))
        groups[fresh.model, source] = group._replace(ood_tasks=shifts)
    return [groups[key] for key in sorted(groups, key=str)]
