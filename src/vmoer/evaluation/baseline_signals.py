"""What a signal of routing has to beat: columns of predictions that need no router.

unseen_words          the share of a question's words that no training question has
last_mahalanobis      of the state that the letters' logits are made of (metrics.distances), the classes being the letters
last_relative         the same, less the distance to all training questions
energy                -log sum_k exp(logit of letter k)
probe                 P(wrong), a logistic regression on that state, fitted on validation questions

beside them what the letters leave out,

outside_letters       -log of the share of the vocabulary's probability that the letters have: NLL over the vocabulary is NLL over
                      the letters and this

and two that relative novelty takes off, each as large in the mean as novelty would be if its reference were

novelty_tokens        all tokens of the training prompts
novelty_others        the last tokens of other questions

Shapes: n questions, B prompts, D model, C letters.
"""

import re
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from vmoer.evaluation.answers import answer_questions
from vmoer.live.attach import routers_of
from vmoer.live.fitting import fit
from vmoer.live.inputs import context_length, keeps_logits, last_positions, memory_for
from vmoer.metrics import distances, last_layer
from vmoer.tasks import Question
from vmoer.tasks.batches import by_length, padded
from vmoer.tasks.prompt import encode, letter_ids

NAMES = ("unseen_words", "last_mahalanobis", "last_relative", "energy", "probe")
BACKGROUND = ("novelty_tokens", "novelty_others")
Floats = npt.NDArray[np.float64]


class Last(NamedTuple):
    """What a model ends in, question by question."""

    states_nD: npt.NDArray[np.float32]
    logits_nC: Floats
    """-inf at letters that are no option."""
    total_n: Floats
    """log sum exp of all logits of the vocabulary."""


@torch.no_grad()
def last(model: nn.Module, tokenizer: Any, questions: Sequence[Question], batch_tokens: int = 8192) -> Last:
    """The last layer's states, and the letters' logits, where the answers start."""
    prompts = encode(tokenizer, questions, context_length(model))
    options = np.array([len(question.choices) for question in questions])
    letters = letter_ids(tokenizer, int(options.max()))
    base: Any = model.get_base_model() if hasattr(model, "get_base_model") else model  # type: ignore[operator]
    seen: list[Tensor] = []
    hook = base.get_output_embeddings().register_forward_pre_hook(lambda _, given: seen.append(given[0]))
    states: dict[int, Any] = {}
    logits: dict[int, Any] = {}
    totals: dict[int, float] = {}
    try:
        for rows in by_length([len(ids) for ids in prompts], batch_tokens):
            batch = padded([prompts[row] for row in rows], next(model.parameters()).device)
            last_B = last_positions(batch)
            columns_U, place_B = last_B.unique(return_inverse=True)
            kept = {"logits_to_keep": columns_U} if keeps_logits(model) else {}
            with memory_for(batch, "--batch-tokens"):
                found_BUV = model(**batch, **kept, use_cache=False).logits
            column_B = place_B if found_BUV.shape[1] == len(columns_U) else last_B
            each_B = torch.arange(len(rows), device=last_B.device)
            own_BV = found_BUV[each_B, column_B].float()
            own_BC = own_BV[:, letters].double().cpu().numpy()
            totals |= dict(zip(rows, own_BV.logsumexp(-1).tolist(), strict=True))
            states_BD = seen.pop()[each_B, column_B].float().cpu().numpy()
            states |= dict(zip(rows, states_BD, strict=True))
            logits |= dict(zip(rows, own_BC, strict=True))
    finally:
        hook.remove()
    logits_nC = np.stack([logits[row] for row in range(len(questions))])
    logits_nC[np.arange(logits_nC.shape[1]) >= options[:, None]] = -np.inf
    order = range(len(questions))
    return Last(np.stack([states[row] for row in order]), logits_nC, np.array([totals[row] for row in order]))


def outside_letters(
    model: nn.Module, tokenizer: Any, asked: Sequence[Question], batch_tokens: int = 8192
) -> dict[str, list[float]]:
    """By that name, of each question asked."""
    found = last(model, tokenizer, asked, batch_tokens)
    return {"outside_letters": (found.total_n - np.logaddexp.reduce(found.logits_nC, axis=1)).tolist()}


