"""Works timed between two runs of the plain model each, and the rows that come of it."""

import contextlib
import gc
import json
import random
import statistics
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from vmoer.bench.measure import Work, captured, ratio, seconds
from vmoer.bench.reading_rows import Row, figure, line, table
from vmoer.bench.subjects import DEVICE, own_bytes, recorded
from vmoer.errors import InputError
from vmoer.files import write_json, write_text

Works = dict[tuple[str, str], Work]
"""By method and mode."""


@dataclass
class Bench:
    """The rows so far, and until when there is time for more."""

    out: Path | None
    until: float
    say: Callable[[str], object]
    rows: list[Row] = field(default_factory=list)
    machine: dict[str, Any] = field(default_factory=dict)
    batches: tuple[int, ...] = (1, 16)
    """Of generation."""
    sizes: tuple[int, ...] = ()
    """Tokens of the prefills to measure; all of them if nothing is said."""
    turn: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext
    """Held while generation is timed: where several processes measure, each has its turn."""

    def go_on(self) -> None:
        """Take over the rows that the file holds: what is measured again replaces them."""
        if self.out is None or not self.out.exists():
            return
        held = json.loads(self.out.read_text())
        if held["machine"] != self.machine:
            raise InputError(f"{self.out} was made on another machine or by other versions: give another --out")
        self.rows = held["rows"]

    @property
    def left(self) -> float:
        return self.until - time.perf_counter()

    def add(self, rows: list[Row]) -> None:
        made = {_measured(row) for row in rows}
        parts = {(row["geometry"], row["part"]) for row in rows}
        failed = [row for row in self.rows if row["method"] == "-" and (row["geometry"], row["part"]) in parts]
        self.rows = [row for row in self.rows if _measured(row) not in made and row not in failed] + rows
        for row in rows:
            if row["mode"] != "plain" or row.get("error"):
                self.say(line(row))
        if self.out is not None:
            write_json(self.out, {"machine": self.machine, "rows": self.rows})
            write_text(self.out.with_suffix(".md"), table(self.rows))

    def draw(self) -> None:
        """A figure a geometry, beside the file."""
        for geometry in dict.fromkeys(row["geometry"] for row in self.rows):
            drawn = figure(self.rows, geometry) if self.out is not None else None
            if drawn is not None and self.out is not None:
                write_text(self.out.with_name(f"{self.out.stem}-{geometry}.svg"), drawn.svg)


def _measured(row: Row) -> tuple[Any, ...]:
    return tuple(row[name] for name in ("geometry", "part", "launch", "tokens", "batch", "method", "mode"))


def clean() -> None:
    gc.collect()
    if DEVICE == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


def both(models: dict[str, nn.Module], of: Callable[[nn.Module], Work]) -> Works:
    """Every method attached and recorded."""
    works: Works = {}
    for key, model in models.items():
        works[key, "attached"] = of(model)
        works[key, "recorded"] = recorded(model, of(model))
    return works


def compare(
    works: Works,
    base: Work,
    about: Row,
    budget: float,
    *,
    graph: bool = False,
    most: int = 15,
    warm: int = 5,
    repeats: int = 1,
    turn: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext,
) -> list[Row]:
    """Rounds until the budget of seconds is spent, at least three; each work between two runs of the base.

    `warm` runs come before: what captures itself or compiles does so there. Then it waits for its `turn`.
    """
    known, rows = {}, []
    for name, work in {("plain", "plain"): base, **works}.items():
        try:
            for _ in range(warm):
                work()
            known[name] = captured(work) if graph else work
        except Exception as error:
            traceback.print_exc()
            reason = f"{type(error).__name__}: {error}".splitlines()[0][:200]
            rows.append({**about, "method": name[0], "mode": name[1], "ratio": None, "error": reason})
            clean()
    base = known.pop(("plain", "plain"))
    times: dict[tuple[str, str], list[tuple[float, float]]] = {name: [] for name in known}
    with turn():
        rounds = _rounds(known, base, times, budget, most, repeats)
    for (method, mode), values in times.items():
        times_of, around = [own for own, _ in values], [plain for _, plain in values]
        middle, low, high = ratio(times_of, around)
        spread: Row = {"ratio": middle, "low": low, "high": high, "rounds": rounds}
        spread |= {"seconds": statistics.median(times_of), "plain_seconds": statistics.median(around)}
        rows.append({**about, "method": method, "mode": mode, **spread})
    return rows


def _rounds(
    known: dict[tuple[str, str], Work],
    base: Work,
    times: dict[tuple[str, str], list[tuple[float, float]]],
    budget: float,
    most: int,
    repeats: int,
) -> int:
    """Fill in `times`; how many rounds there were."""
    names = list(known)
    shuffle, start, rounds = random.Random(0).shuffle, time.perf_counter(), 0
    while names and rounds < most and (rounds < 3 or (time.perf_counter() - start) * (rounds + 1) / rounds < budget):
        shuffle(names)
        gc.collect()
        gc.disable()
        try:
            before = seconds(base, DEVICE, repeats)
            for name in names:
                own = seconds(known[name], DEVICE, repeats)
                after = seconds(base, DEVICE, repeats)
                times[name].append((own, (before + after) / 2))
                before = after
        finally:
            gc.enable()
        rounds += 1
    return rounds


def peaks(plain: nn.Module, works: Works, models: dict[str, nn.Module], base: Work) -> dict[tuple[str, str], float]:
    """Peak memory of each work over the plain model's: its weights, the method's own, and what the run allocates."""
    weights = sum(p.numel() * p.element_size() for p in plain.parameters())
    total: dict[tuple[str, str], float] = {}
    for name, work in {("plain", "plain"): base, **works}.items():
        clean()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        work()
        own = own_bytes(models[name[0]]) if name[0] in models else 0
        total[name] = weights + own + torch.cuda.max_memory_allocated() - before
    return {name: value / total["plain", "plain"] for name, value in total.items()}
