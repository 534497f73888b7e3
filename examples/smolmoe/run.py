"""The study of variational routing on a real language model with experts, in one command that can be stopped and taken up.

    python examples/smolmoe/run.py --model out/smolmoe --data-root DATA --out out/study --seeds 0,1,2 --workers 8
    python examples/smolmoe/run.py ... --minutes 8 --pack out/part1.tar.xz      stop in time; keep what matters
    python examples/smolmoe/run.py ... --unpack out/part1.tar.xz --minutes 8    go on, here or on another machine
    python examples/smolmoe/run.py ... --unpack a.tar.xz b.tar.xz --report      tables and the page, without a GPU
    python examples/smolmoe/run.py --registered --model out/a out/b ...         the registered study (REGISTERED.md) in its place
    python examples/smolmoe/run.py --registered larger --model out/a ...        the one on a larger base (LARGER.md)

Cells are computed in the order of their importance (cells.py): MAP and every method on openbookqa with its shifts, for all seeds;
the paper's protocol; the other tasks; what makes it calibrate; how many layers and which. The small kernels of a small model
leave most of a GPU idle, so several processes share it.
"""

import argparse
import contextlib
import json
import math
import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import equal
from cells import BATCH, FEWER, HEADS, PARTS, STAGE1, STAGE2, cells
from comparisons import COMPARISONS, SMOLMOE, Comparison
from comparisons import PARTS as COMPARED

from vmoer.errors import InputError
from vmoer.report import report
from vmoer.studies import Cell, Study, backend_named, factors
from vmoer.studies._grid import Ended, missing, run
from vmoer.studies._packing import drop, pack, results, unpack
from vmoer.studies._processes import start_worker

TIMED = Path(__file__).parents[2] / "results" / "smolmoe" / "timing.jsonl"


def main(arguments: Sequence[str] | None = None) -> int:
    given = parser().parse_args(arguments)
    given.out.mkdir(parents=True, exist_ok=True)
    try:
        for file in given.unpack:
            print(f"{file}: {unpack(file, given.out)} folders of predictions came")
        if given.report:
            print(report(results(given.out)).page)
            return 0
        return compute(given)
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def parser() -> argparse.ArgumentParser:
    out = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = out.add_argument
    add("--model", nargs="+", default=["out/smolmoe"], help="model folders; name them alike everywhere: cells go by it")
    add(
        "--registered",
        nargs="?",
        const=SMOLMOE.name,
        choices=COMPARISONS,
        help="the parts and seeds of a registered study, each seed with the next model",
    )
    add("--system-prompt", help="what the printed protocol asks with in the registered study, in place of our own line")
    add("--out", type=Path, default=Path("out/study"))
    add("--data-root", default=os.environ.get("VMOER_DATA"), help="DIR/<task>/<split>.jsonl (or VMOER_DATA)")
    add(
        "--seeds",
        help="separated by commas; 0,1,2 by default, and in a registered study its own",
        type=lambda text: tuple(int(x) for x in text.split(",")),
    )
    add("--workers", type=int, default=8, help="processes that share the GPU")
    add("--backend", default="processes", help="processes, or ray: a cluster whose machines all see --out")
    add("--ray-address", help="host:port, auto or local")
    add(
        "--mps",
        action="store_true",
        help="let kernels of several processes run side by side (CUDA MPS), if it is there",
    )
    add("--minutes", type=float, default=math.inf, help="start nothing that is not expected to end in this time")
    add("--pack", type=Path, metavar="FILE", help="write what was computed here, without weights")
    add("--unpack", type=Path, nargs="+", default=[], metavar="FILE", help="take in packs or results first")
    add("--report", action="store_true", help="OUT/results from what is there, and nothing else")
    add("--dry-run", action="store_true", help="count the cells, and guess the time by those that were timed")
    parts = f"parts of the study, in this order; of the registered one {', '.join(COMPARED)}"
    add("--only", nargs="+", choices=(*PARTS, *COMPARED), help=parts)
    add("--labels", nargs="+", default=HEADS, help="methods and controls; @paper for its protocol")
    add("--limit", type=int, default=5000, help="questions of a split, at most; 5000 are the paper's")
    add("--passes", type=int, default=8)
    fewer = ", ".join(f"{part}={n}" for part, n in FEWER.items())
    how: dict[str, Any] = {"nargs": "+", "type": _count, "default": [], "metavar": "PART=N"}
    add("--seeds-of", **how, help=f"how many of its seeds a part takes; all, but {fewer}")
    add("--factors", nargs="+", choices=factors.FACTORS, default=factors.FACTORS, help="those to vary, in that part")
    smaller = ", ".join(f"{size} of {task}" for task, size in BATCH.items())
    for stage, plan in (("stage1", STAGE1), ("stage2", STAGE2)):
        add(f"--{stage}-epochs", type=int, help=f"{plan.epochs} by default; the registered study has its own")
        add(f"--{stage}-batch", type=int, default=plan.batch_size, help=f"of openbookqa; at most {smaller}")
    add("--keep-runs", action="store_true", help="do not drop trained routers that nothing needs any more")
    return out


