"""What tells shifted questions from home ones, and wrong answers from right ones.

    python examples/smolmoe/detection.py OUT/results

Markdown, tables of AUROC, means over homes and seeds of a registered study. They describe, and test nothing. A score of
routing stands beside those that know nothing of it: words that training never had, the prompt's length, energy, distances and a
probe of the last layer. "equal length" is of pairs of prompts of equal length, where there are enough.
The last table has novelty and its relative forms home by home, on the near shifts, the other homes: what decides its default.
"""

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
from comparisons import BASE, of_results

from vmoer import metrics
from vmoer.evaluation import predictions
from vmoer.evaluation.predictions import Answered, Key, Predictions, entropy
from vmoer.metrics.calibrators import choose
from vmoer.report.tables import grid

Floats = npt.NDArray[np.float64]
Score = Callable[[Answered], Floats]


def of(signal: str) -> Score:
    return lambda cell: cell.signals[signal]


def relative(background: str) -> Score:
    return lambda cell: cell.signals["novelty"] - cell.signals[background]


def length(cell: Answered) -> Floats:
    return cell.prompt_tokens.astype(np.float64)


def doubt(cell: Answered) -> Floats:
    return np.asarray(1 - metrics.confidence(cell.log_probs))


def spread(cell: Answered) -> Floats:
    return entropy(cell.log_probs)


ROUTED = ("vglr-mf@permuted", "vglr-fc@permuted")
SHIFTS: dict[str, tuple[str, Score]] = {
    "unseen words": (BASE, of("unseen_words")),
    "prompt length": (BASE, length),
    "entropy, calibrated": (BASE, spread),
    "energy": (BASE, of("energy")),
    "last layer, Mahalanobis": (BASE, of("last_mahalanobis")),
    "last layer, relative": (BASE, of("last_relative")),
    "novelty": (BASE, of("novelty")),
    "novelty, less all tokens'": (BASE, relative("novelty_tokens")),
    "novelty, less other questions'": (BASE, relative("novelty_others")),
    **{f"variance, {key}": (key, of("logit_variance")) for key in ROUTED},
    **{f"information, {key}+full": (f"{key}+full", of("mutual_information")) for key in ROUTED},
    f"information, {BASE}+orders": (f"{BASE}+orders", of("mutual_information")),
}
ERRORS: dict[str, tuple[str, Score]] = {
    "confidence, calibrated": (BASE, doubt),
    "entropy, calibrated": (BASE, spread),
    "probe of the last layer": (BASE, of("probe")),
    "energy": (BASE, of("energy")),
    "novelty": (BASE, of("novelty")),
    f"confidence, {BASE}+orders": (f"{BASE}+orders", doubt),
    f"information, {BASE}+orders": (f"{BASE}+orders", of("mutual_information")),
    **{f"information, {key}+full": (f"{key}+full", of("mutual_information")) for key in ROUTED},
    **{f"confidence, {key}+orders+routing": (f"{key}+orders+routing", doubt) for key in ROUTED},
}


def calibrated(group: Predictions) -> Predictions:
    """All test answers through the calibrator of their validation; those without either are left out."""
    cells = {}
    for key, valid in group.cells.items():
        if key[:2] == (group.source_task, "validation"):
            calibrator = choose(valid.log_probs, valid.answers, valid.ids).calibrator
            for task in (group.source_task, *group.ood_tasks):
                place = Key(task, "test", *key[2:])
                if (cell := group.cells.get(place)) is not None:
                    cells[place] = cell._replace(log_probs=calibrator.apply(cell.log_probs))
    return group._replace(cells=cells)


def mean(values: list[float]) -> str:
    return f"{np.mean(values):.3f}" if values else "-"


def shifts(groups: list[Predictions]) -> str:
    sets = sorted({task for group in groups for task in group.ood_tasks})
    body = []
    for name, (label, score) in SHIFTS.items():
        found: dict[str, list[float]] = {task: [] for task in sets}
        matched: list[float] = []
        for group in groups:
            for key, away in sorted(group.cells.items()):
                home = group.cells.get(key._replace(task=group.source_task))
                if key.method == label and key.task != group.source_task and home is not None:
                    pair = score(home), score(away)
                    rated, _ = metrics.detection(pair, (length(home), length(away)), draws=1, seed=0)
                    found[key.task].append(rated["auroc"].value)
                    matched += [rated[name].value for name in ("auroc_matched",) if name in rated]
        body.append([name, *(mean(values) for values in found.values()), mean(matched)])
    return "\n".join(grid(["AUROC of shifts", *sets, "equal length"], body))


def near(groups: list[Predictions], homes: Sequence[str]) -> str:
    """Novelty and its relative forms: a mean over the other homes and seeds. Empty where no home is a shift of another."""
    body, plain = [], list[float]()
    for name in (name for name in SHIFTS if name.startswith("novelty")):
        means = []
        for group in groups:
            rates = []
            for key, away in sorted(group.cells.items()):
                home = group.cells.get(key._replace(task=group.source_task))
                if key.method == BASE and key.task in homes and key.task != group.source_task and home is not None:
                    rates.append(metrics.auroc(*map(SHIFTS[name][1], (home, away))))
            means.append(float(np.mean(rates)) if rates else np.nan)
        if np.isnan(means).any():
            return ""
        plain = plain or means
        higher = all(ours > theirs for ours, theirs in zip(means, plain, strict=True))
        body.append([name, *(f"{value:.3f}" for value in means), "yes" if higher else "" if means is plain else "no"])
    return "\n".join(
        grid(["AUROC of near shifts", *(group.source_task for group in groups), "higher on every home"], body)
    )


def errors(groups: list[Predictions]) -> str:
    body = []
    for name, (label, score) in ERRORS.items():
        found: dict[bool, list[float]] = {False: [], True: []}
        for group in groups:
            for key, cell in sorted(group.cells.items()):
                right = metrics.correct_per_question(cell.log_probs, cell.answers) > 0
                if key.method == label and 0 < right.sum() < len(right):
                    values = score(cell)
                    found[key.task != group.source_task].append(metrics.auroc(values[right], values[~right]))
        body.append([name, mean(found[False]), mean(found[True])])
    return "\n".join(grid(["AUROC of wrong answers", "home", "shifts"], body))


def main() -> int:
    of = of_results(Path(sys.argv[1])) if len(sys.argv) == 2 else None
    if of is None:
        print(
            "usage: python examples/smolmoe/detection.py OUT/results    (of run.py --registered --report)",
            file=sys.stderr,
        )
        return 2
    groups = [calibrated(group) for group in predictions.load(Path(sys.argv[1])) if group.source_task in of.homes]
    print("\n\n".join(filter(None, (shifts(groups), errors(groups), near(groups, of.homes)))))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
