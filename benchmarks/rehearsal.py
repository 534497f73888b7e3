"""The calibration study at full size on random weights, so that the first user with a large GPU meets no surprise.

    python benchmarks/rehearsal.py --out results/rehearsal                       Granite-3B, Qwen1.5-MoE, DeepSeek-MoE-16B
    python benchmarks/rehearsal.py --out out/rehearsal --tiny                    the same geometries made small, on a CPU

Every stage and method with two optimiser steps each, as `vmoer train` and `vmoer eval` run them: stage 1 by LoRA on attention
and experts, the susceptible layers, stage 2 for each method under the default preset (all layers) and the paper's (ten), the
novelty statistics, predictions averaged in all three ways. Time and the device's peak memory for each, in rehearsal.json and
rehearsal.md, written after every method; what the files have of others is kept. Weights, tokenizer and questions are made up:
what is measured is cost, not accuracy.
"""

import argparse
import dataclasses
import gc
import json
import platform
import random
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers as tf

import vmoer
from vmoer import tasks
from vmoer.bench.geometries import GEOMETRIES, Geometry
from vmoer.evaluation.answers import predict_task
from vmoer.files import write_json, write_text
from vmoer.live.attach import attach, detach
from vmoer.live.brittleness import select_layers
from vmoer.models import open_model
from vmoer.routers import Config
from vmoer.studies._variants import config_of
from vmoer.tasks import Question
from vmoer.tasks.batches import padded
from vmoer.training.run import Plan, Running, Workers, encode_questions, fit_novelty, stage1, stage2
from vmoer.training.stages import search, with_value

NAMES = ("granite-3b", "qwen1.5-moe", "deepseek-moe-16b")
METHODS: tuple[str, ...] = ("map", "temp-scale", "mcdr", "swag", "vglr-mf", "vglr-fc", "vglr-lr", "vtsr", "laplace")
METHODS += ("mean-only", "fixed-noise", "vglr-fc@paper", "vtsr@paper")
STEPS = 2
LIMIT = 80.0  # GB, of 10^9 bytes: what the card this is for has
TINY = {
    "vocab_size": 512,  # the embedded model's words, and a few more
    "hidden_size": 32,
    "intermediate_size": 16,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}


def shrunk(geometry: Geometry) -> Geometry:
    """The same kind of model with as many experts and as many of them chosen, everything else small."""
    own = {name: value for name, value in TINY.items() if name in geometry.config}
    return dataclasses.replace(geometry, config=geometry.config | own)


def made_up_questions(n: int, words: int, seed: int) -> list[Question]:
    """The embedded model's questions with so many random words of theirs, a token each."""
    asked, drawn = tasks.load("demo", "train"), random.Random(seed)
    known = sorted({word for question in asked for word in question.question.split()})
    texts = (" ".join(drawn.choices(known, k=words + i % 5)) for i in range(n))
    return [dataclasses.replace(question, question=text) for question, text in zip(asked, texts, strict=False)]


class Meter:
    """Seconds and the device's peak memory of each thing done, as rows."""

    def __init__(self, geometry: str, device: torch.device) -> None:
        self.geometry, self.device = geometry, device
        self.rows: list[dict[str, Any]] = []

    def __call__(self, stage: str, method: str, work: Callable[[], Any], **more: Any) -> Any:
        cuda = self.device.type == "cuda"
        gc.collect()
        if cuda:
            torch.cuda.empty_cache()
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        start = time.perf_counter()
        result = work()
        if cuda:
            torch.cuda.synchronize()
        row = {"geometry": self.geometry, "stage": stage, "method": method, "seconds": time.perf_counter() - start}
        row |= {"peak_gb": torch.cuda.max_memory_allocated() / 1e9 if cuda else None, **more}
        self.rows.append(row)
        print(json.dumps(row), flush=True)
        return result


