"""generate: text, the uncertainty of each of its tokens, and a score for the whole (larger: less certain).

Everything is read where token n was chosen, at the token before it, as `predict` reads an answer at the prompt's last token:

    log_probs[n]    log p(y_n | y_<n), the model's own: before temperature, top-k and penalties
    signals[n]      the routers', averaged over the attached layers, and the entropy of p(. | y_<n)

    sequence_nll    - sum_n log p(y_n | y_<n) = - log p(y): how improbable the model holds this very answer. The default:
                    a short answer is right or wrong as a whole, and one unlikely token is enough to make it wrong
    nll, max_nll    the mean over tokens (length-normalised), and the least likely token's
    mean_S, max_S   of every signal S

`passes=M` runs the finished text M times, each time with a routing sample of its own, which costs M passes over the
text and no decoding. It adds the signal `mutual_information`, between the next token and the routing, and

    marginal_sequence_nll    - log (1/M) sum_m p_m(y)
    marginal_nll             the mean over tokens of  - log (1/M) sum_m p_m(y_n | y_<n)

Shapes: M passes, B texts, N new tokens, T columns, V vocabulary.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vmoer.errors import InputError, RunError
from vmoer.inference.averaging import mean_log_probs
from vmoer.live import html
from vmoer.live.attach import ready, record, sampled
from vmoer.live.inputs import context_length, memory_for, seeded
from vmoer.live.recording import Generation

SCORE = "sequence_nll"

Chat = Sequence[Mapping[str, str]]
"""Messages with a role and a content, for the tokenizer's chat template."""
Prompt = str | Chat


@dataclass(frozen=True)
class Answer:
    """One generated text. Lists run over its tokens, the one that ended it included."""

    prompt: Prompt
    text: str
    tokens: list[int]
    pieces: list[str]
    """The text each token adds; together they are `text`."""
    log_probs: list[float]
    signals: dict[str, list[float]]
    scores: dict[str, float]
    score: float
    """The one of `scores` that was asked for."""

    def _repr_html_(self) -> str:
        """The text, each token coloured by how improbable it was, and the scores."""
        values = [-x for x in self.log_probs]
        scores = [(name, f"{value:.4g}") for name, value in self.scores.items()]
        text = html.coloured(self.pieces, values, "-log p")
        return text + html.table(("score", "value"), scores, "larger is less certain")


