"""Ways to average answers, from one forward pass to M.

    router           one pass; each router averages its own scores (the paper's)
    full             M passes, each with a routing sample of its own; answers averaged:  p(y) = (1/M) sum_m p(y | routing_m)
    answer           one pass: the prompt once, its last token M times, each copy with a routing sample of its own
    orders           M passes, each with the question's options in an order of its own; answers mapped back, then averaged
    orders+routing   the same, and each pass with a routing sample of its own

Averaging inside the router smooths gate weights and hardly moves the answer; averaging answers marginalises them. Token ids
have no options, so the last two are asked of questions (vmoer.evaluation.answers), and `predict` has the first three.

Shapes: M passes, B prompts, V answers (the vocabulary, or the tokens asked for), T columns of the batch.
"""

import weakref
from collections.abc import Callable, Mapping
from contextlib import nullcontext, suppress
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from vmoer.errors import InputError
from vmoer.inference import OF_TOKENS, ORDERS, Averaging
from vmoer.inference.shared_prompt import Copies, NotPlain, attending, own_attention
from vmoer.live.attach import attached, gates_of, recording, sampled
from vmoer.live.context import Attachment
from vmoer.live.inputs import keeps_logits, last_positions

_SHARES: "weakref.WeakKeyDictionary[Attachment, bool]" = weakref.WeakKeyDictionary()
"""Whether a model's answers can be averaged in one pass, where it was found out."""
LogitSampler = Callable[[Callable[[], Tensor], int], Tensor]
"""From a pass, which gives logits [B, V], and M: samples of the logits, [M, B, V]."""
_SAMPLERS: "weakref.WeakKeyDictionary[Attachment, LogitSampler]" = weakref.WeakKeyDictionary()
PLAIN = ("sdpa", "flash_attention_2", "flash_attention_3")  # one function for all models, which does nothing else


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

    Args:
        model: With a method attached.
        batch: `input_ids` and, where prompts differ in length, `attention_mask`; either padding side will do.
        averaging: What is averaged over routing: gate weights inside each "router", "answer"s over the last token, or answers
            over "full" passes.
        passes: How many answers or passes are averaged; "router" takes one.
        tokens: Token ids that the probabilities are over; by default the vocabulary.
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
    if averaging in ORDERS:
        raise InputError(
            f"averaging={averaging!r} permutes the options of a question, and token ids have none: "
            "vmoer.evaluation.answers.answer_questions takes questions"
        )
    if averaging not in OF_TOKENS:
        raise InputError(f"averaging={averaging!r}: choose one of {', '.join(OF_TOKENS)}")
    if passes < 1:
        raise InputError(f"passes={passes} must be at least 1")
    inputs = {k: v for k, v in batch.items() if k not in ("labels", "num_items_in_batch")}
    if averaging == "answer":
        return _log_probs(_last_token_passes(model, inputs, passes), tokens)
    if averaging == "router":
        return _log_probs(_last_logits(model, inputs).unsqueeze(0), tokens)
    if (sampler := _SAMPLERS.get(attached(model))) is not None:
        return _log_probs(sampler(lambda: _over(_last_logits(model, inputs), tokens), passes), None)
    out = []
    for number in range(passes):
        with sampled(model, number):
            out.append(_last_logits(model, inputs))
    return _log_probs(torch.stack(out), tokens)


def sample_logits_by(model: nn.Module, sampler: LogitSampler) -> None:
    """From now on the answers that "full" averages are the sampler's: those of a posterior over logits, in place of passes."""
    _SAMPLERS[attached(model)] = sampler


def _last_logits(model: nn.Module, inputs: Mapping[str, Tensor]) -> Tensor:
    """Logits at each prompt's last token, [B, V]; other columns' are left out where the model knows how."""
    last_B = last_positions(inputs)
    columns_U, place_B = last_B.unique(return_inverse=True)
    kept = {"logits_to_keep": columns_U} if keeps_logits(model) else {}
    logits = model(**inputs, **kept, use_cache=False).logits
    column_B = place_B if logits.shape[1] == len(columns_U) else last_B  # some take the argument and do not heed it
    return logits[torch.arange(len(last_B), device=last_B.device), column_B]


def mean_log_probs(log_probs_MBV: Tensor) -> Tensor:
    """log (1/M) sum_m p_m, [B, V]."""
    return torch.logsumexp(log_probs_MBV, 0) - torch.log(torch.tensor(float(len(log_probs_MBV))))


