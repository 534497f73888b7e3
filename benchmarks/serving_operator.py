"""What routing as an operator adds to a decode step, called as vLLM calls it: under CUDA graphs, in padded batches.

    python benchmarks/serving_operator.py --out results/serving_operator

Granite-3B's and Qwen3-30B-A3B's geometries with random bfloat16 weights, ten layers with vglr-fc; on a CPU the same made small,
to see that it runs. For each batch size, padded to the next size that vLLM captures:

    alone      the ten calls and the keeping of their signals as one graph, replayed; their weights stay in the cache
    in place   a whole decode step with the calls behind the ten gates, over the plain step; paired, one between two plain runs
    floor      the least time for a step on this device: weights and KV cache read once, at the rate of a copy

The plain step is transformers' under a CUDA graph, with the faster of its ways to run experts. The calls' answers are not routed
by, so that both steps read the same experts. Signals: none; or all, as `vmoer serve` has them. Checked on the way: a replay on
new inputs equals the eager call bit for bit, tokens beside padding of NaN are what they are without, and nothing waits for the
device. Writes serving_operator.json and .md, and prints the table.
"""

import argparse
import gc
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers as tf
from rehearsal import shrunk
from torch import Tensor, nn

import vmoer
from vmoer import gates
from vmoer.bench import subjects
from vmoer.bench.geometries import GEOMETRIES, Geometry
from vmoer.bench.measure import Work, between, captured, ceilings, ratio, seconds
from vmoer.bench.subjects import CONTEXT, DEVICE, DTYPE, Decode
from vmoer.files import write_json, write_text
from vmoer.inference import operator
from vmoer.serving.rows import Kept

NAMES = ("granite-3b", "qwen3-30b-a3b")
BATCHES = (1, 2, 5, 16, 50, 128, 256)
SIZES = (1, 2, 4, *range(8, 257, 8))
"""The batch sizes that vLLM captures by default, up to 256."""
LEVELS: dict[str, Any] = {"none": (), "all": "all"}
LIMIT = 1.0
"""Percent of a decode step that the operator may take."""


def padded(batch: int) -> int:
    """The size of the graph that vLLM replays for a batch."""
    return next(size for size in SIZES if size >= batch)


class Layer(NamedTuple):
    """An attached layer: the operator's name for it, its number, its gate in the plain model."""

    name: str
    number: int
    gate: nn.Module


def hosted(model: nn.Module, method: str, layers: list[int], level: str, rank: int) -> list[Layer]:
    """Routers in the state they have after training, made known to the operator."""
    kind: Any = vmoer.methods()[method]
    config = kind(layers=layers)
    generator = torch.Generator(device=DEVICE).manual_seed(0)
    out = []
    for found in gates.find(model):
        if found.layer not in layers:
            continue
        gate = gates.Gate.probe(found)
        weight_ND = gates.router_weight(found.router, gate)
        one = operator.logits_gate(gate.scoring.score, gate.num_experts, gate.scoring.k, gate.hidden_size)
        router = config.router(config, one, weight_ND, found.layer, torch.device(DEVICE))
        for parameter in router.parameters():
            noise = torch.randn(parameter.shape, generator=generator, device=DEVICE)
            parameter.data.add_(noise * 0.02 * parameter.shape[-1] ** -0.5)
        router.novelty_root_RD = torch.randn(rank, gate.hidden_size, generator=generator, device=DEVICE) * 0.02
        name = f"{level}.{found.layer}"
        operator.host(name, router, weight_ND, DTYPE, LEVELS[level])
        out.append(Layer(name, found.layer, found.router))
    return out


