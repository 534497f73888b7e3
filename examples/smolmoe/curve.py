"""How answers and signals change with a subject's distance from home.

    python examples/smolmoe/curve.py OUT/results
    python examples/smolmoe/curve.py OUT/results --by novelty --labels map-all vglr-mf@permuted+full --bins 7

Markdown, of a registered study that asks one set by subject (LARGER.md). A subject's distance is a signal of `map-all`, its mean
over the subject's questions less that over the home's own test questions, in standard deviations of the latter; a mean over homes
and seeds. Three tables:

    NLL of the subjects in bins of like distance, of `map-all` and of the other labels less that; and accuracy
    AUROC of telling a bin's questions from the home's own, by every score of detection.py that the results have
    over subjects, the rank correlation of the distance with each of these, with an interval over subjects

All answers are calibrated as everywhere in the study. This describes, and tests nothing.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from comparisons import BASE, Comparison, of_results
from detection import SHIFTS, calibrated
from equal import subject
from scipy.stats import rankdata

from vmoer import metrics
from vmoer.errors import InputError
from vmoer.evaluation import predictions
from vmoer.evaluation.predictions import Answered, Key, Predictions
from vmoer.metrics.resampling import percentiles
from vmoer.report.tables import grid

DISTANCES = ("last_mahalanobis", "last_relative", "novelty", "unseen_words")
LABELS = (
    "map-all+orders",
    "vglr-mf@permuted",
    "vglr-mf@permuted+full",
    "vglr-mf@permuted+orders+routing",
    "vglr-fc@permuted",
    "vglr-fc@permuted+full",
    "vglr-fc@permuted+orders+routing",
    "mean-only@permuted",
    "mcdr@permuted+full",
    "map-ens3",
)
DRAWS = 2000
Floats = npt.NDArray[np.float64]


class Subject(NamedTuple):
    """Means over homes and seeds."""

    name: str
    distance: float
    nll: dict[str, float]
    """By label."""
    accuracy: float
    """Of the baseline."""
    auroc: dict[str, float]
    """By score."""


def of_subject(cell: Answered, name: str) -> Answered:
    """The answers to one subject's questions."""
    at = np.array([subject(id_) == name for id_ in cell.ids])
    ids = tuple(id_ for id_, kept in zip(cell.ids, at, strict=True) if kept)
    signals = {signal: values[at] for signal, values in cell.signals.items()}
    return Answered(ids, cell.log_probs[at], cell.answers[at], cell.prompt_tokens[at], signals)


def distance(home: Answered, away: Answered, by: str) -> float:
    own = home.signals[by]
    return float((away.signals[by].mean() - own.mean()) / own.std())


def measured(of: Comparison, groups: Sequence[Predictions], by: str, labels: Sequence[str]) -> list[Subject]:
    """Every subject, the nearest first."""
    base = [(group, key) for group in groups for key in group.cells if key[:3] == (of.graded, "test", BASE)]
    if not base:
        raise InputError(f"there are no answers of {BASE} to {of.graded}")
    names = sorted({subject(id_) for group, key in base for id_ in group.cells[key].ids})
    found = []
    for name in names:
        distances, right = [], []
        nll: dict[str, list[float]] = {label: [] for label in (BASE, *labels)}
        auroc: dict[str, list[float]] = {score: [] for score in SHIFTS}
        for group, key in base:
            away, home = of_subject(group.cells[key], name), group.cells[key._replace(task=group.source_task)]
            distances.append(distance(home, away, by))
            right.append(float(np.mean(metrics.correct_per_question(away.log_probs, away.answers))))
            for label, values in nll.items():
                if (cell := group.cells.get(key._replace(method=label))) is not None:
                    own = of_subject(cell, name)
                    values.append(metrics.nll(own.log_probs, own.answers))
            for score, (label, function) in SHIFTS.items():
                pair = [group.cells.get(Key(task, "test", label, key.seed)) for task in (group.source_task, key.task)]
                if pair[0] is not None and pair[1] is not None:
                    auroc[score].append(metrics.auroc(function(pair[0]), function(of_subject(pair[1], name))))
        means = [{what: float(np.mean(v)) for what, v in values.items() if v} for values in (nll, auroc)]
        found.append(Subject(name, float(np.mean(distances)), means[0], float(np.mean(right)), means[1]))
    return sorted(found, key=lambda one: one.distance)


