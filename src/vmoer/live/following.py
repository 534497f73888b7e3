"""Following `model.generate`, so that its record reads like that of one pass over the finished text.

`generate` makes a pass over the prompts and then one for each new token, and beam search moves rows about in between. Inside
`vmoer.record` a `Follower` stands before it and notes where its output came from:

    token n of output row b was chosen at the last token of pass n, in its row  rows[b, n]      (n = 0: the prompts' pass)

Ways of generating whose passes cannot be told apart like this are refused.

Shapes: B output rows, T columns of the output, N new tokens.
"""

import copy
import functools
import inspect
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationMixin

from vmoer.errors import InputError
from vmoer.live import compiled
from vmoer.live.context import Attachment
from vmoer.live.recording import Generation, Record


def follow(model: nn.Module, attachment: Attachment) -> None:
    """Put a `Follower` before the model's own `generate`, or before what has taken its place, until the method is detached."""
    module: Any
    for module in _outside_layers(model):
        own = vars(module).get("generate")
        if isinstance(module, GenerationMixin) and not isinstance(own, Follower):
            module.generate = Follower(module, attachment, own)


def unfollow(model: nn.Module) -> None:
    """Take the `Follower`s away again."""
    module: Any
    for module in _outside_layers(model):
        follower = vars(module).get("generate")
        if isinstance(follower, Follower):
            del module.generate
            if follower.custom is not None:
                module.generate = follower.custom


def _outside_layers(module: nn.Module) -> Iterator[nn.Module]:
    """The model and what it is made of, but for its lists of layers."""
    if not isinstance(module, nn.ModuleList):
        yield module
        for child in module.children():
            yield from _outside_layers(child)


class Follower:
    """Stands before a model's `generate`: the same call, the same answer, and inside `vmoer.record` what the record needs to
    know of both."""

    def __init__(self, module: Any, attachment: Attachment, custom: Any) -> None:
        self.module, self.attachment, self.custom = module, attachment, custom

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self._own)

    @property
    def _own(self) -> Any:
        return self.custom or functools.partial(type(self.module).generate, self.module)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        record, asked = self.attachment.asked.record, self.attachment.asked
        if record is None and asked.step is None and not asked.numbers:
            with self.attachment.asking(numbers=compiled.numbered(self.attachment.gates)):
                return self._own(*args, **kwargs)
        if not isinstance(record, Record) or asked.step is not None or record.generating:  # or a model within a model
            return self._own(*args, **kwargs)
        module, own = self.module, type(self.module).generate
        given = inspect.signature(own).bind(module, *args, **kwargs).arguments
        more = given.get("kwargs", {})
        config, _ = module._prepare_generation_config(given.get("generation_config"), **more)
        reason = unaligned(module, config, given, more)
        if self.custom is not None:
            reason = "this model brings a generate of its own"
        if reason:
            raise InputError(f"signals cannot be aligned with what this generates: {reason}")
        if record.passes:
            raise InputError("this record holds other passes already: use one record for each generate")
        beams = (config.num_beams or 1) > 1  # the one kind whose rows move
        asked_for = {"return_dict_in_generate": True} if beams else {}
        if may_compile(config, more):
            record.take_tape(self.attachment, _tokens(config, given, more))
        record.generating = True
        try:
            with self.attachment.asking(numbers=compiled.numbered(self.attachment.gates)):
                out = own(module, **_asking(given, more, asked_for))
        finally:
            record.generating = False
        sequences_BT = out if isinstance(out, Tensor) else out.sequences
        beams_BN = out.beam_indices if beams else None
        record.generation = _came_from(record, sequences_BT, beams_BN, config, given, more)
        return out if not beams or config.return_dict_in_generate else sequences_BT


