"""An output temperature that grows where the routers have seen nothing alike, fitted like any other on validation.

    T(x) = T (min(v(x), top) / v_0)^a,    a >= 0

v is novelty, v_0 its median on validation, top its maximum there: no question is made less certain than the strangest of those
the fit has seen. With a = 0 it is plain temperature scaling, which one number cannot make right on two data sets at once. Where a
model knows more than its novelty says (words that fine-tuning never showed, but pre-training did), it errs to the careful side.

    python examples/smolmoe/tempering.py out/demo/vglr-fc-s0        NLL and debiased ECE of each task, as it is, +ts and +nts
"""

import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from scipy.optimize import minimize
from scipy.special import log_softmax

from vmoer import metrics

SUFFIX = "+nts"


def fit(log_probs: np.ndarray, answers: np.ndarray, novelty: np.ndarray) -> tuple[float, float, float, float]:
    """T, a, v_0 and top that make the answers likeliest."""
    middle, top = float(np.median(novelty)), float(novelty.max())
    rows, known = np.arange(len(answers)), np.log(novelty / middle)

    def nll(point: np.ndarray) -> float:
        scaled = log_softmax(log_probs * np.exp(-point[0] - point[1] * known)[:, None], axis=1)
        return float(-scaled[rows, answers].mean())

    found = minimize(nll, (0.0, 0.0), bounds=((-3.0, 3.0), (0.0, 5.0)), method="L-BFGS-B")
    return float(np.exp(found.x[0])), float(found.x[1]), middle, top


def apply(log_probs: np.ndarray, novelty: np.ndarray, fitted: tuple[float, float, float, float]) -> np.ndarray:
    temperature, power, middle, top = fitted
    return log_softmax(log_probs / (temperature * (np.minimum(novelty, top) / middle) ** power)[:, None], axis=1)


def tempered(table: pa.Table) -> pa.Table | None:
    """One method's test answers again, so tempered; None where it has no novelty or no validation answers."""
    inside = table.filter(pc.equal(table["split"], "validation"))
    outside = table.filter(pc.not_equal(table["split"], "validation"))
    if not len(inside) or table["novelty"].null_count:
        return None
    fitted = fit(padded(inside), inside["answer"].to_numpy(), inside["novelty"].to_numpy())
    found = apply(padded(outside), outside["novelty"].to_numpy(), fitted)
    own = [row[: len(old)].tolist() for row, old in zip(found, outside["log_probs"].to_pylist(), strict=True)]
    column = pa.array(own, outside.schema.field("log_probs").type)
    method = pa.array([f"{name}{SUFFIX}" for name in outside["method"].to_pylist()], pa.string())
    outside = outside.set_column(outside.column_names.index("log_probs"), "log_probs", column)
    return outside.set_column(outside.column_names.index("method"), "method", method)


def padded(table: pa.Table) -> np.ndarray:
    return metrics.pad(table["log_probs"].to_pylist())


def main() -> int:
    if len(sys.argv) != 2 or not (Path(sys.argv[1]) / "predictions.parquet").is_file():
        print(
            "usage: python examples/smolmoe/tempering.py FOLDER    (with predictions, validation among them)",
            file=sys.stderr,
        )
        return 2
    table = pq.read_table(Path(sys.argv[1]) / "predictions.parquet")
    warm = tempered(table)
    if warm is None:
        print(f"error: {sys.argv[1]} has no novelty or no validation answers", file=sys.stderr)
        return 2
    inside = table.filter(pc.equal(table["split"], "validation"))
    temperature = metrics.fit_temperature(padded(inside), inside["answer"].to_numpy())
    plain = table.filter(pc.not_equal(table["split"], "validation"))
    print(f"{'':24}{'NLL':>8}{'+ts':>8}{SUFFIX:>8}{'dECE':>10}{'+ts':>8}{SUFFIX:>8}")
    for task in sorted({*plain["task"].to_pylist()}):
        own, ours = (x.filter(pc.equal(x["task"], task)) for x in (plain, warm))
        answers = own["answer"].to_numpy()
        kinds = [padded(own), metrics.apply_temperature(padded(own), temperature), padded(ours)]
        nll = [metrics.nll(kind, answers) for kind in kinds]
        ece = [metrics.debiased_ece(metrics.confidence(k), metrics.correct_per_question(k, answers)) for k in kinds]
        print(f"{task:24}" + "".join(f"{x:8.3f}" for x in nll) + "  " + "".join(f"{x:8.3f}" for x in ece))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
