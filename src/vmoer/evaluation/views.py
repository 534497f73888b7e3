"""Questions as they are asked: a prompt each, or one for each of several orders of the options; and their answers.

    orders           log (1/M) sum_m p(y | options in order m), mapped back to the question's own options
    orders+routing   the same, each pass with a routing sample of its own

All orders of a question go through the model in one batch; where they route alike, what they begin with is run once
(shared_prefix.py). Its mutual information is between the answer and what its passes
differ in: the order, or order and routing together.

Shapes: R prompts of a batch (questions times orders), M orders of a question, V letters, T columns, E entries of layers.
"""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from vmoer.evaluation.predictions import in_order
from vmoer.evaluation.shared_prefix import last_logits, worthwhile
from vmoer.evaluation.writing import Batch
from vmoer.inference import ORDERS
from vmoer.inference.averaging import mean_log_probs, mutual_information, predict_passes, shares_prompts
from vmoer.inference.orders import Order, orders, places
from vmoer.live.attach import record, sampled
from vmoer.live.inputs import last_positions
from vmoer.live.recording import Record
from vmoer.tasks import Question
from vmoer.tasks.prompt import encode


class View(NamedTuple):
    """A question in one order of its options."""

    prompt: list[int]
    order: Order


def views(
    tokenizer: Any, questions: Sequence[Question], averaging: str, passes: int, max_length: int
) -> list[list[View]]:
    """Each question in every order that it is asked in, its own first: that one alone where nothing is permuted."""
    chosen = [
        orders(len(q.choices), passes, again=averaging == "orders+routing")
        if averaging in ORDERS
        else [tuple(range(len(q.choices)))]
        for q in questions
    ]
    asked = [q.ordered(order) for q, own in zip(questions, chosen, strict=True) for order in own]
    prompts = iter(encode(tokenizer, asked, max_length))
    return [[View(next(prompts), order) for order in own] for own in chosen]


@torch.no_grad()
def answer_orders(
    model: nn.Module,
    batch: Mapping[str, Tensor],
    asked: Sequence[Sequence[View]],
    letters: Sequence[int],
    *,
    routing: bool,
) -> Batch:
    """Answer questions averaged over their orders.

    Args:
        model: With a method attached.
        batch: Every view's prompt, question by question.
        asked: Of `views`.
        letters: The tokens of A, B, C, ...
        routing: Whether each pass has a routing sample of its own too.
    """
    number_R = torch.tensor([m for own in asked for m in range(len(own))], device=batch["input_ids"].device)
    prompts = [[view.prompt for view in own] for own in asked]
    with record(model, signals="all") as rec, sampled(model, number_R) if routing else nullcontext():
        if not routing and shares_prompts(model) and worthwhile(prompts):
            found_RV, batch = last_logits(model, prompts)
            logits_RV = found_RV[:, list(letters)].double().cpu()
        else:
            logits_RV = predict_passes(model, batch, tokens=list(letters))[0].double().cpu()
    signals_R = at_last(rec, batch)
    log_probs: list[list[float]] = []
    signals: dict[str, list[float]] = {name: [] for name in (*signals_R, "predictive_entropy", "mutual_information")}
    start = 0
    for own in asked:
        mine = slice(start, start := start + len(own))
        places_MV = torch.tensor([places(view.order) for view in own])
        log_probs_MV = logits_RV[mine, : places_MV.shape[1]].log_softmax(-1).gather(1, places_MV)
        mean_V = mean_log_probs(log_probs_MV).log_softmax(-1)
        log_probs.append(mean_V.tolist())
        for name, values_R in signals_R.items():
            signals[name].append(values_R[mine].mean().item())
        signals["predictive_entropy"].append(torch.special.entr(mean_V.exp()).sum().item())
        signals["mutual_information"].append(mutual_information(log_probs_MV.unsqueeze(1)).item())
    return Batch(log_probs, {name: signals[name] for name in in_order(signals) if name in signals}, None)


def at_last(rec: Record, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Every signal of the last pass at the prompts' last tokens, [R], averaged over layers."""
    _, entries = rec.passes[-1]
    last_R = last_tokens(batch)
    found = {}
    for name in entries[rec.layers[0]].signals:
        x_ET = torch.stack([entries[layer].signals[name].to(last_R.device) for layer in rec.layers])
        found[name] = x_ET[:, last_R].double().mean(0).cpu()
    return found


def last_tokens(batch: Mapping[str, Tensor]) -> Tensor:
    """Where each prompt's last token lies among the tokens of the batch, row by row, [R]."""
    last_R = last_positions(batch)
    return torch.arange(len(last_R), device=last_R.device) * batch["input_ids"].shape[1] + last_R
