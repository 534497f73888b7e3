"""A pass over prompts whose last token stands there M times: each copy sees the prompt and itself, no other copy.

    s = c q'k,    z = log sum_t exp(c q'k_t) over the prompt,    o = (e^z o_prompt + e^s v) / (e^z + e^s)

A mask can say the same (`Copies.sees`), and does where a model has eager attention of its own; but masked attention is slow and
repeats the keys for every head of a group. Here the model's own causal attention runs over all columns, which is right for the
prompt; the copies' columns are then written over: the copies, and the heads that share their keys, are the queries of one plain
attention over the prompt, which answers with z as well.

Shapes: B prompts, H heads, G heads a key head, T tokens of a prompt, M copies, D of a head.
"""

import functools
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

PREFIX = "vmoer_shared_prompt_"


@dataclass
class Copies:
    """How many copies stand behind prompts of so many tokens, which of these are real, and the layers that have come here."""

    count: int
    tokens: int
    mask_BT: Tensor | None
    device: torch.device
    seen: set[int] = field(default_factory=set)

    @functools.cached_property
    def sees(self) -> Tensor:
        """Who sees whom among a prompt's tokens and copies, [B or 1, 1, T + M, T + M]; padding sees itself."""
        itself = torch.eye(self.tokens + self.count, dtype=torch.bool, device=self.device)
        both = torch.ones_like(itself).tril()
        both[self.tokens :] &= itself[self.tokens :] | (torch.arange(len(itself), device=self.device) < self.tokens)
        if self.mask_BT is None:
            return both[None, None]
        real = torch.nn.functional.pad(self.mask_BT.bool(), (0, self.count), value=True)
        return ((both & real[:, None, :]) | itself).unsqueeze(1)


class NotPlain(Exception):
    """Raised inside a pass: this model's attention is more than a softmax over keys."""


_CURRENT: ContextVar[Copies | None] = ContextVar("vmoer_copies", default=None)
_LOCK = threading.Lock()
_INSIDE: dict[int, tuple[int, str]] = {}
"""By a configuration's id: how many threads are inside `attending`, and how the model attends otherwise."""


@contextmanager
def attending(model: Any, copies: Copies) -> Iterator[None]:
    """Inside the block the model's last columns are copies. A model with a way of its own to attend leaves `seen` short.

    The attention that is registered meanwhile acts in this thread or task alone; for all others it is the model's own.
    """
    config = model.config.get_text_config()
    with _LOCK:
        inside, own = _INSIDE.get(id(config), (0, config._attn_implementation))
        _INSIDE[id(config)] = inside + 1, own
        if not inside:
            _register(own)
            config._attn_implementation = PREFIX + own
    token = _CURRENT.set(copies)
    try:
        yield
    finally:
        _CURRENT.reset(token)
        with _LOCK:
            inside, own = _INSIDE[id(config)]
            _INSIDE[id(config)] = inside - 1, own
            if inside == 1:
                config._attn_implementation = own
                del _INSIDE[id(config)]


def own_attention(config: Any) -> str | None:
    """How a model attends outside `attending`."""
    name = getattr(config, "_attn_implementation", None)
    return name.removeprefix(PREFIX) if isinstance(name, str) else name


def _register(own: str) -> None:
    """Attention and mask under a name of our own: those of the copies where there are some, else those behind the name `own`."""

    def attend(*args: Any, **kwargs: Any) -> Any:
        return attention(*args, **kwargs) if _CURRENT.get() else ALL_ATTENTION_FUNCTIONS[own](*args, **kwargs)

    def mask(*args: Any, **kwargs: Any) -> Any:
        return None if _CURRENT.get() else ALL_MASK_ATTENTION_FUNCTIONS[own](*args, **kwargs)

    AttentionInterface.register(PREFIX + own, attend)
    AttentionMaskInterface.register(PREFIX + own, mask)


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **more: Any,
) -> tuple[Tensor, None]:
    """What transformers calls: queries [B, H, T + M, D], keys and values of H / G heads."""
    copies = _CURRENT.get()
    assert copies is not None
    if any(more.get(name) is not None for name in ("softcap", "s_aux", "position_bias")):
        raise NotPlain
    copies.seen.add(module.layer_idx)  # type: ignore[arg-type]
    mask = None if copies.mask_BT is None else copies.sees.to(query.device)  # layers may lie on several
    out, _ = sdpa_attention_forward(module, query, key, value, mask, scaling=scaling, **more)
    out[:, -copies.count :] = _of_copies(
        query, key, value, copies, query.shape[-1] ** -0.5 if scaling is None else scaling
    )
    return out, None


def _of_copies(query: Tensor, key: Tensor, value: Tensor, copies: Copies, scale: float) -> Tensor:
    """[B, M, H, D of values]"""
    tokens = copies.tokens
    mask_BT = None if copies.mask_BT is None else copies.mask_BT.to(query.device)
    q = query[:, :, tokens:].unflatten(1, (key.shape[1], -1))
    out, z = _over_prompt(q.flatten(2, 3), key[:, :, :tokens], value[:, :, :tokens], mask_BT, scale)
    s = scale * (q.float() * key[:, :, None, tokens:]).sum(-1)
    itself = torch.sigmoid(s - z.view_as(s)).unsqueeze(-1)
    out = torch.lerp(out.unflatten(2, q.shape[2:4]).float(), value[:, :, None, tokens:].float(), itself)
    return out.flatten(1, 2).transpose(1, 2)


def _over_prompt(
    q: Tensor, keys: Tensor, values: Tensor, mask_BT: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    """Attention and the logarithm of its denominator."""
    size, where = q.shape[-1], q.device.type
    if size != values.shape[-1] or size % 8 or size > 256 or where not in ("cpu", "cuda"):
        scores = scale * (q.float() @ keys.float().mT)
        if mask_BT is not None:
            scores = scores.masked_fill(mask_BT[:, None, None] == 0, float("-inf"))
        return torch.softmax(scores, -1) @ values.float(), scores.logsumexp(-1)
    bias = None if mask_BT is None else _bias(mask_BT, q)
    if where == "cpu":
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, keys, values, attn_mask=bias, scale=scale)
    if bias is None and q.dtype != torch.float32:
        return torch.ops.aten._scaled_dot_product_flash_attention(q, keys, values, scale=scale)[:2]
    out, z, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(q, keys, values, bias, True, scale=scale)
    return out, z[..., : q.shape[-2]]  # rounded up to whole tiles


def _bias(mask_BT: Tensor, q: Tensor) -> Tensor:
    """-inf at padding, for every query; rows lie a multiple of 16 bytes apart."""
    columns = mask_BT.shape[1]
    bias_BT = torch.zeros(len(mask_BT), -(-columns // 8) * 8, dtype=q.dtype, device=q.device)
    bias_BT[:, :columns].masked_fill_(mask_BT == 0, float("-inf"))
    return bias_BT[:, None, None, :columns].expand(-1, *q.shape[1:3], -1)
