"""The cells of a registered comparison (comparisons.py): every label has seen the same questions.

Each seed has a cut of train and validation of its own, and a base model: `models[seed % len(models)]`, on all tasks alike. The
printed protocol has the published cut. All that belongs to one seed and task comes together, so that a run that is stopped leaves
whole pairs.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

from comparisons import LAPLACE, Comparison

from vmoer import tasks
from vmoer.errors import InputError
from vmoer.evaluation.answers import predict_task
from vmoer.evaluation.baseline_signals import (
    background_novelty,
    baseline_signals,
    laplace_answers,
    outside_letters,
)
from vmoer.evaluation.ensembles import ensemble, other_answers
from vmoer.evaluation.scores import Row
from vmoer.models import Opened
from vmoer.studies import Cell, Study
from vmoer.studies._adapters import answering
from vmoer.studies._labels import ALL, parse, passes_of, stage1_label
from vmoer.studies._variants import first_stage, prepare
from vmoer.training.run import PRESETS

OPTIONS = 4
"""Options that every question asked has."""
BACKGROUND = "commonsense_qa"
"""General questions, which relative novelty takes off: no home, no shift."""


def cells(
    of: Comparison, base: Study, models: Sequence[str], parts: Sequence[str], fewer: Mapping[str, int]
) -> list[Cell]:
    """What the parts asked for take; `base` has the folder, the seeds and where the questions are."""
    out: list[Cell] = []
    for part in parts:
        seeds = of.seeds_of(part)[: fewer.get(part)]
        for seed in (seed for seed in base.seeds if seed in seeds):
            for home in of.printed_on if part == "printed" else of.homes:
                study = study_of(of, replace(base, model=models[seed % len(models)]), home, part)
                asked(of, study, seed)  # what cannot be read is said before anything starts
                others(study)
                make = partial(_cell, of, study, seed=seed, part=part)
                if part == "equal":
                    own = {head: make(head, ways) for head, ways in of.asked.items()}
                    out += [*own.values(), _ensemble(of, study, "map-ens3", own, seed, part)]
                elif part == "ensembles":
                    own = {head: make(head, of.asked.get(head, ("",))) for head in of.ensembles["map-ens5"]}
                    out += [*(own[head] for head in of.further), _ensemble(of, study, "map-ens5", own, seed, part)]
                else:
                    heads = of.printed if part == "printed" else dict.fromkeys(of.adapters, ("",))
                    out += [make(head, ways) for head, ways in heads.items()]
    return out


def study_of(of: Comparison, base: Study, home: str, part: str = "equal") -> Study:
    plans: dict[str, Any] = {
        name: replace(plan, batch_size=min(plan.batch_size, of.batch[home]))
        for name, plan in (("stage1", base.stage1), ("stage2", base.stage2 or of.stage2))
    }
    return replace(base, task=home, out=base.out / home, vary_data=part != "printed", **plans)


def _cell(of: Comparison, study: Study, head: str, ways: Sequence[str], *, seed: int, part: str) -> Cell:
    """A trained label, asked in every way."""
    asked_as = [f"{head}{how}" for how in ways]
    key, preset, _ = parse(head)
    printed = preset.startswith("printed")
    first, batch = (
        plan.batch_size
        for plan in ((PRESETS[preset].stage1, PRESETS[preset].stage2) if printed else (study.stage1, study.stage2))
        if plan is not None
    )
    needs = [
        Cell(
            study.task,
            {"method": f"stage 1 of {need.key['method']}", "seed": seed, "part": part, "runs": []},
            need.work,
            leaves=need.leaves,
            gb=_gb(of, first, 1),
        )
        for need in first_stage(study, head, seed)
    ]
    shared = key == "map" and stage1_label(head) in (ALL, "map@printed")  # other labels start from it
    return Cell(
        study.task,
        {
            "method": head,
            "seed": seed,
            "part": part,
            "runs": [] if shared else [study.out / "runs" / f"{head}-s{seed}"],
        },
        partial(_answer, of, study, asked_as, seed),
        tuple(needs),
        tuple(predictions(study, label, seed) / "meta.json" for label in [*asked_as, *[LAPLACE] * (head == ALL)]),
        gb=of.gb if key == "map" and head not in of.adapters else _gb(of, batch, 2),
    )


def _ensemble(of: Comparison, study: Study, name: str, own: dict[str, Cell], seed: int, part: str) -> Cell:
    place = predictions(study, name, seed)
    return Cell(
        study.task,
        {"method": name, "seed": seed, "part": part, "runs": []},
        partial(_average, of, study, name, seed),
        tuple(own[head] for head in of.ensembles[name]),
        (place / "meta.json",),
    )


def _average(of: Comparison, study: Study, name: str, seed: int) -> list[Row]:
    members = [predictions(study, head, seed) for head in of.ensembles[name]]
    ensemble(members, predictions(study, name, seed), method=name, seed=seed)
    return []


def _answer(of: Comparison, study: Study, asked_as: Sequence[str], seed: int) -> list[Row]:
    """Train a label, and ask it in every way that is missing."""
    missing = [label for label in asked_as if not (predictions(study, label, seed) / "meta.json").exists()]
    opened = prepare(study, asked_as[0], seed)
    for label in missing:
        printed = parse(label)[1].startswith("printed")
        found = asked(of, study, seed, shifts=not printed)
        more: dict[str, list[float]] = {}
        if label == ALL:
            more = _signals(of, study, opened, found, seed)
        elif label == "map@printed":
            more = outside_letters(opened.model, opened.tokenizer, found, of.batch_tokens)
        averaging: Any = parse(label)[2]
        predict_task(
            opened.model,
            opened.tokenizer,
            found,
            folder=predictions(study, label, seed),
            name=of.name,
            method=label,
            seed=seed,
            averaging=averaging,
            passes=passes_of(label, study.passes),
            signals=more,
            run=opened.run,
            **{"batch_tokens": of.batch_tokens} | answering(label),
        )
    if asked_as[0] == ALL and not (predictions(study, LAPLACE, seed) / "meta.json").exists():
        train, valid = (study.questions(study.task, split, seed) for split in ("train", "validation"))
        found = asked(of, study, seed)
        rows = laplace_answers(opened.model, opened.tokenizer, found, train, valid, of.batch_tokens)
        other_answers(predictions(study, ALL, seed), predictions(study, LAPLACE, seed), rows, method=LAPLACE)
    return []


def _signals(
    of: Comparison, study: Study, opened: Opened, found: Sequence[tasks.Question], seed: int
) -> dict[str, list[float]]:
    """What routing has to beat, and what relative novelty takes off: columns beside MAP's answers."""
    train, valid = (study.questions(study.task, split, seed) for split in ("train", "validation"))
    model, tokenizer = opened.model, opened.tokenizer
    return baseline_signals(model, tokenizer, found, train, valid, of.batch_tokens) | background_novelty(
        model, tokenizer, found, train, others(study)[: len(train)], of.batch_tokens
    )


