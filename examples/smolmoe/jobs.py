"""What the study computes: a list of jobs, the most important first, each with what it leaves and what it needs.

A job is the unit that a process takes: one trained label with all its kinds of averaging and its stability, one level of the
factors, one cell of an ablation. Stage 1 is a job of its own for each task, seed and preset, and is made again only where a job
that is still to do needs it.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

from vmoer import tasks
from vmoer.errors import RunError
from vmoer.predict import predict_task
from vmoer.studies import Study, brittleness, factors, layer_count, layer_placement, stability
from vmoer.studies._grid import Cell, compute
from vmoer.studies._variants import _train, moe_layers, parse, prepare
from vmoer.train import PRESETS, Plan, Running, Workers
from vmoer.training.data import held_out_share

SOURCE = "openbookqa"
OTHERS = ("arc_challenge", "sciq", "medmcqa")
SHIFTS = {"arc_easy": 500, "arc_challenge": 500, "mmlu_law": 300, "medmcqa": 1000}
"""Questions of each: the paper's 500; fewer of mmlu_law, whose prompts are four times as long; more of medmcqa, so that enough of
them are as long as the source's. Last: the shift that the ablations over layers report."""
HEADS = ("map", "vglr-fc", "vglr-mf", "tuned-noise", "vtsr", "mean-only", "temp-scale", "laplace", "fixed-noise")
HEADS += ("vglr-lr", "mcdr", "swag", "map-early")
TIERS = ("main", "paper", "tasks", "factors", "layers", "paper-tasks")
PAPER = ("map@paper", "vglr-fc@paper", "vglr-mf@paper", "vtsr@paper")
WHOLE = ("vglr-fc", "vglr-mf", "vtsr", "mcdr", "laplace", "fixed-noise", "tuned-noise")
"""Methods that are averaged over whole passes too: most of the time that answering takes."""
FEWER = {"factors": 2, "layers": 2}
BATCH = {"arc_challenge": 16, "sciq": 16, "medmcqa": 32}
"""Questions of a step, at most, so that tasks with fewer of them are trained for about as many steps as openbookqa."""
LONG = {"mmlu_law": 4}  # prompts so many times longer than the others'
STEP, FORWARD, OPEN = 0.04, 0.2, 37.0
"""Seconds of a training step, of a pass over 8,192 tokens, and of opening and fitting, in one of eight processes that share an
H200: least squares over the first run's jobs in results/smolmoe/timing.jsonl. Single jobs are off by half; sums are what they
are for."""


@dataclass(frozen=True)
class Job:
    tier: str
    name: str
    kind: str
    """Jobs of one kind take about as long."""
    work: Callable[[], None]
    leaves: tuple[Path, ...]
    """Done where all of these are."""
    needs: tuple[str, ...] = ()
    runs: tuple[Path, ...] = ()
    """Run folders that may go once no job that is still to do lists them."""
    steps: int = 0
    passes: float = 0.0
    gb: float = 12.0
    """Of the GPU's memory that it may take."""

    @property
    def done(self) -> bool:
        return all(path.exists() for path in self.leaves)

    @property
    def seconds(self) -> float:
        return self.steps * STEP + self.passes * FORWARD + OPEN


