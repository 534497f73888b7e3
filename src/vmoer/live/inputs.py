"""What is asked of any model and of the batches it is given.

Shapes: B rows, T columns of a batch.
"""

import hashlib
import inspect
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from vmoer.errors import InputError, RunError
from vmoer.live.context import documents


def context_length(model: Any) -> int:
    """The most tokens the model takes in a row; no bound where its configuration names none."""
    config = model.config.get_text_config() if hasattr(model.config, "get_text_config") else model.config
    return int(getattr(config, "max_position_embeddings", None) or sys.maxsize)


def keeps_logits(model: Any) -> bool:
    """Whether the model takes the columns that logits are wanted of."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    return "logits_to_keep" in inspect.signature(type(base).forward).parameters


def last_positions(inputs: Mapping[str, Tensor]) -> Tensor:
    """The column of each prompt's last token, [B], on either padding side."""
    ids_BT = inputs["input_ids"]
    mask_BT = inputs.get("attention_mask")
    positions_BT = inputs.get("position_ids")
    if positions_BT is not None and documents(positions_BT, None if mask_BT is None else mask_BT.bool()).any():
        raise InputError(
            "one prompt a row is read at its last token, and these rows hold several: position_ids restart"
        )
    if mask_BT is None:
        return torch.full((len(ids_BT),), ids_BT.shape[1] - 1, device=ids_BT.device)
    columns_T = torch.arange(1, ids_BT.shape[1] + 1, device=ids_BT.device)
    return (mask_BT.long() * columns_T).argmax(-1)


@contextmanager
def seeded(key: str, model: nn.Module) -> Iterator[None]:
    """Methods that draw fresh noise draw the same inside the block, whatever ran before it."""
    device = next(model.parameters()).device
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(int.from_bytes(hashlib.sha256(key.encode()).digest()[:7], "big"))
        yield


@contextmanager
def memory_for(batch: Mapping[str, Tensor], option: str) -> Iterator[None]:
    """Running out of memory becomes one line that names the option to lower."""
    try:
        yield
    except torch.OutOfMemoryError:
        rows, width = batch["input_ids"].shape
        raise RunError(f"out of memory on {rows} prompts of {width} tokens: take a smaller {option}") from None
