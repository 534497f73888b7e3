"""The cells of the registered study (REGISTERED.md): every label has seen the same questions.

Each seed has a cut of train and validation of its own, and a base model: `models[seed % len(models)]`, on all tasks alike. The
printed protocol has the published cut. All that belongs to one seed and task comes together, so that a run that is stopped leaves
whole pairs.
"""

import re
from collections.abc import Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

from vmoer import tasks
from vmoer.errors import InputError
from vmoer.evaluation.answers import predict_task
from vmoer.evaluation.baseline_signals import background_novelty, baseline_signals, laplace_answers
from vmoer.evaluation.ensembles import ensemble, other_answers
from vmoer.evaluation.scores import Row
from vmoer.models import Opened
from vmoer.studies import Cell, Study
from vmoer.studies._adapters import answering
from vmoer.studies._labels import ALL, parse, passes_of, stage1_label
from vmoer.studies._variants import first_stage, prepare
from vmoer.training.run import PRESETS, Plan

PARTS = ("equal", "ensembles", "printed", "adapters")
SEEDS = (0, 1, 2, 3, 4)
FEWER = {"printed": 2, "adapters": 2}
"""Parts that have the seeds below this number alone."""
NAME = "smolmoe"
"""What predictions call the model, whatever base a seed has."""
HOMES = ("openbookqa", "arc_easy", "arc_challenge", "sciq")
SHIFTED = {**dict.fromkeys((*HOMES, "medmcqa"), 300), "mmlu_law": 150}
"""Questions of each set that a model is shifted to; mmlu_law's prompts are four times as long."""
MOST, OPTIONS = 1000, 4
"""Questions of a home's own test, at most; options that every question asked has."""
BATCH = {"openbookqa": 64, "arc_easy": 32, "arc_challenge": 16, "sciq": 16}
STAGE1, STAGE2 = Plan(epochs=3, lr=7e-4, batch_size=64), Plan(epochs=3, lr=2e-3, batch_size=64)

_ROUTERS = ("", "+full", "+orders", "+orders+routing")
ASKED = {
    "map-all": ("", "+orders4", "+orders"),
    "map@permuted-both": ("", "+orders"),
    "vglr-mf@permuted": _ROUTERS,
    "vglr-fc@permuted": _ROUTERS,
    "mean-only@permuted": ("", "+orders"),
    "mcdr@permuted": ("", "+full", "+orders+routing"),
    "map-all.1": ("",),
    "map-all.2": ("",),
}
"""By what is trained: how it is asked."""
LAPLACE = "last-laplace"
"""MAP's own run, its last layer by Laplace's method."""
FURTHER = ("map-all.3", "map-all.4")
ENSEMBLES = {
    "map-ens3": ("map-all", "map-all.1", "map-all.2"),
    "map-ens5": ("map-all", "map-all.1", "map-all.2", *FURTHER),
}
ADAPTERS = ("lora-dropout", "blob", "laplace-lora")
"""What people use in place of routers; each averages over as many samples of its adapter as others take passes."""
BACKGROUND = "commonsense_qa"
"""General questions, which relative novelty takes off: no home, no shift."""
PRINTED_ON = ("arc_challenge",)
PRINTED = {
    "map@printed": ("",),
    **{
        f"{key}@printed{how}": ("", "+full35")
        for key in ("vglr-mf", "vglr-fc")
        for how in ("", "-best", "-fast", "-fast-best", "-listing")
    },
}
BATCH_TOKENS = 32768
GB = 12.0


def labels() -> list[str]:
    """Every label of the comparison at equal data, the baseline first."""
    asked = [f"{head}{how}" for head, ways in ASKED.items() if "." not in head for how in ways]
    return [*asked, LAPLACE, *ENSEMBLES]


