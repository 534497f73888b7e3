"""What variational routing costs: every method against the plain model, in one process, interleaved.

    vmoer bench --out results/overhead/h200.json             all geometries, on a GPU
    vmoer bench --geometries granite-3b --quick              a first look
    vmoer bench --methods vglr-fc,novelty --out FILE         those alone
    vmoer bench --out results/overhead/cpu.json              without a GPU: a reduced geometry

Writes `{"machine": ..., "ceilings": ..., "rows": [...], "routers": [...]}` and a Markdown table beside it. A row is
{geometry, method, phase: prefill|decode|answer, launch: eager|graph, tokens, batch, time_ratio, low, high, seconds,
memory_ratio};
ratios are medians and quartiles over rounds of a method's time over the mean of the plain model's just before and after it.
Geometries and methods already in the file and not measured again are kept. Weights are random and in bfloat16, the attached
routers' too, as a model cast for inference has them; prefill asks for the last token's logits, as generation does. The row
`novelty` is the plain model with its signals recorded, novelty at rank 128 among them; the phase `answer` has `answer-32`, the
answers of 64 prompts of 1,024 tokens, each averaged over 32 routing samples of its last token, against one pass over the same.
"""

import gc
import platform
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

from vmoer._version import __version__
from vmoer.bench.geometries import GEOMETRIES, SMALL, Geometry
from vmoer.bench.measure import Work, between, captured, ceilings, interleaved, ratio
from vmoer.bench.subjects import (
    DEVICE,
    DTYPE,
    Decode,
    Prefill,
    attached,
    configurations,
    floor,
    is_slow,
    own_bytes,
    recorded,
    routers,
    with_novelty,
)
from vmoer.files import read_json, write_json, write_text
from vmoer.inference.averaging import predict
from vmoer.numerics import kernels
from vmoer.report.tables import grid

PLAIN = "map"
PASSES, PROMPTS = 32, 64  # of answer averaging: routing samples, and prompts at a time
KNOWN = GEOMETRIES if DEVICE == "cuda" else SMALL


def methods() -> list[str]:
    """All that can be measured: what is trained, the listing, and the rows `novelty` and `answer-32`."""
    return [*configurations(), "novelty", f"answer-{PASSES}"]