@cache
def others(study: Study) -> tuple[tasks.Question, ...]:
    """Questions of the background, with as many options as those asked: without some of the wrong ones."""
    found = tasks.load(BACKGROUND, "train", data_root=study.data_root, limit=study.limit)
    wrong = [[i for i in range(len(q.choices)) if i != q.answer][: OPTIONS - 1] for q in found]
    return tuple(q.ordered(sorted([q.answer, *kept])) for q, kept in zip(found, wrong, strict=True))


@cache
def asked(of: Comparison, study: Study, seed: int, shifts: bool = True) -> tuple[tasks.Question, ...]:
    """Test of the home and of its shifts, and the seed's validation: with four options, and no wording that the pool of train
    and validation has."""
    pool = {tasks.wording(q) for split in ("train", "validation") for q in study.questions(study.task, split, seed)}
    out: list[tasks.Question] = []
    for name in of.sets(study.task) if shifts else (study.task,):
        test = tasks.load(name, "test", data_root=study.data_root)
        kept = [q for q in test if len(q.choices) == OPTIONS and tasks.wording(q) not in pool]
        if not kept:
            raise InputError(f"{name} has no test question with {OPTIONS} options that {study.task} does not train on")
        most = of.most if name == study.task else of.shifted[name]
        for own in by_subject(kept).values() if name == of.graded else [kept]:
            out += tasks.subsample(own, min(most, study.limit or most), 0)
    valid = study.questions(study.task, "validation", seed)
    return (*out, *(q for q in valid if len(q.choices) == OPTIONS))


def by_subject(questions: Sequence[tasks.Question]) -> dict[str, list[tasks.Question]]:
    """Questions whose ids begin with their subject, as mmlu's do."""
    found: dict[str, list[tasks.Question]] = {}
    for question in questions:
        found.setdefault(subject(question.id), []).append(question)
    return found


def subject(id_: str) -> str:
    return re.sub(r"-[a-z]+-\d+$", "", id_)


def predictions(study: Study, label: str, seed: int) -> Path:
    return study.out / f"{label}-s{seed}"


def expected(of: Comparison, cell: Cell) -> float:
    """A guess at a cell's seconds beside as many others as share the GPU, where none like it was timed."""
    method, home = str(cell.key["method"]), cell.study
    if "ens" in method:
        return 5.0
    first = of.seconds[home]
    if cell.key["part"] == "printed":
        return 3 * first if method.startswith("stage 1") else 20.0 if method == "map@printed" else of.printed_seconds
    if method.startswith("stage 1"):
        return first
    if method == "laplace-lora":  # its backward passes, over what was trained on and what is asked
        return 135.0 + 1.5 * first
    ways = of.asked.get(method, ("",))
    # of orders that route alike, what they begin with is run once
    passes = sum(passes_of(f"{method}{how}", 8) * (0.5 if re.fullmatch(r"\+orders\d*", how) else 1) for how in ways)
    return 15.0 + of.pass_seconds * passes + (0.0 if method.startswith("map") else 1.3 * first)


def _gb(of: Comparison, batch: int, stage: int) -> float:
    return max(of.gb, of.gb_each[stage - 1] * batch + of.gb_fixed)
