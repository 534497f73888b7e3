"""Prompts as batches: which rows go together, and their padding."""

from collections.abc import Sequence

import torch
from torch import Tensor


def by_length(lengths: Sequence[int], batch_tokens: int) -> list[list[int]]:
    """Batches of rows, the longest first: at most `batch_tokens` tokens with their padding, and at least one row."""
    batches: list[list[int]] = []
    for row in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        if batches and lengths[batches[-1][0]] * (len(batches[-1]) + 1) <= batch_tokens:
            batches[-1].append(row)
        else:
            batches.append([row])
    return batches


def padded(prompts: Sequence[Sequence[int]], device: torch.device, width: int = 0) -> dict[str, Tensor]:
    """The prompts as one batch, padded on the right, where no position moves and no real token sees the padding."""
    width = max(width, *map(len, prompts))
    ids_BT = torch.tensor([[*p, *[p[-1]] * (width - len(p))] for p in prompts])
    mask_BT = torch.tensor([[1] * len(p) + [0] * (width - len(p)) for p in prompts])
    return {
        "input_ids": ids_BT.to(device, non_blocking=True),
        "attention_mask": mask_BT.to(device, non_blocking=True),
    }