def _count(text: str) -> tuple[str, int]:
    part, _, number = text.partition("=")
    if part not in (*PARTS, *COMPARED) or not number.isdigit() or not int(number):
        raise argparse.ArgumentTypeError(f"{text!r}: write PART=N, as in factors=2, with one of {', '.join(PARTS)}")
    return part, int(number)


def chosen(given: argparse.Namespace) -> Comparison | None:
    """The registered study that is asked for, by its name or by parts that only such a one has."""
    if given.registered is None and (given.only is None or not set(given.only) <= set(COMPARED)):
        return None
    return COMPARISONS[given.registered or SMOLMOE.name]


def wanted(given: argparse.Namespace) -> list[Cell]:
    new = chosen(given)
    known = PARTS if new is None else new.parts
    parts = given.only or known
    if not set(parts) <= set(known):
        other = ", ".join(sorted(set(parts) - set(known)))
        raise InputError(
            f"{'this' if new is None else new.name} study has no part {other}: a registered one is run by itself"
        )
    if len(given.model) > 1 and new is None:
        raise InputError("several models belong to the registered study: give one, or --registered")
    seeds = given.seeds or ((0, 1, 2) if new is None else new.all_seeds)
    stages = (STAGE1, STAGE2) if new is None else (new.stage1, new.stage2)
    epochs, sizes = (given.stage1_epochs, given.stage2_epochs), (given.stage1_batch, given.stage2_batch)
    stage1, stage2 = (
        replace(plan, epochs=plan.epochs if n is None else n, batch_size=size)
        for plan, n, size in zip(stages, epochs, sizes, strict=True)
    )
    study = Study(
        model=given.model[0],
        task="",
        out=given.out,
        methods=tuple(given.labels),
        seeds=seeds,
        averaging=("router", "answer", "full"),
        passes=given.passes,
        limit=given.limit,
        data_root=given.data_root,
        stage1=stage1,
        stage2=stage2,
        skip_nonfinite=True,
        system_prompt=given.system_prompt,
    )
    if new is not None:
        return equal.cells(new, study, given.model, parts, dict(given.seeds_of))
    return cells(study, parts, FEWER | dict(given.seeds_of), given.factors)


# -- computing ---------------------------------------------------------------------------------------------------------


