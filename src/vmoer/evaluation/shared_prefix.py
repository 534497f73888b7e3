"""Prompts that begin alike, such as one question with its options in several orders: what they share is run once.

    tokens run:   P + sum_m (T_m - P)   in place of   sum_m T_m,    P the tokens that all M prompts of a group begin with

The rest of each prompt goes behind the keys of its group. Routing must not differ between the prompts of a group.

Shapes: B groups, R prompts of all groups, P and S columns of the prefixes and of the rests, V vocabulary.
"""

from collections.abc import Sequence
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor, nn

from vmoer.live.inputs import keeps_logits, last_positions
from vmoer.tasks.batches import padded

Prompt = Sequence[int]


def shared(prompts: Sequence[Prompt]) -> int:
    """How many tokens all begin with; each keeps one at least for itself."""
    alike = sum(1 for _ in takewhile(lambda tokens: len(set(tokens)) == 1, zip(*prompts, strict=False)))
    return min(alike, min(map(len, prompts)) - 1)


def worthwhile(groups: Sequence[Sequence[Prompt]]) -> bool:
    """Whether sharing saves more than its second pass costs: a quarter of the tokens, and each group shares at least one."""
    sizes = [shared(own) for own in groups]
    saved = sum(size * (len(own) - 1) for own, size in zip(groups, sizes, strict=True))
    return min(sizes) > 0 and 4 * saved >= sum(len(prompt) for own in groups for prompt in own)


@torch.no_grad()
def last_logits(model: nn.Module, groups: Sequence[Sequence[Prompt]]) -> tuple[Tensor, dict[str, Tensor]]:
    """Logits at the last token of every prompt, [R, V], and the rests as the model's last pass was given them.

    Args:
        model: One that `shares_prompts` says yes to.
        groups: Prompts that begin with at least one token in common.
    """
    device = next(model.parameters()).device
    sizes = [shared(own) for own in groups]
    head = padded([own[0][:size] for own, size in zip(groups, sizes, strict=True)], device)
    one: dict[str, Any] = {"logits_to_keep": 1} if keeps_logits(model) else {}
    cache = model(**head, **one, use_cache=True).past_key_values
    rows_R = torch.tensor([row for row, own in enumerate(groups) for _ in own], device=device)
    cache.reorder_cache(rows_R)
    rest = padded([prompt[size:] for own, size in zip(groups, sizes, strict=True) for prompt in own], device)
    last_R = last_positions(rest)
    columns_U, place_R = last_R.unique(return_inverse=True)
    start_R = torch.tensor(sizes, device=device)[rows_R]
    logits = model(
        input_ids=rest["input_ids"],
        attention_mask=torch.cat([head["attention_mask"][rows_R], rest["attention_mask"]], 1),
        position_ids=start_R.unsqueeze(1) + torch.arange(rest["input_ids"].shape[1], device=device),
        past_key_values=cache,
        use_cache=True,
        **({"logits_to_keep": columns_U} if one else {}),
    ).logits
    column_R = place_R if logits.shape[1] == len(columns_U) else last_R  # some take the argument and do not heed it
    return logits[torch.arange(len(rows_R), device=device), column_R], rest