def correlation(x: Floats, y: Floats, seed: int = 0) -> str:
    """Of ranks, with a bootstrap interval over subjects; none where all are alike."""

    def rho(at: npt.NDArray[np.intp]) -> float:
        ranks = rankdata(x[at]), rankdata(y[at])
        return float(np.corrcoef(*ranks)[0, 1]) if min(map(np.ptp, ranks)) > 0 else np.nan

    value, rng = rho(np.arange(len(x))), np.random.default_rng(seed)
    if np.isnan(value):
        return "-"
    draws = np.array([rho(rng.integers(len(x), size=len(x))) for _ in range(DRAWS)])
    value, low, high = percentiles(value, draws[np.isfinite(draws)], 0.95)
    return f"{value:+.2f} [{low:+.2f}, {high:+.2f}]"


def tables(subjects: Sequence[Subject], bins: int) -> list[str]:
    labels = [label for label in subjects[0].nll if label != BASE]
    scores = list(subjects[0].auroc)
    cut = [part for part in np.array_split(np.arange(len(subjects)), bins) if len(part)]
    losses, rates = [], []
    for part in cut:
        own = [subjects[i] for i in part]
        far = [f"{np.mean([one.distance for one in own]):+.2f}", str(len(own))]
        less = [f"{np.mean([one.nll[label] - one.nll[BASE] for one in own]):+.3f}" for label in labels]
        plain = [f"{np.mean([one.accuracy for one in own]):.3f}", f"{np.mean([one.nll[BASE] for one in own]):.3f}"]
        losses.append([*far, *plain, *less])
        rates.append([*far, *(f"{np.mean([one.auroc[score] for one in own]):.3f}" for score in scores)])
    x = np.array([one.distance for one in subjects])
    rows = [["accuracy", correlation(x, np.array([one.accuracy for one in subjects]))]]
    rows.append([f"NLL {BASE}", correlation(x, np.array([one.nll[BASE] for one in subjects]))])
    for label in labels:
        rows.append(
            [f"NLL {label}, less", correlation(x, np.array([one.nll[label] - one.nll[BASE] for one in subjects]))]
        )
    for score in scores:
        rows.append([f"AUROC {score}", correlation(x, np.array([one.auroc[score] for one in subjects]))])
    heads = ["distance", "subjects"]
    return [
        "\n".join(grid([*heads, "accuracy", f"NLL {BASE}", *(f"{label}, less" for label in labels)], losses)),
        "\n".join(grid([*heads, *(f"AUROC {score}" for score in scores)], rates)),
        "\n".join(grid(["with the distance", "rank correlation"], rows)),
    ]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path)
    parser.add_argument("--by", choices=DISTANCES, default=DISTANCES[0])
    parser.add_argument("--labels", nargs="+", default=LABELS)
    parser.add_argument("--bins", type=int, default=8, help="of about as many subjects each")
    given = parser.parse_args(arguments)
    try:
        of = of_results(given.results)
        if of is None or of.graded is None:
            raise InputError(f"{given.results} is of no registered study with a set that is asked by subject")
        if given.bins < 1:
            raise InputError(f"bins={given.bins} must be at least 1")
        groups = [calibrated(group) for group in predictions.load(given.results) if group.source_task in of.homes]
        subjects = measured(of, groups, given.by, given.labels)
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"Distance: {given.by} of {BASE}. {len(subjects)} subjects of {of.graded}.\n")
    print("\n\n".join(tables(subjects, given.bins)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
