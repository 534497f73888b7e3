"""Keep a result in git: the compact form of a folder that a run has left, no file over 1 MB.

python results/keep.py out/study/results results/smolmoe        of examples/smolmoe/run.py --report
python results/keep.py out/demo results/demo                    of vmoer demo --full

metrics.json            becomes metrics.json.gz, which vmoer.report reads in its place
report/tables.md        is kept as tables.md; the page beside it is not: `vmoer report` makes it, releases carry it
timing.jsonl            as it is
TASK/*.json             as they are, of folders with a files.json: they are what `run.py --unpack` takes in
TASK/*.parquet          as they are, or where they are too large as a folder of that name with several files, which
                        pyarrow reads as one table; predictions of one method and seed stay in one file
"""

import gzip
import io
import sys
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from vmoer.errors import InputError
from vmoer.files import write_bytes

LARGEST = 1_000_000


def keep(source: Path, target: Path) -> None:
    """Write the compact form of `source` into `target`, over what is there."""
    if not (source / "metrics.json").is_file():
        raise InputError(f"{source} has no metrics.json: it is no folder of results")
    compact(target / "metrics.json.gz", gzip.compress((source / "metrics.json").read_bytes(), 9, mtime=0))
    for place, name in (("report/tables.md", "tables.md"), ("timing.jsonl", "timing.jsonl")):
        if (source / place).is_file():
            compact(target / name, (source / place).read_bytes())
    for path in sorted(source.glob("*/*")):
        if (path.parent / "files.json").is_file() and path.suffix in (".json", ".parquet"):
            for name, data in parts(path):
                compact(target / path.parent.name / name, data)


def compact(path: Path, data: bytes) -> None:
    if len(data) > LARGEST:
        raise InputError(f"{path} would have {len(data):,} bytes; what is kept in git has at most {LARGEST:,}")
    write_bytes(path, data)


def parts(path: Path) -> Iterator[tuple[str, bytes]]:
    """A file as it is, or a table that is too large in several files of a folder."""
    if path.suffix != ".parquet" or path.stat().st_size <= LARGEST:
        yield path.name, path.read_bytes()
        return
    table = pq.read_table(path)
    count = 1 + path.stat().st_size * 11 // (LARGEST * 10)  # a little more than needed: folders differ in size
    bounds, start = [i for i, new in enumerate(_starts(table["folder"])) if new], 0
    for number in range(count):
        after = [bound for bound in bounds if bound >= (number + 1) * len(table) / count]
        end = after[0] if after else len(table)
        yield f"{path.name}/{number}.parquet", parquet(table.slice(start, end - start))
        start = end


def _starts(folders: pa.ChunkedArray) -> list[bool]:
    names = folders.to_pylist()
    return [i == 0 or name != names[i - 1] for i, name in enumerate(names)]


def parquet(table: pa.Table) -> bytes:
    """As small as zstd makes it; the bytes of numbers of one kind are stored side by side."""
    words = [name for name in table.column_names if pa.types.is_string(table[name].type)]
    floats = [name for name in table.column_names if pa.types.is_float32(table[name].type)]
    floats += [f"{name}.list.element" for name in table.column_names if pa.types.is_list(table[name].type)]
    buffer = io.BytesIO()
    pq.write_table(
        table,
        buffer,
        compression="zstd",
        compression_level=19,
        use_dictionary=words,
        use_byte_stream_split=floats,  # type: ignore[arg-type]
    )
    return buffer.getvalue()


def main(arguments: list[str]) -> int:
    if len(arguments) != 2:
        print("usage: python results/keep.py RUN results/NAME", file=sys.stderr)
        return 2
    try:
        keep(*map(Path, arguments))
    except InputError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
