"""What reading the uncertainty costs: every method attached, and recorded with novelty fitted, against the plain model.

    vmoer bench --reading --out FILE                               every part; --quick: prefill and generation, fewer rounds
    python benchmarks/signals.py --out DIR --seconds 450           checks first, then what there is time for, Granite first;
                                                                   by parts too: a run goes on with the rows that DIR holds

Every ratio is to the plain model in the same process, each run timed between two plain runs, rounds in a random order. Rows are
{geometry, part, launch, tokens, batch, method, mode, ratio, low, high, seconds, plain_seconds, rounds}, ratios being medians and
quartiles over rounds. A recorded run computes the signals that a record computes unasked: gate entropy, the posterior's own and
novelty at the default rank. What fails has its reason in its row.
"""

import functools
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from vmoer.bench.geometries import GEOMETRIES, Geometry, twin
from vmoer.bench.geometries import SMALL as SMALL_GEOMETRIES
from vmoer.bench.measure import Work
from vmoer.bench.pairs import Bench, Works, both, clean, compare, peaks
from vmoer.bench.reading_rows import Row
from vmoer.bench.subjects import DEVICE, DTYPE, Decode, Prefill, attached, configurations, recorded
from vmoer.inference import Averaging
from vmoer.inference.averaging import predict
from vmoer.live import capturing
from vmoer.live.attach import attach
from vmoer.live.fitting import fit
from vmoer.routers import methods

KNOWN = GEOMETRIES if DEVICE == "cuda" else SMALL_GEOMETRIES
ORDER = ("vglr-fc", "vglr-mf", "vglr-lr", "vtsr")  # the dearest first: parts for one method take the first
PARTS = ("prefill", "generate", "fit", "predict", "decode", "sweep", "compiled")
QUICK, LESS = ("prefill", "generate"), 0.1  # parts of a first look, and the share of their time that it takes
LARGE, SMALL = (16384, 1024) if DEVICE == "cuda" else (512, 64)
SIZES = (16, 64, 256, 1024, 4096, 16384) if DEVICE == "cuda" else (16, 64, 256)
NEW = 64 if DEVICE == "cuda" else 4  # tokens generated
PROMPT = 128 if DEVICE == "cuda" else 8
PROMPTS, LENGTH = (5000, 64) if DEVICE == "cuda" else (50, 16)  # of fit


def known() -> list[str]:
    """Every registered method that can be attached as it is; the model's own routing last."""
    return [*by_cost(key for key in methods() if key != "map"), "map"]


def usual() -> list[str]:
    """Those that are measured unasked: every registered method with an inference network, and the model's own routing."""
    return [key for key in known() if key == "map" or methods()[key]().trains == "network"]


def by_cost(keys: Iterable[str]) -> list[str]:
    return sorted(keys, key=lambda key: ORDER.index(key) if key in ORDER else len(ORDER))


def fitted(plain: nn.Module, key: str, layers: list[int]) -> nn.Module:
    """The plain model's weights with the method on them and novelty fitted at its default rank."""
    config = configurations(layers).get(key) or methods()[key](layers=layers)
    model = attached(plain, config) if key != "map" else attach(twin(plain), config).eval().requires_grad_(False)
    ids = Prefill(plain, 4096 if DEVICE == "cuda" else 256).ids
    return fit(model, [{"input_ids": ids}])


def prefill(bench: Bench, name: str, plain: nn.Module, models: dict[str, nn.Module], share: float) -> None:
    """Prefills: the large one, and the small one launched by the host and by a CUDA graph."""
    for tokens, graph, budget in ((LARGE, False, 0.5), (SMALL, False, 0.35), (SMALL, True, 0.15)):
        if (graph and DEVICE == "cpu") or (bench.sizes and tokens not in bench.sizes):
            continue
        run = Prefill(plain, tokens)
        works, base = both(models, run.of), run.of(plain)
        about = {"geometry": name, "part": "prefill", "launch": "graph" if graph else "eager", "tokens": tokens}
        rows = compare(
            works, base, {**about, "batch": run.batch}, budget * share, graph=graph, repeats=8 if graph else 1,
            warm=2 if tokens == LARGE else 6, most=15 if tokens == LARGE else 40,
        )  # fmt: skip
        if tokens == LARGE and DEVICE == "cuda":
            memory = peaks(plain, works, models, base)
            for row in rows:
                row["memory"] = memory.get((row["method"], row["mode"]))
        bench.add(rows)
        del works, base
        clean()


