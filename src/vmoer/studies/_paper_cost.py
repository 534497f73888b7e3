"""What the paper's tables cost on the GPUs that its readers have: hours and GB, without opening a model.

Seconds are those of an H200, measured on models of the true shape with random weights (results/rehearsal):
stage 1 and answers from two steps and 64 questions, warm-up included, so rather too long. Stage 1 is the quicker of the runs with
and without `--recompute`: the first one after a start has most warm-up. An A100 was not measured. Where a step
is bound by launching kernels, as at a batch of 16, it takes as long; where it is bound by arithmetic, up to 3.2 times as long,
the ratio of both cards' dense bfloat16 peaks (989 and 312 TFLOPS).
"""

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

from vmoer.report.rows import paper_models
from vmoer.studies import brittleness, paper, stability
from vmoer.studies._ablation import QUESTIONS as ABLATION_PROMPTS
from vmoer.studies._grid import Cell
from vmoer.studies._labels import config_of
from vmoer.studies._variants import Study, moe_layers, searches
from vmoer.studies.temperature_sweep import TEMPERATURES
from vmoer.training.presets import PAPER, STAGE1

A100 = 3.2
TRAIN = {"arc_challenge": 2000}
"""Questions that the paper trains on, 5000 where nothing else stands here; 50 for validation and 500 for test."""
VALIDATION, TEST, LAW = 50, 500, 1534
SHIFTED = (2376, 500, 500, LAW)
"""Test questions of the four shifts: all of ARC-Easy and MMLU-Law, for which the paper prints no number."""


class Cost(NamedTuple):
    """Seconds on an H200 of a step of 16 questions in either stage and of one question answered; the peak in GB, with
    `--recompute` that of stage 2, which is the larger one then."""

    stage1: float
    stage2: float
    answer: float
    gb: float
    gb_recompute: float


COSTS = {
    "granite": Cost(1.67, 0.299, 0.0073, 22.9, 15.3),
    "qwen": Cost(1.58, 0.312, 0.0118, 66.0, 40.2),
    "deepseek": Cost(1.81, 0.385, 0.0143, 78.4, 47.4),
}


class Work(NamedTuple):
    stage1: float = 0
    stage2: float = 0
    answers: float = 0

    def plus(self, other: "Work") -> "Work":
        return Work(*(a + b for a, b in zip(self, other, strict=True)))

    def hours(self, cost: Cost) -> float:
        return (self.stage1 * cost.stage1 + self.stage2 * cost.stage2 + self.answers * cost.answer) / 3600


def short_name(model: str) -> str | None:
    return next((short for short, hub in paper_models().items() if hub == model), None)


def at_most(limit: int | None, *sizes: int) -> int:
    """Questions of several splits, where a study takes at most so many of each."""
    return sum(size if limit is None else min(size, limit) for size in sizes)


def work(cell: Cell, study: Study, layers: int) -> Work:
    """Steps of stage 2, and questions put through the model, of one cell. Stage 1 is counted apart, being shared."""
    if cell.study == "efficiency":
        return Work()
    of = partial(at_most, study.limit)
    test, label = of(TEST), cell.key.get("method", "")
    if cell.study == "temperature-sweep":
        return Work(answers=test * (1 if cell.key["layer"] == "all" else len(TEMPERATURES)))
    if cell.study == "brittleness":
        return Work(answers=min(test, brittleness.QUESTIONS) * (1 + 7 * layers))
    trained, tried = _tried(label, study)
    epochs = PAPER.stage2.epochs * trained
    done = Work(stage2=epochs * of(TRAIN.get(cell.key["task"], 5000)) / 16, answers=epochs * VALIDATION)
    if cell.study == "stability":  # trained for Table 1; fixed points, fresh noise and map, each at ten layers
        return done.plus(Work(answers=3 * min(test, stability.QUESTIONS) * (1 + 5 * 10)))
    if cell.study == "calibration":
        return done.plus(Work(answers=test + tried * VALIDATION + of(*SHIFTED) * bool(cell.key["ood"])))
    return done.plus(Work(answers=test + of(LAW) + 2 * min(test, ABLATION_PROMPTS) * 11))


def _tried(label: str, study: Study) -> tuple[int, int]:
    """How often stage 2 trains a label, once for each value that is searched; and how many values need no training."""
    config = config_of(label)
    if config.search is None:
        return int(bool(config.trains)), 0
    always = config.search.always and study.transfer_from is None
    values = len(config.search.values) if searches(study, label) or always else 0
    return (max(1, values), 0) if config.trains else (0, values)


def total(cells: Sequence[Cell], study: Study) -> Work:
    """Each run once: Table 3 and the susceptible layers of the ablation take those of Table 1."""
    layers, found, seen = moe_layers(study.model), Work(), set[tuple[object, ...]]()
    for cell in cells:
        one, task, seed = work(cell, study, layers), cell.key.get("task"), cell.key.get("seed")
        label = cell.key.get("method")
        placed = str(cell.key.get("layers", "susceptible:10")).removeprefix("susceptible:")
        run = (task, seed, label, placed)
        if one.stage2 and run in seen:
            one = one._replace(stage2=0)
        first = cell.study not in ("efficiency", "temperature-sweep") and (task, seed) not in seen
        if first:
            steps = STAGE1.epochs * at_most(study.limit, TRAIN.get(str(task), 5000)) / 16
            one = one._replace(stage1=steps)
        found, seen = found.plus(one), seen | {run, (task, seed)}
    return found


def summary(study: Study) -> tuple[list[tuple[str, ...]], str]:
    """A line for each table, and what is said below them."""
    parts = paper.parts(study)
    short = short_name(study.model)
    cost = COSTS.get(short or "")
    lines = [_line(table, cells, study, cost) for table, cells in parts.items()]
    if len(parts) > 1:
        lines.append(_line("all, what they share counted once", paper.cells(study), study, cost))
    if cost is None:
        return lines, f"{study.model} was not measured on a GPU: there are no hours of it"
    return lines, (
        "Hours on an H200 by results/rehearsal, which is rough and rather too long; on an A100, which was "
        f"not measured, up to {A100:g} times as long. Early stopping is not counted on. GB are the peak with prompts of about "
        "130 tokens; longer ones take more, and --recompute takes less."
    )


def _line(table: str, cells: Sequence[Cell], study: Study, cost: Cost | None) -> tuple[str, ...]:
    done = sum(cell.done(study.out) for cell in cells)
    if cost is None or table == "4":
        return table, str(len(cells)), str(done), *(("-",) * 3 if cost is None else ("0", "0", "-"))
    hours = total([cell for cell in cells if not cell.done(study.out)], study).hours(cost)
    gb = cost.gb_recompute if study.recompute else cost.gb
    return table, str(len(cells)), str(done), f"{hours:.1f}", f"{hours:.1f} to {A100 * hours:.1f}", f"{gb:.0f}"
