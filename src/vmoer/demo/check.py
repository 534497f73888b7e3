"""What the embedded model shows, measured: `python -m vmoer.demo.check [--model DIR]`."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import Tensor

from vmoer import gates, metrics, tasks
from vmoer.gates import Gate
from vmoer.tasks.prompt import encode, letter_ids

from . import STAGES, model_path
from .tokenizer import CONTEXT
from .words import FAMILIES
from .world import ESTABLISHED, NEW, OPTIONS, Fact, world

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

NOVELTY_LAYERS = (1, 3, 5, 7)
Randomised = Literal["equal", "own", "logits"]


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


@torch.no_grad()
def answer(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, task: str, split: str) -> Answers:
    """Ask every question of the split; prompts are equally long, so no padding is needed."""
    questions = tasks.load(task, split)
    prompts = encode(tokenizer, questions, CONTEXT)
    letters = letter_ids(tokenizer, OPTIONS)
    log_probs, states = [], []
    for rows in torch.tensor(prompts).split(500):
        with _router_inputs(model) as seen:
            logits = model(rows, logits_to_keep=1, use_cache=False).logits[:, 0, letters]
        log_probs.append(logits.double().log_softmax(-1))
        states.append(torch.stack([state.view(*rows.shape, -1)[:, -1] for state in seen]))
    return Answers(
        torch.cat(log_probs).numpy(),
        np.array([question.answer for question in questions]),
        np.array([len(prompt) for prompt in prompts]),
        torch.cat(states, 1),
        world().splits[task][split],
    )


def novelty(train: Tensor, states: Tensor) -> np.ndarray:
    """u' A^-1 u with A = I + sum u u' over the training prompts, averaged over the layers; [n] from [layer, n, D]."""
    train, states = train[list(NOVELTY_LAYERS)].double(), states[list(NOVELTY_LAYERS)].double()
    precision = torch.eye(train.shape[-1], dtype=torch.float64) + train.mT @ train
    return np.asarray((states * torch.linalg.solve(precision, states.mT).mT).sum(-1).mean(0))


@contextmanager
def random_routing(model: torch.nn.Module, seed: int = 0, how: Randomised = "equal") -> Iterator[None]:
    """Every token goes to K experts drawn at random, in every layer.

    `how` says how they are weighed: "equal"ly, by the "own" weights that the model gave the experts it would have taken,
    or by "logits" drawn at random too, with the spread of the layer's own.
    """
    generator = torch.Generator().manual_seed(seed)

    def hook_for(gate: Gate) -> Any:
        def hook(router: torch.nn.Module, inputs: Any, outputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            own_TN = gate.logits(outputs)
            drawn_TN = torch.randn(own_TN.shape, generator=generator).to(own_TN)
            chosen_TK = drawn_TN.topk(gate.scoring.k).indices
            new, weights, indices = list(outputs), gate.places["weights"], gate.places["indices"]
            if how == "equal":
                new[weights] = torch.full_like(outputs[weights], 1 / gate.scoring.k)
            elif how == "logits":
                weights_TK = gate.scoring.weigh(drawn_TN * own_TN.std(), chosen_TK, router)
                new[weights] = weights_TK.to(outputs[weights].dtype)
            new[indices] = chosen_TK.to(outputs[indices].dtype)
            return tuple(new)

        return hook

    hooks = [found.router.register_forward_hook(hook_for(Gate.probe(found))) for found in gates.find(model)]
    try:
        yield
    finally:
        for handle in hooks:
            handle.remove()


def measure(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> dict[str, float]:
    """Every number that the demo promises, by name."""
    test = answer(model, tokenizer, "demo", "test")
    validation = answer(model, tokenizer, "demo", "validation")
    train = answer(model, tokenizer, "demo", "train")
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
        entropies = [-(np.exp(a.log_probs) * a.log_probs).sum(1) for a in (test, out)]
        found[f"accuracy, {shift}"] = metrics.accuracy(out.log_probs, out.answers)
        found[f"AUROC of prompt length, {shift}"] = metrics.auroc(test.lengths, out.lengths)
        found[f"AUROC of predictive entropy, {shift}"] = metrics.auroc(*entropies)
        found[f"AUROC of novelty, {shift}"] = metrics.auroc(
            novelty(train.states, test.states), novelty(train.states, out.states)
        )
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


@contextmanager
def _router_inputs(model: PreTrainedModel) -> Iterator[list[Tensor]]:
    seen: list[Tensor] = []
    hooks = [router.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0])) for router in _routers(model)]
    try:
        yield seen
    finally:
        for handle in hooks:
            handle.remove()


def _routers(model: PreTrainedModel) -> list[torch.nn.Module]:
    return [found.router for found in gates.find(model)]


def main() -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    parser = argparse.ArgumentParser(description="Measure the embedded model.")
    parser.add_argument("--model", type=Path, help="a folder with base/, map/ and map-early/; by default the embedded")
    root = parser.parse_args().model
    folders = [root / stage if root else model_path(stage) for stage in STAGES]
    tokenizer = AutoTokenizer.from_pretrained(folders[0])
    columns = [measure(AutoModelForCausalLM.from_pretrained(folder).eval(), tokenizer) for folder in folders]
    print(f"{'':40}" + "".join(f"{stage:>11}" for stage in STAGES))
    for name in columns[0]:
        print(f"{name:40}" + "".join(f"{column[name]:11.3f}" for column in columns))


if __name__ == "__main__":
    main()
