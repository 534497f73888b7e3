"""What studies of several tasks computed, in one small file: predictions, cells, what each run says of itself; no weights.

    <task>/predictions.parquet   of all labels and seeds, a column `folder` says where each row belongs
    <task>/factors.parquet       of all levels of the factors
    <task>/files.json            the JSON files by their path
    timing.jsonl

OUT/<task> is a study's folder. `results` writes the same files into a folder, which is taken in like a pack. Numbers are rounded
to 14 bits, a relative error of at most 6e-5, far below what any interval resolves: the rest of their bits are noise that does
not compress. A pack holds what was computed here, not what came out of other packs.
"""

import io
import json
import re
import shutil
import tarfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from vmoer.errors import InputError
from vmoer.evaluation import scores
from vmoer.evaluation.predictions import meta_of
from vmoer.evaluation.scores import Row
from vmoer.files import SEAL, parse_json, read_json, sealed, write_bytes, write_json, write_rows
from vmoer.studies import factor_rows, stability
from vmoer.studies._labels import stage1_label

BITS = 14
RECOMPUTED = ("predictive_entropy",)  # from log_probs, by vmoer.evaluation.predictions
_UNPACKED = "unpacked.json"


def pack(out: Path, file: Path) -> int:
    """Write the pack; returns its size in bytes."""
    known = set(_known(out))
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:xz") as tar:
        for task in tasks(out):
            _records(task)
            files = {name: value for name, value in said(task).items() if f"{task.name}/{name}" not in known}
            # listed after the files: work goes on meanwhile, and a file must not speak of predictions that are not here
            for name, folders in kinds(task).items():
                if new := [f for f in folders if str(f.relative_to(out)) not in known]:
                    _add(tar, f"{task.name}/{name}", merged(new, task))
            _add(tar, f"{task.name}/files.json", lines(files))
        if (out / "timing.jsonl").exists():
            _add(tar, "timing.jsonl", (out / "timing.jsonl").read_bytes())
    write_bytes(file, buffer.getvalue())
    return len(buffer.getvalue())


def unpack(file: Path, out: Path) -> int:
    """Put what a pack holds where it belongs, but for what is there already; returns how many folders of predictions came."""
    read, known = _read(file), _known(out)
    came = [folder for name in read if name.endswith(".parquet") for folder in _unpack_table(name, read, file, out)]
    known += came
    for name, data in read.items():
        if name.endswith("files.json"):
            known += _unpack_files(parse_json(data, f"{file}: {name}"), file, out / Path(name).parent.name)
    if "timing.jsonl" in read:
        mine = (out / "timing.jsonl").read_text() if (out / "timing.jsonl").exists() else ""
        new = [line for line in read["timing.jsonl"].decode().splitlines(keepends=True) if line not in mine]
        write_bytes(out / "timing.jsonl", ("".join(new) + mine).encode())
    write_json(out / _UNPACKED, sorted(set(known)))
    return len(came)


def _unpack_table(name: str, read: dict[str, bytes], file: Path, out: Path) -> list[str]:
    """The predictions of one file, each folder's where it belongs; returns the folders that came."""
    task, came = out / Path(name).parts[0], []
    files = parse_json(read[f"{task.name}/files.json"], f"{file}: {task.name}/files.json")
    table = pq.read_table(io.BytesIO(read[name]))
    folders = table["folder"].combine_chunks().dictionary_encode()
    for number, folder in enumerate(folders.dictionary.to_pylist()):
        place = _inside(folder, task, file)
        rows = table.filter(pc.equal(folders.indices, number)).drop(["folder"])
        if (place / "meta.json").exists() or f"{folder}/meta.json" not in files:
            _refuse_other(place, rows, file)
            continue
        write_bytes(place / "predictions.parquet", _parquet(rows))
        came.append(f"{task.name}/{folder}")
    return came


def _unpack_files(files: dict[str, Any], file: Path, task: Path) -> list[str]:
    """The JSON files of a task; returns those that came."""
    came = []
    # what says that something is complete comes last: a level after its predictions
    for path, value in sorted(files.items(), key=lambda item: Path(item[0]).name == "level.json"):
        place = _inside(path, task, file)
        alone = place.name == "meta.json" and not place.with_name("predictions.parquet").exists()
        if not place.exists() and not alone:
            write_json(place, _complete(place, value))
            came.append(f"{task.name}/{path}")
    return came


def _complete(place: Path, value: Any) -> Any:
    """A file as the study would have left it: with its checksum, and with those of the predictions that came with it."""
    if place.name == "meta.json":
        return meta_of(place.parent, value)
    return sealed(value) if place.name == "level.json" or place.parent.name == "cells" else value


