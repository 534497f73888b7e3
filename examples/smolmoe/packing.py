"""Everything worth keeping of a study in one small file: predictions, cells, what each run says of itself; no weights.

    <task>/predictions.parquet   of all labels and seeds, a column `folder` says where each row belongs
    <task>/factors.parquet       of all levels of the factors
    <task>/files.json            the JSON files by their path
    timing.jsonl

The results that `run.py --report` writes have the same files, and are taken in like a pack. Numbers are rounded to 14 bits, a
relative error of at most 6e-5, far below what any interval resolves: the rest of their bits are noise that does not compress.
A pack holds what was computed here, not what came out of other packs.
"""

import io
import json
import shutil
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from vmoer.errors import InputError
from vmoer.files import write_bytes, write_json

BITS = 14
RECOMPUTED = ("predictive_entropy",)  # from log_probs, by vmoer.predictions
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
    """Put what a pack or a folder of results holds where it belongs, but for what is there; returns how many folders came."""
    came, known = 0, _known(out)
    read = _read(file)
    for name, data in read.items():
        task = out / Path(name).parent.name
        if name.endswith(".parquet"):
            files = json.loads(read[f"{task.name}/files.json"])
            table = pq.read_table(io.BytesIO(data))
            folders = table["folder"].combine_chunks().dictionary_encode()
            for number, folder in enumerate(folders.dictionary.to_pylist()):
                place, meta = task / folder, f"{folder}/meta.json"
                rows = table.filter(pc.equal(folders.indices, number)).drop(["folder"])
                if (place / "meta.json").exists() or meta not in files:
                    _refuse_other(place, rows, file)
                    continue
                write_bytes(place / "predictions.parquet", _parquet(rows))
                known.append(f"{task.name}/{folder}")
                came += 1
    for name, data in read.items():
        if not name.endswith("files.json"):
            continue
        task = out / Path(name).parent.name
        # what says that something is complete comes last: a level after its predictions
        for path, value in sorted(json.loads(data).items(), key=lambda item: Path(item[0]).name == "level.json"):
            if ".." in Path(path).parts or Path(path).is_absolute():
                raise InputError(f"{file} is not a pack: it would write to {path}")
            alone = Path(path).name == "meta.json" and not (task / path).with_name("predictions.parquet").exists()
            if not (task / path).exists() and not alone:
                write_json(task / path, value)
                known.append(f"{task.name}/{path}")
    if "timing.jsonl" in read:
        mine = (out / "timing.jsonl").read_text() if (out / "timing.jsonl").exists() else ""
        new = [line for line in read["timing.jsonl"].decode().splitlines(keepends=True) if line not in mine]
        write_bytes(out / "timing.jsonl", ("".join(new) + mine).encode())
    write_json(out / _UNPACKED, sorted(set(known)))
    return came


def _refuse_other(place: Path, rows: pa.Table, file: Path) -> None:
    """Differences are paired by seed: two runs of one seed on models of their own must not be mixed."""
    path = place / "predictions.parquet"
    here = pq.read_table(path, columns=["id", "log_probs"]) if path.exists() else None
    if here is not None and not _rounded(here).equals(rows.select(["id", "log_probs"])):
        raise InputError(
            f"{file} has other predictions of {place.parent.name}/{place.name} than those here: another run's"
        )


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
    return _parquet(_rounded(pa.concat_tables(tables)))


def _rounded(table: pa.Table) -> pa.Table:
    for i, name in enumerate(table.column_names):
        column = table[name].combine_chunks()
        if pa.types.is_floating(column.type):
            table = table.set_column(i, name, pa.array(_cut(column), pa.float32(), mask=np.asarray(column.is_null())))
        elif pa.types.is_list(column.type):
            values = pa.array(_cut(column.flatten()), pa.float32())
            table = table.set_column(i, name, pa.ListArray.from_arrays(_offsets(column), values))
    return table


def _offsets(column: pa.ListArray) -> pa.Array:
    offsets = np.asarray(column.offsets)
    return pa.array(offsets - offsets[0], pa.int32())


def _cut(column: pa.Array) -> Any:
    """Rounded to BITS of mantissa."""
    mantissa, exponent = np.frexp(column.to_numpy(zero_copy_only=False).astype(np.float64))
    return np.ldexp(np.round(mantissa * 2**BITS) / 2**BITS, exponent).astype(np.float32)


def _parquet(table: pa.Table) -> bytes:
    buffer = io.BytesIO()
    words = [name for name in table.column_names if pa.types.is_string(table[name].type)]
    floats = [name for name in table.column_names if pa.types.is_float32(table[name].type)]
    floats += [f"{name}.list.element" for name in table.column_names if pa.types.is_list(table[name].type)]
    pq.write_table(
        table,
        buffer,
        compression="zstd",
        compression_level=15,
        use_dictionary=words,
        use_byte_stream_split=floats,  # type: ignore[arg-type]
    )
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
    return {str(path.relative_to(task)): json.loads(path.read_text()) for path in paths}


def lines(files: dict[str, Any]) -> bytes:
    """JSON, a file a line: small, and readable as a difference."""
    shown = (f"{json.dumps(name)}: {json.dumps(value)}" for name, value in files.items())
    return ("{\n" + ",\n".join(shown) + "\n}\n").encode()


def _read(file: Path) -> dict[str, bytes]:
    """What a pack or a folder of results holds, by name."""
    if file.is_dir():
        paths = [path for path in file.glob("*/*") if (path.parent / "files.json").is_file()]
        paths += file.glob("timing.jsonl")
        read = {str(p.relative_to(file)): p.read_bytes() for p in paths if p.suffix in (".parquet", ".json", ".jsonl")}
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
    return list(json.loads((out / _UNPACKED).read_text())) if (out / _UNPACKED).exists() else []


def _add(tar: tarfile.TarFile, name: str, data: bytes) -> None:
    info = tarfile.TarInfo(name)
    info.size = len(data)
    tar.addfile(info, io.BytesIO(data))
