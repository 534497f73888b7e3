"""Predictions to metrics: `metrics.json` is a pure function of `predictions.parquet`, its `meta.json` and a seed."""

import math
from collections.abc import Mapping
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from vmoer import metrics as m
from vmoer.errors import InputError
from vmoer.files import write_rows
from vmoer.metrics import batched
from vmoer.metrics.batched import MEANS, Estimate
from vmoer.metrics.resampling import percentiles
from vmoer.predictions import SIGNALS, Cell, Key, Predictions, load, name_of, temperatures

BASELINES = ("map", "map+ts")
PAPER = "map@paper"  # what the paper's protocol starts from, where stage 1 is part of the study
_COMPARED = (*MEANS, "debiased_ece")

Row = dict[str, Any]


def _paired(method: Mapping[int, Estimate], other: Mapping[int, Estimate]) -> dict[int, Estimate]:
    """Differences seed by seed; a baseline of one seed is compared with every seed."""
    if len(other) == 1:
        (only,) = other.values()
        return {seed: estimate - only for seed, estimate in method.items()}
    return {seed: estimate - other[seed] for seed, estimate in method.items() if seed in other}


class _Scorer:
    """The rows of one model and source task."""

    def __init__(self, group: Predictions, draws: int, seed: int) -> None:
        self.group, self.draws, self.seed = group, draws, seed
        self.rows: list[Row] = []

    def add(self, task: str, method: str, seed: int | None, metric: str, value: Any, **more: Any) -> None:
        """One row; `value` an Estimate or a number; low, high, signal, split and note come through `more`."""
        low, high = more.pop("low", None), more.pop("high", None)
        if isinstance(value, Estimate):
            # Resampling repeats questions, which biases all but means upwards: shift it out (metrics.bootstrap_metric).
            mean = metric.removesuffix("_matched").split("_minus_")[0] in (*MEANS, "auroc", "auprc", "fpr95")
            shift = 0.0 if mean else value.draws.mean() - value.value
            value, low, high = percentiles(value.value, value.draws - shift, 0.95)
        source = self.group.source_task
        row = {
            "study": self.group.study,
            "model": self.group.model,
            "task": task,
            "split": self.group.split_of(task),
            "method": method,
        }
        row |= {"seed": seed, "signal": None, "metric": metric, "value": value, "low": low, "high": high} | more
        self.rows.append(row if task == source else row | {"source": source})

    def add_seeds(self, task: str, method: str, metric: str, by_seed: Mapping[int, Estimate], **more: Any) -> None:
        """A row per seed, and where there are several one over seeds."""
        for seed, estimate in by_seed.items():
            self.add(task, method, seed, metric, estimate, **more)
        if len(by_seed) > 1:
            self.add(task, method, None, metric, batched.over_seeds(list(by_seed.values()), self.seed), **more)

    def cells(self, task: str) -> dict[str, dict[int, Cell]]:
        """Test cells of a task by method and seed. All must answer the same questions, or nothing could be paired."""
        found: dict[str, dict[int, Cell]] = {}
        first: tuple[Key, Cell] | None = None
        for key, cell in sorted(self.group.cells.items()):
            if key.task == task and self.group.scores(key):
                first = first or (key, cell)
                if cell.ids != first[1].ids:
                    raise InputError(f"{name_of(key)} and {name_of(first[0])} answer different questions")
                found.setdefault(key.method, {})[key.seed] = cell
        return found

    def calibration(self, task: str) -> None:
        estimates: dict[str, dict[str, dict[int, Estimate]]] = {}
        for method, cells in self.cells(task).items():
            for seed, cell in cells.items():
                for metric, estimate in batched.calibration(
                    cell.log_probs, cell.answers, self.draws, self.seed
                ).items():
                    estimates.setdefault(metric, {}).setdefault(method, {})[seed] = estimate
            self.floors(task, method, cells)
        for metric, methods in estimates.items():
            for method, by_seed in methods.items():
                self.add_seeds(task, method, metric, by_seed)
                for baseline in (*BASELINES, PAPER) if method.partition("+")[0].endswith("@paper") else BASELINES:
                    if metric in _COMPARED and method != baseline and baseline in methods:
                        difference = f"{metric}_minus_{baseline.replace('+', '_')}"
                        self.add_seeds(task, method, difference, _paired(by_seed, methods[baseline]))
            self.against_best(task, metric, methods)

    def against_best(self, task: str, metric: str, methods: Mapping[str, Mapping[int, Estimate]]) -> None:
        """How far each method is from the best one: what "best within noise" in the tables rests on."""
        overall = {method: float(np.mean([e.value for e in by_seed.values()])) for method, by_seed in methods.items()}
        best = min(overall, key=lambda method: (-overall[method] if metric == "accuracy" else overall[method], method))
        for method, by_seed in methods.items():
            if method != best and (paired := _paired(by_seed, methods[best])):
                seed = None if len(by_seed) > 1 else next(iter(by_seed))
                difference = batched.over_seeds(list(paired.values()), self.seed)
                self.add(task, method, seed, f"{metric}_minus_best", difference, note=f"best: {best}")

    def floors(self, task: str, method: str, cells: Mapping[int, Cell]) -> None:
        floors = {}
        for seed, cell in cells.items():
            correct = m.correct_per_question(cell.log_probs, cell.answers)
            floors[seed] = floor = m.noise_floor(
                m.confidence(cell.log_probs), correct, draws=self.draws, seed=self.seed
            )
            self.add(task, method, seed, "questions", len(correct))
            self.add(task, method, seed, "ece_floor", floor.mean, high=floor.high)
            self.add(task, method, seed, "ece_p", floor.p_value)
        if len(floors) > 1:
            mean, high = (float(np.mean([floor[i] for floor in floors.values()])) for i in (0, 1))
            self.add(task, method, None, "questions", len(correct))
            self.add(task, method, None, "ece_floor", mean, high=high)
            # Twice the mean of p-values is a p-value whatever their dependence (Rüschendorf 1982).
            p_value = min(1.0, 2 * float(np.mean([floor.p_value or 0.0 for floor in floors.values()])))
            self.add(task, method, None, "ece_p", p_value)

    def detection(self, shift: str) -> None:
        known: dict[tuple[bytes, ...], tuple[dict[str, Estimate], str | None]] = {}
        inside, outside = self.cells(self.group.source_task), self.cells(shift)
        for method in sorted(inside.keys() & outside.keys()):
            estimates: dict[tuple[str, str], dict[int, Estimate]] = {}
            unmatched: dict[str, dict[int | None, str]] = {}
            for seed in sorted(inside[method].keys() & outside[method].keys()):
                cells = inside[method][seed], outside[method][seed]
                lengths = [cell.prompt_tokens.astype(np.float64) for cell in cells]
                scored = {name: [cell.signals[name] for cell in cells if name in cell.signals] for name in SIGNALS}
                for signal, scores in (scored | {"prompt_tokens": lengths}).items():
                    if len(scores) < 2:
                        continue
                    # Prompt lengths, and the signals of methods that route alike, are the same arrays again and again.
                    content = tuple(array.tobytes() for array in (*scores, *lengths))
                    if content not in known:
                        known[content] = batched.detection(
                            (scores[0], scores[1]), (lengths[0], lengths[1]), self.draws, self.seed
                        )
                    found, reason = known[content]
                    for metric, estimate in found.items():
                        estimates.setdefault((signal, metric), {})[seed] = estimate
                    if reason:
                        unmatched.setdefault(signal, {})[seed] = reason
            for (signal, metric), by_seed in estimates.items():
                self.add_seeds(shift, method, metric, by_seed, signal=signal)
            for signal, reasons in unmatched.items():
                if len(reasons) > 1:
                    reasons[None] = next(iter(reasons.values()))
                for (which, reason), metric in product(reasons.items(), ("auroc", "auprc", "fpr95")):
                    self.add(shift, method, which, f"{metric}_matched", None, signal=signal, note=reason)

    def score(self) -> list[Row]:
        source = self.group.source_task
        for (method, seed), temperature in temperatures(self.group).items():
            self.add(source, f"{method}+ts", seed, "temperature", temperature, split="validation")
        for task in sorted({key.task for key in self.group.cells if self.group.scores(key)}):
            self.calibration(task)
            if task != source and task in self.group.ood_tasks:
                self.detection(task)
        return self.rows


def score(directory: Path, draws: int = 500, seed: int = 0) -> list[Row]:
    """Every metric of the predictions in a directory, one row each, sorted; intervals from `draws` bootstrap draws."""
    rows = [row for group in load(directory) for row in _Scorer(group, draws, seed).score()]
    keys = ("study", "model", "task", "source", "split", "method", "signal", "metric", "seed")
    for row in rows:
        for name in ("value", "low", "high"):
            number = row[name]
            # Ten digits: the last ones depend on the machine's summation order, and the file should not.
            row[name] = None if number is None or not math.isfinite(number) else float(f"{number:.10g}")
    return sorted(rows, key=lambda row: [(row.get(key) is not None, row.get(key) or 0) for key in keys])


def write(directory: Path, draws: int = 500, seed: int = 0) -> Path:
    """Score a directory into its `metrics.json`, one row per line; the same predictions give the same bytes."""
    rows = score(directory, draws, seed)
    path = Path(directory) / "metrics.json"
    write_rows(path, rows)
    return path