def mutual_information(log_probs_MBV: Tensor) -> Tensor:
    """I(answer; pass) = H[mean_m p_m] - mean_m H[p_m], in nats, [B]: how much the passes disagree, whatever they differ in."""
    mean_BV = mean_log_probs(log_probs_MBV).exp()
    return (torch.special.entr(mean_BV).sum(-1) - torch.special.entr(log_probs_MBV.exp()).sum(-1).mean(0)).clamp_min(0)


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
    """Logits [M, B, V]: the prompt but its last token once, then that token M times."""
    unknown = set(inputs) - {"input_ids", "attention_mask", "position_ids"}
    if unknown:
        raise InputError(
            f"averaging='answer' takes input_ids and attention_mask alone, not {', '.join(sorted(unknown))}"
        )
    ids_BT, mask_BT, positions_BT = left_padded(inputs)
    columns = ids_BT.shape[1]
    given_BT = None if inputs.get("attention_mask") is None else mask_BT
    if columns < 2 or (given_BT is not None and int(given_BT.sum(-1).min()) < 2):
        raise InputError("averaging='answer' needs prompts of at least two tokens")
    if shares_prompts(model):
        logits_BMV = _in_one_pass(model, ids_BT, given_BT, positions_BT, passes)
        if logits_BMV is not None:
            return logits_BMV.transpose(0, 1)
    return _over_cache(model, ids_BT, given_BT, positions_BT, passes)


def _in_one_pass(
    model: nn.Module, ids_BT: Tensor, mask_BT: Tensor | None, positions_BT: Tensor, passes: int
) -> Tensor | None:
    """[B, M, V]: the copies stand side by side behind the prompt (shared_prompt.py); None where that cannot be."""

    def repeated(x_BT: Tensor) -> Tensor:
        return torch.cat([x_BT, x_BT[:, -1:].expand(-1, passes - 1)], 1)

    record = recording(model)
    recorded = 0 if record is None else len(record.passes)
    columns = ids_BT.shape[1]
    copies = Copies(passes, columns - 1, None if mask_BT is None else mask_BT[:, :-1], ids_BT.device)
    last = torch.arange(columns - 1, columns - 1 + passes, device=ids_BT.device)
    kept = {"logits_to_keep": last} if keeps_logits(model) else {}  # by number: a slice is multiplied prompt by prompt
    numbers = torch.arange(passes, device=ids_BT.device).expand(len(ids_BT), passes)
    config: Any = model.config.get_text_config()  # type: ignore[operator, union-attr]
    by_mask = own_attention(config) == "eager"
    mask = None if mask_BT is None else repeated(mask_BT)
    given = mask
    if by_mask:
        dtype = next(model.parameters()).dtype
        given = (~copies.sees).to(dtype) * torch.finfo(dtype).min
    with sampled(model, numbers), nullcontext() if by_mask else attending(model, copies), suppress(NotPlain):
        out = model(
            input_ids=repeated(ids_BT),
            attention_mask=given,
            position_ids=repeated(positions_BT),
            use_cache=False,
            **kept,
        )
        if by_mask and record is not None and mask is not None:
            (prompts, _), (drawn, _) = record.passes[recorded:]  # a mask of four dimensions does not say
            prompts.mask_BT, drawn.mask_BT = mask.bool().split([columns - 1, passes], 1)
        if by_mask or len(copies.seen) == config.num_hidden_layers:
            return out.logits[:, -passes:]
    _SHARES[attached(model)] = False
    if record is not None:
        del record.passes[recorded:]
    return None


def _over_cache(model: nn.Module, ids_BT: Tensor, mask_BT: Tensor | None, positions_BT: Tensor, passes: int) -> Tensor:
    """[M, B, V]: one pass over the prompt, and one of M rows a prompt over its keys, repeated."""
    batch = len(ids_BT)
    head: dict[str, Any] = {"input_ids": ids_BT[:, :-1], "attention_mask": None if mask_BT is None else mask_BT[:, :-1]}
    cache = model(**head, position_ids=positions_BT[:, :-1], use_cache=True, logits_to_keep=1).past_key_values
    cache.reorder_cache(torch.arange(batch, device=ids_BT.device).repeat_interleave(passes))
    with sampled(model, torch.arange(passes, device=ids_BT.device).repeat(batch)):
        out = model(
            input_ids=ids_BT[:, -1:].repeat_interleave(passes, 0),
            attention_mask=None if mask_BT is None else mask_BT.repeat_interleave(passes, 0),
            position_ids=positions_BT[:, -1:].repeat_interleave(passes, 0),
            past_key_values=cache,
            use_cache=True,
        )
    return out.logits[:, -1].view(batch, passes, -1).transpose(0, 1)


def shares_prompts(model: Any) -> bool:
    """Whether averaging answers needs no more than the prompt and its copies in one pass: where every layer attends plainly,
    to all that came before, and the routers are asked about nothing but their states."""
    attachment = attached(model)
    if attachment not in _SHARES:
        layers = getattr(DynamicCache(config=model.config), "layers", None) or []
        _SHARES[attachment] = (
            bool(layers)
            and all(type(layer) is DynamicLayer for layer in layers)
            and all(not gate.arguments for gate in gates_of(model))
        )
    implementation = own_attention(model.config.get_text_config())
    return implementation in (*PLAIN, "eager") and _SHARES[attachment]


def _log_probs(logits_MBV: Tensor, tokens: Tensor | list[int] | None) -> Tensor:
    return torch.log_softmax(_over(logits_MBV, tokens).float(), -1)


def _over(logits: Tensor, tokens: Tensor | list[int] | None) -> Tensor:
    return logits if tokens is None else logits[..., torch.as_tensor(tokens, device=logits.device)]
