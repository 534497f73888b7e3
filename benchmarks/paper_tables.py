"""Cells of the paper's calibration tables that cannot all be right: python benchmarks/paper_tables.py

ECE above 1 - accuracy: a model that is overconfident wherever it errs has ECE = mean confidence - accuracy, at most 1 - accuracy.
NLL below the least: answers with a confidence c have p(answer) = c where they are right and at most min(c, 1 - c) where they are
wrong. The least NLL that an accuracy and an ECE leave is then a linear programme over the shares of right and wrong answers at
each confidence, whatever the number of options. It holds for means over seeds too: NLL and accuracy are linear, ECE convex.
MCE above 1: it is a difference of two shares.
"""

import itertools
import json
from collections.abc import Iterator
from importlib.resources import files

import numpy as np
from scipy.optimize import linprog

from vmoer.metrics.calibration import BINS


def least_nll(accuracy: float, ece: float, grid: int = 40) -> float:
    """Over confidences on a grid of `grid` steps a bin; both ends of a bin are on it."""
    edges = np.linspace(0, 1, BINS + 1)
    # bins are open below and closed above; the step at the lower end stands for the limit
    steps = [np.linspace(low, high, grid + 1) for low, high in itertools.pairwise(edges)]
    bins = np.repeat(np.arange(BINS), grid + 1)
    confidence = np.concatenate(steps).clip(1e-9, 1)
    right, wrong = -np.log(confidence), -np.log(np.minimum(confidence, 1 - confidence).clip(1e-9))
    n = len(confidence)
    gaps = []
    for b in range(BINS):  # |sum of confidence - correct| in a bin <= its slack; the slacks add up to ECE
        gap = np.concatenate([(bins == b) * (confidence - 1), (bins == b) * confidence])
        slack = -np.eye(BINS)[b]
        gaps += [np.concatenate([gap, slack]), np.concatenate([-gap, slack])]
    limits = np.vstack([*gaps, np.concatenate([np.zeros(2 * n), np.ones(BINS)])])
    shares = np.vstack([np.repeat([1.0, 0.0, 0.0], [n, n, BINS]), np.repeat([0.0, 1.0, 0.0], [n, n, BINS])])
    solved = linprog(
        np.concatenate([right, wrong, np.zeros(BINS)]),
        A_ub=limits,
        b_ub=[*[0.0] * (2 * BINS), ece],
        A_eq=shares,
        b_eq=[accuracy, 1 - accuracy],
    )
    assert solved.success, solved.message
    return float(solved.fun)


def printed() -> dict[tuple[str, str, str], dict[str, float]]:
    """The table by model, task and method."""
    rows = json.loads(files("vmoer.report").joinpath("paper.json").read_text())["rows"]
    cells: dict[tuple[str, str, str], dict[str, float]] = {}
    for row in rows:
        if row["study"] == "calibration":
            cells.setdefault((row["model"], row["task"], row["method"]), {})[row["metric"]] = row["value"]
    return cells


def lines() -> Iterator[str]:
    for key, cell in printed().items():
        name, accuracy, ece = " ".join(key), cell["accuracy"], cell["ece"]
        if key[2] == "map" and ece > 1 - accuracy:
            yield f"{name}: ECE {ece:.3f} above 1 - accuracy {1 - accuracy:.3f}"
        # the most that rounding allows
        if cell["nll"] + 5e-4 < (least := least_nll(accuracy + 5e-4, ece + 5e-4)):
            as_printed = least_nll(accuracy, ece)
            yield f"{name}: NLL {cell['nll']:.3f} below {as_printed:.3f}, the least ({least:.3f} with rounding)"
        if cell["mce"] > 1:
            yield f"{name}: MCE {cell['mce']:.3f} above 1"


if __name__ == "__main__":
    print("\n".join(lines()))
