"""What the study computes: a list of cells for the engine (vmoer.studies._grid), the most important first.

A cell is what a process takes: one trained label with all its kinds of averaging and its stability, one level of the factors, one
cell of an ablation. Stage 1 of a task, a seed and a preset is a cell that these need. Each task is a study in OUT/<task>.
"""

import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from vmoer import tasks
from vmoer.errors import RunError
from vmoer.evaluation.answers import predict_task
from vmoer.evaluation.scores import Row
from vmoer.studies import Cell, Study, brittleness, calibration, factors, layer_count, layer_placement, stability
from vmoer.studies._grid import COORDINATES, compute
from vmoer.studies._labels import STATES, parse
from vmoer.studies._variants import first_stage, moe_layers, prepare
from vmoer.training.run import PRESETS, Plan

warnings.filterwarnings("ignore", message=".*the paper takes")  # smaller sets than the paper's: the README says so

SOURCE = "openbookqa"
OTHERS = ("arc_challenge", "sciq", "medmcqa")
SHIFTS = {"arc_easy": 500, "arc_challenge": 500, "mmlu_law": 300, "medmcqa": 1000}
"""Questions of each: the paper's 500; fewer of mmlu_law, whose prompts are four times as long; more of medmcqa, so that enough of
them are as long as the source's. Last: the shift that the ablations over layers report."""
HEADS: tuple[str, ...] = (
    "map",
    "vglr-fc",
    "vglr-mf",
    "tuned-noise",
    "vtsr",
    "mean-only",
    "temp-scale",
    "laplace",
    "fixed-noise",
)
HEADS += ("vglr-lr", "mcdr", "swag", "map-early", "map@paper", "vglr-fc@paper", "vglr-mf@paper", "vtsr@paper")
PARTS = ("main", "paper", "tasks", "factors", "layers", "paper-tasks")
WHOLE = ("vglr-fc", "vglr-mf", "vtsr", "mcdr", "laplace", "fixed-noise", "tuned-noise")
"""Methods that are averaged over whole passes too: most of the time that answering takes."""
FEWER = {"factors": 2, "layers": 2}
"""How many of the seeds a part takes, where not all."""
BATCH = {"arc_challenge": 16, "sciq": 16, "medmcqa": 32}
"""Questions of a step, at most, so that tasks with fewer of them are trained for about as many steps as openbookqa."""
UNTRAINED = (*STATES, "temp-scale", "laplace", "fixed-noise", "tuned-noise")
STAGE1, STAGE2 = Plan(epochs=3, lr=7e-4, batch_size=64), Plan(epochs=10, lr=2e-3, batch_size=64, patience=3)
BATCH_TOKENS = 32768
GB = 12.0


def study_of(base: Study, task: str) -> Study:
    """The study of one task; `base` has its folder, seeds and plans for openbookqa."""
    plans: dict[str, Any] = {
        name: replace(plan, batch_size=min(plan.batch_size, BATCH.get(task, plan.batch_size)))
        for name, plan in (("stage1", base.stage1), ("stage2", base.stage2 or STAGE2))
    }
    return replace(base, task=task, out=base.out / task, ood=tuple(SHIFTS) if task == SOURCE else (), **plans)


def cells(base: Study, parts: Sequence[str], fewer: Mapping[str, int], varied: Sequence[str]) -> list[Cell]:
    """What the parts asked for take; `varied` are the factors whose levels are computed."""
    own = [head for head in base.methods if "@" not in head]
    papers = [head for head in base.methods if "@" in head]
    out: list[Cell] = []
    for part in parts:
        here = replace(base, seeds=base.seeds[: fewer.get(part, len(base.seeds))])
        source = study_of(here, SOURCE)
        if part in ("tasks", "paper-tasks"):
            for task in OTHERS:
                out += _labels(study_of(here, task), part, own if part == "tasks" else papers)
        elif part in ("main", "paper"):
            out += _labels(source, part, own if part == "main" else papers)
        elif part == "factors":
            out += _factors(source, varied)
        else:
            out += _layers(source)
        if part == "main":
            out += [_placed(cell, source, part, GB) for cell in brittleness.cells(source)]
    return out


# -- labels ------------------------------------------------------------------------------------------------------------


def _labels(study: Study, part: str, heads: Iterable[str]) -> list[Cell]:
    questions(study, validation=True)  # what cannot be read is said before anything starts
    stable = {(cell.key["method"], cell.key["seed"]): cell for cell in stability.cells(study)} if study.ood else {}
    out = []
    for head in heads:
        key, preset, _ = parse(head)
        averaged = calibration.labels(replace(study, methods=(head,)))
        labels = [label for label in averaged if not label.endswith("+full") or key in WHOLE]
        plan = PRESETS["paper"].stage2 if preset == "paper" else study.stage2 or STAGE2
        for seed in study.seeds:
            measured = [stable[head, seed]] if (head, seed) in stable else []
            left = [predictions(study, label, seed) / "meta.json" for label in labels]
            left += [cell.path(study.out) for cell in measured]
            runs = [] if key in STATES else [study.out / "runs" / f"{head}-s{seed}"]
            out.append(
                Cell(
                    study.task,
                    {"method": head, "seed": seed, "part": part, "runs": runs},
                    partial(_answer, study, labels, seed, measured),
                    tuple(_placed(need, study, part, GB) for need in first_stage(study, head, seed)),
                    tuple(left),
                    gb=GB if key in UNTRAINED else _gb(plan),
                )
            )
    return out