def cells(base: Study, models: Sequence[str], parts: Sequence[str], fewer: dict[str, int]) -> list[Cell]:
    """What the parts asked for take; `base` has the folder, the seeds and where the questions are."""
    out: list[Cell] = []
    for part in parts:
        few = (FEWER | fewer).get(part)
        for seed in (seed for seed in base.seeds if few is None or seed < few):
            for home in PRINTED_ON if part == "printed" else HOMES:
                study = study_of(replace(base, model=models[seed % len(models)]), home, part)
                asked(study, seed)  # what cannot be read is said before anything starts
                others(study)
                if part == "equal":
                    own = {head: _cell(study, head, ways, seed, part) for head, ways in ASKED.items()}
                    out += [*own.values(), _ensemble(study, "map-ens3", own, seed, part)]
                elif part == "ensembles":
                    own = {
                        head: _cell(study, head, ASKED.get(head, ("",)), seed, part) for head in ENSEMBLES["map-ens5"]
                    }
                    out += [*(own[head] for head in FURTHER), _ensemble(study, "map-ens5", own, seed, part)]
                else:
                    heads = PRINTED if part == "printed" else dict.fromkeys(ADAPTERS, ("",))
                    out += [_cell(study, head, ways, seed, part) for head, ways in heads.items()]
    return out


def study_of(base: Study, home: str, part: str = "equal") -> Study:
    plans: dict[str, Any] = {
        name: replace(plan, batch_size=min(plan.batch_size, BATCH[home]))
        for name, plan in (("stage1", base.stage1), ("stage2", base.stage2 or STAGE2))
    }
    return replace(base, task=home, out=base.out / home, vary_data=part != "printed", **plans)