class Rehearsal:
    """One geometry: its model through stage 1, then one method after the other."""

    def __init__(self, name: str, args: argparse.Namespace, scratch: Path) -> None:
        cuda = torch.cuda.is_available() and not args.tiny
        device = torch.device("cuda" if cuda else "cpu")
        geometry = shrunk(GEOMETRIES[name]) if args.tiny else GEOMETRIES[name]
        self.scratch, self.meter = scratch, Meter(name, device)
        model = self.meter("build", "-", lambda: geometry.build(str(device), torch.bfloat16 if cuda else torch.float32))
        self.meter.rows[-1]["parameters"] = sum(p.numel() for p in model.parameters())
        self.tokenizer = open_model("demo", device="cpu").tokenizer
        self.train, self.valid = (
            encode_questions(self.tokenizer, made_up_questions(n, args.words, seed), 2**31)
            for n, seed in ((STEPS * args.batch, 1), (args.batch, 2))
        )
        self.asked = made_up_questions(args.questions, args.words, 3)
        self.running = Running(workers=Workers(device=device), checkpoint_seconds=1e9, recompute=args.recompute)
        self.plan = Plan(epochs=1, batch_size=args.batch, lr=1e-4)
        self.first_stage(model, min(10, len(geometry.layers())))

    def first_stage(self, model: Any, many: int) -> None:
        stage = partial(stage1, folder=self.scratch / "stage1", running=self.running)
        self.model, outcome = self.meter("stage 1", "map", lambda: stage(model, self.train, self.valid, self.plan))
        self.meter.rows[-1]["trained_parameters"] = sum(v.numel() for v in outcome.last.values())
        del outcome
        self.meter("merge", "map", self.model.merge_adapter)
        size, prompts = self.plan.batch_size, self.train.prompts
        batches = [padded(prompts[i : i + size], self.meter.device) for i in range(0, len(prompts), size)]
        susceptible = partial(select_layers, self.model, batches, strategy="susceptible", n=many)
        self.ten = self.meter("layers", "map", susceptible)

    def method(self, label: str) -> list[dict[str, Any]]:
        """Stage 2, statistics and predictions; nothing is attached afterwards. Returns all rows so far."""
        config: Config = config_of(label)
        if label.endswith("@paper"):
            config = with_value(config, "layers", tuple(self.ten))
        folder = self.scratch / label.replace("@", "-")
        data = (self.train, self.valid)

        def second() -> Any:
            chosen = config
            if config.search and config.search.always:
                chosen, *_ = search(
                    self.model, *data, config, folder=folder / "search", plan=self.plan, running=self.running
                )
            return stage2(self.model, *data, chosen, folder=folder, plan=self.plan, running=self.running)

        if label == "map":
            attach(self.model, config)
        else:
            self.meter("stage 2", label, second, steps=STEPS)
            self.meter.rows[-1]["trained_parameters"] = sum(
                p.numel() for p in self.model.parameters() if p.requires_grad
            )
        self.model.requires_grad_(False)
        self.meter("fit", label, lambda: fit_novelty(self.model, self.train, self.meter.device))
        for averaging in ("router", "answer", "full") if config.draws else ("router",):
            how: dict[str, Any] = {"averaging": averaging, "passes": 8, "batch_tokens": 8192}
            predict = partial(predict_task, folder=folder / averaging, name="rehearsal", **how)
            what = partial(predict, self.model, self.tokenizer, self.asked)
            self.meter(f"predict ({averaging})", label, what, questions=len(self.asked))
        detach(self.model)
        return self.meter.rows


