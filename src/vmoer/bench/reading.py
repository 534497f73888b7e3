"""What reading the uncertainty costs: every method attached, and recorded with novelty fitted, against the plain model.

    python benchmarks/signals.py --out DIR                               on a GPU: Granite first, then what time is left for
    python benchmarks/signals.py --out DIR --parts generate --seconds 300

Every ratio is to the plain model in the same process, each run timed between two plain runs, rounds in a random order. Rows are
{geometry, part, launch, tokens, batch, method, mode, ratio, low, high, seconds, plain_seconds, rounds}, ratios being medians and
quartiles over rounds. A recorded run computes the signals that a record computes unasked: gate entropy, the posterior's own and
novelty at the default rank. What fails has its reason in its row.
"""

import functools
import gc
import random
import statistics
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vmoer.bench.geometries import Geometry, twin
from vmoer.bench.measure import Work, captured, ratio, seconds
from vmoer.bench.subjects import DEVICE, DTYPE, Prefill, attached, own_bytes
from vmoer.files import write_json, write_text
from vmoer.inference.averaging import Averaging, predict
from vmoer.live.attach import attach, record
from vmoer.live.fitting import fit
from vmoer.report.tables import grid
from vmoer.routers import methods

METHODS = ("vglr-fc", "vglr-mf", "vglr-lr", "vtsr", "map")
PARTS = ("prefill", "generate", "fit", "predict", "compiled")
LARGE, SMALL = (16384, 1024) if DEVICE == "cuda" else (512, 64)
NEW = 64 if DEVICE == "cuda" else 4  # tokens generated
PROMPT = 128 if DEVICE == "cuda" else 8
PROMPTS, LENGTH = (5000, 64) if DEVICE == "cuda" else (50, 16)  # of fit

Row = dict[str, Any]
Peaks = dict[tuple[str, str], float]


@dataclass
class Bench:
    """The rows so far, and until when there is time for more."""

    out: Path | None
    until: float
    say: Callable[[str], object]
    rows: list[Row] = field(default_factory=list)
    machine: dict[str, Any] = field(default_factory=dict)

    @property
    def left(self) -> float:
        return self.until - time.perf_counter()

    def add(self, rows: list[Row]) -> None:
        self.rows += rows
        for row in rows:
            if row["mode"] != "plain" or row.get("error"):
                self.say(line(row))
        if self.out is not None:
            write_json(self.out / "signals.json", {"machine": self.machine, "rows": self.rows})
            write_text(self.out / "signals.md", table(self.rows))


def clean() -> None:
    gc.collect()
    if DEVICE == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


def fitted(plain: nn.Module, key: str, layers: list[int]) -> nn.Module:
    """The plain model's weights with the method on them and novelty fitted at its default rank."""
    config = methods()[key](layers=layers)
    model = attached(plain, config) if key != "map" else attach(twin(plain), config).eval().requires_grad_(False)
    ids = Prefill(plain, 4096 if DEVICE == "cuda" else 256).ids
    return fit(model, [{"input_ids": ids}])


def recorded(model: nn.Module, work: Work) -> Work:
    def run() -> Any:
        with record(model):
            return work()

    return run


def both(models: dict[str, nn.Module], of: Callable[[nn.Module], Work]) -> dict[tuple[str, str], Work]:
    """Every method attached and recorded."""
    works: dict[tuple[str, str], Work] = {}
    for key, model in models.items():
        works[key, "attached"] = of(model)
        works[key, "recorded"] = recorded(model, of(model))
    return works


