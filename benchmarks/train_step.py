"""Stage-2 step time and memory of every method against a forward pass alone, and what a whole run would take.

    python benchmarks/train_step.py --out results/train_step

On CUDA: Granite-3B's geometry with random bfloat16 weights. On a CPU: a small geometry, to see that it runs. Each method is
attached to the layers of the paper's protocol (10) and to all; a step is what `vmoer train` does: a length-bucketed batch, one
sample, answer loss + beta KL, backward through what lies above the first attached layer, fused AdamW. The projection is
5,000 questions x 10 epochs at the batch size measured. Writes train_step.json and train_step.md.
"""

import argparse
import gc
import math
import platform
import statistics
import time
from pathlib import Path
from typing import Any

import torch
import transformers as tf

import vmoer
from vmoer.attach import attach, detach
from vmoer.bench.geometries import GEOMETRIES
from vmoer.files import write_json, write_text
from vmoer.training.data import Batch, Examples, collate
from vmoer.training.loop import _step
from vmoer.training.objective import answer_log_probs
from vmoer.training.plan import Plan
from vmoer.training.workers import Workers

GRANITE_3B = GEOMETRIES["granite-3b"].config
SMALL = GRANITE_3B | {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 64,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
}
METHODS = ("mcdr", "swag", "vglr-mf", "vglr-fc", "vglr-lr", "vtsr")
QUESTIONS, EPOCHS = 5000, 10


def build(device: torch.device) -> Any:
    torch.manual_seed(0)
    geometry = GRANITE_3B if device.type == "cuda" else SMALL
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(device):
            return tf.GraniteMoeForCausalLM(tf.GraniteMoeConfig(**geometry)).eval().requires_grad_(False)
    finally:
        torch.set_default_dtype(torch.float32)


def questions(n: int, length: int, vocabulary: int) -> Examples:
    """Prompts whose lengths vary by a tenth around `length`, as those of one bucket do."""
    generator = torch.Generator().manual_seed(0)
    lengths = (length * (0.9 + 0.1 * torch.rand(n, generator=generator))).long().tolist()
    prompts = [torch.randint(10, vocabulary, (size,), generator=generator).tolist() for size in lengths]
    return Examples(prompts, [i % 4 for i in range(n)], [4] * n, [3, 4, 5, 6])


class Meter:
    """Median seconds of a call, and the peak of the device's memory while it ran."""

    def __init__(self, device: torch.device, repeats: int, warm: int) -> None:
        self.device, self.repeats, self.warm = device, repeats, warm

    def __call__(self, function: Any) -> tuple[float, float | None]:
        cuda = self.device.type == "cuda"
        for i in range(self.warm):
            function(i)
        gc.collect()
        if cuda:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        times = []
        for i in range(self.repeats):
            begin = time.perf_counter()
            function(self.warm + i)
            if cuda:
                torch.cuda.synchronize()
            times.append(time.perf_counter() - begin)
        return statistics.median(times), torch.cuda.max_memory_allocated() / 2**30 if cuda else None


def forward_only(model: Any, examples: Examples, batches: list[list[int]], device: torch.device) -> Any:
    collated: list[Batch] = [collate(examples, rows, device) for rows in batches]

    @torch.no_grad()
    def run(i: int) -> None:
        answer_log_probs(model, collated[i % len(collated)])

    return run


def stage2_step(model: Any, examples: Examples, batches: list[list[int]], device: torch.device) -> Any:
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=1e-4, fused=True)
    plan, workers = Plan(epochs=1), Workers(device=device)

    def run(i: int) -> None:
        _step(model, examples, batches[i % len(batches)], plan, optimizer, parameters, 1e-4, i, workers, 1)

    return run


