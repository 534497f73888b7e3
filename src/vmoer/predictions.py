"""Predictions as files: `predictions.parquet`, `routing.parquet` and `meta.json`, written by `predict`, read by `scores`.

    id, task, split, method, seed     which question, answered by what
    answer, log_probs                 the right letter, and the logarithms over the question's own letters
    prompt_tokens, a signal each      null where a method has no such signal

Parts of an unfinished run lie in `.parts/`; `meta.json` comes last, so that it never describes other files.
"""

import io
import json
import shutil
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from vmoer import metrics as m
from vmoer.errors import InputError
from vmoer.files import write_bytes
from vmoer.tasks import Question

ROUTER_SIGNALS = ("gate_entropy", "logit_variance", "temperature", "mc_logit_variance", "novelty")
SIGNALS = (*ROUTER_SIGNALS, "mutual_information", "predictive_entropy")
KEYS = ("id", "task", "split")

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


# -- writing -----------------------------------------------------------------------------------------------------------


def write_part(path: Path, rows: list[int], found: dict[str, list[Any]], routing: bool) -> None:
    import pyarrow as pa

    columns = {"row": pa.array(rows, pa.int64()), "log_probs": pa.array(found["log_probs"], pa.list_(pa.float64()))}
    columns |= {name: pa.array(found[name], pa.float64()) for name in SIGNALS}
    if routing:
        columns["experts"] = pa.array(found["experts"], pa.list_(pa.list_(pa.int32())))
    write_bytes(path, _parquet(pa.table(columns)))