def sweep(bench: Bench, name: str, plain: nn.Module, models: dict[str, nn.Module], share: float) -> None:
    """Prefills of many sizes, launched by the host: the curve of overhead against tokens."""
    for tokens in SIZES:
        run = Prefill(plain, tokens)
        about = {"geometry": name, "part": "sweep", "launch": "eager", "tokens": tokens, "batch": run.batch}
        bench.add(compare(both(models, run.of), run.of(plain), about, share / len(SIZES), warm=6, most=7))


def decode(bench: Bench, name: str, plain: nn.Module, models: dict[str, nn.Module], share: float) -> None:
    """One decode step over a full cache, launched by the host and by a CUDA graph."""
    for batch in (1, 16):
        run = Decode(plain, batch)
        for graph in (False, True) if DEVICE == "cuda" else (False,):
            about = {"geometry": name, "part": "decode", "launch": "graph" if graph else "eager", "tokens": batch}
            works, repeats = both(models, run.of), 8 if graph else 1
            bench.add(
                compare(
                    works, run.of(plain), {**about, "batch": batch}, share / 4, graph=graph, warm=6, repeats=repeats
                )
            )
            clean()


def generation(model: Any, ids: Tensor, new: int = 0, **settings: Any) -> Work:
    """Of `new` tokens, or of as many as are timed."""
    new = new or NEW
    fixed = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0, "max_new_tokens": new, "min_new_tokens": new}
    mask = torch.ones_like(ids)
    return lambda: model.generate(input_ids=ids, attention_mask=mask, **fixed, **settings)


def prompts(plain: Any, rows: int, columns: int) -> Tensor:
    generator = torch.Generator(device=DEVICE).manual_seed(rows)
    return torch.randint(3, plain.config.vocab_size, (rows, columns), generator=generator, device=DEVICE)


def generate(bench: Bench, name: str, plain: nn.Module, models: dict[str, nn.Module], share: float) -> None:
    """`model.generate`, launched by the host. Short ones come first, in which every router is captured for the prompt's shape and
    the step's: a capture inside a timed run would be charged to one of few rounds."""
    for batch in bench.batches:
        ids = prompts(plain, batch, PROMPT)
        works = both(models, functools.partial(generation, ids=ids))
        short = both(models, functools.partial(generation, ids=ids, new=2))
        for _ in range(capturing.SIGHTS + 1):
            for work in short.values():
                work()
        about = {"geometry": name, "part": "generate", "launch": "eager", "tokens": NEW, "batch": batch}
        budget = share / len(bench.batches)
        bench.add(compare(works, generation(plain, ids), about, budget, most=40, warm=1, turn=bench.turn))


def compiled(bench: Bench, name: str, plain: nn.Module, models: dict[str, nn.Module], share: float) -> None:
    """`model.generate` with a static cache, which transformers compiles; `eager` is the plain model launched by the host."""
    torch._dynamo.config.recompile_limit = 64
    torch._dynamo.config.automatic_dynamic_shapes = False
    start = time.perf_counter()
    for batch in bench.batches:
        ids = prompts(plain, batch, PROMPT)
        static: dict[str, Any] = {"cache_implementation": "static"}
        about = {"geometry": name, "part": "generate", "launch": "compiled", "tokens": NEW, "batch": batch}
        base = generation(plain, ids, **static)
        base()
        first = time.perf_counter() - start
        works: Works = {("eager plain", "plain"): generation(plain, ids)} if ORDER[0] in models else {}
        for key in models:
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
        budget = min(max(40.0, share / 3), bench.left / 3)
        rows = compare(works, base, about, budget, most=24, warm=2, turn=bench.turn)
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

    works: Works = {
        (key, "attached"): lambda: forward(models[key]),
        (key, "fit"): lambda: fit(models[key], batches),
    }
    about = {"geometry": name, "part": "fit", "launch": "eager", "tokens": PROMPTS * LENGTH, "batch": PROMPTS}
    bench.add(compare(works, lambda: forward(plain), about, share, most=3, warm=1))