@dataclass(frozen=True)
class Settings:
    model: str
    out: Path
    seeds: tuple[int, ...]
    data_root: str | None = None
    limit: int = 5000  # the paper's training sets
    averaging: tuple[str, ...] = ("router", "answer", "full")
    heads: tuple[str, ...] = (*HEADS, *PAPER)
    stage1: Plan = dataclasses.field(default_factory=lambda: Plan(epochs=3, lr=7e-4, batch_size=64))
    stage2: Plan = dataclasses.field(default_factory=lambda: Plan(epochs=10, lr=2e-3, batch_size=64, patience=3))
    passes: int = 8
    batch_tokens: int = 32768
    seeds_of: Mapping[str, int] = dataclasses.field(default_factory=lambda: FEWER)
    """How many of the seeds a part takes, where not all."""
    factors: tuple[str, ...] = factors.FACTORS
    """Those whose levels are computed; the default and its stage 1, which all are compared with, always."""

    def part(self, tier: str) -> "Settings":
        return dataclasses.replace(self, seeds=self.seeds[: self.seeds_of.get(tier, len(self.seeds))])

    def plan(self, task: str, plan: Plan) -> Plan:
        return dataclasses.replace(plan, batch_size=min(plan.batch_size, BATCH.get(task, plan.batch_size)))

    def study(self, task: str) -> Study:
        return Study(
            model=self.model,
            task=task,
            out=self.out / task,
            ood=tuple(SHIFTS) if task == SOURCE else (),
            methods=self.heads,
            seeds=self.seeds,
            averaging=self.averaging,
            passes=self.passes,
            limit=self.limit,
            data_root=self.data_root,
            stage1=self.plan(task, self.stage1),
            stage2=self.plan(task, self.stage2),
        )


# -- what a process does -----------------------------------------------------------------------------------------------


def _running() -> Running:
    return Running(workers=Workers.launched(), checkpoint_seconds=20.0, skip_nonfinite=True)


def first_stage(study: Study, preset: str, seed: int) -> None:
    _train(study, "map", preset=preset, out=source(study, preset, seed), seed=seed, running=_running())


def label_job(study: Study, head: str, labels: Sequence[str], seed: int, tokens: int, cells: Sequence[Cell]) -> None:
    """Train a label, predict it under each kind of averaging that is missing, and measure its stability."""
    missing = [label for label in labels if not (predictions(study, label, seed) / "meta.json").exists()]
    if missing:
        changes = {} if parse(head)[0] in ("map", "map-early") else {"running": _running()}
        opened = prepare(study, head, seed, **changes)
        for label in missing:
            asked = questions(study, validation=parse(label)[1] == "default")
            averaging: Any = parse(label)[2]
            predict_task(
                opened.model,
                opened.tokenizer,
                asked,
                folder=predictions(study, label, seed),
                name=study.model,
                method=label,
                seed=seed,
                averaging=averaging,
                passes=study.passes,
                batch_tokens=tokens,
            )
    for cell in cells:
        cell_job(study, cell)


def cell_job(study: Study, cell: Cell) -> None:
    if not cell.path(study.out).exists() and (reason := compute(cell, study.out)):
        raise RunError(reason)


def questions(study: Study, validation: bool) -> list[tasks.Question]:
    """Test of the task and of its shifts; validation where something is to be fitted to the answers."""
    out = study.questions(study.task, "test")
    for shift in study.ood:
        most = min(SHIFTS[shift], study.limit or SHIFTS[shift])
        out += tasks.load(shift, "test", data_root=study.data_root, limit=most)
    return [*out, *study.questions(study.task, "validation")] if validation else out


def predictions(study: Study, label: str, seed: int) -> Path:
    return study.out / f"{label}-s{seed}"


def source(study: Study, preset: str, seed: int) -> Path:
    return study.out / "runs" / f"map{'@paper' if preset == 'paper' else ''}-s{seed}"


# -- the list ----------------------------------------------------------------------------------------------------------


