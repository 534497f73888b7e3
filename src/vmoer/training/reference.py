"""A run's signals on validation questions, which no stage learned from: what those of a later answer are held against."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from vmoer.inference import generation
from vmoer.live.attach import ready, record
from vmoer.live.inputs import context_length, last_positions
from vmoer.tasks import Question
from vmoer.tasks.batches import by_length, padded
from vmoer.tasks.prompt import encode, freely

MOST = 500  # questions
LEVELS = 101


def reference(model: nn.Module, tokenizer: Any, questions: Sequence[Question]) -> dict[str, Any]:
    """Quantiles of every signal where the answer starts, the mean over layers: `letters` of questions with their options,
    `text` of the bare question, as `vmoer ask` asks it.
    """
    questions, longest = list(questions)[:MOST], context_length(model)
    bare = [generation.encode(tokenizer, freely(tokenizer, question.question)) for question in questions]
    forms = {"letters": encode(tokenizer, questions, longest), "text": [ids for ids in bare if len(ids) <= longest]}
    found = {form: _quantiles(model, prompts) for form, prompts in forms.items() if prompts}
    return {"task": questions[0].task, "questions": len(questions), **found}


@torch.no_grad()
def _quantiles(model: Any, prompts: list[list[int]]) -> dict[str, list[float]]:
    values: dict[str, list[torch.Tensor]] = {}
    with ready(model):
        for rows in by_length([len(ids) for ids in prompts], 4096):
            batch = padded([prompts[row] for row in rows], next(model.parameters()).device)
            with record(model) as rec:
                model(**batch, use_cache=False)
            last_B = last_positions(batch).cpu()
            for name, value_LBT in rec.signals.items():
                values.setdefault(name, []).append(value_LBT[:, torch.arange(len(rows)), last_B].double().mean(0).cpu())
    levels = torch.linspace(0, 1, LEVELS, dtype=torch.float64)
    return {
        name: [float(f"{value:.6g}") for value in torch.cat(parts).quantile(levels).tolist()]
        for name, parts in values.items()
    }
