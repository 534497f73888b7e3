"""Questions as batches: prompts with their answers' letters, what is predicted in them, and how tokens count in the load.

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
from recipe import Recipe
from torch import Tensor

from vmoer.tasks import Question
from vmoer.tasks.prompt import encode, letter_ids
from vmoer.training.data import epoch_batches


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
    ids = torch.full((len(rows), width), eos)
    real = torch.zeros(len(rows), width, dtype=torch.bool)
    places, targets, ends = [], [], []
    for i, (prompt, letter) in enumerate(rows):
        tokens = [*prompt, letter]
        ids[i, : len(tokens)] = torch.tensor(tokens)
        real[i, : len(tokens)] = True
        places += range(i * width + prefix - 1, i * width + len(tokens))
        targets += [*tokens[prefix:], eos]
        ends.append(i * width + len(prompt) - 1)
    place_P = torch.tensor(places)
    letter_P = torch.isin(place_P, torch.tensor(ends))
    others = max(1, len(places) - len(rows))
    causal = torch.ones(width, width, dtype=torch.bool).tril()
    last = torch.zeros(len(rows) * width).index_fill(0, torch.tensor(ends), 1 / len(rows))
    return Batch(
        ids_BT=ids,
        mask_BTT=(causal & real[:, None, :])[:, None],
        place_P=place_P,
        target_P=torch.tensor(targets),
        weight_P=torch.where(letter_P, 1 / len(rows), lm / others),
        letter_P=letter_P,
        token_MT=torch.stack([real.flatten() / real.sum(), last]),
    )


def shared_prefix(prompts: Sequence[Sequence[int]]) -> int:
    """How many tokens all prompts begin with, at least 1: in sorted order the first and the last differ soonest."""
    pairs = enumerate(zip(min(prompts), max(prompts), strict=False))
    differs = next((i for i, (a, b) in pairs if a != b), min(map(len, prompts)))
    return max(1, differs)


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