def compare(
    works: dict[tuple[str, str], Work],
    base: Work,
    about: Row,
    budget: float,
    *,
    graph: bool = False,
    most: int = 15,
    warm: int = 5,
    repeats: int = 1,
) -> list[Row]:
    """Rounds until the budget of seconds is spent, at least three; each work between two runs of the base.

    `warm` runs come before: what captures itself or compiles does so there.
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
    names = list(known)
    times: dict[tuple[str, str], list[tuple[float, float]]] = {name: [] for name in names}
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
    for (method, mode), values in times.items():
        times_of, around = [own for own, _ in values], [plain for _, plain in values]
        middle, low, high = ratio(times_of, around)
        spread: Row = {"ratio": middle, "low": low, "high": high, "rounds": rounds}
        spread |= {"seconds": statistics.median(times_of), "plain_seconds": statistics.median(around)}
        rows.append({**about, "method": method, "mode": mode, **spread})
    return rows


def peaks(plain: nn.Module, works: dict[tuple[str, str], Work], models: dict[str, nn.Module], base: Work) -> Peaks:
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


def prefill(bench: Bench, name: str, plain: nn.Module, models: dict[str, nn.Module], share: float) -> None:
    """Prefills: the large one, and the small one launched by the host and by a CUDA graph."""
    for tokens, graph, budget in ((LARGE, False, 0.5), (SMALL, False, 0.35), (SMALL, True, 0.15)):
        if graph and DEVICE == "cpu":
            continue
        run = Prefill(plain, tokens)
        works, base = both(models, run.of), run.of(plain)
        about = {"geometry": name, "part": "prefill", "launch": "graph" if graph else "eager", "tokens": tokens}
        rows = compare(
            works, base, {**about, "batch": run.batch}, budget * share, graph=graph, repeats=8 if graph else 1,
            warm=2 if tokens == LARGE else 6,
        )  # fmt: skip
        if tokens == LARGE and DEVICE == "cuda":
            memory = peaks(plain, works, models, base)
            for row in rows:
                row["memory"] = memory.get((row["method"], row["mode"]))
        bench.add(rows)
        del works, base
        clean()


def generation(model: Any, ids: Tensor, **settings: Any) -> Work:
    fixed = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0, "max_new_tokens": NEW, "min_new_tokens": NEW}
    mask = torch.ones_like(ids)
    return lambda: model.generate(input_ids=ids, attention_mask=mask, **fixed, **settings)


def prompts(plain: Any, rows: int, columns: int) -> Tensor:
    generator = torch.Generator(device=DEVICE).manual_seed(rows)
    return torch.randint(3, plain.config.vocab_size, (rows, columns), generator=generator, device=DEVICE)


def generate(bench: Bench, name: str, plain: nn.Module, models: dict[str, nn.Module], share: float) -> None:
    """`model.generate`, launched by the host."""
    for batch, part in ((1, 0.6), (16, 0.4)):
        ids = prompts(plain, batch, PROMPT)
        works = both(models, functools.partial(generation, ids=ids))
        about = {"geometry": name, "part": "generate", "launch": "eager", "tokens": NEW, "batch": batch}
        bench.add(compare(works, generation(plain, ids), about, share * part, most=7, warm=1))


def compiled(bench: Bench, name: str, plain: nn.Module, models: dict[str, nn.Module], share: float) -> None:
    """`model.generate` with a static cache, which transformers compiles; `eager` is the plain model launched by the host."""
    torch._dynamo.config.recompile_limit = 64
    torch._dynamo.config.automatic_dynamic_shapes = False
    start = time.perf_counter()
    for batch in (1, 16):
        ids = prompts(plain, batch, PROMPT)
        static = {"cache_implementation": "static"}
        about = {"geometry": name, "part": "generate", "launch": "compiled", "tokens": NEW, "batch": batch}
        base = generation(plain, ids, **static)
        base()
        first = time.perf_counter() - start
        works: dict[tuple[str, str], Work] = {("eager plain", "plain"): generation(plain, ids)}
        for key in [k for k in ("vglr-fc", "vglr-mf", "map", "vtsr", "vglr-lr") if k in models]:
            if works and bench.left < 2 * first + 30:
                break
            model = models[key]
            works[key, "recorded"] = recorded(model, generation(model, ids, **static))
            try:
                works[key, "recorded"]()
            except Exception as error:
                traceback.print_exc()
                del works[key, "recorded"]
                reason = f"{type(error).__name__}: {error}".splitlines()[0][:200]
                bench.add([{**about, "method": key, "mode": "recorded", "ratio": None, "error": reason}])
        compiles = dict(torch._dynamo.utils.counters["stats"])
        rows = compare(works, base, about, min(40.0, bench.left / 3), most=7, warm=2)
        again = dict(torch._dynamo.utils.counters["stats"]) != compiles
        bench.add([{**row, "compiled_again": again} for row in rows])
        if bench.left < 2 * first + 30:
            break


def fits(bench: Bench, name: str, plain: nn.Module, models: dict[str, nn.Module], share: float) -> None:
    """`vmoer.fit` against one forward pass over the same prompts."""
    key = next(iter(models))
    ids = prompts(plain, PROMPTS, LENGTH)
    batches = [{"input_ids": part, "attention_mask": torch.ones_like(part)} for part in ids.split(16384 // LENGTH)]

    def forward(model: nn.Module) -> Tensor:
        out = None
        for batch in batches:
            out = model(**batch, use_cache=False, logits_to_keep=1).logits
        assert out is not None
        return out

    works: dict[tuple[str, str], Work] = {
        (key, "attached"): lambda: forward(models[key]),
        (key, "fit"): lambda: fit(models[key], batches),
    }
    about = {"geometry": name, "part": "fit", "launch": "eager", "tokens": PROMPTS * LENGTH, "batch": PROMPTS}
    bench.add(compare(works, lambda: forward(plain), about, share, most=3, warm=1))


def predicts(bench: Bench, name: str, plain: nn.Module, models: dict[str, nn.Module], share: float) -> None:
    """`vmoer.predict` with each averaging, 8 samples, against one pass over the same prompts."""
    key = next(iter(models))
    run = Prefill(plain, LARGE)
    works: dict[tuple[str, str], Work] = {}
    kinds: tuple[Averaging, ...] = ("router", "answer", "full")
    for averaging in kinds:
        works[key, averaging] = functools.partial(
            predict, models[key], {"input_ids": run.ids}, averaging=averaging, passes=8
        )
    about = {"geometry": name, "part": "predict", "launch": "eager", "tokens": LARGE, "batch": run.batch}
    bench.add(compare(works, run.of(plain), about, share, most=5, warm=1))


WORK: dict[str, Callable[..., None]] = {
    "prefill": prefill,
    "generate": generate,
    "fit": fits,
    "predict": predicts,
    "compiled": compiled,
}
SHARES = {"prefill": 90.0, "generate": 130.0, "fit": 30.0, "predict": 10.0, "compiled": 120.0}
"""Seconds each part may measure for, on the first geometry; half of that on the others."""


def measure(bench: Bench, name: str, geometry: Geometry, parts: tuple[str, ...], wanted: tuple[str, ...]) -> None:
    start = time.perf_counter()
    plain = geometry.build(DEVICE, DTYPE)
    models = {key: fitted(plain, key, geometry.layers()) for key in wanted}
    bench.say(f"{name}: built in {time.perf_counter() - start:.0f} s")
    for part in parts:
        if bench.left < 20:
            bench.say(f"{name}, {part}: no time left")
            continue
        try:
            WORK[part](bench, name, plain, models, min(SHARES[part], bench.left - 10))
        except Exception as error:
            traceback.print_exc()
            reason = f"{type(error).__name__}: {error}".splitlines()[0][:200]
            about = {"geometry": name, "part": part, "launch": "-", "tokens": 0, "batch": 0}
            bench.add([{**about, "method": "-", "mode": "-", "ratio": None, "error": reason}])
        bench.say(f"{name}, {part}: done after {time.perf_counter() - start:.0f} s, {bench.left:.0f} s left")
        clean()


def line(row: Row) -> str:
    what = (
        f"{row['geometry']} {row['part']} {row['launch']} {row['tokens']}x{row['batch']} {row['method']} {row['mode']}"
    )
    if row["ratio"] is None:
        return f"{what}: {row.get('error')}"
    low, high = (100 * (row[key] - 1) for key in ("low", "high"))
    memory = "" if row.get("memory") is None else f", memory {100 * (row['memory'] - 1):+.2f}%"
    return f"{what}: {100 * (row['ratio'] - 1):+.2f}% [{low:+.2f}, {high:+.2f}] of {1e3 * row['plain_seconds']:.1f} ms{memory}"


def table(rows: list[Row]) -> str:
    """Percent over the plain model, a line a method and mode."""
    lines = ["# What reading the uncertainty costs", "", "Percent over the plain model: medians of rounds."]
    for geometry in dict.fromkeys(row["geometry"] for row in rows):
        own = [row for row in rows if row["geometry"] == geometry]
        columns = list(dict.fromkeys((r["part"], r["launch"], r["tokens"], r["batch"]) for r in own))
        body = []
        for method, mode in dict.fromkeys((r["method"], r["mode"]) for r in own):
            cells = [method, mode]
            for column in columns:
                found = [
                    r
                    for r in own
                    if (r["part"], r["launch"], r["tokens"], r["batch"], r["method"], r["mode"])
                    == (*column, method, mode)
                ]
                value = found[-1]["ratio"] if found else None
                cells.append("-" if value is None else f"{100 * (value - 1):+.2f}")
            memory = [r["memory"] for r in own if (r["method"], r["mode"]) == (method, mode) and r.get("memory")]
            body.append([*cells, f"{100 * (memory[-1] - 1):+.2f}" if memory else "-"])
        heads = [f"{part} {tokens} x{batch} {launch[0]}" for part, launch, tokens, batch in columns]
        lines += ["", f"## {geometry}", "", *grid(["method", "mode", *heads, "memory"], body)]
        lines += ["", *[line(row) for row in own if row.get("error")]]
    return "\n".join(lines) + "\n"
