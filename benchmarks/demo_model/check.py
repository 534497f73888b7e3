"""What the embedded model shows, measured: `python -m demo_model.check [--model DIR]` in `benchmarks`."""

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from demo_model.tokenizer import CONTEXT
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from vmoer import gates, metrics, tasks
from vmoer.demo import STAGES, model_path
from vmoer.demo.words import FAMILIES
from vmoer.demo.world import ESTABLISHED, NEW, OPTIONS, Fact, world
from vmoer.models import open_model
from vmoer.tasks.prompt import encode, letter_ids

NOVELTY_LAYERS = [1, 3, 5, 7]


@dataclass(frozen=True)
class Answers:
    """A split's answers: `log_probs` [n, 4], and each prompt's last token as the routers see it, [layer, n, D]."""

    log_probs: np.ndarray
    answers: np.ndarray
    lengths: np.ndarray
    states: Tensor
    facts: tuple[Fact, ...]

    @property
    def correct(self) -> np.ndarray:
        return metrics.correct_per_question(self.log_probs, self.answers)

    @property
    def confidence(self) -> np.ndarray:
        return metrics.confidence(self.log_probs)

    @property
    def entropy(self) -> np.ndarray:
        return -(np.exp(self.log_probs) * self.log_probs).sum(1)


@contextmanager
def _removed(handles: list[Any]) -> Iterator[None]:
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@torch.no_grad()
def answer(model: Any, tokenizer: PreTrainedTokenizerBase, task: str, split: str) -> Answers:
    """Ask every question of the split. Prompts are equally long, so no padding is needed."""
    questions = tasks.load(task, split)
    prompts = torch.tensor(encode(tokenizer, questions, CONTEXT))
    letters = letter_ids(tokenizer, OPTIONS)
    routers = [found.router for found in gates.find(model)]
    seen: list[Tensor] = []

    def see(router: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        seen.append(inputs[0].unflatten(0, (-1, prompts.shape[1]))[:, -1])

    with _removed([router.register_forward_pre_hook(see) for router in routers]):
        logits = [model(rows, logits_to_keep=1, use_cache=False).logits[:, 0, letters] for rows in prompts.split(500)]
    return Answers(
        torch.cat(logits).double().log_softmax(-1).numpy(),
        np.array([question.answer for question in questions]),
        np.full(len(prompts), prompts.shape[1]),
        torch.stack([torch.cat(seen[layer :: len(routers)]) for layer in range(len(routers))]),
        world().splits[task][split],
    )


def novelty(train: Tensor, states: Tensor) -> np.ndarray:
    """u' A^-1 u with A = I + sum u u' over the training prompts, averaged over the layers; [n] from [layer, n, D]."""
    train, states = train[NOVELTY_LAYERS].double(), states[NOVELTY_LAYERS].double()
    precision = torch.eye(train.shape[-1], dtype=torch.float64) + train.mT @ train
    return np.asarray((states * torch.linalg.solve(precision, states.mT).mT).sum(-1).mean(0))


@contextmanager
def random_routing(model: nn.Module) -> Iterator[None]:
    """Every token goes to K experts drawn at random and weighed equally, in every layer."""
    generator = torch.Generator().manual_seed(0)

    def hook_for(gate: gates.Gate) -> Any:
        def hook(router: nn.Module, inputs: Any, outputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            drawn_TN = torch.randn(gate.logits(outputs).shape, generator=generator)
            return gate.route(router, outputs, drawn_TN, torch.zeros_like(drawn_TN), None)[0]

        return hook

    found = gates.find(model)
    with _removed([one.router.register_forward_hook(hook_for(gates.Gate.probe(one))) for one in found]):
        yield


def measure(model: Any, tokenizer: PreTrainedTokenizerBase) -> dict[str, float]:
    """Every number that the demo promises, by name."""
    test, validation, train = (answer(model, tokenizer, "demo", split) for split in ("test", "validation", "train"))
    with random_routing(model):
        shuffled = answer(model, tokenizer, "demo", "test")
    floor = metrics.noise_floor(test.confidence, test.correct, draws=200)
    temperature = metrics.fit_temperature(validation.log_probs, validation.answers)
    found = {
        "accuracy": metrics.accuracy(test.log_probs, test.answers),
        "standard error": float(test.correct.std() / len(test.correct) ** 0.5),
        "confidence": float(test.confidence.mean()),
        "NLL": metrics.nll(test.log_probs, test.answers),
        "NLL on train": metrics.nll(train.log_probs, train.answers),
        "ECE": metrics.ece(test.confidence, test.correct),
        "ECE noise floor": floor.mean,
        "output temperature": temperature,
        "NLL at that temperature": metrics.nll(metrics.apply_temperature(test.log_probs, temperature), test.answers),
        "accuracy, random routing": metrics.accuracy(shuffled.log_probs, shuffled.answers),
    }
    for name, rows in _groups(test.facts).items():
        found[f"accuracy, {name}"] = float(test.correct[rows].mean())
        found[f"confidence, {name}"] = float(test.confidence[rows].mean())
    for shift in ("demo-near", "demo-far"):
        out = answer(model, tokenizer, shift, "test")
        found[f"accuracy, {shift}"] = metrics.accuracy(out.log_probs, out.answers)
        found[f"AUROC of prompt length, {shift}"] = metrics.auroc(test.lengths, out.lengths)
        found[f"AUROC of predictive entropy, {shift}"] = metrics.auroc(test.entropy, out.entropy)
        found[f"AUROC of novelty, {shift}"] = metrics.auroc(*(novelty(train.states, a.states) for a in (test, out)))
    return found


def _groups(facts: tuple[Fact, ...]) -> dict[str, np.ndarray]:
    """Rows of the test split by why they are hard; the coverage groups leave noisy relations out."""
    new = np.array([fact.family in FAMILIES[ESTABLISHED : ESTABLISHED + NEW] for fact in facts])
    noisy = np.array([fact.noise > 0 for fact in facts])
    coverage = np.array([fact.coverage for fact in facts])
    exception = np.array([fact.value != fact.customary for fact in facts])
    groups = {name: (coverage == name) & ~noisy & ~new for name in ("well", "thin", "never")}
    exceptions = {f"{name}, exceptions": rows & exception for name, rows in groups.items()}
    return {**groups, **exceptions, "new families": new & ~noisy, "noisy relations": noisy}


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure the embedded model.")
    parser.add_argument("--model", type=Path, help="a folder with base/, map/ and map-early/; by default the embedded")
    root = parser.parse_args().model
    opened = [open_model(root / stage if root else model_path(stage), device="cpu") for stage in STAGES]
    columns = [measure(one.model, one.tokenizer) for one in opened]
    print(f"{'':40}" + "".join(f"{stage:>11}" for stage in STAGES))
    for name in columns[0]:
        print(f"{name:40}" + "".join(f"{column[name]:11.3f}" for column in columns))


if __name__ == "__main__":
    main()