class Inputs:
    """Fixed places in memory for what the gates hand to the operator, and for its signals."""

    def __init__(self, layers: list[Layer], tokens: int, depth: int, hidden: int, experts: int) -> None:
        self.layers, self.tokens = layers, tokens
        self.u_LTD = torch.empty(len(layers), tokens, hidden, device=DEVICE, dtype=DTYPE)
        self.logits_LTN = torch.empty(len(layers), tokens, experts, device=DEVICE, dtype=DTYPE)
        self.kept = Kept(tokens, depth, torch.device(DEVICE))
        self.refill(0)

    def refill(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.u_LTD.normal_()
        self.logits_LTN.normal_(0, 2)

    def calls(self) -> list[Tensor]:
        """What each layer's step does in the engine, layer after layer: averaged logits and, in `kept`, signals."""
        out = []
        for place, layer in enumerate(self.layers):
            into_TG = self.kept.of(layer.number, self.tokens)
            out.append(torch.ops.vmoer.route_into(self.u_LTD[place], self.logits_LTN[place], layer.name, into_TG))
        return out

    def answer(self) -> list[Tensor]:
        return [*(x.clone() for x in self.calls()), self.kept.signals_TLG.clone()]


def checks(inputs: Inputs, batch: int) -> dict[str, Any]:
    """Replays against eager calls, and real tokens with and without padding. On a CPU the calls are simply made again."""
    answers: list[Tensor] = []

    def work() -> None:
        answers[:] = [*inputs.calls(), inputs.kept.signals_TLG]

    replay = captured(work) if DEVICE == "cuda" else work
    inputs.refill(1)
    replay()
    replayed = [x.clone() for x in answers]
    eager = inputs.answer()
    equal = all(
        torch.equal(a, b) or torch.equal(a.nan_to_num(7), b.nan_to_num(7)) for a, b in zip(replayed, eager, strict=True)
    )
    for x_LTE in (inputs.u_LTD, inputs.logits_LTN):
        x_LTE[:, batch:] = torch.nan
    replay()
    beside = all(
        torch.equal(a[:batch].nan_to_num(7), b[:batch].nan_to_num(7)) for a, b in zip(answers, replayed, strict=True)
    )
    inputs.refill(1)
    worst = 0.0
    for place, layer in enumerate(inputs.layers):
        own = inputs.u_LTD[place, :batch].clone(), inputs.logits_LTN[place, :batch].clone()
        alone_TN, _ = torch.ops.vmoer.route(*own, layer.name)
        worst = max(worst, float((alone_TN.float() - eager[place][:batch].float()).abs().max()))
    return {"replay_equals_eager": equal, "unmoved_by_padding": beside, "unpadded_difference": worst}


def with_calls(model: nn.Module, inputs: Inputs, run: Work) -> Work:
    """The same step with the operator behind the gates of its layers."""

    def behind(place: int, layer: Layer) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], out: Any) -> None:
            u_TD, into_TG = args[0].reshape(inputs.tokens, -1), inputs.kept.of(layer.number, inputs.tokens)
            torch.ops.vmoer.route_into(u_TD, inputs.logits_LTN[place], layer.name, into_TG)

        return hook

    def work() -> Any:
        handles = [layer.gate.register_forward_hook(behind(place, layer)) for place, layer in enumerate(inputs.layers)]
        try:
            return run()
        finally:
            for handle in handles:
                handle.remove()

    return work


def fastest(model: Any, run: Work, tokens: int) -> tuple[str, Work]:
    """The plain step under a graph, by the faster of transformers' ways to run experts that do not wait for the device."""
    found = {}
    # one matrix product a token and expert copies the weights of each: only for small batches
    for kind in ("grouped_mm", "batched_mm") if DEVICE == "cuda" and tokens <= 32 else ("grouped_mm",):
        model.set_experts_implementation(kind)
        try:
            work = captured(run) if DEVICE == "cuda" else run
        except RuntimeError as error:
            print(f"{kind} cannot be captured: {str(error).splitlines()[0]}", flush=True)
            continue
        seconds(work, DEVICE, 2)
        found[kind] = seconds(work, DEVICE, 3), work
    kind = min(found, key=lambda name: found[name][0])
    model.set_experts_implementation(kind)
    return kind, found[kind][1]


def floor(model: nn.Module, geometry: Geometry, tokens: int, bytes_per_second: float) -> float:
    """Seconds: every weight that a step needs, and the KV cache, read once. Experts are taken to be hit evenly at random."""
    experts = sum(p.numel() for name, p in model.named_parameters() if ".experts." in name or "_linear.weight" in name)
    others = sum(p.numel() for p in model.parameters()) - experts
    if not geometry.config.get("tie_word_embeddings", False):
        others -= (
            geometry.config["vocab_size"] * geometry.config["hidden_size"]
        )  # of the embedding a step reads some rows
    config: Any = model.config
    count = getattr(config, "num_experts", None) or config.num_local_experts
    hit = 1 - (1 - config.num_experts_per_tok / count) ** tokens
    heads = config.num_key_value_heads * (
        getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    )
    cache = 2 * tokens * CONTEXT * heads * config.num_hidden_layers
    # a copy's bytes are counted twice, read and written; reading alone is taken to go at the same rate
    return (others + hit * experts + cache) * 2 / bytes_per_second


def measure(name: str, geometry: Geometry, args: argparse.Namespace, rate: float) -> list[dict[str, Any]]:
    model: Any = geometry.build(DEVICE, DTYPE)
    layers, depth = geometry.layers(), geometry.config["num_hidden_layers"]
    levels = {level: hosted(model, args.method, layers, level, args.rank) for level in LEVELS}
    hidden, experts = geometry.config["hidden_size"], gates.expert_count(gates.find(model)[0])
    rows = []
    for batch in args.batches:
        tokens = padded(batch)
        inputs = {level: Inputs(own, tokens, depth, hidden, experts) for level, own in levels.items()}
        run = Decode(model, tokens).of(model)
        kind, plain = fastest(model, run, tokens)
        graph = captured if DEVICE == "cuda" else lambda work: work
        steps = {level: graph(with_calls(model, own, run)) for level, own in inputs.items()}
        alone = {level: graph(own.calls) for level, own in inputs.items()}
        pairs = between(steps, plain, DEVICE, args.rounds)
        step = statistics.median(around for values in pairs.values() for _, around in values)
        for level, own in inputs.items():
            took = statistics.median(seconds(alone[level], DEVICE, 20) for _ in range(args.rounds))
            middle, low, high = ratio(*zip(*pairs[level], strict=True))
            row = {"geometry": name, "batch": batch, "padded": tokens, "signals": level, "experts": kind}
            row |= {"step_seconds": step, "floor_seconds": floor(model, geometry, tokens, rate), "alone_seconds": took}
            row |= {"in_place_ratio": middle, "low": low, "high": high}
            rows.append(row | checks(own, batch))
        del run, plain, steps, alone, inputs
        clean()
    operator.forget()
    return rows