def jobs(settings: Settings, tiers: Sequence[str] = TIERS) -> list[Job]:
    """What the parts asked for take, in the order in which it is worth having, stage 1 before what starts from it."""
    own = [head for head in settings.heads if "@" not in head]
    papers = [head for head in settings.heads if "@" in head]
    parts: dict[str, Callable[[Settings], list[Job]]] = {
        "main": lambda here: [*_labels(here, "main", SOURCE, own), *_brittleness(here)],
        "paper": lambda here: _labels(here, "paper", SOURCE, papers),
        "tasks": lambda here: [job for task in OTHERS for job in _labels(here, "tasks", task, own)],
        "factors": _factors,
        "layers": _layers,
        "paper-tasks": lambda here: [job for task in OTHERS for job in _labels(here, "paper-tasks", task, papers)],
    }
    wanted = [job for tier in tiers for job in parts[tier](settings.part(tier))]
    out: list[Job] = []
    stages = _stages(settings)
    for job in wanted:
        for name in job.needs:
            if name in stages and stages[name] not in out:
                out.append(dataclasses.replace(stages[name], tier=job.tier))
                stages[name] = out[-1]
        out.append(job)
    return out


def _stages(settings: Settings) -> dict[str, Job]:
    out = {}
    for task in (SOURCE, *OTHERS):
        study = settings.study(task)
        for seed in settings.seeds:
            for preset in ("default", "paper"):
                share = held_out_share(PRESETS[preset].stage2_data)
                name = _stage_name(task, preset, seed)
                steps, gb = _steps(settings, task, 1 - share, study.stage1), _gb(study.stage1, stage1=True)
                work, leaves = partial(first_stage, study, preset, seed), (source(study, preset, seed) / "run.json",)
                out[name] = Job("", name, f"stage 1 {task}", work, leaves, steps=steps, gb=gb)
    return out


def _stage_name(task: str, preset: str, seed: int) -> str:
    return f"{task}: stage 1{' of the paper' if preset == 'paper' else ''}, seed {seed}"


def _labels(settings: Settings, tier: str, task: str, heads: Iterable[str]) -> list[Job]:
    study = settings.study(task)
    stable = {(cell.key["method"], cell.key["seed"]): cell for cell in stability.cells(study)} if study.ood else {}
    out = []
    for head in heads:
        key, preset, _ = parse(head)
        labels = [head]
        if key not in ("map", "map-early", "mean-only"):
            kinds = [kind for kind in settings.averaging if kind != "router" and (kind != "full" or key in WHOLE)]
            labels += [f"{head}+{kind}" for kind in kinds]
        for seed in settings.seeds:
            cells = [stable[head, seed]] if (head, seed) in stable else []
            made = [predictions(study, label, seed) / "meta.json" for label in labels]
            trained = key not in ("map", "map-early", "temp-scale", "laplace", "fixed-noise", "tuned-noise")
            plan = PRESETS["paper"].stage2 if preset == "paper" else study.stage2
            share = held_out_share(PRESETS[preset].stage2_data) or 1.0
            runs = (study.out / "runs" / f"{head}-s{seed}",) if key not in ("map", "map-early") else ()
            out.append(
                Job(
                    tier,
                    f"{task}: {head}, seed {seed}",
                    f"{head} {task}",
                    partial(label_job, study, head, labels, seed, settings.batch_tokens, cells),
                    (*made, *(cell.path(study.out) for cell in cells)),
                    (_stage_name(task, preset, seed),),
                    runs,
                    _steps(settings, task, share, plan) if trained else 0,
                    _batches(settings, study) * sum(_cost(settings, label) for label in labels) + 100 * len(cells),
                    _gb(plan) if trained else Job.gb,
                )
            )
    return out


def _brittleness(settings: Settings) -> list[Job]:
    return [_cell(settings, "main", cell, passes=100) for cell in brittleness.cells(settings.study(SOURCE))]


