"""What both ablations over layers measure: change of Jaccard at gamma = 0.005, ECE on the source task, AUROC to the far shift."""

from typing import Any

import numpy as np

from vmoer import metrics as m
from vmoer.evaluation.answers import predict_task
from vmoer.evaluation.scores import Row
from vmoer.live.attach import attach, attached, detach
from vmoer.live.brittleness import brittleness
from vmoer.routers import Deterministic
from vmoer.studies._grid import row
from vmoer.studies._labels import config_of, parse
from vmoer.studies._variants import Study, alone, batches, prepare, read_answers
from vmoer.training.layers import preset_layers
from vmoer.training.presets import PRESETS

GAMMA, QUESTIONS = 0.005, 100
METHODS = ("mcdr", "vglr-fc", "vtsr")  # the paper's


def measure(study_name: str, study: Study, method: str, layers: str, seed: int, everywhere: bool = False) -> list[Row]:
    """Where the preset trains the same layers, its run serves here too; `everywhere` says that these are all layers."""
    own, _ = preset_layers(PRESETS[parse(method)[1]], study.model)
    own_run = own == layers or (everywhere and own == "all")
    opened = prepare(study, method, seed, layers=None if own_run else layers)
    model: Any = opened.model
    test = study.questions(study.task, "test")
    questions = [*test, *study.questions(study.ood[-1], "test")]
    folder = study.out / "ablations" / f"{method}-{layers}-s{seed}".replace(":", "")
    with alone(folder):  # the same layers may be asked for by both ablations
        path = predict_task(model, opened.tokenizer, questions, folder=folder, method=method, seed=seed)
    table, log_probs, answers = read_answers(path)
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
    for signal in (config_of(method).signal, "novelty"):
        values = table[signal].to_pylist()
        if all(value is not None for value in values):
            scores = np.asarray(values)
            rows.append(row(study_name, "auroc", m.auroc(scores[inside], scores[~inside]), **keys | {"signal": signal}))
    return rows
