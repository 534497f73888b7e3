"""Appendix B.2: experts sampled at a temperature, one layer at a time, on the base model without fine-tuning.

Accuracy and ECE for each layer and temperature, against the deterministic line; the averages over layers are given with and
without layer 0. ECE stands beside its noise floor: with a few hundred questions most of these differences lie below it.
"""

import tempfile
from functools import partial

from vmoer import metrics as m
from vmoer.evaluation.answers import predict_task
from vmoer.evaluation.scores import Row
from vmoer.gates import find
from vmoer.live.attach import attach, attachment_of, detach
from vmoer.models import open_model, skeleton
from vmoer.routers import Config, Deterministic, Temperature
from vmoer.studies._grid import Cell, row
from vmoer.studies._variants import Study, read_answers

STUDY = "temperature-sweep"
TEMPERATURES = (0.1, 0.3, 0.5, 0.7, 1.0, 1.5, 2.0)


def cells(study: Study) -> list[Cell]:
    """One cell a layer: the model is opened once for its seven temperatures. Layer None is the deterministic line."""
    layers: list[int | None] = [None, *(found.layer for found in find(skeleton(study.model)))]
    return [
        Cell(STUDY, {"layer": "all" if i is None else i, "seed": s, **study.common()}, partial(work, study, i, s))
        for s in study.seeds
        for i in layers
    ]


def _base(study: Study) -> str:
    return "demo-base" if study.model == "demo" else study.model


def work(study: Study, layer: int | None, seed: int) -> list[Row]:
    opened = open_model(_base(study), device=study.device, dtype=study.dtype)
    questions = study.questions(study.task, "test")
    configs: list[tuple[float | None, Config]] = [(None, Deterministic())]
    if layer is not None:
        configs = [(t, Temperature(layers=[layer], temperature=t, seed=seed)) for t in TEMPERATURES]
    rows: list[Row] = []
    for temperature, config in configs:
        if attachment_of(opened.model) is not None:
            detach(opened.model)
        attach(opened.model, config)
        with tempfile.TemporaryDirectory() as folder:
            path = predict_task(opened.model, opened.tokenizer, questions, folder=folder, seed=seed)
            _, log_probs, answers = read_answers(path)
        confidence, correct = m.confidence(log_probs), m.correct_per_question(log_probs, answers)
        keys = {"model": study.model, "task": study.task, "split": "test", "method": config.key, "seed": seed}
        keys |= {"layer": layer, "temperature": temperature}
        rows += [
            row(STUDY, "accuracy", m.accuracy(log_probs, answers), **keys),
            row(STUDY, "nll", m.nll(log_probs, answers), **keys),
            row(STUDY, "ece", m.ece(confidence, correct), **keys),
            row(STUDY, "ece_floor", m.noise_floor(confidence, draws=200, seed=seed).mean, **keys),
        ]
    return rows
