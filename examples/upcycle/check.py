"""What an upcycled model's routing is worth: `python check.py --model DIR`.

- Accuracy on validation questions, and what of it is lost when routing is randomised in every layer: K experts drawn at random
  for each token, weighed by the weights the model gave its own ("own") or by random logits of the same spread ("logits"). The
  loss is a paired difference over questions. Below two standard errors routing carries nothing, and no study of routers on this
  model means anything. Copies of one expert, which is what upcycle.py writes, lose nothing: the check can say no.
- How evenly the experts of each layer are used: the entropy of the load over log N, 1 where it is even, over all tokens and over
  the prompts' last tokens, where the answer is read.
- The Jaccard index of the last tokens' experts in two different questions: 1 where every question is answered by the same
  experts, 0.18 where 2 of 8 are drawn at random.

Shapes: L layers, B rows, T tokens, K chosen experts, N experts.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from upcycle import run

import vmoer
from vmoer import gates, metrics, tasks
from vmoer.attach import record
from vmoer.demo.check import Randomised, random_routing
from vmoer.errors import InputError
from vmoer.files import write_json
from vmoer.models import open_model
from vmoer.training.data import Examples, collate, encode_questions
from vmoer.training.objective import answer_log_probs, evaluate
from vmoer.training.workers import Workers

HOW: tuple[Randomised, ...] = ("own", "logits")
BATCH = 128


@torch.no_grad()
def usage(model: Any, examples: Examples, device: torch.device) -> dict[str, list[float]]:
    """Per layer: the load's entropy over all tokens and over the last ones, and the last tokens' Jaccard index."""
    experts = gates.Gate.probe(gates.find(model)[0]).num_experts
    load_LN: Tensor | float = 0.0
    last_LBN = []
    order = sorted(range(len(examples)), key=lambda row: examples.lengths[row])
    vmoer.attach(model, vmoer.Deterministic())
    try:
        for start in range(0, len(order), BATCH):
            batch = collate(examples, order[start : start + BATCH], device)
            with record(model) as rec:
                answer_log_probs(model, batch)
            chosen_LBTN = torch.zeros(*rec.experts.shape[:3], experts, device=device).scatter(3, rec.experts, 1)
            load_LN = load_LN + (chosen_LBTN * rec.mask[..., None]).sum((1, 2))
            rows = torch.arange(len(batch.last_B), device=device)
            last_LBN.append(chosen_LBTN[:, rows, batch.last_B])
    finally:
        vmoer.detach(model)
    last = torch.cat(last_LBN, 1)
    assert isinstance(load_LN, Tensor)
    return {
        "entropy": evenness(load_LN).tolist(),
        "entropy_answers": evenness(last.sum(1)).tolist(),
        "jaccard_answers": jaccard_between(last).tolist(),
    }


def evenness(load_LN: Tensor) -> Tensor:
    """Entropy of the load over log N, [L]."""
    return torch.special.entr(load_LN / load_LN.sum(-1, keepdim=True)).sum(-1) / math.log(load_LN.shape[-1])


def jaccard_between(chosen_LBN: Tensor) -> Tensor:
    """Mean Jaccard index of the expert sets of all pairs of different rows, [L]."""
    rows = chosen_LBN.shape[1]
    if rows < 2:
        raise InputError("at least two questions are needed")
    size = chosen_LBN[0, 0].sum()
    both_LBB = chosen_LBN @ chosen_LBN.mT
    return ((both_LBB / (2 * size - both_LBB)).sum((1, 2)) - rows) / (rows * (rows - 1))


def standard_error(values: np.ndarray) -> float:
    return float(values.std() / math.sqrt(len(values)))


def answers(log_probs: Tensor, examples: Examples) -> dict[str, Any]:
    scores = log_probs.numpy()
    correct = metrics.correct_per_question(scores, examples.answers)
    return {
        "correct": correct,
        "accuracy": float(correct.mean()),
        "standard_error": standard_error(correct),
        "nll": metrics.nll(scores, examples.answers),
        "ece": metrics.ece(metrics.confidence(scores), correct),
    }


def loss(own: np.ndarray, randomised: np.ndarray) -> dict[str, Any]:
    """The accuracy lost, as a paired difference: a row a seed, a column a question."""
    difference = own - randomised.mean(0)
    lost, error = float(difference.mean()), standard_error(difference)
    return {
        "accuracy": float(randomised.mean()),
        "lost": lost,
        "standard_error": error,
        "matters": bool(lost > 2 * error),
    }


def check(model: Any, tokenizer: Any, questions: dict[str, list[tasks.Question]], seeds: int = 2) -> dict[str, Any]:
    """Every number by task, and pooled over the tasks."""
    device = next(model.parameters()).device
    workers, context = Workers(device=device), model.config.max_position_embeddings
    rows: dict[str, Any] = {}
    own: list[np.ndarray] = []
    drawn: dict[str, list[np.ndarray]] = {how: [] for how in HOW}
    seen = []
    for task, asked in questions.items():
        examples = encode_questions(tokenizer, asked, context, letters=max(len(q.choices) for q in asked))
        plain = answers(evaluate(model, examples, workers), examples)
        row = {"questions": len(asked), "chance": float(np.mean([1 / n for n in examples.options]))}
        own.append(plain.pop("correct"))
        row |= plain
        for how in HOW:
            scores = []
            for seed in range(seeds):
                with random_routing(model, seed, how):
                    scores.append(answers(evaluate(model, examples, workers), examples)["correct"])
            drawn[how].append(np.stack(scores))
            row[f"random_{how}"] = loss(own[-1], drawn[how][-1])
        rows[task] = row
        seen += asked
    pooled = {f"random_{how}": loss(np.concatenate(own), np.concatenate(drawn[how], 1)) for how in HOW}
    correct = np.concatenate(own)
    pooled |= {"questions": len(correct), "accuracy": float(correct.mean()), "standard_error": standard_error(correct)}
    routing = usage(model, encode_questions(tokenizer, seen, context), device)
    matters = all(pooled[f"random_{how}"]["matters"] for how in HOW)
    return {"tasks": rows, "pooled": pooled, "layers": routing, "routing_matters": matters}


def show(found: dict[str, Any]) -> None:
    head = ("", "questions", "chance", "accuracy", "NLL", "ECE", "random experts", "lost", "random logits", "lost")
    lines = [head]
    for name, row in [*found["tasks"].items(), ("all", found["pooled"])]:
        shown = [name, str(row["questions"])]
        shown += [f"{row[key]:.3f}" if key in row else "" for key in ("chance", "accuracy", "nll", "ece")]
        shown[3] += f" +- {row['standard_error']:.3f}"
        for how in HOW:
            lost = row[f"random_{how}"]
            shown += [f"{lost['accuracy']:.3f}", f"{lost['lost']:.3f} +- {lost['standard_error']:.3f}"]
        lines.append(tuple(shown))
    _print(lines)
    names = ("entropy", "entropy_answers", "jaccard_answers")
    columns = np.array([found["layers"][name] for name in names])
    lines = [("layer", "usage entropy", "on answers", "Jaccard between answers")]
    lines += [(str(i), *(f"{value:.3f}" for value in column)) for i, column in enumerate(columns.T)]
    _print([*lines, ("mean", *(f"{value:.3f}" for value in columns.mean(1)))])
    verdict = "matters: randomising it costs more than two standard errors of accuracy"
    print(f"routing {verdict if found['routing_matters'] else 'CARRIES NOTHING: randomising it costs no accuracy'}")


def _print(lines: list[tuple[str, ...]]) -> None:
    widths = [max(map(len, column)) + 2 for column in zip(*lines, strict=True)]
    print(
        "\n".join("".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in lines) + "\n"
    )


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Measure accuracy, expert usage, and what random routing costs.")
    parser.add_argument("--model", required=True, help="what upcycle.py or specialise.py wrote, or any MoE model")
    parser.add_argument("--out", type=Path, help="default: MODEL/check.json")
    parser.add_argument("--tasks", default="commonsense_qa,social_iqa")
    parser.add_argument("--split", default="validation")
    parser.add_argument("--data-root", help="DIR/<task>/<split>.jsonl; default VMOER_DATA, or the hub")
    parser.add_argument("--limit", type=int, help="questions of each task")
    parser.add_argument("--seeds", type=int, default=2, help="draws of each kind of random routing")
    parser.add_argument("--device", help="default: the GPU where there is one")
    args = parser.parse_args(arguments)
    if args.seeds < 1:
        raise InputError(f"seeds must be at least 1, not {args.seeds}")
    start = time.monotonic()
    questions = {
        task: tasks.load(task, args.split, data_root=args.data_root, limit=args.limit) for task in args.tasks.split(",")
    }
    model, tokenizer, *_ = open_model(args.model, device=args.device)
    if not gates.find(model):
        raise InputError(f"{args.model} is a dense model: it has no routing to check")
    found = check(model, tokenizer, questions, args.seeds)
    found |= {"split": args.split, "seeds": args.seeds, "seconds": round(time.monotonic() - start, 1)}
    out = args.out or Path(args.model) / "check.json"
    write_json(out, found)
    show(found)
    print(f"written to {out} ({found['seconds']:.0f} s)")


if __name__ == "__main__":
    sys.exit(run(main))
