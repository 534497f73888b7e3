"""results/: what keep.py keeps is what was there, no file is large, and every folder is described."""

import gzip
import json
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from vmoer import report
from vmoer.errors import InputError

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "results"
KEEP = runpy.run_path(str(RESULTS / "keep.py"))


def run_folder(folder: Path) -> Path:
    """As `examples/smolmoe/run.py --report` leaves one: a task with noise that no compression makes small."""
    rng, n = np.random.default_rng(0), 40_000
    table = pa.table(
        {
            "id": [f"q{i % 400}" for i in range(n)],
            "log_probs": pa.ListArray.from_arrays(
                pa.array(np.arange(0, 4 * n + 1, 4), pa.int32()),
                pa.array(rng.normal(size=4 * n).astype(np.float32)),
            ),
            "novelty": pa.array(rng.normal(size=n).astype(np.float32), mask=np.arange(n) < 900),
            "folder": [f"map-s{i // 400}" for i in range(n)],
        }
    )
    (folder / "t").mkdir(parents=True)
    pq.write_table(table, folder / "t" / "predictions.parquet")
    pq.write_table(table.slice(0, 100), folder / "t" / "factors.parquet")
    (folder / "t" / "files.json").write_text("{}\n")
    (folder / "map-s0").mkdir()
    (folder / "map-s0" / "predictions.parquet").write_bytes(b"not of a task")
    row: dict[str, object] = dict.fromkeys(("model", "task", "split", "method", "seed", "signal", "low", "high"))
    (folder / "metrics.json").write_text(json.dumps([row | {"method": "map", "metric": "nll", "value": 1.25}]))
    (folder / "report").mkdir()
    (folder / "report" / "tables.md").write_text("### A table\n")
    (folder / "report" / "index.html").write_text("a page")
    return folder


def test_what_is_kept_is_what_was_there(tmp_path: Path) -> None:
    """Oracle: the run's own files, read by pyarrow and json. No method and seed is cut in two."""
    source, target = run_folder(tmp_path / "run"), tmp_path / "kept"
    KEEP["keep"](source, target)
    files = [path for path in target.rglob("*") if path.is_file()]
    parts = sorted((target / "t" / "predictions.parquet").iterdir())
    assert len(parts) > 1
    names = {"metrics.json.gz", "tables.md", "t/files.json", "t/factors.parquet"}
    names |= {f"t/predictions.parquet/{path.name}" for path in parts}
    assert {str(path.relative_to(target)) for path in files} == names
    assert max(path.stat().st_size for path in files) <= 1_000_000
    for name in ("predictions.parquet", "factors.parquet"):
        assert pq.read_table(target / "t" / name).equals(pq.read_table(source / "t" / name))
    folders = [name for path in parts for name in set(pq.read_table(path)["folder"].to_pylist())]
    assert len(folders) == len(set(folders)) == 100
    assert report.read(target) == json.loads((source / "metrics.json").read_text())


def test_what_cannot_be_kept_is_said_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = run_folder(tmp_path / "run")
    (source / "t" / "files.json").write_text("x" * 1_000_001)
    with pytest.raises(InputError, match=r"files\.json would have 1,000,001 bytes"):
        KEEP["keep"](source, tmp_path / "kept")
    assert KEEP["main"]([str(tmp_path / "none"), str(tmp_path / "kept")]) == 2
    assert KEEP["main"]([]) == 2
    assert [line.partition(":")[0] for line in capsys.readouterr().err.splitlines()] == [
        f"{tmp_path / 'none'} has no metrics.json",
        "usage",
    ]


def test_rows_that_are_not_whole_are_one_line(tmp_path: Path) -> None:
    path = tmp_path / "metrics.json.gz"
    for data in (gzip.compress(b"[]" * 999)[:-9], b"no gzip", gzip.compress(b"no json")):
        path.write_bytes(data)
        with pytest.raises(InputError, match=r"metrics\.json\.gz: not a list of metrics rows") as caught:
            report.read(tmp_path)
        assert "\n" not in str(caught.value)


@pytest.mark.slow
def test_the_study_takes_in_what_is_kept(tmp_path: Path) -> None:
    """Oracle: the kept predictions of two methods on sciq, which come out of `--unpack` and `--report` as they went in."""
    kept, place = RESULTS / "smolmoe" / "sciq", tmp_path / "kept" / "sciq"
    assert len([*(kept / "predictions.parquet").iterdir()]) > 1
    wanted = pa.array([f"{method}-s{seed}" for method in ("map", "vglr-mf") for seed in (3, 4, 5)])
    for path in sorted((kept / "predictions.parquet").iterdir()):
        table = pq.read_table(path)
        table = table.filter(pc.is_in(table["folder"], wanted))
        assert len(table)
        (place / "predictions.parquet").mkdir(parents=True, exist_ok=True)
        pq.write_table(table, place / "predictions.parquet" / path.name)
    for name in ("files.json", "meta.json"):
        shutil.copy(kept / name, place)
    command = [sys.executable, str(ROOT / "examples" / "smolmoe" / "run.py"), "--out", str(tmp_path / "out")]
    done = subprocess.run([*command, "--unpack", str(tmp_path / "kept"), "--report"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    came = pq.read_table(tmp_path / "out" / "results" / "sciq" / "predictions.parquet")
    assert sorted(set(came["folder"].to_pylist())) == sorted(wanted.to_pylist())
    order = [("folder", "ascending"), ("task", "ascending"), ("split", "ascending"), ("id", "ascending")]
    assert came.sort_by(order).equals(pq.read_table(place / "predictions.parquet").sort_by(order))


def test_every_folder_is_described_and_has_its_own_words() -> None:
    table = (RESULTS / "README.md").read_text().partition("## What is kept")[0]
    described = re.findall(r"^\| \[([\w-]+)\]\(([\w-]+)/README\.md\) \|", table, re.M)
    assert [shown for shown, _ in described] == [link for _, link in described]
    there = {path.name for path in RESULTS.iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert {name for name, _ in described} == there
    for name in there:
        assert (RESULTS / name / "README.md").is_file()


def test_links_of_the_results_lead_somewhere() -> None:
    for page in RESULTS.rglob("README.md"):
        for link in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
            assert (page.parent / link).exists(), f"{page}: {link}"
