"""Predictions to metrics: `metrics.json` is a pure function of `predictions.parquet`, its `meta.json` and a seed."""

import math
from collections.abc import Iterator, Mapping
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from vmoer import metrics as m
from vmoer.errors import InputError
from vmoer.evaluation.predictions import Answered, Key, Predictions, name_of
from vmoer.evaluation.temperatures import load, temperatures
from vmoer.files import write_rows
from vmoer.metrics import estimates
from vmoer.metrics.estimates import MEANS, Estimate
from vmoer.metrics.resampling import percentiles

BASELINES = ("map", "map+ts")
PAPER = "map@paper"  # what the paper's protocol starts from, where stage 1 is part of the study
_COMPARED = (*MEANS, "debiased_ece")

Row = dict[str, Any]
"""A row of `metrics.json`."""
Detected = tuple[dict[str, Estimate], str | None]
"""The estimates of one signal, and why there are none on prompts of matched length."""


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
            # Resampling repeats questions, which biases everything but means: see metrics.bootstrap_metric.
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
            self.add(task, method, None, metric, estimates.over_seeds(list(by_seed.values()), self.seed), **more)

    def cells(self, task: str) -> dict[str, dict[int, Answered]]:
        """The scored answers to a task by method and seed. All must answer the same questions, to be paired."""
        found: dict[str, dict[int, Answered]] = {}
        first: tuple[Key, Answered] | None = None
        for key, cell in sorted(self.group.cells.items()):
            if key.task == task and self.group.scores(key):
                first = first or (key, cell)
                if cell.ids != first[1].ids:
                    raise InputError(f"{name_of(key)} and {name_of(first[0])} answer different questions")
                found.setdefault(key.method, {})[key.seed] = cell
        return found

    def calibration(self, task: str) -> None:
        found: dict[str, dict[str, dict[int, Estimate]]] = {}
        for method, cells in self.cells(task).items():
            for seed, cell in cells.items():
                for metric, estimate in estimates.calibration(
                    cell.log_probs, cell.answers, self.draws, self.seed
                ).items():
                    found.setdefault(metric, {}).setdefault(method, {})[seed] = estimate
            self.floors(task, method, cells)
        for metric, methods in found.items():
            for method, by_seed in methods.items():
                self.add_seeds(task, method, metric, by_seed)
                for baseline in (*BASELINES, PAPER) if method.partition("+")[0].endswith("@paper") else BASELINES:
                    if metric in _COMPARED and method != baseline and baseline in methods:
                        difference = f"{metric}_minus_{baseline.replace('+', '_')}"
                        self.add_seeds(task, method, difference, _paired(by_seed, methods[baseline]))
            self.against_best(task, metric, methods)

    def against_best(self, task: str, metric: str, methods: Mapping[str, Mapping[int, Estimate]]) -> None:
        """How far each method is from the best one. The tables mark as best those whose interval includes zero."""
        overall = {method: float(np.mean([e.value for e in by_seed.values()])) for method, by_seed in methods.items()}
        best = min(overall, key=lambda method: (-overall[method] if metric == "accuracy" else overall[method], method))
        for method, by_seed in methods.items():
            if method != best and (paired := _paired(by_seed, methods[best])):
                seed = None if len(by_seed) > 1 else next(iter(by_seed))
                difference = estimates.over_seeds(list(paired.values()), self.seed)
                self.add(task, method, seed, f"{metric}_minus_best", difference, note=f"best: {best}")

    def floors(self, task: str, method: str, cells: Mapping[int, Answered]) -> None:
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
        known: dict[tuple[bytes, ...], Detected] = {}
        inside, outside = self.cells(self.group.source_task), self.cells(shift)
        for method in sorted(inside.keys() & outside.keys()):
            found: dict[str, dict[int, Detected]] = {}
            for seed in sorted(inside[method].keys() & outside[method].keys()):
                for signal, detected in self.detected(inside[method][seed], outside[method][seed], known):
                    found.setdefault(signal, {})[seed] = detected
            for signal, by_seed in found.items():
                self.add_signal(shift, method, signal, by_seed)

    def detected(
        self, own: Answered, shifted: Answered, known: dict[tuple[bytes, ...], Detected]
    ) -> Iterator[tuple[str, Detected]]:
        """How well each signal, and prompt length, tells two tasks apart; `known` keeps what was computed before."""
        lengths = own.prompt_tokens.astype(np.float64), shifted.prompt_tokens.astype(np.float64)
        signals = {name: (own.signals[name], shifted.signals[name]) for name in own.signals if name in shifted.signals}
        for signal, values in (signals | {"prompt_tokens": lengths}).items():
            # Prompt lengths, and the signals of methods that route alike, are the same arrays again and again.
            content = tuple(array.tobytes() for array in (*values, *lengths))
            if content not in known:
                known[content] = estimates.detection(values, lengths, self.draws, self.seed)
            yield signal, known[content]

    def add_signal(self, shift: str, method: str, signal: str, by_seed: Mapping[int, Detected]) -> None:
        metrics = dict.fromkeys(name for found, _ in by_seed.values() for name in found)
        for metric in metrics:
            own = {seed: found[metric] for seed, (found, _) in by_seed.items() if metric in found}
            self.add_seeds(shift, method, metric, own, signal=signal)
        reasons: dict[int | None, str] = {seed: reason for seed, (_, reason) in by_seed.items() if reason}
        if len(reasons) > 1:
            reasons[None] = next(iter(reasons.values()))
        for (seed, reason), metric in product(reasons.items(), ("auroc", "auprc", "fpr95")):
            self.add(shift, method, seed, f"{metric}_matched", None, signal=signal, note=reason)

    def score(self) -> list[Row]:
        source = self.group.source_task
        for (method, seed), temperature in temperatures(self.group).items():
            self.add(source, f"{method}+ts", seed, "temperature", temperature, split="validation")
        for method in sorted({method for method, _ in self.group.moved}):
            least = min(value for (name, _), value in self.group.moved.items() if name == method)
            self.add(source, method, None, "moved", least, note="of all seeds the least")
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
