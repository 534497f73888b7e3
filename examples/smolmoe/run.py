"""The study of variational routing on a real language model with experts, in one command that can be stopped and taken up.

    python examples/smolmoe/run.py --model out/smolmoe --data-root DATA --out out/study --seeds 0,1,2 --workers 8
    python examples/smolmoe/run.py ... --minutes 8 --pack out/part1.tar.xz      stop in time; keep what matters
    python examples/smolmoe/run.py ... --unpack out/part1.tar.xz --minutes 8    go on, here or on another machine
    python examples/smolmoe/run.py ... --unpack a.tar.xz b.tar.xz --report      tables and the page, without a GPU

Jobs are done in the order of their importance (jobs.py): MAP and every method on openbookqa with its shifts, for all seeds; the
paper's protocol; the other tasks; what makes it calibrate; how many layers and which. A finished one is never computed again.
The small kernels of a small model leave most of a GPU idle, so several processes share it.
"""

import argparse
import contextlib
import dataclasses
import gc
import json
import math
import os
import re
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, Executor, Future, ProcessPoolExecutor, wait
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from jobs import BATCH, FEWER, HEADS, PAPER, TIERS, Job, Settings, jobs
from packing import drop, kinds, lines, merged, pack, said, tasks, unpack

from vmoer.errors import InputError
from vmoer.studies.factors import FACTORS
from vmoer.train import Plan

SHARED = 0.95  # of the GPU's memory: the rest is what each process's context takes


def main(arguments: Sequence[str] | None = None) -> int:
    given = parser().parse_args(arguments)
    given.out.mkdir(parents=True, exist_ok=True)
    try:
        for file in given.unpack:
            print(f"{file}: {unpack(file, given.out)} folders of predictions came")
        if given.report:
            print(results(given.out))
            return 0
        start()
        wanted = jobs(_settings(given), given.only)
        if given.dry_run:
            estimate(wanted, given.workers)
            return 0
        end = None if given.minutes is None else time.monotonic() + 60 * given.minutes
        with _mps() if given.mps else contextlib.nullcontext():
            failed = execute(wanted, given.workers, end, given.out, keep=given.keep_runs)
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if given.pack:
        size = pack(given.out, given.pack)
        print(f"{given.pack}: {size / 2**20:.1f} MiB")
    missing = [job for job in _needed(wanted) if not job.done]
    print(f"missing: {len(missing)} of {len(wanted)} jobs")
    for job in missing:
        print(f"  {job.tier}: {job.name}" + (f": failed: {failed[job.name]}" if job.name in failed else ""))
    return 1 if failed else 0