def generate(
    model: Any,
    tokenizer: Any,
    prompts: Prompt | Sequence[Prompt],
    *,
    max_new_tokens: int = 128,
    passes: int = 0,
    score: str = SCORE,
    batch_size: int = 16,
    seed: int = 0,
    **generation: Any,
) -> Answer | list[Answer]:
    """Answer prompts: one gives an `Answer`, a list of them a list, in their order.

    With `num_return_sequences` each prompt has that many answers, one after the other.

    Args:
        model: Run as it is where nothing is attached.
        tokenizer: The model's own.
        prompts: One or several. A prompt is a text, taken as it is, or a list of chat messages, put through the tokenizer's
            template.
        max_new_tokens: At most so many tokens are generated.
        passes: How often the finished text is run again, each time with a routing sample of its own; 0 leaves it at that.
        score: Which of the answer's `scores` is its `score`.
        batch_size: Prompts that are answered together.
        seed: Sampling is a function of it.
        **generation: `model.generate`'s own arguments (`do_sample`, `num_beams`, `stop_strings`, ...); greedy unless told
            otherwise.
    """
    one = isinstance(prompts, str) or (bool(prompts) and isinstance(prompts[0], Mapping))
    asked: list[Any] = [prompts] if one else list(prompts)
    for option, value, least in (
        ("max_new_tokens", max_new_tokens, 1),
        ("passes", passes, 0),
        ("batch_size", batch_size, 1),
    ):
        if value < least:
            raise InputError(f"{option}={value} must be at least {least}")
    if generation.get("generation_config") is not None:
        raise InputError("give the settings of generation_config by name: some of them are needed here")
    encoded = [encode(tokenizer, prompt) for prompt in asked]
    _check(encoded, max_new_tokens, context_length(model))
    settings = _settings(model, tokenizer, generation) | {"max_new_tokens": max_new_tokens}
    answers: list[list[Answer]] = [[] for _ in asked]
    with ready(model):
        order = sorted(range(len(asked)), key=lambda row: (-len(encoded[row]), row))
        for start in range(0, len(order), batch_size):
            rows = order[start : start + batch_size]
            with seeded(f"{seed} {start}", model):
                texts = _batch(model, [encoded[row] for row in rows], passes, settings)
            each = len(texts) // len(rows)
            for number, text in enumerate(texts):
                row = rows[number // each]
                answers[row].append(_answer(tokenizer, asked[row], text, score))
    found = [answer for of_prompt in answers for answer in of_prompt]
    return found[0] if one and len(found) == 1 else found


def encode(tokenizer: Any, prompt: Prompt) -> list[int]:
    """The prompt's token ids."""
    if isinstance(prompt, str):
        return list(tokenizer(prompt, verbose=False)["input_ids"])
    if not getattr(tokenizer, "chat_template", None):
        raise InputError("this tokenizer has no chat template: give the prompt as text")
    text = tokenizer.apply_chat_template(
        list(prompt), tokenize=False, add_generation_prompt=True, enable_thinking=False
    )
    return list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def _check(encoded: list[list[int]], new: int, context: int) -> None:
    if not encoded:
        raise InputError("there are no prompts to answer")
    for number, ids in enumerate(encoded):
        if not ids:
            raise InputError(f"prompt {number} is empty")
        if len(ids) + new > context:
            raise InputError(
                f"prompt {number} is {len(ids)} tokens long, and with {new} new ones longer than the model's context of {context}"
            )


def _settings(model: Any, tokenizer: Any, generation: dict[str, Any]) -> dict[str, Any]:
    settings = {"do_sample": False, **generation, "return_dict_in_generate": True, "output_logits": True}
    if settings.get("stop_strings") is not None:
        settings["tokenizer"] = tokenizer
    pad = next((x for x in (tokenizer.pad_token_id, tokenizer.eos_token_id) if x is not None), None)
    if pad is not None and getattr(model.generation_config, "pad_token_id", None) is None:
        settings.setdefault("pad_token_id", pad)
    return settings


# -- one batch ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Text:
    tokens: list[int]
    log_probs_N: np.ndarray[Any, Any]
    signals_N: dict[str, np.ndarray[Any, Any]]
    marginal: dict[str, float]


@torch.no_grad()
def _batch(model: Any, encoded: list[list[int]], passes: int, settings: dict[str, Any]) -> list[_Text]:
    """Generate, and bring over what each text was generated with in one piece."""
    width, device = max(map(len, encoded)), next(model.parameters()).device
    pad = settings.get("pad_token_id") or 0
    ids_BT = torch.tensor([[pad] * (width - len(ids)) + ids for ids in encoded], device=device)
    mask_BT = torch.tensor([[0] * (width - len(ids)) + [1] * len(ids) for ids in encoded], device=device)
    with record(model) as rec:
        inputs = {"input_ids": ids_BT, "attention_mask": mask_BT}
        with memory_for(inputs, "batch_size"):
            out = model.generate(**inputs, **settings)
    made, generated = rec.generation, rec.generated
    assert made is not None
    log_probs_BN, entropy_BN = _of_choices(out.logits, made)
    values = {"log_prob": log_probs_BN} | {name: value.mean(0) for name, value in generated.signals.items()}
    values["predictive_entropy"] = entropy_BN
    sums_MB = None
    if passes:
        values["mutual_information"], values["marginal"], sums_MB = _over_routing(model, made, passes)
    table = torch.stack([value.double() for value in values.values()]).cpu().numpy()
    lengths, tokens = generated.mask.sum(1).tolist(), generated.tokens.tolist()
    whole = [] if sums_MB is None else (-mean_log_probs(sums_MB.double())).tolist()
    texts = []
    for row, n in enumerate(lengths):
        read = {name: table[number, row, :n] for number, name in enumerate(values)}
        if not all(np.isfinite(value).all() for value in read.values()):
            raise RunError("the model's logits are not finite numbers")
        marginal = {}
        if passes:
            marginal = {"marginal_sequence_nll": whole[row], "marginal_nll": float(-read.pop("marginal").mean())}
        texts.append(_Text(tokens[row][:n], read.pop("log_prob"), read, marginal))
    return texts


def _of_choices(logits: Sequence[Tensor], made: Generation) -> tuple[Tensor, Tensor]:
    """Each new token's log-probability and the entropy it was chosen at, [B, N]; step by step, to hold no N-th copy of V."""
    tokens_BN = made.sequences_BT[:, made.prompt :]
    log_probs, entropies = [], []
    for n in range(tokens_BN.shape[1]):
        log_p_BV = torch.log_softmax(logits[n][made.rows_BN[:, n]].float(), -1)
        log_probs.append(log_p_BV.gather(1, tokens_BN[:, n : n + 1]).squeeze(1))
        entropies.append(torch.special.entr(log_p_BV.exp()).sum(-1))
    # what stands behind a row's end was never chosen, and may be impossible
    return torch.stack(log_probs, 1).where(made.real_BN, 0), torch.stack(entropies, 1)


def _over_routing(model: Any, made: Generation, passes: int) -> tuple[Tensor, Tensor, Tensor]:
    """Mutual information and the log of the passes' mean probability, [B, N] each, and log p_m of each text, [M, B]."""
    ids_BT, tokens_BN = made.sequences_BT, made.sequences_BT[:, made.prompt :]
    new = tokens_BN.shape[1]
    mask_BT = torch.cat([made.prompt_mask_BT, made.real_BN], 1).long()
    inputs = {"input_ids": ids_BT[:, :-1], "attention_mask": mask_BT[:, :-1]}
    inputs["position_ids"] = (inputs["attention_mask"].cumsum(-1) - 1).clamp_min(0)
    total_BNV, entropy_BN, chosen = None, torch.zeros((), device=ids_BT.device), []
    for number in range(passes):
        with sampled(model, number):
            logits_BNV = model(**inputs, use_cache=False, logits_to_keep=new).logits[:, -new:]
        p_BNV = torch.softmax(logits_BNV.float(), -1)
        chosen.append(torch.log_softmax(logits_BNV.float(), -1).gather(2, tokens_BN.unsqueeze(-1)).squeeze(-1))
        entropy_BN = entropy_BN + torch.special.entr(p_BNV).sum(-1) / passes
        total_BNV = p_BNV if total_BNV is None else total_BNV + p_BNV
    assert total_BNV is not None
    information_BN = (torch.special.entr(total_BNV / passes).sum(-1) - entropy_BN).clamp_min(0)
    chosen_MBN = torch.stack(chosen).where(made.real_BN, 0)
    return information_BN, mean_log_probs(chosen_MBN), chosen_MBN.sum(-1)


# -- one answer --------------------------------------------------------------------------------------------------------


def _answer(tokenizer: Any, prompt: Prompt, text: _Text, score: str) -> Answer:
    scores = {
        "sequence_nll": float(-text.log_probs_N.sum()),
        "nll": float(-text.log_probs_N.mean()),
        "max_nll": float(-text.log_probs_N.min()),
        **text.marginal,
    }
    for name, values_N in text.signals_N.items():
        scores |= {f"mean_{name}": float(values_N.mean()), f"max_{name}": float(values_N.max())}
    if score not in scores:
        more = "" if text.marginal else "; with passes also those of averaged routing"
        raise InputError(f"score={score!r}: choose one of {', '.join(scores)}{more}")
    signals = {name: values_N.tolist() for name, values_N in text.signals_N.items()}
    pieces = _pieces(tokenizer, text.tokens)
    return Answer(
        prompt, "".join(pieces), text.tokens, pieces, text.log_probs_N.tolist(), signals, scores, scores[score]
    )


def _pieces(tokenizer: Any, tokens: list[int]) -> list[str]:
    """What each token adds to the text; a character of several tokens comes with its last, special tokens add nothing."""
    pieces, before = [], ""
    for end in range(1, len(tokens) + 1):
        now = tokenizer.decode(tokens[:end], skip_special_tokens=True, clean_up_tokenization_spaces=False)
        if now.endswith("\ufffd") and end < len(tokens):
            now = before
        pieces.append(now[len(before) :])
        before = now
    return pieces
