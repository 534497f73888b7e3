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
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import transformers as tf

import vmoer
from vmoer.attach import attach, attachment_of, detach, routers_of
from vmoer.bench.geometries import GEOMETRIES, Geometry
from vmoer.files import write_json, write_text
from vmoer.layers import select_layers
from vmoer.predict import collate, predict_task
from vmoer.routers import Config
from vmoer.studies._variants import CONTROLS
from vmoer.tasks import Question
from vmoer.train import PRESETS, Plan, Running, Workers, _fit_novelty, encode_questions, stage1, stage2
from vmoer.training.stages import search, searched, with_value

NAMES = ("granite-3b", "qwen1.5-moe", "deepseek-moe-16b")
METHODS = ("map", "temp-scale", "mcdr", "swag", "vglr-mf", "vglr-fc", "vglr-lr", "vtsr", "laplace")
METHODS += ("mean-only", "fixed-noise", "vglr-fc@paper", "vtsr@paper")
STEPS = 2
LIMIT = 80.0  # GB, of 10^9 bytes: what the card this is for has
TINY = {
    "vocab_size": 256,
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


def made_up_tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = ["<unk>", "<pad>", "</s>", "A", "B", "C", "D", *(f"w{i}" for i in range(200))]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    special = {"unk_token": "<unk>", "pad_token": "<pad>", "eos_token": "</s>"}
    return tf.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)


def made_up_questions(n: int, words: int, seed: int) -> list[Question]:
    g = torch.Generator().manual_seed(seed)
    out = []
    for i in range(n):
        drawn = torch.randint(200, (words + i % 5,), generator=g).tolist()
        text = " ".join(f"w{k}" for k in drawn)
        choices = tuple(f"w{k}" for k in torch.randint(200, (4,), generator=g).tolist())
        out.append(Question(f"{seed}-{i}", text, choices, i % 4, "made up", "test"))
    return out


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


def rehearse(name: str, geometry: Geometry, args: argparse.Namespace, scratch: Path) -> Iterator[list[dict[str, Any]]]:
    """The rows so far, after every method."""
    device = torch.device("cuda" if torch.cuda.is_available() and not args.tiny else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    meter = Meter(name, device)
    model = meter("build", "-", lambda: geometry.build(str(device), dtype))
    parameters = sum(p.numel() for p in model.parameters())
    meter.rows[-1]["parameters"] = parameters
    tokenizer = made_up_tokenizer()
    train, valid = (
        encode_questions(tokenizer, made_up_questions(n, args.words, seed), 2**31)
        for n, seed in ((STEPS * args.batch, 1), (args.batch, 2))
    )
    asked = made_up_questions(args.questions, args.words, 3)
    running = Running(workers=Workers(device=device), checkpoint_seconds=1e9, recompute=args.recompute)
    plan = Plan(epochs=1, batch_size=args.batch, lr=1e-4)

    tuned, outcome = meter(
        "stage 1", "map", lambda: stage1(model, train, valid, plan, folder=scratch / "stage1", running=running)
    )
    meter.rows[-1]["trained_parameters"] = sum(v.numel() for v in outcome.last.values())
    del outcome
    meter("merge", "map", tuned.merge_adapter)
    batches = [collate(train.prompts[i : i + args.batch], tuned) for i in range(0, len(train), args.batch)]
    many = min(10, len(geometry.layers()))
    ten = meter("layers", "map", lambda: select_layers(tuned, batches, strategy="susceptible", n=many))

    for label in args.methods:
        key, _, preset = label.partition("@")
        config: Config = CONTROLS.get(key) or PRESETS[preset or "default"].config(key)
        if preset == "paper":
            config = with_value(config, "layers", tuple(ten))
        folder = scratch / label.replace("@", "-")
        _method(label, config, tuned, (train, valid), asked, tokenizer, plan, folder, running, meter)
        yield meter.rows


def _method(
    label: str,
    config: Config,
    model: Any,
    data: tuple[Any, Any],
    asked: list[Question],
    tokenizer: Any,
    plan: Plan,
    folder: Path,
    running: Running,
    meter: Meter,
) -> None:
    """Stage 2, statistics and predictions of one method; nothing is attached afterwards."""

    def second() -> Any:
        chosen = config
        if searched(config) == "temperature":
            chosen, *_ = search(model, *data, config, folder=folder / "search", running=running, plan=plan)
        return stage2(model, *data, chosen, plan, folder=folder, running=running)

    if label == "map":
        attach(model, config)
    else:
        meter("stage 2", label, second, steps=STEPS)
        meter.rows[-1]["trained_parameters"] = sum(p.numel() for p in model.parameters() if p.requires_grad)
    model.requires_grad_(False)
    meter("fit", label, lambda: _fit_novelty(model, data[0], running.workers.device))
    draws = label.partition("@")[0] not in ("map", "mean-only")
    for averaging in ("router", "answer", "full") if draws else ("router",):
        how: dict[str, Any] = {"averaging": averaging, "passes": 8, "batch_tokens": 8192}
        place = folder / averaging
        meter(
            f"predict ({averaging})",
            label,
            lambda place=place, how=how: predict_task(model, tokenizer, asked, folder=place, name="rehearsal", **how),
            questions=len(asked),
        )
    assert attachment_of(model) is not None
    assert routers_of(model)
    detach(model)


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
        "prompt_tokens": args.words + 30,
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
        "--words", type=int, default=100, help="of a question; the prompt around it has about 30 tokens"
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
        geometry = shrunk(GEOMETRIES[name]) if args.tiny else GEOMETRIES[name]
        with tempfile.TemporaryDirectory() as scratch:
            for new in rehearse(name, geometry, args, Path(scratch)):
                rows = joined(before, new)
                result |= {"peaks": peaks(rows), "rows": rows}
                write_json(args.out / "rehearsal.json", result)
                write_text(args.out / "rehearsal.md", markdown(result))
        before = rows
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    print(markdown(result))
    return 0 if all(most is None or most["peak_gb"] < LIMIT for most in result["peaks"].values()) else 1


if __name__ == "__main__":
    raise SystemExit(main())