def measure(args: argparse.Namespace) -> dict[str, Any]:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = build(device)
    config = model.config
    meter = Meter(device, args.repeats, args.warm)
    rows: list[dict[str, Any]] = []
    machine = torch.cuda.get_device_name() if device.type == "cuda" else platform.machine()
    result = {
        "device": machine,
        "geometry": {name: getattr(config, name) for name in SMALL},
        "dtype": "bfloat16",
        "prompt_tokens": args.length,
        "repeats": args.repeats,
        "versions": {"vmoer": vmoer.__version__, "torch": torch.__version__, "transformers": tf.__version__},
        "rows": rows,
    }
    for size in args.batch_sizes:
        examples = questions(size * 8, args.length, config.vocab_size)
        batches = [list(range(i, i + size)) for i in range(0, size * 8, size)]
        tokens = sum(examples.lengths) / len(batches)
        base, memory = meter(forward_only(model, examples, batches, device))
        rows.append(row("forward alone", "-", size, tokens, base, memory, base, 0))
        for layers in (10, config.num_hidden_layers) if device.type == "cuda" else (2, config.num_hidden_layers):
            # spread evenly: the susceptible layers of a random model say nothing
            chosen = [round(i * (config.num_hidden_layers - 1) / max(1, layers - 1)) for i in range(layers)]
            for key in args.methods:
                attach(model, vmoer.methods()[key](layers=chosen))
                trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
                seconds, memory = meter(stage2_step(model, examples, batches, device))
                rows.append(row(key, str(layers), size, tokens, seconds, memory, base, trained))
                detach(model)
                print(rows[-1], flush=True)
                write_json(args.out / "train_step.json", result)  # a run that is cut short leaves what it has
                write_text(args.out / "train_step.md", markdown(result))
    return result


def row(
    method: str, layers: str, size: int, tokens: float, seconds: float, memory: float | None, base: float, trained: int
) -> dict[str, Any]:
    steps = math.ceil(QUESTIONS / size) * EPOCHS
    return {
        "method": method,
        "layers": layers,
        "batch": size,
        "milliseconds": 1e3 * seconds,
        "against_forward": seconds / base,
        "tokens_per_second": tokens / seconds,
        "peak_gib": memory,
        "trained_parameters": trained,
        "run_minutes": steps * seconds / 60,
    }


def markdown(result: dict[str, Any]) -> str:
    geometry = result["geometry"]
    head = (
        f"# Stage-2 step on {result['device']}\n\n"
        f"{geometry['num_hidden_layers']} layers, D {geometry['hidden_size']}, {geometry['num_local_experts']} experts, "
        f"top-{geometry['num_experts_per_tok']}, random {result['dtype']} weights, prompts of about "
        f"{result['prompt_tokens']} tokens; median of {result['repeats']} steps; "
        f"torch {result['versions']['torch']}, transformers {result['versions']['transformers']}.\n\n"
        f"The last column is {QUESTIONS} questions x {EPOCHS} epochs at that batch size, without validation.\n\n"
        "| method | layers | batch | ms | x forward | tokens/s | peak GiB | trained | run, minutes |\n"
        "|---|---|---|---|---|---|---|---|---|\n"
    )
    lines = []
    for r in result["rows"]:
        peak = "" if r["peak_gib"] is None else f"{r['peak_gib']:.2f}"
        trained = f"{r['trained_parameters'] / 1e6:.2f}M" if r["trained_parameters"] else ""
        lines.append(
            f"| {r['method']} | {r['layers']} | {r['batch']} | {r['milliseconds']:.1f} | {r['against_forward']:.2f} "
            f"| {r['tokens_per_second']:,.0f} | {peak} | {trained} | {r['run_minutes']:.1f} |\n"
        )
    return head + "".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--methods", nargs="+", default=METHODS, choices=METHODS)
    parser.add_argument("--batch-sizes", nargs="+", type=int, default=[16, 64])
    parser.add_argument("--length", type=int, default=128, help="tokens of a prompt")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--warm", type=int, default=3)
    args = parser.parse_args()
    result = measure(args)
    print(markdown(result))


if __name__ == "__main__":
    main()
