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
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from upcycle import run

import vmoer
from vmoer import gates, metrics, tasks
from vmoer.errors import InputError
from vmoer.files import write_json
from vmoer.live.attach import record
from vmoer.models import open_model
from vmoer.training.data import Examples, collate, encode_questions
from vmoer.training.objective import answer_log_probs, evaluate
from vmoer.training.workers import Workers

Randomised = Literal["own", "logits"]
HOW: tuple[Randomised, ...] = ("own", "logits")


@contextmanager
def random_routing(model: torch.nn.Module, seed: int, how: Randomised) -> Iterator[None]:
    """Every token goes to K experts drawn at random, in every layer.

    They are weighed by the "own" weights that the model gave the experts it would have taken, or by "logits" drawn at
    random too, with the spread of the layer's own.
    """
    generator = torch.Generator().manual_seed(seed)

    def hook_for(gate: gates.Gate) -> Any:
        def hook(router: torch.nn.Module, inputs: Any, outputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            own_TN = gate.logits(outputs)
            drawn_TN = torch.randn(own_TN.shape, generator=generator).to(own_TN)
            if how == "logits":
                return gate.route(router, outputs, drawn_TN, drawn_TN * own_TN.std(), None)[0]
            new, place = list(outputs), gate.places["indices"]
            new[place] = drawn_TN.topk(gate.scoring.k).indices.to(outputs[place].dtype)
            return tuple(new)

        return hook

    hooks = [found.router.register_forward_hook(hook_for(gates.Gate.probe(found))) for found in gates.find(model)]
    try:
        yield
    finally:
        for handle in hooks:
            handle.remove()


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
    found = {"accuracy": float(randomised.mean()), "lost": lost, "standard_error": error}
    return found | {"matters": lost > 2 * error}


def check(model: Any, tokenizer: Any, questions: dict[str, list[tasks.Question]], seeds: int = 2) -> dict[str, Any]:
    """Every number by task, and pooled over the tasks."""
    device = next(model.parameters()).device
    workers, context = Workers(device=device), model.config.max_position_embeddings
    rows: dict[str, Any] = {}
    own: list[np.ndarray] = []
    drawn: dict[str, list[np.ndarray]] = {how: [] for how in HOW}
    for task, asked in questions.items():
        examples = encode_questions(tokenizer, asked, context, letters=max(len(q.choices) for q in asked))
        rows[task] = {"questions": len(asked), "chance": float(np.mean([1 / n for n in examples.options]))}
        plain = answers(evaluate(model, examples, workers), examples)
        own.append(plain.pop("correct"))
        rows[task] |= plain
        for how in HOW:
            scores = []
            for seed in range(seeds):
                with random_routing(model, seed, how):
                    scores.append(answers(evaluate(model, examples, workers), examples)["correct"])
            drawn[how].append(np.stack(scores))
            rows[task][f"random_{how}"] = loss(own[-1], drawn[how][-1])
    correct = np.concatenate(own)
    pooled: dict[str, Any] = {f"random_{how}": loss(correct, np.concatenate(drawn[how], 1)) for how in HOW}
    pooled |= {"questions": len(correct), "accuracy": float(correct.mean()), "standard_error": standard_error(correct)}
    seen = [question for asked in questions.values() for question in asked]
    routing = usage(model, encode_questions(tokenizer, seen, context), device)
    matters = all(pooled[f"random_{how}"]["matters"] for how in HOW)
    return {"tasks": rows, "pooled": pooled, "layers": routing, "routing_matters": matters}


def show(found: dict[str, Any]) -> None:
    print(f"{'':16}questions  chance  accuracy         NLL    ECE    random experts, lost     random logits, lost")
    for name, row in [*found["tasks"].items(), ("all", found["pooled"])]:
        chance, nll, ece = (f"{row[key]:.3f}" if key in row else "" for key in ("chance", "nll", "ece"))
        shown = f"{row['accuracy']:.3f} +- {row['standard_error']:.3f}  {nll:5}  {ece:5}"
        for lost in (row[f"random_{how}"] for how in HOW):
            shown += f"  {lost['accuracy']:.3f}, {lost['lost']:.3f} +- {lost['standard_error']:.3f}"
        print(f"{name:16}{row['questions']:9}  {chance:6}  {shown}")
    names = ("entropy", "entropy_answers", "jaccard_answers")
    columns = np.array([found["layers"][name] for name in names])
    print(f"\n{'layer':6}{'usage entropy':>15}{'on answers':>12}{'Jaccard between answers':>25}")
    for layer, (all_tokens, last, jaccard) in [*enumerate(columns.T), ("mean", columns.mean(1))]:
        print(f"{layer!s:6}{all_tokens:15.3f}{last:12.3f}{jaccard:25.3f}")
    verdict = "matters: randomising it costs more than two standard errors of accuracy"
    print(f"\nrouting {verdict if found['routing_matters'] else 'CARRIES NOTHING: randomising it costs no accuracy'}")


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
    load = partial(tasks.load, split=args.split, data_root=args.data_root, limit=args.limit)
    questions = {task: load(task) for task in args.tasks.split(",")}
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