def predicts(bench: Bench, name: str, plain: nn.Module, models: dict[str, nn.Module], share: float) -> None:
    """`vmoer.predict` with each averaging, 8 samples, against one pass over the same prompts."""
    key = next(iter(models))
    run = Prefill(plain, LARGE)
    works: Works = {}
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
    "decode": decode,
    "sweep": sweep,
    "compiled": compiled,
}
SHARES = {
    "prefill": 90.0,
    "generate": 130.0,
    "fit": 30.0,
    "predict": 10.0,
    "decode": 20.0,
    "sweep": 40.0,
    "compiled": 120.0,
}
"""Seconds each part may measure for; where the time has an end, its share of what is left."""


def measure(
    bench: Bench,
    name: str,
    geometry: Geometry,
    parts: tuple[str, ...],
    wanted: Sequence[str],
    behind: float = 0.0,
    part_of_time: float = 1.0,
) -> None:
    """One geometry, where others are to have so many seconds' share of the time behind it."""
    start = time.perf_counter()
    plain = geometry.build(DEVICE, DTYPE)
    models = {key: fitted(plain, key, geometry.layers()) for key in wanted}
    bench.say(f"{name}: built in {time.perf_counter() - start:.0f} s")
    for number, part in enumerate(parts):
        if bench.left < 20:
            bench.say(f"{name}, {part}: no time left")
            continue
        try:
            share = part_of_time * SHARES[part]
            if bench.left != float("inf"):
                share *= (bench.left - 10) / (sum(SHARES[part] for part in parts[number:]) + behind)
            WORK[part](bench, name, plain, models, share)
        except Exception as error:
            traceback.print_exc()
            reason = f"{type(error).__name__}: {error}".splitlines()[0][:200]
            about = {"geometry": name, "part": part, "launch": "-", "tokens": 0, "batch": 0}
            bench.add([{**about, "method": "-", "mode": "-", "ratio": None, "error": reason}])
        bench.say(f"{name}, {part}: done after {time.perf_counter() - start:.0f} s, {bench.left:.0f} s left")
        clean()


def run(
    names: list[str],
    out: Path | None,
    say: Callable[[str], object],
    wanted: Sequence[str] = (),
    *,
    quick: bool = False,
    parts: tuple[str, ...] = PARTS,
    later: tuple[str, ...] = PARTS,
    until: float = float("inf"),
    machine: dict[str, Any] | None = None,
    go_on: bool = False,
    **more: Any,
) -> list[Row]:
    """Measure until then, `parts` of the first geometry and `later` of the others; `go_on` keeps what the file holds.

    `quick` measures the parts of a first look alone, and those for a tenth of the time. `more` are fields of `Bench`.
    """
    wanted = list(wanted) or usual()
    if quick:
        parts, later = (tuple(part for part in asked if part in QUICK) for asked in (parts, later))
    # transformers looks for packed rows on the host, which would forbid a graph; there are none here
    transformers.masking_utils.find_packed_sequence_indices = lambda position_ids: None
    bench = Bench(out, until, say, machine=machine or {}, **more)
    if go_on:
        bench.go_on()
    with torch.no_grad():
        for number, name in enumerate(names):
            if bench.left < 40:
                say(f"{name}: no time left")
                continue
            try:
                behind = (len(names) - number - 1) * sum(SHARES[part] for part in later)
                mine = parts if number == 0 else later
                measure(bench, name, KNOWN[name], mine, wanted, behind, LESS if quick else 1.0)
            except Exception:
                traceback.print_exc()
            clean()
    bench.draw()
    return bench.rows