def markdown(result: dict[str, Any]) -> str:
    lines = [
        f"# Full-size rehearsal on {result['device']}\n",
        f"Random {result['dtype']} weights, prompts of about {result['prompt_tokens']} tokens, batches of {result['batch']}, "
        f"{STEPS} optimiser steps a stage, {result['questions']} questions predicted (8 passes for answer and full); gradient "
        f"checkpointing in stage 1: {'on' if result['recompute'] else 'off'}. Peak memory in GB, weights included.\n",
        "| geometry | method | stage | seconds | peak GB | trained parameters |",
        "|---|---|---|---|---|---|",
    ]
    for row in result["rows"]:
        peak = "" if row["peak_gb"] is None else f"{row['peak_gb']:.1f}"
        trained = f"{row['trained_parameters'] / 1e6:.1f}M" if row.get("trained_parameters") else ""
        stage = f"{row['geometry']} | {row['method']} | {row['stage']}"
        lines.append(f"| {stage} | {row['seconds']:.1f} | {peak} | {trained} |")
    lines.append("")
    for name, most in result["peaks"].items():
        if most is not None:
            fits = "fits" if most["peak_gb"] < LIMIT else "DOES NOT FIT"
            lines.append(
                f"- {name}: at most {most['peak_gb']:.1f} GB ({most['stage']}, {most['method']}): {fits} {LIMIT:g} GB"
            )
    return "\n".join(lines) + "\n"


def settings(args: argparse.Namespace) -> dict[str, Any]:
    cuda = torch.cuda.is_available() and not args.tiny
    return {
        "device": torch.cuda.get_device_name() if cuda else platform.machine(),
        "dtype": "bfloat16" if cuda else "float32",
        "tiny": args.tiny,
        "batch": args.batch,
        "prompt_tokens": args.words + 10,
        "questions": args.questions,
        "recompute": args.recompute,
        "versions": {"vmoer": vmoer.__version__, "torch": torch.__version__, "transformers": tf.__version__},
    }


def kept(path: Path, asked: dict[str, Any]) -> list[dict[str, Any]]:
    """What the file holds, where it was measured with the same settings."""
    before = json.loads(path.read_text()) if path.exists() else {}
    return before["rows"] if all(before.get(name) == value for name, value in asked.items()) else []


def joined(rows: list[dict[str, Any]], new: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row for each stage of a method, the new one where there are two; geometry by geometry."""
    found = {(row["geometry"], row["stage"], row["method"]): row for row in (*rows, *new)}
    names = [*dict.fromkeys(row["geometry"] for row in (*rows, *new))]
    return sorted(found.values(), key=lambda row: names.index(row["geometry"]))


def peaks(rows: list[dict[str, Any]]) -> dict[str, dict[str, Any] | None]:
    """The row of each geometry that took most memory; None where nothing was counted."""
    out = {}
    for name in dict.fromkeys(row["geometry"] for row in rows):
        own = [row for row in rows if row["geometry"] == name and row["peak_gb"] is not None]
        out[name] = max(own, key=lambda row: row["peak_gb"]) if own else None
    return out


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--geometries", nargs="+", default=NAMES, choices=[*GEOMETRIES])
    parser.add_argument("--methods", nargs="+", default=METHODS, choices=METHODS)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument(
        "--words", type=int, default=120, help="of a question; the prompt around it has about 10 tokens"
    )
    parser.add_argument("--questions", type=int, default=64, help="to predict")
    parser.add_argument("--recompute", action="store_true", help="gradient checkpointing in stage 1")
    parser.add_argument("--tiny", action="store_true", help="small models of the same geometries, on a CPU")
    args = parser.parse_args(arguments)
    if args.tiny:
        torch.set_num_threads(1)  # matrices this small only lose by being shared out
    result = settings(args)
    before = kept(args.out / "rehearsal.json", result)
    for name in args.geometries:  # a run that is cut short leaves what it has
        with tempfile.TemporaryDirectory() as scratch:
            rehearsal = Rehearsal(name, args, Path(scratch))
            for label in args.methods:
                rows = joined(before, rehearsal.method(label))
                result |= {"peaks": peaks(rows), "rows": rows}
                write_json(args.out / "rehearsal.json", result)
                write_text(args.out / "rehearsal.md", markdown(result))
        before = rows
        del rehearsal
    print(markdown(result))
    return 0 if all(most is None or most["peak_gb"] < LIMIT for most in result["peaks"].values()) else 1


if __name__ == "__main__":
    raise SystemExit(main())