def _inside(path: str, task: Path, file: Path) -> Path:
    if ".." in Path(path).parts or Path(path).is_absolute():
        raise InputError(f"{file} is not a pack: it would write to {path}")
    return task / path


def _refuse_other(place: Path, rows: pa.Table, file: Path) -> None:
    """Differences are paired by seed: two runs of one seed on models of their own must not be mixed."""
    path = place / "predictions.parquet"
    here = pq.read_table(path, columns=["id", "log_probs"]) if path.exists() else None
    if here is not None and not _rounded(here).equals(rows.select(["id", "log_probs"])):
        which = f"{place.parent.name}/{place.name}"
        raise InputError(f"{file} has other predictions of {which} than those here: another run's")


def results(out: Path, say: Callable[[str], object] = print) -> Path:
    """OUT/results: the files of a pack of everything, and every metric; returns the folder."""
    place, rows = out / "results", list[Row]()
    for task in tasks(out):
        files = said(task)
        (place / task.name).mkdir(parents=True, exist_ok=True)
        for name, folders in kinds(task).items():
            if folders:
                write_bytes(place / task.name / name, merged(folders, task))
        if metas := [value for name, value in files.items() if re.fullmatch("[^/]+/meta.json", name)]:
            keys = ("model", "source_task", "ood_tasks", "split", "dtype", "device", "versions", "passes")
            write_json(place / task.name / "meta.json", {key: metas[0][key] for key in keys})
            _check_stage1(task.name, metas, say)
        write_bytes(place / task.name / "files.json", lines(files))
        rows += factor_rows.summary(task)
        rows += [row for cell in sorted(task.glob("cells/*.json")) for row in json.loads(cell.read_text())["rows"]]
    rows = _together([*scores.score(place), *stability.over_seeds(rows)])
    write_rows(place / "metrics.json", rows)
    if (out / "timing.jsonl").exists():
        (place / "timing.jsonl").write_bytes((out / "timing.jsonl").read_bytes())
    return place


def _together(rows: Sequence[Row]) -> list[Row]:
    """Without each seed's own rows where there is one over all seeds: they follow from the predictions, and would be most."""

    def key(row: Row) -> tuple[Any, ...]:
        return tuple((name, row[name]) for name in row if name not in ("seed", "value", "low", "high", "note", "seeds"))

    joint = {key(row) for row in rows if row["seed"] is None}
    return [row for row in rows if row["seed"] is None or key(row) not in joint]


def _check_stage1(task: str, metas: Sequence[Row], say: Callable[[str], object]) -> None:
    """Methods are paired with MAP by seed; where stage 1 was made again on another machine, the pair is not exact."""
    made: dict[tuple[int, str], set[str]] = {}
    for meta in metas:
        if meta["method"] != "map-early" and (label := _stage1_of(meta["method"])) is not None:
            made.setdefault((meta["seed"], label), set()).add(str(meta["fingerprint"]["adapter"]))
    for (seed, label), adapters in sorted(made.items()):
        if len(adapters) > 1:
            say(f"{task}, seed {seed}: {label} was made {len(adapters)} times: methods and map are not paired exactly")


def _stage1_of(method: str) -> str | None:
    """The MAP model that a label starts from; None of what was made from others' answers."""
    try:
        return stage1_label(method)
    except InputError:
        return None


def drop(run: Path) -> None:
    """A run folder that nothing needs any more: what it says of itself stays, its weights go."""
    if (run / "run.json").exists():
        write_bytes(run.parent.parent / "records" / f"{run.name}.json", (run / "run.json").read_bytes())
    shutil.rmtree(run, ignore_errors=True)


def merged(folders: list[Path], task: Path) -> bytes:
    """The predictions of many folders as one file."""
    tables = []
    for folder in folders:
        table = pq.read_table(folder / "predictions.parquet")
        table = table.drop([name for name in RECOMPUTED if name in table.column_names])
        tables.append(table.append_column("folder", pa.array([str(folder.relative_to(task))] * len(table))))
    # some have columns of their own, and what came out of a pack is float32
    return _parquet(_rounded(pa.concat_tables(tables, promote_options="permissive")))


def _rounded(table: pa.Table) -> pa.Table:
    for i, name in enumerate(table.column_names):
        column = table[name].combine_chunks()
        if pa.types.is_floating(column.type):
            table = table.set_column(i, name, pa.array(_cut(column), pa.float32(), mask=np.asarray(column.is_null())))
        elif pa.types.is_list(column.type):
            offsets = np.asarray(column.offsets)
            values = pa.array(_cut(column.flatten()), pa.float32())
            lists = pa.ListArray.from_arrays(pa.array(offsets - offsets[0], pa.int32()), values)
            table = table.set_column(i, name, lists)
    return table


