"""Three ways to average over routing, from one forward pass to M.

    router   one pass; each router averages its own scores (the paper's)
    full     M passes, each with a routing sample of its own; answers averaged:  p(y) = (1/M) sum_m p(y | routing_m)
    answer   the prompt once, its last token M times in one pass over the shared cache: the price of one decode step

Averaging inside the router smooths gate weights and hardly moves the answer; averaging answers marginalises them.

Shapes: M passes, B prompts, V answers (the vocabulary, or the tokens asked for), T columns of the batch.
"""

import inspect
from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn

from vmoer.attach import attached, sampled
from vmoer.context import documents
from vmoer.errors import InputError

Averaging = Literal["router", "answer", "full"]


@torch.no_grad()
def predict(
    model: nn.Module,
    batch: Mapping[str, Tensor],
    *,
    averaging: Averaging = "router",
    passes: int = 8,
    tokens: Tensor | list[int] | None = None,
) -> Tensor:
    """Log-probabilities of the token after each prompt, [B, V]; over `tokens` alone (such as answer letters) where given.

    `batch` holds `input_ids` and, where prompts differ in length, `attention_mask`; either padding side will do.
    """
    return mean_log_probs(predict_passes(model, batch, averaging=averaging, passes=passes, tokens=tokens))


@torch.no_grad()
def predict_passes(
    model: nn.Module,
    batch: Mapping[str, Tensor],
    *,
    averaging: Averaging = "router",
    passes: int = 8,
    tokens: Tensor | list[int] | None = None,
) -> Tensor:
    """The same for each pass apart, [M, B, V]; M is 1 for "router"."""
    attached(model)
    if averaging not in ("router", "answer", "full"):
        raise InputError(f"averaging={averaging!r}: choose one of router, answer, full")
    if passes < 1:
        raise InputError(f"passes={passes} must be at least 1")
    inputs = {k: v for k, v in batch.items() if k not in ("labels", "num_items_in_batch")}
    if averaging == "answer":
        return _log_probs(_last_token_passes(model, inputs, passes), tokens)
    if averaging == "router":
        return _log_probs(_last_logits(model, inputs).unsqueeze(0), tokens)
    out = []
    for number in range(passes):
        with sampled(model, number):
            out.append(_last_logits(model, inputs))
    return _log_probs(torch.stack(out), tokens)


def _last_logits(model: nn.Module, inputs: Mapping[str, Tensor]) -> Tensor:
    """Logits at each prompt's last token, [B, V]; other columns' are left out where the model knows how."""
    last_B = last_positions(inputs)
    columns_U, place_B = last_B.unique(return_inverse=True)
    kept = {"logits_to_keep": columns_U} if keeps_logits(model) else {}
    logits = model(**inputs, **kept, use_cache=False).logits
    column_B = place_B if logits.shape[1] == len(columns_U) else last_B  # some take the argument and do not heed it
    return logits[torch.arange(len(last_B), device=last_B.device), column_B]


def keeps_logits(model: Any) -> bool:
    """Whether the model takes the columns that logits are wanted of."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    return "logits_to_keep" in inspect.signature(type(base).forward).parameters


def mean_log_probs(log_probs_MBV: Tensor) -> Tensor:
    """log (1/M) sum_m p_m, [B, V]."""
    return torch.logsumexp(log_probs_MBV, 0) - torch.log(torch.tensor(float(len(log_probs_MBV))))


def mutual_information(log_probs_MBV: Tensor) -> Tensor:
    """I(answer; routing) = H[mean_m p_m] - mean_m H[p_m], in nats, [B]: how much the passes disagree."""
    mean_BV = mean_log_probs(log_probs_MBV).exp()
    return (torch.special.entr(mean_BV).sum(-1) - torch.special.entr(log_probs_MBV.exp()).sum(-1).mean(0)).clamp_min(0)


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


def left_padded(inputs: Mapping[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Ids, mask and positions with every prompt's last token in the last column."""
    ids_BT = inputs["input_ids"]
    mask_BT = inputs.get("attention_mask")
    mask_BT = torch.ones_like(ids_BT) if mask_BT is None else mask_BT
    shift_B = ids_BT.shape[1] - 1 - last_positions(inputs)
    columns_BT = (torch.arange(ids_BT.shape[1], device=ids_BT.device) - shift_B.unsqueeze(1)) % ids_BT.shape[1]
    ids_BT, mask_BT = ids_BT.gather(1, columns_BT), mask_BT.gather(1, columns_BT)
    return ids_BT, mask_BT, (mask_BT.long().cumsum(-1) - 1).clamp_min(0)