def _factors(settings: Settings) -> list[Job]:
    study = settings.study(SOURCE)
    out = []
    wanted = {"default", *settings.factors}
    for level in factors.levels(study, moe_layers(settings.model)):
        if level.factor not in wanted and level is not factors.MAPS["default"]:
            continue
        preset = parse(level.label)[1]
        plan = PRESETS["paper"].stage2 if preset == "paper" else settings.stage2
        share = held_out_share(level.train.get("stage2_data", PRESETS[preset].stage2_data))
        trained = not level.samples and parse(level.label)[0] not in ("map", "fixed-noise", "laplace")
        whole = 4 if level.train.get("objective") else 1  # passes of a step
        steps = _steps(settings, SOURCE, share or 1.0, plan) * whole if trained else 0
        own_stage1 = level.train.keys() & {"noisy_stage1", "stage2_data"}
        if own_stage1:
            steps += _steps(settings, SOURCE, 1 - share, settings.stage1)
        for seed in study.seeds:
            needs = [_stage_name(SOURCE, preset, seed)]
            run = study.out / "runs" / f"{factors.STUDY}-{(factors.DEFAULT if level.samples else level).slug}-s{seed}"
            if level.samples:
                needs.append(_cell_name(factors.cell(study, factors.DEFAULT, seed)))
            gb = max(
                Job.gb, _gb(plan, whole) if trained else 0.0, _gb(settings.stage1, stage1=True) if own_stage1 else 0.0
            )
            job = _cell(settings, "factors", factors.cell(study, level, seed), steps=steps, passes=100, gb=gb)
            out.append(dataclasses.replace(job, needs=tuple(needs), runs=(run,)))
    return out


def _layers(settings: Settings) -> list[Job]:
    study = settings.study(SOURCE)
    steps = _steps(settings, SOURCE, held_out_share(PRESETS["default"].stage2_data), settings.stage2)
    out = []
    for cell in (*layer_count.cells(study), *layer_placement.cells(study)):
        layers = cell.key["layers"] if isinstance(cell.key["layers"], str) else f"susceptible:{cell.key['layers']}"
        method, seed, runs = cell.key["method"], cell.key["seed"], study.out / "runs"
        used = (
            runs / f"{method}-{layers}-s{seed}".replace(":", ""),
            runs / f"{method}-s{seed}",
        )  # all layers: the label's
        job = _cell(settings, "layers", cell, steps=steps, passes=100, gb=_gb(settings.stage2))
        out.append(dataclasses.replace(job, runs=used))
    return out


def _cell_name(cell: Cell) -> str:
    return f"{SOURCE}: {cell.study}, {cell.name}"


def _cell(settings: Settings, tier: str, cell: Cell, **counts: Any) -> Job:
    study = settings.study(SOURCE)
    needs = (_stage_name(SOURCE, "default", cell.key["seed"]),)
    work, leaves = partial(cell_job, study, cell), (cell.path(study.out),)
    return Job(tier, _cell_name(cell), f"{cell.study} {cell.key.get('method')}", work, leaves, needs, **counts)


# -- how much there is to do -------------------------------------------------------------------------------------------


@cache
def _size(task: str, split: str, data_root: str | None, limit: int) -> int:
    return len(tasks.load(task, split, data_root=data_root, limit=limit))


def _steps(settings: Settings, task: str, share: float, plan: Plan) -> int:
    """Of all epochs: stopping early makes them fewer."""
    questions = round(share * _size(task, "train", settings.data_root, settings.limit))
    return math.ceil(questions / plan.batch_size) * plan.epochs


def _gb(plan: Plan, passes: int = 1, stage1: bool = False) -> float:
    """What training with such batches took (peak_gb in results/smolmoe/timing.jsonl), and a little more."""
    return max(Job.gb, (0.35 if stage1 else 0.28) * plan.batch_size * (1 + 0.6 * (passes - 1)) + 8)


def _batches(settings: Settings, study: Study) -> float:
    """Passes over 8,192 tokens that one prediction of everything takes, at a hundred tokens a question."""
    asked = _size(study.task, "test", settings.data_root, settings.limit)
    asked += sum(min(SHIFTS[shift], settings.limit) * LONG.get(shift, 1) for shift in study.ood)
    return asked * 100 / 8192


def _cost(settings: Settings, label: str) -> float:
    return {"router": 1.5, "answer": 2.0, "full": float(settings.passes)}[parse(label)[2]]