def clean() -> None:
    gc.collect()
    if DEVICE == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


def table(report: dict[str, Any]) -> str:
    """A row for each batch size and choice of signals; times in microseconds, shares in percent."""
    rows = report["rows"]
    lines = [
        f"# Routing as an operator on {report['device']}",
        "",
        f"bfloat16, ten layers of {report['method']}, novelty of rank {report['rank']}, {CONTEXT} tokens of context; "
        + ", ".join(f"{name} {version}" for name, version in report["versions"].items())
        + ". `python benchmarks/serving_operator.py`; its first lines say what the columns are.",
        "",
        "| geometry | batch | padded | step ms | floor ms | signals | alone us | % of step | % of floor | in place % |",
        "|:--|--:|--:|--:|--:|:--|--:|--:|--:|:--|",
    ]
    for row in rows:
        alone, step, least = row["alone_seconds"], row["step_seconds"], row["floor_seconds"]
        place = " ".join(f"{100 * (row[key] - 1):+.2f}" for key in ("in_place_ratio", "low", "high")).split()
        lines.append(
            f"| {row['geometry']} | {row['batch']} | {row['padded']} | {1e3 * step:.2f} | {1e3 * least:.2f} "
            f"| {row['signals']} | {1e6 * alone:.0f} | {100 * alone / step:.2f} | {100 * alone / least:.2f} "
            f"| {place[0]} ({place[1]}, {place[2]}) |"
        )
    within = {level: [r for r in rows if r["signals"] == level] for level in LEVELS}
    lines += ["", f"At most {LIMIT:g}% of the plain step:"]
    for level, own in within.items():
        alone = sum(100 * r["alone_seconds"] / r["step_seconds"] <= LIMIT for r in own)
        inside = sum(100 * (r["in_place_ratio"] - 1) <= LIMIT for r in own)
        lines.append(f"- signals {level}: alone in {alone} of {len(own)} rows, in place in {inside} of {len(own)}")
    for key, text in (
        ("replay_equals_eager", "A replay on new inputs equals the eager calls bit for bit"),
        ("unmoved_by_padding", "Tokens beside padding of NaN are bit for bit what they were"),
    ):
        lines.append(f"- {text}: {sum(r[key] for r in rows)} of {len(rows)} rows")
    worst = max(r["unpadded_difference"] for r in rows)
    lines.append(f"- Averaged logits of the same tokens without padding differ by at most {worst:.2g}")
    if report["device_is_gpu"]:
        lines.append('- No call waits for the device: each ran once under torch.cuda.set_sync_debug_mode("error")')
    return "\n".join(lines) + "\n"


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--geometries", nargs="+", default=NAMES, choices=NAMES)
    parser.add_argument("--batches", nargs="+", type=int, default=BATCHES)
    parser.add_argument("--method", default="vglr-fc")
    parser.add_argument("--rank", type=int, default=subjects.RANK, help="of novelty")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args(arguments)
    # transformers looks for packed rows on the host, which would forbid a graph; there are none here
    tf.masking_utils.find_packed_sequence_indices = lambda position_ids: None
    versions = {"torch": torch.__version__, "transformers": tf.__version__, "vmoer": vmoer.__version__}
    device = torch.cuda.get_device_name() if DEVICE == "cuda" else platform.machine()
    report: dict[str, Any] = {"device": device, "device_is_gpu": DEVICE == "cuda", "versions": versions}
    report |= {"method": args.method, "rank": args.rank, "ceilings": ceilings(DEVICE), "rows": []}
    with torch.no_grad():
        for name in args.geometries:
            start = time.perf_counter()
            geometry = GEOMETRIES[name] if DEVICE == "cuda" else shrunk(GEOMETRIES[name])
            report["rows"] += measure(name, geometry, args, report["ceilings"]["bytes_per_second"])
            clean()
            print(f"{name}: {time.perf_counter() - start:.0f} s", flush=True)
            write_json(args.out / "serving_operator.json", report)  # a run that is cut short leaves what it has
            write_text(args.out / "serving_operator.md", table(report))
    print(table(report))


if __name__ == "__main__":
    main()
