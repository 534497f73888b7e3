"""Does a signal know where an output temperature should be higher?

    T(x) = T exp(a (min(s(x), top) - s_0) / sd),    a >= 0

s is the logarithm of novelty, or another signal as it is; s_0, sd and top are its median, standard deviation and maximum where it
is fitted: no question is made less certain than the strangest that the fit has seen. With a = 0 it is plain temperature scaling,
which one number cannot make right on two data sets at once. By the answer's entropy it is much what Balanya et al. (2022) do.

    python examples/smolmoe/tempering.py OUT/results/openbookqa [METHOD ...] [--by novelty]

prints NLL on the task's own test questions and on each shift: as it is; with a temperature fitted at home, on validation, and
with T(x) fitted there; with a temperature fitted at home and on the other shifts together, each set counted alike, and with T(x)
fitted on the same, whose a is given. The set itself is never fitted on. The last two columns are what the signal adds to
either temperature, with intervals over questions and seeds.
"""

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from scipy.optimize import minimize
from scipy.special import log_softmax

from vmoer import metrics
from vmoer.evaluation.predictions import SIGNALS, entropy

Fitted = tuple[float, float, float, float, float]
KINDS = ("as it is", "home", "home, s", "pooled", "pooled, s")


class Answers(NamedTuple):
    log_probs: np.ndarray
    answers: np.ndarray
    signal: np.ndarray


def fit(log_probs: np.ndarray, answers: np.ndarray, signal: np.ndarray) -> Fitted:
    """T, a, s_0, sd and top that make the answers likeliest."""
    middle, spread, top = float(np.median(signal)), float(signal.std()) or 1.0, float(signal.max())
    rows, known = np.arange(len(answers)), (signal - middle) / spread

    def nll(point: np.ndarray) -> float:
        scaled = log_softmax(log_probs * np.exp(-point[0] - point[1] * known)[:, None], axis=1)
        return float(-scaled[rows, answers].mean())

    found = minimize(nll, (0.0, 0.0), bounds=((-3.0, 3.0), (0.0, 5.0)), method="L-BFGS-B")
    return float(np.exp(found.x[0])), float(found.x[1]), middle, spread, top


def apply(log_probs: np.ndarray, signal: np.ndarray, fitted: Fitted) -> np.ndarray:
    temperature, slope, middle, spread, top = fitted
    own = temperature * np.exp(slope * (np.minimum(signal, top) - middle) / spread)
    return np.asarray(log_softmax(log_probs / own[:, None], 1))


def pooled(sets: list[Answers]) -> Answers:
    """Every set drawn to the size of the largest, so that each counts alike."""
    rng, size = np.random.default_rng(0), max(len(one.answers) for one in sets)
    drawn = [[column[rows] for column in one] for one in sets for rows in [rng.integers(len(one.answers), size=size)]]
    return Answers(*(np.concatenate(columns) for columns in zip(*drawn, strict=True)))


def compared(
    home: Answers, sets: dict[str, Answers], source: str = ""
) -> Iterator[tuple[str, dict[str, np.ndarray], float]]:
    """Each set, the losses of its questions under each temperature, and the slope a that was found."""
    for name, own in sets.items():
        others = [other for key, other in sets.items() if key not in (name, source)]
        found, slope = {"as it is": own.log_probs}, 0.0
        for kind, seen in (("home", home), ("pooled", pooled([home, *others]))):
            fitted = fit(*seen)
            found[kind] = metrics.apply_temperature(own.log_probs, metrics.fit_temperature(*seen[:2]))
            found[f"{kind}, s"], slope = apply(own.log_probs, own.signal, fitted), fitted[1]
        rows = np.arange(len(own.answers))
        yield name, {kind: -log_probs[rows, own.answers] for kind, log_probs in found.items()}, slope


def read(table: pa.Table, by: str) -> tuple[str, Answers, dict[str, Answers]]:
    """Of a method and seed: the task's name, its validation answers, and those to its test questions and each shift."""
    found = {}
    for task, split in sorted({*zip(table["task"].to_pylist(), table["split"].to_pylist(), strict=True)}):
        own = table.filter(pc.and_(pc.equal(table["task"], task), pc.equal(table["split"], split)))
        log_probs = metrics.pad(own["log_probs"].to_pylist())
        # the answer's entropy is not stored: it follows from the answers
        signal = entropy(log_probs) if by == "predictive_entropy" else own[by].to_numpy().astype(np.float64)
        found[task, split] = Answers(log_probs, own["answer"].to_numpy(), np.log(signal) if by == "novelty" else signal)
    (task,) = (task for task, split in found if split == "validation")
    return task, found[task, "validation"], {name: own for (name, split), own in found.items() if split == "test"}


def lines(table: pa.Table, method: str, by: str) -> Iterator[str]:
    own = table.filter(pc.equal(table["method"], method))
    losses: dict[str, dict[str, list[np.ndarray]]] = {}
    slopes: dict[str, list[float]] = {}
    for seed in sorted({*own["seed"].to_pylist()}):
        source, home, sets = read(own.filter(pc.equal(own["seed"], seed)), by)
        for name, by_kind, slope in compared(home, sets, source):
            slopes.setdefault(name, []).append(slope)
            for kind, loss in by_kind.items():
                losses.setdefault(name, {}).setdefault(kind, []).append(loss)
    for name, found in losses.items():
        shown = "".join(f"{np.mean(found[kind]):11.3f}" for kind in KINDS) + f"{np.mean(slopes[name]):8.2f}"
        for kind in ("home", "pooled"):
            value, low, high = metrics.paired_bootstrap(np.stack(found[f"{kind}, s"]), np.stack(found[kind]))
            shown += f"   {value:+.3f} [{low:+.3f}, {high:+.3f}]"
        yield f"{method:18}{name:16}{shown}"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="with predictions")
    parser.add_argument("methods", nargs="*", help="all that have the signal and validation answers, by default")
    parser.add_argument("--by", default="novelty", choices=SIGNALS)
    given = parser.parse_intermixed_args(arguments)
    path = given.folder / "predictions.parquet"
    if not path.exists():
        print(f"error: {path}: no such file", file=sys.stderr)
        return 2
    table = pq.read_table(path)
    known = set(table.filter(pc.equal(table["split"], "validation"))["method"].to_pylist())
    if given.by in table.column_names:
        known -= set(table.filter(pc.is_null(table[given.by]))["method"].to_pylist())
    wanted = given.methods or sorted(known)
    if wrong := [name for name in wanted if name not in known]:
        print(f"error: {wrong[0]} has no {given.by} or no validation answers in {path.parent}", file=sys.stderr)
        return 2
    head = f"{'':34}{''.join(f'{kind:>11}' for kind in KINDS)}{'a':>8}"
    print(f"{head}   what {given.by} adds at home, and pooled")
    for method in wanted:
        print("\n".join(lines(table, method, given.by)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