def timed(works: dict[str, Work], graph: bool, rounds: int, about: dict[str, Any]) -> list[dict[str, Any]]:
    """One row a method. Where a method cannot run (captured, or at all) its row says why. Short work is repeated in a round."""
    variants, failed = {}, {}
    for name, run in works.items():
        try:
            if not bool(run().isfinite().all()):
                raise RuntimeError("the logits are not finite")
            variants[name] = captured(run) if graph else run
        except Exception as error:
            traceback.print_exc()
            failed[name] = f"{type(error).__name__}: {error}".splitlines()[0][:200]
            clean()
    rows = []
    if PLAIN in variants:
        base, repeats = variants.pop(PLAIN), 8 if graph and about["tokens"] <= 1024 else 1
        # these take several times as long as the others: half the rounds show it
        known = configurations()
        slow = {name: variants.pop(name) for name in [*variants] if name in known and is_slow(known[name])}
        pairs = between(variants, base, DEVICE, rounds, repeats)
        if slow:
            pairs |= between(slow, base, DEVICE, max(2, rounds // 2), repeats)
        plain = [own for values in pairs.values() for _, own in values]
        for name, values in {PLAIN: [(own, own) for own in plain], **pairs}.items():
            own, around = zip(*values, strict=True)
            middle, low, high = ratio(own, around)
            spread = {"time_ratio": middle, "low": low, "high": high, "seconds": statistics.median(own)}
            rows.append({**about, "launch": "graph" if graph else "eager", "method": name, **spread})
    blank = {"time_ratio": None, "low": None, "high": None, "seconds": None}
    rows += [
        {**about, "launch": "graph" if graph else "eager", "method": name, **blank, "error": why}
        for name, why in failed.items()
    ]
    return rows


def answers(geometry: str, plain: nn.Module, model: nn.Module, tokens: int, rounds: int) -> list[dict[str, Any]]:
    """Answers averaged over PASSES routing samples of the last token, against one pass over the same prompts."""
    prefill = Prefill(plain, tokens)
    works = {PLAIN: prefill.of(plain), "vglr-fc": prefill.of(model)}
    works[f"answer-{PASSES}"] = lambda: predict(model, {"input_ids": prefill.ids}, averaging="answer", passes=PASSES)
    about = {"geometry": geometry, "phase": "answer", "tokens": tokens, "batch": prefill.batch}
    return timed(works, False, rounds, about)


def clean() -> None:
    gc.collect()
    if DEVICE == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


def peak(models: dict[str, nn.Module], work: Prefill) -> dict[str, float]:
    """Peak memory of a prefill relative to the plain model's: its weights, the method's own, and what the pass allocates."""
    if DEVICE == "cpu":
        return {}
    weights = sum(p.numel() * p.element_size() for p in models[PLAIN].parameters())
    total = {}
    for name, model in models.items():
        clean()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        try:
            work.of(model)()
        except torch.cuda.OutOfMemoryError:
            continue
        total[name] = weights + own_bytes(model) + torch.cuda.max_memory_allocated() - before
    return {name: value / total[PLAIN] for name, value in total.items()}


def router_alone(
    models: dict[str, nn.Module], geometry: Geometry, tokens: int, rounds: int, ceiling: dict[str, float]
) -> list[dict[str, Any]]:
    """Each method's router on random states, by graph replay where that is possible, beside its floor."""
    states = torch.randn(tokens, geometry.config["hidden_size"], device=DEVICE, dtype=DTYPE)
    layer = geometry.layers()[0]
    first = next(model for name, model in models.items() if name != PLAIN)
    path = next(name for name, m in first.named_modules() if m is routers(first)[0])
    variants = {}
    for name, model in models.items():
        router = model.get_submodule(path)

        def run(router: nn.Module = router) -> Any:
            return router(states)

        try:
            run()
            variants[name] = captured(run) if DEVICE == "cuda" else run
        except Exception:
            clean()
            variants[name] = run
    times = interleaved(variants, DEVICE, rounds, repeats=8 if DEVICE == "cuda" else 1)
    rows = []
    for name, values in times.items():
        least = None if name == PLAIN else floor(routers(models[name])[0].vmoer, tokens, ceiling)
        median = statistics.median(values)
        rows.append(
            {
                "method": name,
                "layer": layer,
                "tokens": tokens,
                "seconds": median,
                "plain_seconds": statistics.median(times[PLAIN]),
                "floor_seconds": least,
                "over_floor": None if least is None else median / least,
            }
        )
    return rows


def measure(
    name: str, geometry: Geometry, quick: bool, ceiling: dict[str, float], wanted: Sequence[str]
) -> dict[str, list[dict[str, Any]]]:
    start = time.perf_counter()
    plain, known = geometry.build(DEVICE, DTYPE), configurations(geometry.layers())
    models = {PLAIN: plain} | {key: attached(plain, known[key]) for key in known if key in wanted}
    print(f"{name}: built in {time.perf_counter() - start:.0f} s", file=sys.stderr, flush=True)
    gpu = DEVICE == "cuda"
    rounds = 3 if quick else 5
    sizes = ([1024, 16384] if quick else [1024, 4096, 16384]) if gpu else [256, 1024]
    rows, memory = [], {}
    for tokens in sizes:
        prefill = Prefill(plain, tokens)
        works = {name: prefill.of(model) for name, model in models.items()}
        memory[tokens] = peak(models, prefill)
        about = {"geometry": name, "phase": "prefill", "tokens": tokens, "batch": prefill.batch}
        if tokens == sizes[-1] and "novelty" in wanted:
            novelty = with_novelty(plain, geometry.layers())
            works["novelty"] = recorded(novelty, prefill.of(novelty))
        if len(works) == 1:
            continue
        rows += timed(works, False, rounds + (6 if tokens == sizes[-1] and not quick else 0), about)
        if gpu and tokens <= 1024:
            rows += timed(works, True, rounds, about)
        clean()
    if f"answer-{PASSES}" in wanted:
        full = models.get("vglr-fc") or attached(plain, known["vglr-fc"])
        rows += answers(name, plain, full, PROMPTS * 1024 if gpu else sizes[-1], rounds)
    for batch in (([16] if quick else [1, 16, 64]) if gpu else [1, 4]) if len(models) > 1 else ():
        decode = Decode(plain, batch)
        about = {"geometry": name, "phase": "decode", "tokens": batch, "batch": batch}
        works = {name: decode.of(model) for name, model in models.items()}
        rows += timed(works, gpu, rounds if gpu else 5, about)
        del decode
        clean()
    for row in rows:
        ratios = memory.get(row["tokens"], {}) if row["phase"] == "prefill" else {}
        row["memory_ratio"] = ratios.get(row["method"])
    alone = []
    if len(models) > 1:
        alone = [{"geometry": name, **row} for row in router_alone(models, geometry, sizes[-1], rounds, ceiling)]
    print(f"{name}: {time.perf_counter() - start:.0f} s in all", file=sys.stderr, flush=True)
    return {"rows": rows, "routers": alone}


def machine() -> dict[str, Any]:
    try:
        import triton

        triton_version = triton.__version__
    except ImportError:
        triton_version = None
    return {
        "device": torch.cuda.get_device_name() if DEVICE == "cuda" else platform.processor() or platform.machine(),
        "threads": torch.get_num_threads(),
        "dtype": str(DTYPE).removeprefix("torch."),
        "kernels": kernels.enabled,
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "triton": triton_version,
            "vmoer": __version__,
        },
    }


def table(report: dict[str, Any]) -> str:
    """Overhead in percent, a line a method; memory of the largest prefill; the router alone in microseconds over its floor."""
    where = report["machine"]
    versions = ", ".join(f"{name} {version}" for name, version in where["versions"].items())
    lines = [f"# Overhead on {where['device']} ({where['dtype']}; {versions})", ""]
    lines += [
        "Percent over the plain model, median of paired rounds (quartiles in the JSON); `g` marks CUDA-graph replay. Memory:",
        "peak of the largest prefill. Router alone: microseconds at the largest prefill, and times its floor.",
    ]
    for geometry in dict.fromkeys(row["geometry"] for row in report["rows"]):
        rows = [row for row in report["rows"] if row["geometry"] == geometry]
        columns = list(dict.fromkeys((r["phase"], r["tokens"], r["launch"]) for r in rows))
        heads = [f"{phase} {tokens}{' g' if launch == 'graph' else ''}" for phase, tokens, launch in columns]
        body = []
        largest = max(row["tokens"] for row in rows if row["phase"] == "prefill")
        for method in dict.fromkeys(row["method"] for row in rows):
            own = {(r["phase"], r["tokens"], r["launch"]): r for r in rows if r["method"] == method}
            alone = next((r for r in report["routers"] if (r["geometry"], r["method"]) == (geometry, method)), None)
            cells = []
            for column in columns:
                row = own.get(column)
                cells.append(
                    "-" if row is None or row["time_ratio"] is None else f"{100 * (row['time_ratio'] - 1):+.2f}"
                )
            memory = own.get(("prefill", largest, "eager"), {}).get("memory_ratio")
            cells.append("-" if memory is None else f"{100 * (memory - 1):+.2f}")
            cells.append("-" if alone is None else f"{1e6 * alone['seconds']:.0f}")
            cells.append("-" if alone is None or alone["over_floor"] is None else f"{alone['over_floor']:.1f}")
            body.append([method, *cells])
        lines += ["", f"## {geometry}", "", *grid(["method", *heads, "memory", "router us", "x floor"], body)]
        plain = [r for r in rows if r["method"] == PLAIN and r["seconds"]]
        shown = ", ".join(f"{r['phase']} {r['tokens']} {1e3 * r['seconds']:.1f}" for r in plain)
        lines += ["", f"Plain model, ms: {shown}."]
        failed = {(r["method"], r["error"]) for r in rows if r.get("error")}
        lines += [f"Did not run: {method} ({why})." for method, why in sorted(failed)]
    return "\n".join(lines) + "\n"


def merged(before: list[dict[str, Any]], rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows measured again take the place of the former ones. The plain model's times, to which other methods' ratios go, stay."""

    def place(row: dict[str, Any]) -> tuple[Any, ...]:
        return tuple(row.get(key) for key in ("geometry", "phase", "launch", "tokens", "batch", "method"))

    found = {place(row): row for row in before}
    found |= {place(row): row for row in rows if row["method"] != PLAIN or place(row) not in found}
    return list(found.values())


def run(
    names: list[str], out: Path | None, quick: bool, say: Callable[[str], object], wanted: Sequence[str] = ()
) -> dict[str, Any]:
    """Measure methods at geometries, all of them where none are named; what a file holds of others is kept."""
    wanted = wanted or methods()
    # transformers looks for packed rows on the host, which would forbid a graph; there are none here
    transformers.masking_utils.find_packed_sequence_indices = lambda position_ids: None
    report: dict[str, Any] = {"machine": machine(), "ceilings": {}, "rows": [], "routers": []}
    if out is not None and out.exists():
        before, some = read_json(out), set(wanted) != set(methods())
        for key in ("rows", "routers"):
            report[key] = [row for row in before.get(key, []) if row["geometry"] not in names or some]
        if report["routers"]:
            report["ceilings"] = before["ceilings"]  # the floors in one file are taken from the same
    report["ceilings"] = report["ceilings"] or ceilings(DEVICE)
    with torch.no_grad():
        for name in names:
            say(f"{name} ...")
            found = measure(name, KNOWN[name], quick, report["ceilings"], wanted)
            for key, rows in found.items():
                report[key] = merged(report[key], rows)
            clean()
            if out is not None:  # after every geometry: a run that is cut short leaves what it has
                write_json(out, report)
                write_text(out.with_suffix(".md"), table(report))
    return report
