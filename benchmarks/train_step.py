"""Stage-2 step time and memory of every method against a forward pass alone, and what a whole run would take.

    python benchmarks/train_step.py --out results/train_step

On CUDA: Granite-3B's geometry with random bfloat16 weights. On a CPU: a small one of its kind, to see that it runs. Each method
is attached to the layers of the paper's protocol (10) and to all; a step is what `vmoer train` does: a batch, one sample,
answer loss + beta KL, backward through what lies above the first attached layer, fused AdamW. The projection is 5,000
questions x 10 epochs at the batch size measured. Writes train_step.json and train_step.md.
"""

import argparse
import math
import platform
import statistics
from itertools import count, cycle
from pathlib import Path
from typing import Any

import torch
import transformers as tf
from rehearsal import shrunk

import vmoer
from vmoer.bench.geometries import GEOMETRIES
from vmoer.bench.measure import Work, interleaved
from vmoer.files import write_json, write_text
from vmoer.live.attach import attach, detach
from vmoer.training.data import Examples, collate
from vmoer.training.objective import answer_log_probs, micro_loss

METHODS = ("mcdr", "swag", "vglr-mf", "vglr-fc", "vglr-lr", "vtsr")
QUESTIONS, EPOCHS = 5000, 10


def questions(n: int, length: int, vocabulary: int) -> Examples:
    """Prompts whose lengths vary by a tenth around `length`, as those of one bucket do."""
    generator = torch.Generator().manual_seed(0)
    lengths = (length * (0.9 + 0.1 * torch.rand(n, generator=generator))).long().tolist()
    prompts = [torch.randint(10, vocabulary, (size,), generator=generator).tolist() for size in lengths]
    return Examples(prompts, [i % 4 for i in range(n)], [4] * n, [3, 4, 5, 6])


def forward(model: Any, examples: Examples, groups: list[list[int]], device: str) -> Work:
    turns = cycle([collate(examples, rows, torch.device(device)) for rows in groups])
    return torch.no_grad()(lambda: answer_log_probs(model, next(turns)))


def stage2_step(model: Any, examples: Examples, groups: list[list[int]], device: str) -> Work:
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=1e-4, fused=True)
    turns, steps = cycle(groups), count()

    def step() -> None:
        rows = next(turns)
        size = {"rows": len(rows), "tokens": sum(examples.lengths[row] for row in rows)}
        batch = collate(examples, rows, torch.device(device))
        micro_loss(model, batch, step=next(steps), first_row=0, **size)[0].backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def timed(work: Work, device: str, args: argparse.Namespace) -> tuple[float, float | None]:
    """Median seconds, and the peak of the device's memory in GiB."""
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    seconds = statistics.median(interleaved({"": work}, device, args.repeats, warm_up=args.warm)[""])
    return seconds, torch.cuda.max_memory_allocated() / 2**30 if device == "cuda" else None


def measure(args: argparse.Namespace) -> dict[str, Any]:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    geometry = GEOMETRIES["granite-3b"] if device == "cuda" else shrunk(GEOMETRIES["granite-3b"])
    model, depth = geometry.build(device, torch.bfloat16), geometry.config["num_hidden_layers"]
    versions = {"vmoer": vmoer.__version__, "torch": torch.__version__, "transformers": tf.__version__}
    result: dict[str, Any] = {"geometry": geometry.config, "dtype": "bfloat16", "prompt_tokens": args.length}
    result |= {"device": torch.cuda.get_device_name() if device == "cuda" else platform.machine()}
    result |= {"repeats": args.repeats, "versions": versions, "rows": []}
    for size in args.batch_sizes:
        examples = questions(size * 8, args.length, geometry.config["vocab_size"])
        tokens, groups = sum(examples.lengths) / 8, [list(range(i, i + size)) for i in range(0, size * 8, size)]
        base, memory = timed(forward(model, examples, groups, device), device, args)
        result["rows"].append(row("forward alone", "-", size, tokens, base, memory, base, 0))
        for layers in dict.fromkeys((min(10, depth), depth)):
            # spread evenly: the susceptible layers of a random model say nothing
            chosen = [round(i * (depth - 1) / (layers - 1)) for i in range(layers)]
            for key in args.methods:
                attach(model, vmoer.methods()[key](layers=chosen))
                trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
                seconds, memory = timed(stage2_step(model, examples, groups, device), device, args)
                result["rows"].append(row(key, str(layers), size, tokens, seconds, memory, base, trained))
                detach(model)
                print(result["rows"][-1], flush=True)
                write_json(args.out / "train_step.json", result)  # a run that is cut short leaves what it has
                write_text(args.out / "train_step.md", markdown(result))
    return result


def row(
    method: str, layers: str, size: int, tokens: float, seconds: float, memory: float | None, base: float, trained: int
) -> dict[str, Any]:
    out: dict[str, Any] = {"method": method, "layers": layers, "batch": size, "milliseconds": 1e3 * seconds}
    out |= {"against_forward": seconds / base, "tokens_per_second": tokens / seconds, "peak_gib": memory}
    return out | {"trained_parameters": trained, "run_minutes": math.ceil(QUESTIONS / size) * EPOCHS * seconds / 60}


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
    print(markdown(measure(parser.parse_args())))


if __name__ == "__main__":
    main()