def _answer(study: Study, labels: Sequence[str], seed: int, measured: Sequence[Cell]) -> list[Row]:
    """Train a label, predict it under each kind of averaging that is missing, and measure its stability."""
    missing = [label for label in labels if not (predictions(study, label, seed) / "meta.json").exists()]
    opened = prepare(study, labels[0], seed) if missing else None
    for label in missing:
        assert opened is not None
        averaging: Any = parse(label)[2]
        predict_task(
            opened.model,
            opened.tokenizer,
            questions(study, validation=parse(label)[1] == "default"),
            folder=predictions(study, label, seed),
            name=study.model,
            method=label,
            seed=seed,
            averaging=averaging,
            passes=study.passes,
            batch_tokens=BATCH_TOKENS,
        )
    for cell in measured:
        _store(cell, study.out)
    return []


def questions(study: Study, validation: bool) -> list[tasks.Question]:
    """Test of the task and of its shifts; validation where something is to be fitted to the answers."""
    out = study.questions(study.task, "test")
    for shift in study.ood:
        most = min(SHIFTS[shift], study.limit or SHIFTS[shift])
        out += tasks.load(shift, "test", data_root=study.data_root, limit=most)
    return [*out, *study.questions(study.task, "validation")] if validation else out


def predictions(study: Study, label: str, seed: int) -> Path:
    return study.out / f"{label}-s{seed}"


# -- cells of the library's studies ------------------------------------------------------------------------------------


def _factors(study: Study, varied: Sequence[str]) -> list[Cell]:
    out = []
    for level in factors.levels(study, moe_layers(study.model)):
        if level.factor not in ("default", *varied) and level is not factors.MAPS["default"]:
            continue
        key, preset, _ = parse(level.label)
        gb = GB
        if not level.samples and key not in UNTRAINED:
            plan = PRESETS["paper"].stage2 if preset == "paper" else study.stage2 or STAGE2
            gb = _gb(plan, passes=4 if level.train.get("objective") else 1)
        if level.train.get("noisy_stage1"):
            gb = max(gb, _gb(study.stage1, each=0.35))
        for seed in study.seeds:
            slug = (factors.DEFAULT if level.samples else level).slug
            run = study.out / "runs" / f"{factors.STUDY}-{slug}-s{seed}"
            out.append(_placed(factors.cell(study, level, seed), study, "factors", gb, [run]))
    return out


def _layers(study: Study) -> list[Cell]:
    out = []
    for cell in (*layer_count.cells(study), *layer_placement.cells(study)):
        method, layers, seed = (cell.key[name] for name in ("method", "layers", "seed"))
        own = f"{method}-{layers if isinstance(layers, str) else f'susceptible:{layers}'}-s{seed}".replace(":", "")
        runs = [study.out / "runs" / name for name in (own, f"{method}-s{seed}")]  # all layers: the label's
        out.append(_placed(cell, study, "layers", _gb(study.stage2 or STAGE2), runs))
    return out


def _placed(cell: Cell, study: Study, part: str, gb: float, runs: Sequence[Path] = ()) -> Cell:
    """A cell of one task's study as one of all tasks together: its files stay in the task's folder."""
    method = cell.key.get("method")
    if cell.study == "stage 1":
        name = {"map": "stage 1", "map@paper": "stage 1 of the paper"}.get(str(method), f"stage 1, {method}")
        gb = _gb(study.stage1, each=0.35)
    else:
        name = cell.study if method is None else f"{cell.study}, {method}"
    others = {key: value for key, value in cell.key.items() if key in COORDINATES and key != "method"}
    return Cell(
        study.task,
        {"method": name, **others, "part": part, "runs": list(runs)},
        partial(_store, cell, study.out),
        tuple(_placed(need, study, part, gb) for need in cell.needs),
        cell.files(study.out),
        gb=gb,
    )


def _store(cell: Cell, out: Path) -> list[Row]:
    if not cell.done(out) and (reason := compute(cell, out)):
        raise RunError(reason)
    return []


def _gb(plan: Plan, passes: int = 1, each: float = 0.28) -> float:
    """A little more than training with such batches took, by question and pass (peak_gb in results/smolmoe/timing.jsonl)."""
    return max(GB, each * plan.batch_size * (1 + 0.6 * (passes - 1)) + 8)