def finish(
    folder: Path, parts: list[Path], questions: Sequence[Question], lengths: list[int], meta: dict[str, Any]
) -> None:
    """The parts as one table in the order of the questions; `meta.json` last, so that it never describes other files."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    n, scratch = len(questions), parts[0].parent
    found = pa.concat_tables([pq.read_table(part) for part in parts]).sort_by("row")
    keys = pa.table({name: pa.array([getattr(q, name) for q in questions], pa.string()) for name in KEYS})
    columns = {name: keys[name] for name in KEYS}
    columns["method"] = pa.array([meta["method"]] * n, pa.string())
    columns["seed"] = pa.array([meta["seed"]] * n, pa.int64())
    columns["answer"] = pa.array([q.answer for q in questions], pa.int64())
    columns["log_probs"] = found["log_probs"]
    columns["prompt_tokens"] = pa.array(lengths, pa.int64())
    columns |= {name: found[name] for name in SIGNALS}
    for name in ("meta.json", "routing.parquet", "metrics.json"):  # of other predictions
        (folder / name).unlink(missing_ok=True)
    write_bytes(folder / "predictions.parquet", _parquet(pa.table(columns)), scratch)
    if meta["routing"]:
        layers = meta["config"]["layers"]
        of_layers = keys.take([row for row in range(n) for _ in layers])
        columns = {name: of_layers[name] for name in KEYS}
        columns["layer"] = pa.array([*layers] * n, pa.int32())
        columns["experts"] = pa.chunked_array([chunk.flatten() for chunk in found["experts"].chunks])
        write_bytes(folder / "routing.parquet", _parquet(pa.table(columns)), scratch)
    write_bytes(folder / "meta.json", (json.dumps(meta, indent=2) + "\n").encode(), scratch)
    shutil.rmtree(scratch)


def _parquet(table: Any) -> bytes:
    import pyarrow.parquet as pq

    buffer = io.BytesIO()
    pq.write_table(table, buffer)
    return buffer.getvalue()


# -- reading -----------------------------------------------------------------------------------------------------------


class Key(NamedTuple):
    """Which predictions: one method and seed on one split of one task."""

    task: str
    split: str
    method: str
    seed: int


class Cell(NamedTuple):
    """The predictions of one `Key`, ordered by question id; a signal is there if it has a value for every question."""

    ids: tuple[str, ...]
    log_probs: Floats
    answers: Ints
    prompt_tokens: Ints
    signals: dict[str, Floats]


class Predictions(NamedTuple):
    """All predictions of one model fine-tuned on one task."""

    study: str | None
    model: str | None
    source_task: str
    ood_tasks: tuple[str, ...]
    cells: dict[Key, Cell]
    split: str = "test"
    """Which split of the source task is scored; of the shifted tasks it is test."""

    def split_of(self, task: str) -> str:
        return self.split if task == self.source_task else "test"

    def scores(self, key: Key) -> bool:
        return key.split == self.split_of(key.task)


def files(directory: Path) -> list[Path]:
    """`DIR/predictions.parquet`, or else all `DIR/*/predictions.parquet`."""
    directory = Path(directory)
    single = directory / "predictions.parquet"
    found = [single] if single.exists() else sorted(directory.glob("*/predictions.parquet"))
    if not found:
        raise InputError(f"{directory}: no predictions.parquet there, nor in its subdirectories")
    return found


def _columns(path: Path) -> dict[str, Any]:
    """The columns of a parquet file, checked and sorted by key, then id; all-null signals left out."""
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ModuleNotFoundError as error:
        raise InputError("reading predictions needs pyarrow: pip install 'vmoer[eval]'") from error
    wanted = {name: pa.string() for name in ("id", "task", "split", "method")}
    wanted |= {name: pa.int64() for name in ("seed", "answer", "prompt_tokens")} | {"log_probs": pa.list_(pa.float64())}
    try:
        table = pq.read_table(path)
    except (pa.ArrowException, OSError) as error:
        raise InputError(f"{path}: not a readable parquet file ({str(error).splitlines()[0]})") from error
    if missing := [name for name in wanted if name not in table.column_names]:
        raise InputError(f"{path}: missing column {', '.join(missing)}")
    if not table.num_rows:
        raise InputError(f"{path}: no predictions, the file has no rows")
    wanted |= {name: pa.float64() for name in SIGNALS if name in table.column_names}
    cast = {}
    for name, kind in wanted.items():
        try:
            cast[name] = table[name].cast(kind)
        except pa.ArrowException as error:
            raise InputError(f"{path}: column {name} must be {kind}, not {table.schema.field(name).type}") from error
        if name not in SIGNALS and cast[name].null_count:
            raise InputError(f"{path}: column {name} has {cast[name].null_count} missing values")
    table = pa.table(cast).sort_by([(name, "ascending") for name in (*Key._fields, "id")]).combine_chunks()
    log_probs = table["log_probs"].combine_chunks()
    options = np.diff(log_probs.offsets.to_numpy())
    padded = np.full((len(options), max(options.max(), 1)), -np.inf)
    padded[np.arange(padded.shape[1]) < options[:, None]] = log_probs.values.to_numpy(zero_copy_only=False)
    answers = table["answer"].to_numpy()
    try:
        m.nll_per_question(padded, answers)
    except InputError as error:
        raise InputError(f"{path}: {error} (rows counted in the order {', '.join(Key._fields)}, id)") from error
    rest = {name: table[name].to_numpy() for name in wanted if name not in ("log_probs", "answer")}
    return rest | {"log_probs": padded, "answer": answers}


def _cells(path: Path) -> Iterator[tuple[Key, Cell]]:
    columns = _columns(path)
    keys = [Key(*key) for key in zip(*(columns[name].tolist() for name in Key._fields), strict=True)]
    starts = [i for i, key in enumerate(keys) if i == 0 or key != keys[i - 1]]
    for start, end in zip(starts, [*starts[1:], len(keys)], strict=True):
        key, cell = keys[start], {name: column[start:end] for name, column in columns.items()}
        ids = tuple(cell["id"].tolist())
        if len(set(ids)) < len(ids):
            twice = next(a for a, b in pairwise(ids) if a == b)
            raise InputError(f"{path}: question {twice} is there twice for {name_of(key)}")
        signals = {}
        for name in SIGNALS:
            lacking = np.isnan(cell[name]).sum() if name in cell else len(ids)
            if lacking == 0:
                signals[name] = cell[name]
            elif lacking < len(ids):
                raise InputError(f"{path}: column {name} lacks {lacking} of {len(ids)} values for {name_of(key)}")
        signals.setdefault("predictive_entropy", entropy(cell["log_probs"]))
        yield key, Cell(ids, cell["log_probs"], cell["answer"], cell["prompt_tokens"], signals)


def name_of(key: Key) -> str:
    return f"{key.method} seed {key.seed} on {key.task} {key.split}"


def entropy(log_probs: Floats) -> Floats:
    """To twelve digits, as confidence is: the order of a sum must not decide which of two questions is less sure."""
    finite = np.where(np.isneginf(log_probs), 0.0, log_probs)
    return np.asarray(-(np.exp(log_probs) * finite).sum(1).round(12), dtype=np.float64)


def load(directory: Path) -> list[Predictions]:
    """The predictions under a directory, one entry per model and source task.

    A method whose answers to validation questions are there too is given a second time with an output temperature: `map+ts`.
    """
    groups: dict[tuple[str | None, str], Predictions] = {}
    for path in files(directory):
        own = path.parent / "meta.json"
        meta_path = own if own.exists() else Path(directory) / "meta.json"
        try:
            meta = json.loads(meta_path.read_text())
            source = meta["source_task"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise InputError(f"{meta_path}: must be a JSON object with source_task beside {path.name}") from error
        fresh = Predictions(meta.get("study"), meta.get("model"), source, (), {}, meta.get("split") or "test")
        group = groups.setdefault((fresh.model, source), fresh)
        for key, cell in _cells(path):
            if key in group.cells:
                raise InputError(f"{path}: {name_of(key)} is already in another file of {directory}")
            group.cells[key] = cell
        listed = meta.get("ood_tasks") or {key.task for key in group.cells}
        shifts = tuple(sorted({*group.ood_tasks, *listed} - {source}))
        groups[fresh.model, source] = group._replace(ood_tasks=shifts)
    for group in groups.values():
        found = temperatures(group)
        for key, cell in list(group.cells.items()):
            if (key.method, key.seed) in found and group.scores(key):
                scaled = m.apply_temperature(cell.log_probs, found[key.method, key.seed])
                signals = {"predictive_entropy": entropy(scaled)}  # the others are those of the method itself
                group.cells[key._replace(method=f"{key.method}+ts")] = cell._replace(log_probs=scaled, signals=signals)
    return [groups[key] for key in sorted(groups, key=str)]


def temperatures(group: Predictions) -> dict[tuple[str, int], float]:
    """The output temperature of every method and seed that has validation predictions on the source task."""
    fitted = {
        (key.method, key.seed): m.fit_temperature(cell.log_probs, cell.answers)
        for key, cell in group.cells.items()
        if key[:2] == (group.source_task, "validation") and not group.scores(key)
    }
    return dict(sorted(fitted.items()))
