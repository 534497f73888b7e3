"""Does novelty know where an output temperature should be higher?

    T(x) = T (min(v(x), top) / v_0)^a,    a >= 0

v is novelty, v_0 its median where it is fitted, top its maximum there: no question is made less certain than the strangest that
the fit has seen. With a = 0 it is plain temperature scaling, which one number cannot make right on two data sets at once.

    python examples/smolmoe/tempering.py OUT/results/openbookqa [METHOD ...]

prints NLL on each shift: as it is; with a temperature fitted at home, on validation, and with T(x) fitted there; with a
temperature fitted at home and on the other shifts together, each set counted alike, and with T(x) fitted on the same, whose
power a is given. The shift itself is never fitted on. The last column is what novelty adds to the pooled temperature, with an
interval over questions and seeds.
"""

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

Fitted = tuple[float, float, float, float]


class Answers(NamedTuple):
    log_probs: np.ndarray
    answers: np.ndarray
    novelty: np.ndarray


def fit(log_probs: np.ndarray, answers: np.ndarray, novelty: np.ndarray) -> Fitted:
    """T, a, v_0 and top that make the answers likeliest."""
    middle, top = float(np.median(novelty)), float(novelty.max())
    rows, known = np.arange(len(answers)), np.log(novelty / middle)

    def nll(point: np.ndarray) -> float:
        scaled = log_softmax(log_probs * np.exp(-point[0] - point[1] * known)[:, None], axis=1)
        return float(-scaled[rows, answers].mean())

    found = minimize(nll, (0.0, 0.0), bounds=((-3.0, 3.0), (0.0, 5.0)), method="L-BFGS-B")
    return float(np.exp(found.x[0])), float(found.x[1]), middle, top


def apply(log_probs: np.ndarray, novelty: np.ndarray, fitted: Fitted) -> np.ndarray:
    temperature, power, middle, top = fitted
    return np.asarray(log_softmax(log_probs / (temperature * (np.minimum(novelty, top) / middle) ** power)[:, None], 1))


def padded(table: pa.Table) -> np.ndarray:
    return metrics.pad(table["log_probs"].to_pylist())


def pooled(sets: list[Answers]) -> Answers:
    """Every set drawn to the size of the largest, so that each counts alike."""
    rng, size = np.random.default_rng(0), max(len(one.answers) for one in sets)
    drawn = [[column[rows] for column in one] for one in sets for rows in [rng.integers(len(one.answers), size=size)]]
    return Answers(*(np.concatenate(columns) for columns in zip(*drawn, strict=True)))


def compared(home: Answers, shifts: dict[str, Answers]) -> Iterator[tuple[str, dict[str, np.ndarray], float]]:
    """Each shift, the losses of its questions under each temperature, and the power of novelty that was found."""
    for name, own in shifts.items():
        found, power = {"as it is": own.log_probs}, 0.0
        for kind, seen in (
            ("home", home),
            ("pooled", pooled([home, *(o for key, o in shifts.items() if key != name)])),
        ):
            fitted = fit(*seen)
            found[kind] = metrics.apply_temperature(own.log_probs, metrics.fit_temperature(*seen[:2]))
            found[f"{kind}, v"], power = apply(own.log_probs, own.novelty, fitted), fitted[1]
        rows = np.arange(len(own.answers))
        yield name, {kind: -log_probs[rows, own.answers] for kind, log_probs in found.items()}, power


def read(table: pa.Table) -> tuple[Answers, dict[str, Answers]]:
    """A method's and seed's validation answers, and those to each shift."""
    found = {}
    for task, split in sorted({*zip(table["task"].to_pylist(), table["split"].to_pylist(), strict=True)}):
        own = table.filter(pc.and_(pc.equal(table["task"], task), pc.equal(table["split"], split)))
        found[task, split] = Answers(padded(own), own["answer"].to_numpy(), own["novelty"].to_numpy())
    (task,) = (task for task, split in found if split == "validation")
    shifts = {name: own for (name, split), own in found.items() if split == "test" and name != task}
    return found[task, "validation"], shifts


def main() -> int:
    path = Path(sys.argv[1] if len(sys.argv) > 1 else "") / "predictions.parquet"
    if not path.is_file():
        print("usage: python examples/smolmoe/tempering.py FOLDER [METHOD ...]    (with predictions)", file=sys.stderr)
        return 2
    table = pq.read_table(path)
    asked = set(table.filter(pc.equal(table["split"], "validation"))["method"].to_pylist())
    blind = set(table.filter(pc.is_null(table["novelty"]))["method"].to_pylist())
    wanted = sys.argv[2:] or sorted(asked - blind)
    if wrong := [name for name in wanted if name not in asked - blind]:
        print(f"error: {wrong[0]} has no novelty or no validation answers in {path.parent}", file=sys.stderr)
        return 2
    kinds = ("as it is", "home", "home, v", "pooled", "pooled, v")
    print(f"{'':18}{'':16}{''.join(f'{kind:>11}' for kind in kinds)}{'power':>8}   what v adds to pooled")
    for method in wanted:
        own = table.filter(pc.equal(table["method"], method))
        losses: dict[str, dict[str, list[np.ndarray]]] = {}
        powers: dict[str, list[float]] = {}
        for seed in sorted({*own["seed"].to_pylist()}):
            for shift, by_kind, power in compared(*read(own.filter(pc.equal(own["seed"], seed)))):
                powers.setdefault(shift, []).append(power)
                for kind, loss in by_kind.items():
                    losses.setdefault(shift, {}).setdefault(kind, []).append(loss)
        for shift, found in losses.items():
            value, low, high = metrics.paired_bootstrap(np.stack(found["pooled, v"]), np.stack(found["pooled"]))
            shown = "".join(f"{np.mean(found[kind]):11.3f}" for kind in kinds) + f"{np.mean(powers[shift]):8.2f}"
            print(f"{method:18}{shift:16}{shown}   {value:+.3f} [{low:+.3f}, {high:+.3f}]")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
