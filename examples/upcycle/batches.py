"""Every number of the specialisation stage, and questions as batches: prompts with their answers' letters, what is
predicted in them, and how tokens count in the load.

The attention mask is given in full: where no row is padded, transformers would otherwise drop the mask, and that path of the
attention kernel gave gradients that were not finite.

Shapes: B rows, T tokens (of a row, or of the flattened batch), P predicted positions, M = 2 ways to weigh tokens (all, last).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vmoer.errors import InputError
from vmoer.tasks import Question
from vmoer.tasks.prompt import encode, letter_ids
from vmoer.training.data import epoch_batches

TASKS = ("commonsense_qa", "social_iqa")


@dataclass(frozen=True)
class Recipe:
    tasks: tuple[str, ...] = TASKS
    epochs: int = 4
    per_task: int = 10_000
    """Questions of each task in an epoch; the next epoch goes on where this one stopped, and turns round at the end."""
    batch_size: int = 128
    lr: float = 2e-4
    router_lr: float = 1e-3
    warmup: float = 0.05
    lm: float = 0.2
    balance: float = 0.01
    answers: float = 0.002
    noise: float = 0.02
    """Standard deviation of what is added to each expert's weights, relative to theirs."""
    seed: int = 0
    log_every: int = 20
    steps: int | None = None
    """Stop after this many, with the schedule of so many."""
    seconds: float | None = None
    """Stop after this long, with the learning rate down by then; only then does the result depend on the machine's speed."""

    def __post_init__(self) -> None:
        counts = (self.epochs, self.batch_size, self.per_task, self.log_every, 1 if self.steps is None else self.steps)
        if min(counts) < 1:
            raise InputError("epochs, batch size, questions per task, steps and log-every must be at least 1")
        if not self.lr > 0 or not self.router_lr > 0 or (self.seconds is not None and not self.seconds > 0):
            raise InputError("learning rates and seconds must be above 0")
        if min(self.lm, self.balance, self.answers, self.noise) < 0:
            raise InputError("lm, balance, answers and noise must not be negative")


@dataclass(frozen=True)
class Batch:
    ids_BT: Tensor
    mask_BTT: Tensor
    place_P: Tensor
    """Where in the flattened batch a token is predicted ..."""
    target_P: Tensor
    weight_P: Tensor
    """... and its weight in the loss: 1/B at a prompt's end, lm / (P - B) elsewhere."""
    letter_P: Tensor
    token_MT: Tensor
    """Weights of the flattened tokens in the load: evenly over all but padding, and over the prompts' last tokens."""

    def to(self, device: torch.device) -> Batch:
        fields = dataclasses.fields(self)
        moved = [getattr(self, f.name).pin_memory() if device.type == "cuda" else getattr(self, f.name) for f in fields]
        return Batch(*(tensor.to(device, non_blocking=True) for tensor in moved))


def epoch_questions(pools: Sequence[list[Question]], recipe: Recipe, epoch: int) -> list[Question]:
    """The epoch's share of every task, each question with its options in an order of this epoch's own."""
    chosen = []
    for pool in pools:
        size = min(recipe.per_task, len(pool))
        chosen += [pool[i % len(pool)] for i in range(epoch * size, (epoch + 1) * size)]
    return [question.shuffled(recipe.seed * 1009 + epoch) for question in chosen]


def collate(rows: Sequence[tuple[Sequence[int], int]], prefix: int, eos: int, lm: float) -> Batch:
    """Rows of (prompt, letter), padded on the right; what follows the prefix that all prompts share is predicted."""
    width = -(-max(len(prompt) + 1 for prompt, _ in rows) // 8) * 8  # the kernels like multiples of 8
    ids_BT = torch.tensor([[*prompt, letter, *[eos] * (width - len(prompt) - 1)] for prompt, letter in rows])
    length_B1, at_T = torch.tensor([[len(prompt) + 1] for prompt, _ in rows]), torch.arange(width)
    real_BT, last_BT = at_T < length_B1, at_T == length_B1 - 2
    place_P = (real_BT & (at_T >= prefix - 1)).flatten().nonzero()[:, 0]
    letter_P = last_BT.flatten()[place_P]
    others = max(1, len(place_P) - len(rows))
    causal_TT = torch.ones(width, width, dtype=torch.bool).tril()
    return Batch(
        ids_BT=ids_BT,
        mask_BTT=(causal_TT & real_BT[:, None, :])[:, None],
        place_P=place_P,
        target_P=torch.cat([ids_BT[:, 1:], torch.full((len(rows), 1), eos)], 1).flatten()[place_P],
        weight_P=torch.where(letter_P, 1 / len(rows), lm / others),
        letter_P=letter_P,
        token_MT=torch.stack([real_BT.flatten() / real_BT.sum(), last_BT.flatten() / len(rows)]),
    )


def shared_prefix(prompts: Sequence[Sequence[int]]) -> int:
    """How many tokens all prompts begin with, at least 1: in sorted order the first and the last differ soonest."""
    pairs = enumerate(zip(min(prompts, key=list), max(prompts, key=list), strict=False))
    return max(1, next((i for i, (a, b) in pairs if a != b), min(map(len, prompts))))


def batches(tokenizer: Any, pools: Sequence[list[Question]], recipe: Recipe, context: int) -> Iterator[Batch]:
    """All batches in order. An epoch is tokenised when it begins."""
    letters = letter_ids(tokenizer, max(len(question.choices) for pool in pools for question in pool))
    for epoch in range(recipe.epochs):
        questions = epoch_questions(pools, recipe, epoch)
        prompts = encode(tokenizer, questions, context - 1)
        prefix = shared_prefix(prompts)
        rows = [(prompt, letters[question.answer]) for prompt, question in zip(prompts, questions, strict=True)]
        for chosen in epoch_batches([len(prompt) for prompt in prompts], recipe.batch_size, recipe.seed, epoch):
            yield collate([rows[i] for i in chosen], prefix, tokenizer.eos_token_id, recipe.lm)


def steps_in_all(pools: Sequence[list[Question]], recipe: Recipe) -> int:
    rows = sum(min(recipe.per_task, len(pool)) for pool in pools)
    total = recipe.epochs * math.ceil(rows / recipe.batch_size)
    return total if recipe.steps is None else min(total, recipe.steps)