def _cut(column: pa.Array) -> Any:
    """Rounded to BITS of mantissa."""
    mantissa, exponent = np.frexp(column.to_numpy(zero_copy_only=False).astype(np.float64))
    return np.ldexp(np.round(mantissa * 2**BITS) / 2**BITS, exponent).astype(np.float32)


def _parquet(table: pa.Table) -> bytes:
    buffer = io.BytesIO()
    words = [name for name in table.column_names if pa.types.is_string(table[name].type)]
    floats = [name for name in table.column_names if pa.types.is_float32(table[name].type)]
    floats += [f"{name}.list.element" for name in table.column_names if pa.types.is_list(table[name].type)]
    how: dict[str, Any] = {"use_dictionary": words, "use_byte_stream_split": floats}
    pq.write_table(table, buffer, compression="zstd", compression_level=15, **how)
    return buffer.getvalue()


def tasks(out: Path) -> list[Path]:
    """The folders of the tasks that something was computed of."""
    marks = ("cells", "runs", "records")
    return sorted(path for path in out.iterdir() if any((path / mark).is_dir() for mark in marks))


def kinds(task: Path) -> dict[str, list[Path]]:
    """Folders of finished predictions by the file they go into: of labels, and of the levels of the factors that are complete."""
    levels = [path.parent for path in sorted(task.glob("factors/*/level.json"))]
    found = {
        "predictions.parquet": sorted(task.glob("*/meta.json")),
        "factors.parquet": [meta for level in levels for meta in sorted(level.glob("*/meta.json"))],
    }
    return {
        name: [meta.parent for meta in metas if meta.with_name("predictions.parquet").exists()]
        for name, metas in found.items()
    }


def said(task: Path) -> dict[str, Any]:
    """The JSON files of cells, runs, predictions and levels by their path."""
    places = ("cells/*.json", "records/*.json", "*/meta.json", "factors/*/level.json", "factors/*/*/meta.json")
    paths = [path for place in places for path in sorted(task.glob(place))]
    return {str(path.relative_to(task)): _without_checksums(read_json(path)) for path in paths}


def _without_checksums(value: Any) -> Any:
    """They are those of files here; what is unpacked elsewhere gets its own."""
    return {k: v for k, v in value.items() if k not in (SEAL, "files")} if isinstance(value, dict) else value


def lines(files: dict[str, Any]) -> bytes:
    """JSON, a file a line: small, and readable as a difference."""
    shown = (f"{json.dumps(name)}: {json.dumps(value)}" for name, value in files.items())
    return ("{\n" + ",\n".join(shown) + "\n}\n").encode()


def _read(file: Path) -> dict[str, bytes]:
    """What a pack or a folder of results holds, by name."""
    if file.is_dir():
        folders = [path.parent for path in file.glob("*/files.json")]
        # a table too large for one file is a folder of several (results/keep.py)
        paths = [p for folder in folders for p in (*folder.glob("*.json"), *folder.rglob("*.parquet")) if p.is_file()]
        paths += file.glob("timing.jsonl")
        read = {str(path.relative_to(file)): path.read_bytes() for path in paths}
        if not any(name.endswith("/files.json") for name in read):
            raise InputError(f"{file} has no TASK/files.json: it is no folder of results")
        return read
    if not file.is_file():
        raise InputError(f"{file}: no such file")
    try:
        with tarfile.open(file, "r:xz") as tar:
            return {m.name: handle.read() for m in tar.getmembers() if (handle := tar.extractfile(m)) is not None}
    except (tarfile.TarError, EOFError, OSError) as error:
        raise InputError(f"{file} is not a pack: {error}") from None


def _records(task: Path) -> None:
    """What the runs that are still here say of themselves, where it does not make them look complete elsewhere."""
    for run in (*task.glob("runs/*/run.json"), *task.glob("runs/*/map*/run.json")):
        name = "-".join(run.parent.relative_to(task / "runs").parts)
        write_bytes(task / "records" / f"{name}.json", run.read_bytes())


def _known(out: Path) -> list[str]:
    return list(read_json(out / _UNPACKED)) if (out / _UNPACKED).exists() else []


def _add(tar: tarfile.TarFile, name: str, data: bytes) -> None:
    info = tarfile.TarInfo(name)
    info.size = len(data)
    tar.addfile(info, io.BytesIO(data))