def parser() -> argparse.ArgumentParser:
    out = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    out.add_argument("--model", default="out/smolmoe", help="a model folder; name it alike everywhere: cells go by it")
    out.add_argument("--out", type=Path, default=Path("out/study"))
    out.add_argument(
        "--data-root", default=os.environ.get("VMOER_DATA"), help="DIR/<task>/<split>.jsonl (or VMOER_DATA)"
    )
    out.add_argument("--seeds", default="0,1,2", type=lambda text: tuple(int(x) for x in text.split(",")))
    out.add_argument("--workers", type=int, default=8, help="processes that share the GPU")
    out.add_argument(
        "--mps", action="store_true", help="let their kernels run side by side (CUDA MPS), where it can be had"
    )
    out.add_argument("--minutes", type=float, help="start nothing that is not expected to end in this time")
    out.add_argument("--pack", type=Path, metavar="FILE", help="write what was computed here, without weights")
    out.add_argument(
        "--unpack", type=Path, nargs="+", default=[], metavar="FILE", help="take in packs or results first"
    )
    out.add_argument("--report", action="store_true", help="OUT/results from what is there, and nothing else")
    out.add_argument(
        "--dry-run", action="store_true", help="count the jobs, their steps and passes, and guess the time"
    )
    out.add_argument("--only", nargs="+", default=TIERS, choices=TIERS, help="parts of the study, in this order")
    out.add_argument(
        "--labels", nargs="+", default=[*HEADS, *PAPER], help="methods and controls; @paper for its protocol"
    )
    out.add_argument("--averaging", nargs="+", default=["router", "answer", "full"])
    out.add_argument("--limit", type=int, default=5000, help="questions of a split, at most; 5000 are the paper's")
    out.add_argument("--passes", type=int, default=8)
    out.add_argument("--batch-tokens", type=int, default=32768, help="of a prediction")
    out.add_argument(
        "--seeds-of",
        nargs="+",
        type=_count,
        default=[],
        metavar="PART=N",
        help=f"how many of the seeds a part takes; all, but {', '.join(f'{part}={n}' for part, n in FEWER.items())}",
    )
    out.add_argument("--factors", nargs="+", choices=FACTORS, default=FACTORS, help="those to vary, in that part")
    for stage, plan in (
        ("stage1", Settings.__dataclass_fields__["stage1"]),
        ("stage2", Settings.__dataclass_fields__["stage2"]),
    ):
        default = plan.default_factory()  # type: ignore[misc]
        out.add_argument(f"--{stage}-epochs", type=int, default=default.epochs)
        out.add_argument(f"--{stage}-lr", type=float, default=default.lr)
        fewer = ", ".join(f"{size} of {task}" for task, size in BATCH.items())
        out.add_argument(
            f"--{stage}-batch", type=int, default=default.batch_size, help=f"of openbookqa; at most {fewer}"
        )
    out.add_argument("--patience", type=int, default=3, help="epochs of stage 2 without a better validation NLL")
    out.add_argument("--keep-runs", action="store_true", help="do not drop trained routers that nothing needs any more")
    return out


def _count(text: str) -> tuple[str, int]:
    part, _, number = text.partition("=")
    if part not in TIERS or not number.isdigit() or not int(number):
        raise argparse.ArgumentTypeError(f"{text!r}: write PART=N, as in factors=2, with one of {', '.join(TIERS)}")
    return part, int(number)


def _settings(given: argparse.Namespace) -> Settings:
    stage1 = Plan(epochs=given.stage1_epochs, lr=given.stage1_lr, batch_size=given.stage1_batch)
    patience = {"patience": given.patience}
    stage2 = Plan(epochs=given.stage2_epochs, lr=given.stage2_lr, batch_size=given.stage2_batch, **patience)
    return Settings(
        model=given.model,
        out=given.out,
        seeds=given.seeds,
        data_root=given.data_root,
        limit=given.limit,
        averaging=tuple(given.averaging),
        heads=tuple(given.labels),
        stage1=stage1,
        stage2=stage2,
        passes=given.passes,
        batch_tokens=given.batch_tokens,
        seeds_of=FEWER | dict(given.seeds_of),
        factors=tuple(given.factors),
    )


# -- doing it ----------------------------------------------------------------------------------------------------------