def baseline_signals(
    model: nn.Module,
    tokenizer: Any,
    asked: Sequence[Question],
    trained: Sequence[Question],
    validation: Sequence[Question],
    batch_tokens: int = 8192,
) -> dict[str, list[float]]:
    """Every signal of the module, of each question asked. Validation questions among them get a probe's value that was fitted
    without them."""
    known, chosen, found = (last(model, tokenizer, qs, batch_tokens) for qs in (trained, validation, asked))
    gaussians = distances.classes(known.states_nD, [question.answer for question in trained])
    answers = np.array([question.answer for question in validation])
    fitted, held = distances.probe(chosen.states_nD, chosen.logits_nC.argmax(1) != answers)
    own = {(q.task, q.id): value for q, value in zip(validation, held, strict=True)}
    wrong = [own.get((q.task, q.id), value) for q, value in zip(asked, fitted(found.states_nD), strict=True)]
    words = {word for question in trained for word in words_of(question)}
    columns = {
        "unseen_words": unseen_words(asked, words),
        "last_mahalanobis": gaussians.mahalanobis(found.states_nD),
        "last_relative": gaussians.relative(found.states_nD),
        "energy": -np.logaddexp.reduce(found.logits_nC, axis=1),
        "probe": wrong,
    }
    return {name: np.asarray(values, dtype=np.float64).tolist() for name, values in columns.items()}


def background_novelty(
    model: nn.Module,
    tokenizer: Any,
    asked: Sequence[Question],
    trained: Sequence[Question],
    others: Sequence[Question],
    batch_tokens: int = 8192,
) -> dict[str, list[float]]:
    """Novelty of each question asked against two backgrounds: less one of them, novelty is relative (Ren et al., 2019).

    u' A^-1 u falls with the number of tokens that A sums, so it is multiplied by it, and divided by the number of training
    questions, which novelty itself sums.

    Args:
        model: With a method attached that does not route by its novelty; it is fitted as it was when this returns.
        tokenizer: The model's own.
        asked: The questions that get a value.
        trained: Those that novelty itself was fitted to.
        others: Those of the second background.
        batch_tokens: The size of a batch with its padding.
    """
    kept = {layer: router.novelty_root_RD for layer, router in routers_of(model).items()}
    rank = max(len(root_RD) for root_RD in kept.values())
    device = next(model.parameters()).device

    def against(reference: Sequence[Question], tokens: Literal["all", "last"]) -> list[float]:
        prompts = encode(tokenizer, reference, context_length(model))
        batches = by_length([len(ids) for ids in prompts], batch_tokens)
        fit(model, (padded([prompts[row] for row in rows], device) for rows in batches), tokens=tokens, rank=rank)
        count = len(prompts) if tokens == "last" else sum(map(len, prompts))
        answers = answer_questions(model, tokenizer, asked, batch_tokens=batch_tokens)
        return [answer.signals["novelty"] * count / len(trained) for answer in answers]

    try:
        return dict(zip(BACKGROUND, (against(trained, "all"), against(others, "last")), strict=True))
    finally:
        for layer, router in routers_of(model).items():
            router.novelty_root_RD = kept[layer]


def laplace_answers(
    model: nn.Module,
    tokenizer: Any,
    asked: Sequence[Question],
    trained: Sequence[Question],
    validation: Sequence[Question],
    batch_tokens: int = 8192,
) -> list[list[float]]:
    """Log-probabilities of each question asked, by Laplace's method on the last layer (metrics.last_layer)."""
    known, chosen, found = (last(model, tokenizer, qs, batch_tokens) for qs in (trained, validation, asked))
    fitted = last_layer.factors(known.states_nD, known.logits_nC)
    answers = [question.answer for question in validation]
    prior = last_layer.best_prior(fitted, chosen.states_nD, chosen.logits_nC, answers)
    rows: list[list[float]] = fitted.log_probs(found.states_nD, found.logits_nC, prior).tolist()
    return rows


def words_of(question: Question) -> list[str]:
    """The words of a question and its options, without case."""
    return re.findall(r"[a-z0-9']+", " ".join([question.question, *question.choices]).lower())


def unseen_words(questions: Sequence[Question], known: set[str]) -> Floats:
    """Of each question the share of its words that are not among the known ones; 0 where it has no words."""
    shares = [[float(word not in known) for word in words_of(question)] for question in questions]
    return np.array([np.mean(share or [0.0]) for share in shares])