def _came_from(
    record: Record, sequences_BT: Tensor, beams_BN: Tensor | None, config: Any, given: Any, more: Any
) -> Generation:
    ids = next((x for x in (given.get("inputs"), more.get("input_ids")) if x is not None), None)
    prompt = 1 if ids is None else ids.shape[1]  # generate begins with BOS where it is given nothing
    tokens_BN = sequences_BT[:, prompt:]
    if beams_BN is not None:
        real_BN, rows_BN = beams_BN >= 0, beams_BN.clamp_min(0).long()
    else:
        real_BN = until_end(tokens_BN, config.eos_token_id, config.pad_token_id)
        rows_BN = torch.arange(len(tokens_BN), device=tokens_BN.device).unsqueeze(1).expand_as(tokens_BN)
    mask = more.get("attention_mask")
    if mask is not None:
        mask = mask[:, :prompt].bool().repeat_interleave(len(sequences_BT) // len(mask), 0)
    elif (seen := record.first.mask_BT) is not None:  # what generate made of the padding
        mask = seen[rows_BN[:, 0].to(seen.device)]
    else:
        mask = torch.ones(len(sequences_BT), prompt, dtype=torch.bool)
    mask = mask.to(sequences_BT.device)
    return Generation(sequences_BT, prompt, mask, real_BN, rows_BN, record.count)


def unaligned(module: Any, config: Any, given: Any, more: Any) -> str | None:
    """Why the passes of this generation cannot be told apart token by token; None where they can."""
    mode = config.get_generation_mode(given.get("assistant_model")).value
    cache = more.get("past_key_values")
    if given.get("custom_generate") is not None:
        return "custom_generate brings a decoding loop of its own"
    if mode == "assisted_generation":
        return "assisted generation routes drafted tokens and takes some of them back"
    if mode not in ("greedy_search", "sample", "beam_search", "beam_sample"):
        return f"{mode.replace('_', ' ')} is not one of greedy search, sampling and beam search"
    if config.guidance_scale not in (None, 1):
        return "classifier-free guidance runs the model twice for a token"
    if config.token_healing:
        return "token healing changes the prompt's last token"
    if config.cache_implementation == "paged":
        return "continuous batching mixes the prompts' tokens"
    if module.config.is_encoder_decoder:
        return "an encoder-decoder model's prompt and text are two sequences"
    if more.get("inputs_embeds") is not None:
        return "prompts given as embeddings have no ids"
    if cache is not None and cache.get_seq_length() > 0:
        return "the tokens in the cache it goes on from were routed before this record began"
    return None


def may_compile(config: Any, more: Mapping[str, Any]) -> bool:
    """Whether transformers may compile the passes of this generation: with a cache that keeps its place."""
    if config.disable_compile:
        return False
    given = more.get("past_key_values")
    static = config.cache_implementation is not None and "static" in str(config.cache_implementation)
    return static or bool(getattr(given, "is_compileable", False) and type(given).__name__ != "DynamicCache")


def _tokens(config: Any, given: Mapping[str, Any], more: Mapping[str, Any]) -> int:
    """How many tokens are routed one at a time, at most."""
    ids = next((x for x in (given.get("inputs"), more.get("input_ids")) if isinstance(x, Tensor)), None)
    rows = (1 if ids is None else len(ids)) * max(config.num_beams or 1, config.num_return_sequences or 1)
    columns = 1 if ids is None else ids.shape[1]
    return rows * int(config.max_new_tokens or max(0, (config.max_length or 0) - columns))


def until_end(tokens_BN: Tensor, eos: int | list[int] | None, pad: int | None) -> Tensor:
    """Which new tokens belong to the text: those up to the first EOS, or up to the padding of a row stopped otherwise."""
    if eos is None:  # generate then pads nothing
        return torch.ones_like(tokens_BN, dtype=torch.bool)
    ends = [eos] if isinstance(eos, int) else list(eos)
    end_BN = torch.isin(tokens_BN, torch.tensor(ends, device=tokens_BN.device)).long()
    real_BN = end_BN.cumsum(1) - end_BN == 0
    if pad is not None and pad not in ends:
        real_BN &= (tokens_BN != pad).long().flip(1).cummax(1).values.flip(1).bool()
        real_BN[:, 0] = True  # no row has ended before it began
    return real_BN


def _asking(given: dict[str, Any], more: dict[str, Any], wanted: dict[str, Any]) -> dict[str, Any]:
    """The same call with other settings, which go where the caller's own are: into a configuration, or by name."""
    named = {name: value for name, value in given.items() if name not in ("self", "kwargs")}
    if named.get("generation_config") is None:
        return {**named, **more, **wanted}
    config = named["generation_config"] = copy.deepcopy(named["generation_config"])
    for name, value in wanted.items():
        setattr(config, name, value)
    return {**named, **{name: value for name, value in more.items() if name not in wanted}}
