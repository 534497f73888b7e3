"""Appendix A.3: Top-K of the average, which is computed, against the average of Top-K, which would be unbiased.

For each token: how often a sample's own Top-K differs from the average's, and how many experts the union over the S samples
would activate in place of K. For the answer: what averaging whole passes changes against averaging in the router.
"""

from functools import partial
from typing import Any

import numpy as np
import torch

from vmoer import metrics as m
from vmoer.evaluation.scores import Row
from vmoer.inference.averaging import predict
from vmoer.live.attach import attached, routers_of
from vmoer.routers import methods
from vmoer.studies._grid import Cell, row
from vmoer.studies._labels import parse
from vmoer.studies._variants import Study, batches, first_stage, prepare
from vmoer.tasks.prompt import letter_ids

STUDY = "topk-bias"
QUESTIONS = 200


def cells(study: Study) -> list[Cell]:
    keys = [key for key, kind in methods().items() if kind.router.samples_logits]
    chosen = [label for label in study.methods if parse(label)[0] in keys and "+" not in label]
    return [
        Cell(
            STUDY,
            {"method": label, "seed": seed, **study.common()},
            partial(work, study, label, seed),
            first_stage(study, label, seed),
        )
        for seed in study.seeds
        for label in chosen
    ]


@torch.no_grad()
def work(study: Study, label: str, seed: int) -> list[Row]:
    opened = prepare(study, label, seed)
    model: Any = opened.model
    k = next(iter(routers_of(model).values())).gate.scoring.k
    agree: list[torch.Tensor] = []
    union: list[torch.Tensor] = []
    mask_T = torch.ones(0, dtype=torch.bool)

    def look(module: Any, args: Any, routing: Any) -> None:
        q, eps = routing.posterior.q, module.points()
        averaged_TK = routing.select_TN.topk(k).indices
        chosen_TSK = q.samples(eps).topk(k).indices[mask_T]
        member_TN = torch.zeros_like(routing.select_TN, dtype=torch.bool).scatter(1, averaged_TK, True)[mask_T]
        inside_TSK = member_TN.unsqueeze(1).expand(-1, len(eps), -1).gather(2, chosen_TSK)
        agree.append(inside_TSK.all(-1).float().mean(-1).cpu())
        used = torch.zeros_like(member_TN).scatter(1, chosen_TSK.flatten(1), True)
        union.append(used.sum(-1).cpu())

    questions = study.questions(study.task, "test")[:QUESTIONS]
    letters = letter_ids(opened.tokenizer, max(len(q.choices) for q in questions))
    inside, full = [], []
    for batch in batches(study, opened, questions):
        mask_T = batch["attention_mask"].reshape(-1).bool()
        handles = [router.register_forward_hook(look) for router in routers_of(model).values()]
        inside.append(predict(model, batch, tokens=letters))
        for handle in handles:
            handle.remove()
        full.append(predict(model, batch, averaging="full", passes=study.passes, tokens=letters))
    a, b = torch.cat(inside).exp().cpu().numpy(), torch.cat(full).exp().cpu().numpy()
    keys = {"model": study.model, "task": study.task, "method": label, "seed": seed}
    values = {
        "samples_with_another_set": 1 - torch.cat(agree).mean().item(),
        "experts_in_the_union": torch.cat(union).float().mean().item(),
        "experts_selected": float(k),
        "answer_total_variation": float(np.abs(a - b).sum(-1).mean() / 2),
        "answers_changed": float((a.argmax(-1) != b.argmax(-1)).mean()),
        "confidence_router": float(m.confidence(np.log(a / a.sum(-1, keepdims=True))).mean()),
        "confidence_full": float(m.confidence(np.log(b / b.sum(-1, keepdims=True))).mean()),
        "layers": float(len(attached(model).layers)),
    }
    return [row(STUDY, name, value, **keys) for name, value in values.items()]