def _last_token_passes(model: nn.Module, inputs: Mapping[str, Tensor], passes: int) -> Tensor:
    """Logits [M, B, V]: the prompt but its last token once, then that token M times over its cache."""
    unknown = set(inputs) - {"input_ids", "attention_mask", "position_ids"}
    if unknown:
        raise InputError(
            f"averaging='answer' takes input_ids and attention_mask alone, not {', '.join(sorted(unknown))}"
        )
    ids_BT, mask_BT, positions_BT = left_padded(inputs)
    batch, columns = ids_BT.shape
    padded = inputs.get("attention_mask") is not None
    if columns < 2 or (padded and int(mask_BT.sum(-1).min()) < 2):
        raise InputError("averaging='answer' needs prompts of at least two tokens")
    head: dict[str, Any] = {"input_ids": ids_BT[:, :-1], "attention_mask": mask_BT[:, :-1] if padded else None}
    cache = model(**head, position_ids=positions_BT[:, :-1], use_cache=True, logits_to_keep=1).past_key_values
    if _takes_any_mask(model, cache):  # M copies of the last token side by side, each sees the prompt and itself
        dtype = next(model.parameters()).dtype
        seen = torch.cat([mask_BT[:, None, :-1].expand(-1, passes, -1), _itself(batch, passes, mask_BT)], -1)
        with sampled(model, torch.arange(passes, device=ids_BT.device).expand(batch, passes)):
            out = model(
                input_ids=ids_BT[:, -1:].expand(-1, passes),
                attention_mask=((1 - seen.to(dtype)) * torch.finfo(dtype).min).unsqueeze(1),
                position_ids=positions_BT[:, -1:].expand(-1, passes),
                past_key_values=cache,
                use_cache=True,
            )
        return out.logits.transpose(0, 1)
    cache.reorder_cache(torch.arange(batch, device=ids_BT.device).repeat_interleave(passes))
    with sampled(model, torch.arange(passes, device=ids_BT.device).repeat(batch)):
        out = model(
            input_ids=ids_BT[:, -1:].repeat_interleave(passes, 0),
            attention_mask=mask_BT.repeat_interleave(passes, 0),
            position_ids=positions_BT[:, -1:].repeat_interleave(passes, 0),
            past_key_values=cache,
            use_cache=True,
        )
    return out.logits[:, -1].view(batch, passes, -1).transpose(0, 1)


def _itself(batch: int, passes: int, like: Tensor) -> Tensor:
    return torch.eye(passes, dtype=like.dtype, device=like.device).expand(batch, -1, -1)


def repeats_cache(model: Any) -> bool:
    """Whether averaging answers needs the prompt's keys M times."""
    from transformers import DynamicCache

    return not _takes_any_mask(model, DynamicCache(config=model.config))


def _takes_any_mask(model: Any, cache: Any) -> bool:
    """Whether every layer attends by a mask over a cache that only grows: then the prompt's keys need not be repeated."""
    from transformers.cache_utils import DynamicLayer

    layers = getattr(cache, "layers", None) or []
    implementation = getattr(model.config.get_text_config(), "_attn_implementation", None)
    return bool(layers) and implementation in ("eager", "sdpa") and all(type(layer) is DynamicLayer for layer in layers)


def _log_probs(logits_MBV: Tensor, tokens: Tensor | list[int] | None) -> Tensor:
    if tokens is not None:
        logits_MBV = logits_MBV[..., torch.as_tensor(tokens, device=logits_MBV.device)]
    return torch.log_softmax(logits_MBV.float(), -1)