def compute(given: argparse.Namespace) -> int:
    # read as a process starts: a model is opened again and again
    new = chosen(given)
    keep = str(SMOLMOE.keep_models if new is None else new.keep_models)
    for name, value in (("VMOER_KEEP_MODELS", keep), ("TOKENIZERS_PARALLELISM", "false"), ("OMP_NUM_THREADS", "1")):
        os.environ.setdefault(name, value)
    start_worker()
    asked, took = wanted(given), times(given.out)
    if new is not None:
        took = {cell.kind: equal.expected(new, cell) for cell in _all(asked)} | took
    if given.dry_run:
        estimate(asked, took, given)
        return 0

    def after(ended: Ended, left: Sequence[Cell]) -> None:
        cell, result = ended.cell, ended.result
        row = {"job": cell.title, "tier": cell.key["part"], "start": round(ended.start, 1)}
        row |= {"seconds": round(result.seconds, 1), "peak_gb": result.peak_gb, "failed": result.reason or None}
        with (given.out / "timing.jsonl").open("a") as file:
            file.write(json.dumps(row) + "\n")
        still = {path for other in left for path in other.key["runs"]}
        if not result.reason and not given.keep_runs:
            for path in set(cell.key["runs"]) - still:
                drop(path)

    backend = backend_named(given.backend, 1 if given.backend == "ray" else given.workers, given.ray_address)
    try:
        with _mps() if given.mps else contextlib.nullcontext():
            until = time.time() + 60 * given.minutes
            failed = run(asked, given.out, backend=backend, until=until, took=took, after=after).failed
    finally:  # also of a run that is ended from outside
        if given.pack:
            print(f"{given.pack}: {pack(given.out, given.pack) / 2**20:.1f} MiB")
    reasons = {cell.title: f": failed: {reason}" for cell, reason in failed}
    left = [cell for cell in asked if not cell.done(given.out)]
    print(f"missing: {len(left)} of {len(asked)} cells")
    for cell in left:
        print(f"  {cell.key['part']}: {cell.title}{reasons.get(cell.title, '')}")
    return 1 if failed else 0


def _all(asked: Sequence[Cell]) -> list[Cell]:
    """The cells, and those that they need."""
    return [one for cell in asked for one in (*_all(cell.needs), cell)]


def times(out: Path) -> dict[str, float]:
    """Seconds of cells by kind: those timed in OUT, or on an H200 by eight processes (results/smolmoe)."""
    found: dict[str, list[float]] = {}
    for path in (TIMED, out / "timing.jsonl"):
        for row in map(json.loads, path.read_text().splitlines() if path.exists() else ()):
            found.setdefault(re.sub(r", seed \d+$", "", row["job"]), []).append(row["seconds"])
    return {kind: statistics.median(seconds) for kind, seconds in found.items()}


def estimate(asked: Sequence[Cell], took: dict[str, float], given: argparse.Namespace) -> None:
    print(f"{'part':12}{'cells':>6}{'to do':>7}{'minutes':>9}   ({given.workers} processes)")
    for part in (*dict.fromkeys(cell.key["part"] for cell in asked), "all"):
        own = [cell for cell in asked if part in (cell.key["part"], "all")]
        todo = missing(own, given.out)
        known = [took[cell.kind] for cell in todo if cell.kind in took]
        each = statistics.mean(known) if known else math.nan
        print(f"{part:12}{len(own):>6}{len(todo):>7}{each * len(todo) / given.workers / 60 if todo else 0:>9.1f}")


PROBE = "import torch; torch.zeros(1, device='cuda' if torch.cuda.is_available() else 'cpu')"


@contextlib.contextmanager
def _mps() -> Iterator[None]:
    """NVIDIA's service that lets processes share a GPU's multiprocessors; without it they take turns. A process tries it first:
    where the service starts and serves nobody, every cell would fail."""
    started = False
    try:
        subprocess.run(["nvidia-cuda-mps-control", "-d"], check=True, capture_output=True, timeout=20)
        started = True
        subprocess.run([sys.executable, "-c", PROBE], check=True, capture_output=True, timeout=120)
    except (OSError, subprocess.SubprocessError) as error:
        print(f"no CUDA MPS ({error}): the processes take turns on the GPU")
        if started:
            _end_mps()
            started = False
    try:
        yield
    finally:
        if started:
            _end_mps()


def _end_mps() -> None:
    subprocess.run(["nvidia-cuda-mps-control"], input=b"quit\n", check=False, capture_output=True, timeout=60)


if __name__ == "__main__":
    raise SystemExit(main())