def execute(wanted: Sequence[Job], workers: int, end: float | None, out: Path, keep: bool = False) -> dict[str, str]:
    """Do what is missing, the first in the list first; returns the reasons of those that failed.

    A job that has not got enough of the GPU's memory is tried again with twice as much, as long as there is more.
    """
    todo = [job for job in _needed(wanted) if not job.done]
    print(f"{len(wanted) - len(todo)} of {len(wanted)} jobs are done or not needed")
    failed: dict[str, str] = {}
    took: dict[str, float] = {}
    memory = _memory()
    running: dict[Future[tuple[str, float | None]], tuple[Job, float]] = {}
    began, number = time.monotonic(), 0
    with _pool(min(workers, max(1, len(todo)))) as pool:
        while todo or running:
            waiting = {job.name for job in todo} | {job.name for job, _ in running.values()}
            for job in [job for job in todo if not (waiting | failed.keys()).intersection(job.needs)]:
                late = end is not None and time.monotonic() + took.get(job.kind, 0.0) > end
                taken = sum(other.gb for other, _ in running.values())
                share = 1.0 if workers == 1 else min(1.0, job.gb / memory)
                if len(running) == workers or (running and taken + job.gb > memory):
                    break
                if not late:
                    todo.remove(job)
                    running[pool.submit(attempt, job.work, share)] = job, time.monotonic()
            if not running:
                break
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                job, start = running.pop(future)
                seconds, peak = time.monotonic() - start, None
                try:
                    reason, peak = future.result()
                except BrokenExecutor:
                    reason, todo = "its process was killed (out of memory?)", []
                if reason.removeprefix("CUDA ").startswith("out of memory") and workers > 1 and job.gb < memory:
                    todo.insert(0, dataclasses.replace(job, gb=2 * job.gb))
                    print(f"{job.name}: {job.gb:.0f} GB were not enough, again with twice as much", flush=True)
                    continue
                number, took[job.kind] = number + 1, seconds
                if reason:
                    failed[job.name] = reason
                elif not keep:
                    _drop_runs(job, [*todo, *(other for other, _ in running.values())])
                row = {"start": round(start - began, 1), "seconds": round(seconds, 1), "peak_gb": peak}
                _tell(job, number, len(todo) + len(running), row, reason, out)
    return failed


def _memory() -> float:
    """GB of the GPU that jobs can share; without one there is nothing to share out."""
    import torch

    return SHARED * torch.cuda.get_device_properties(0).total_memory / 1e9 if torch.cuda.is_available() else math.inf


def attempt(work: Callable[[], None], share: float = 1.0) -> tuple[str, float | None]:
    """Work; returns the reason where it failed, in one line, and the most GB of the GPU that it held.

    A process keeps what it has freed for later, and would take the others' part of the memory with it: its share is all it gets.
    """
    import torch

    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_per_process_memory_fraction(share * SHARED)
        torch.cuda.reset_peak_memory_stats()
    reason = ""
    try:
        work()
    except Exception as error:
        if os.environ.get("VMOER_DEBUG"):
            traceback.print_exc()
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
    gc.collect()  # an error's frames keep each other, and what they had on the GPU
    if not cuda:
        return reason, None
    torch.cuda.empty_cache()
    return reason, round(torch.cuda.max_memory_reserved() / 1e9, 1)


def _needed(wanted: Sequence[Job]) -> list[Job]:
    """Stage 1 is made again on another machine, but only for what is still to do there."""
    needs = {name for job in wanted if not job.done for name in job.needs}
    return [job for job in wanted if not job.kind.startswith("stage 1") or job.name in needs]


def _drop_runs(job: Job, left: Sequence[Job]) -> None:
    still = {run for other in left for run in other.runs}
    for run in job.runs:
        if run not in still:
            drop(run)


def _tell(job: Job, number: int, left: int, row: dict[str, Any], reason: str, out: Path) -> None:
    outcome = f"failed: {reason}" if reason else f"{row['seconds']:.0f} s"
    print(
        f"[{(row['start'] + row['seconds']) / 60:.1f} min, {number} done, {left} left] {job.name}: {outcome}",
        flush=True,
    )
    row = {"job": job.name, "tier": job.tier, "kind": job.kind} | row | {"steps": job.steps, "failed": reason or None}
    with (out / "timing.jsonl").open("a") as file:
        file.write(json.dumps(row) + "\n")


class _Here(Executor):
    """One process is this one."""

    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Any:
        future: Future[Any] = Future()
        future.set_result(fn(*args, **kwargs))
        return future


def _pool(workers: int) -> Executor:
    os.environ.setdefault(
        "VMOER_KEEP_MODELS", "3"
    )  # read when a process imports vmoer: a model is opened again and again
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if workers == 1:
        return _Here()
    return ProcessPoolExecutor(workers, mp_context=get_context("spawn"), initializer=start)


def start() -> None:
    import warnings

    import torch
    import transformers

    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    warnings.filterwarnings("ignore", message=".*the paper takes")  # smaller sets than its own: said in the README