def _cell(study: Study, head: str, ways: Sequence[str], seed: int, part: str) -> Cell:
    """A trained label, asked in every way."""
    asked_as = [f"{head}{how}" for how in ways]
    key, preset, _ = parse(head)
    batch = PRESETS[preset].stage2.batch_size if preset.startswith("printed") else (study.stage2 or STAGE2).batch_size
    needs = [
        Cell(
            study.task,
            {"method": f"stage 1 of {need.key['method']}", "seed": seed, "part": part, "runs": []},
            need.work,
            leaves=need.leaves,
            gb=_gb(study.stage1.batch_size, 0.35),
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
        partial(_answer, study, asked_as, seed),
        tuple(needs),
        tuple(predictions(study, label, seed) / "meta.json" for label in [*asked_as, *[LAPLACE] * (head == ALL)]),
        gb=GB if key == "map" and head not in ADAPTERS else _gb(batch, 0.28),
    )


def _ensemble(study: Study, name: str, own: dict[str, Cell], seed: int, part: str) -> Cell:
    place = predictions(study, name, seed)
    return Cell(
        study.task,
        {"method": name, "seed": seed, "part": part, "runs": []},
        partial(_average, study, name, seed),
        tuple(own[head] for head in ENSEMBLES[name]),
        (place / "meta.json",),
    )


def _average(study: Study, name: str, seed: int) -> list[Row]:
    members = [predictions(study, head, seed) for head in ENSEMBLES[name]]
    ensemble(members, predictions(study, name, seed), method=name, seed=seed)
    return []


def _answer(study: Study, asked_as: Sequence[str], seed: int) -> list[Row]:
    """Train a label, and ask it in every way that is missing."""
    missing = [label for label in asked_as if not (predictions(study, label, seed) / "meta.json").exists()]
    opened = prepare(study, asked_as[0], seed)
    for label in missing:
        printed = parse(label)[1].startswith("printed")
        found = asked(study, seed, shifts=not printed)
        more = _signals(study, opened, found, seed) if label == ALL else {}
        averaging: Any = parse(label)[2]
        predict_task(
            opened.model,
            opened.tokenizer,
            found,
            folder=predictions(study, label, seed),
            name=NAME,
            method=label,
            seed=seed,
            averaging=averaging,
            passes=passes_of(label, study.passes),
            signals=more,
            run=opened.run,
            **{"batch_tokens": BATCH_TOKENS} | answering(label),
        )
    if asked_as[0] == ALL and not (predictions(study, LAPLACE, seed) / "meta.json").exists():
        train, valid = (study.questions(study.task, split, seed) for split in ("train", "validation"))
        rows = laplace_answers(opened.model, opened.tokenizer, asked(study, seed), train, valid, BATCH_TOKENS)
        other_answers(predictions(study, ALL, seed), predictions(study, LAPLACE, seed), rows, method=LAPLACE)
    return []


def _signals(study: Study, opened: Opened, found: Sequence[tasks.Question], seed: int) -> dict[str, list[float]]:
    """What routing has to beat, and what relative novelty takes off: columns beside MAP's answers."""
    train, valid = (study.questions(study.task, split, seed) for split in ("train", "validation"))
    model, tokenizer = opened.model, opened.tokenizer
    return baseline_signals(model, tokenizer, found, train, valid, BATCH_TOKENS) | background_novelty(
        model, tokenizer, found, train, others(study)[: len(train)], BATCH_TOKENS
    )


@cache
def others(study: Study) -> tuple[tasks.Question, ...]:
    """Questions of the background, with as many options as those asked: without some of the wrong ones."""
    found = tasks.load(BACKGROUND, "train", data_root=study.data_root, limit=study.limit)
    wrong = [[i for i in range(len(q.choices)) if i != q.answer][: OPTIONS - 1] for q in found]
    return tuple(q.ordered(sorted([q.answer, *kept])) for q, kept in zip(found, wrong, strict=True))


@cache
def asked(study: Study, seed: int, shifts: bool = True) -> tuple[tasks.Question, ...]:
    """Test of the home and of its shifts, and the seed's validation: with four options, and no wording that the pool of train
    and validation has."""
    pool = {tasks.wording(q) for split in ("train", "validation") for q in study.questions(study.task, split, seed)}
    sets = {study.task: MOST} | ({name: n for name, n in SHIFTED.items() if name != study.task} if shifts else {})
    out: list[tasks.Question] = []
    for name, most in sets.items():
        test = tasks.load(name, "test", data_root=study.data_root)
        kept = [q for q in test if len(q.choices) == OPTIONS and tasks.wording(q) not in pool]
        if not kept:
            raise InputError(f"{name} has no test question with {OPTIONS} options that {study.task} does not train on")
        out += tasks.subsample(kept, min(most, study.limit or most), 0)
    valid = study.questions(study.task, "validation", seed)
    return (*out, *(q for q in valid if len(q.choices) == OPTIONS))


def predictions(study: Study, label: str, seed: int) -> Path:
    return study.out / f"{label}-s{seed}"


def expected(cell: Cell) -> float:
    """A guess at a cell's seconds beside seven others on an H200, where none like it was timed: from the steps and questions of
    the first study's (results/smolmoe/timing.jsonl)."""
    method, home = str(cell.key["method"]), cell.study
    if "ens" in method:
        return 5.0
    first = {"openbookqa": 110.0, "arc_easy": 100.0, "arc_challenge": 90.0, "sciq": 65.0}[home]
    if cell.key["part"] == "printed":
        return 3 * first if method.startswith("stage 1") else 20.0 if method == "map@printed" else 420.0
    if method.startswith("stage 1"):
        return first
    if method == "laplace-lora":  # its backward passes, over what was trained on and what is asked
        return 135.0 + 1.5 * first
    ways = ASKED.get(method, ("",))
    # of orders that route alike, what they begin with is run once
    passes = sum(passes_of(f"{method}{how}", 8) * (0.5 if re.fullmatch(r"\+orders\d*", how) else 1) for how in ways)
    return 15.0 + 8.0 * passes + (0.0 if method.startswith("map") else 1.3 * first)


def _gb(batch: int, each: float) -> float:
    """A little more than training with such batches took, by question (peak_gb in results/smolmoe/timing.jsonl)."""
    return max(GB, each * batch + 8)
