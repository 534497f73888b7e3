"""What both ablations over layers measure: change of Jaccard at gamma = 0.005, ECE on the source task, AUROC to the far shift."""

from typing import Any

import numpy as np

from vmoer import metrics as m
from vmoer.attach import attach, attached, detach
from vmoer.layers import brittleness
from vmoer.predict import predict_task
from vmoer.routers import Deterministic
from vmoer.studies._grid import Row, row
from vmoer.studies._variants import Study, alone, batches, prepare
from vmoer.train import PRESETS

GAMMA, QUESTIONS = 0.005, 100
SIGNAL = {"mcdr": "mc_logit_variance", "vglr-fc": "logit_variance", "vtsr": "gate_entropy"}
"""The signal the paper reports for each."""


def measure(study_name: str, study: Study, method: str, layers: str, seed: int, everywhere: bool = False) -> list[Row]:
    """`everywhere` says that these are all layers: what the default preset trains, so that its run serves here too."""
    import pyarrow.parquet as pq

    own_run = everywhere and PRESETS["default"].layers == "all"
    opened = prepare(study, method, seed, layers=None if own_run else layers)
    model: Any = opened.model
    test = study.questions(study.task, "test")
    questions = [*test, *study.questions(study.ood[-1], "test")]
    folder = study.out / "ablations" / f"{method}-{layers}-s{seed}".replace(":", "")
    with alone(folder):  # the same layers may be asked for by both ablations
        path = predict_task(model, opened.tokenizer, questions, folder=folder, method=method, seed=seed)
    table = pq.read_table(path)
    log_probs, answers = m.pad(table["log_probs"].to_pylist()), np.asarray(table["answer"].to_pylist())
    inside = np.asarray(table["task"].to_pylist()) == study.task
    confidence, correct = m.confidence(log_probs[inside]), m.correct_per_question(log_probs[inside], answers[inside])

    inputs = batches(study, opened, test[:QUESTIONS])
    at = attached(model).layers
    ours = brittleness(model, inputs, gammas=(GAMMA,), layers=at, seed=seed).mean_LG.mean()
    detach(model)
    attach(model, Deterministic(layers=at))
    own = brittleness(model, inputs, gammas=(GAMMA,), layers=at, seed=seed).mean_LG.mean()

    keys = {"model": study.model, "task": study.task, "method": method, "seed": seed, "layers": layers}
    rows = [
        row(study_name, "jaccard_minus_map", float(ours - own), **keys, gamma=GAMMA),
        row(study_name, "accuracy", m.accuracy(log_probs[inside], answers[inside]), **keys),
        row(study_name, "nll", m.nll(log_probs[inside], answers[inside]), **keys),
        row(study_name, "ece", m.ece(confidence, correct), **keys),
        row(study_name, "debiased_ece", m.debiased_ece(confidence, correct), **keys),
        row(study_name, "ece_floor", m.noise_floor(confidence, draws=200, seed=seed).mean, **keys),
    ]
    for signal in (SIGNAL[method], "novelty"):
        values = table[signal].to_pylist()
        if all(value is not None for value in values):
            scores = np.asarray(values)
            rows.append(row(study_name, "auroc", m.auroc(scores[inside], scores[~inside]), **keys | {"signal": signal}))
    return rows