@contextlib.contextmanager
def _mps() -> Iterator[None]:
    """NVIDIA's service that lets processes share a GPU's multiprocessors; without it they take turns."""
    try:
        subprocess.run(["nvidia-cuda-mps-control", "-d"], check=True, capture_output=True, timeout=20)
    except (OSError, subprocess.SubprocessError) as error:
        print(f"no CUDA MPS ({error}): the processes take turns on the GPU")
        yield
        return
    try:
        yield
    finally:
        subprocess.run(["nvidia-cuda-mps-control"], input=b"quit\n", check=False, capture_output=True, timeout=60)


# -- before and after --------------------------------------------------------------------------------------------------


def estimate(wanted: Sequence[Job], workers: int) -> None:
    """What there is to do, and the minutes it took eight processes on an H200 (jobs.py)."""
    print(f"{'part':10}{'jobs':>6}{'to do':>7}{'steps':>9}{'passes':>9}{'minutes':>9}   ({workers} processes)")
    for tier in (*TIERS, "all"):
        own = [job for job in wanted if tier in (job.tier, "all")]
        todo = [job for job in _needed(own) if not job.done]
        steps, passes = sum(job.steps for job in todo), sum(job.passes for job in todo)
        minutes = sum(job.seconds for job in todo) / workers / 60
        print(f"{tier:10}{len(own):>6}{len(todo):>7}{steps:>9}{passes:>9.0f}{minutes:>9.1f}")


def results(out: Path) -> Path:
    """OUT/results: predictions of each task in one file, every metric, tables and the page; returns the page's path."""
    from vmoer import scores
    from vmoer.files import write_bytes, write_json, write_rows
    from vmoer.report import report
    from vmoer.studies import factors, stability

    place, rows = out / "results", []
    for task in tasks(out):
        files = said(task)
        (place / task.name).mkdir(parents=True, exist_ok=True)
        for name, folders in kinds(task).items():
            if folders:
                write_bytes(place / task.name / name, merged(folders, task))
        if metas := [value for name, value in files.items() if re.fullmatch("[^/]+/meta.json", name)]:
            keys = ("model", "source_task", "ood_tasks", "split", "dtype", "device", "versions", "passes")
            write_json(place / task.name / "meta.json", {key: metas[0][key] for key in keys})
            _check_stage1(task.name, metas)
        write_bytes(place / task.name / "files.json", lines(files))
        rows += factors.summary(task)
        rows += [row for cell in sorted(task.glob("cells/*.json")) for row in json.loads(cell.read_text())["rows"]]
    rows = _together([*scores.score(place), *stability.over_seeds(rows)])
    write_rows(place / "metrics.json", rows)
    if (out / "timing.jsonl").exists():
        (place / "timing.jsonl").write_bytes((out / "timing.jsonl").read_bytes())
    return report(place)


def _together(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Without each seed's own rows where there is one over all seeds: they follow from the predictions, and would be most."""

    def key(row: dict[str, Any]) -> tuple[Any, ...]:
        return tuple((name, row[name]) for name in row if name not in ("seed", "value", "low", "high", "note", "seeds"))

    joint = {key(row) for row in rows if row["seed"] is None}
    return [row for row in rows if row["seed"] is None or key(row) not in joint]


def _check_stage1(task: str, metas: Sequence[dict[str, Any]]) -> None:
    """Methods are paired with MAP by seed; where stage 1 was made again on another machine, the pair is not exact."""
    made: dict[tuple[Any, ...], set[str]] = {}
    for meta in metas:
        paper = "@paper" in meta["method"]
        if meta["method"] != "map-early":
            made.setdefault((meta["seed"], paper), set()).add(str(meta["fingerprint"]["adapter"]))
    for (seed, paper), adapters in sorted(made.items()):
        if len(adapters) > 1:
            which = "the paper's stage 1" if paper else "stage 1"
            print(
                f"{task}, seed {seed}: {which} was made {len(adapters)} times, so methods and map are not paired exactly"
            )


if __name__ == "__main__":
    raise SystemExit(main())
