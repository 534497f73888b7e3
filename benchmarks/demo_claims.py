"""What a full run of the demo has to show, line by line, from its `metrics.json` and its page alone.

Of results that are kept in git, `metrics.json.gz`, there is no page, and the line about its figures is left out.

python benchmarks/demo_claims.py DIR          exit code 1 where a line fails; an aim that is missed is only said

Variational methods are those with a posterior and the library's defaults: vglr-mf, vglr-fc, vglr-lr, vtsr, in any averaging.
Differences to map come with paired bootstrap intervals (evaluation/scores.py, studies/stability.py); an interval "excludes zero"
or it does not, and nothing here is rounded first.
"""

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from vmoer.evaluation.scores import Row
from vmoer.files import read_rows, stored

VARIATIONAL = ("vglr-mf", "vglr-fc", "vglr-lr", "vtsr")
SEEDS = {0, 1, 2}
SHIFTS = ("demo-near", "demo-far")
FIGURES: tuple[str, ...] = (
    "reliability-",
    "stability-curves",
    "brittleness-layers",
    "brittleness-curve",
    "roc-",
    "histogram-",
    "risk-",
)
FIGURES += ("layer-count", "overhead-")
HOME = {"study": None, "task": "demo", "split": "test"}

Line = tuple[bool, str, str]


class Rows:
    def __init__(self, rows: list[Row]) -> None:
        self.rows = rows

    def only(self, **keys: Any) -> list[Row]:
        return [row for row in self.rows if all(row.get(name) == value for name, value in keys.items())]

    def one(self, **keys: Any) -> Row:
        """Where there is none, a row whose difference is not known: no claim holds of it."""
        return next(iter(self.only(**keys)), {"value": float("nan"), "low": float("nan"), "high": float("nan")})


def default(label: str | None) -> bool:
    """Whether a label is a variational method with the library's defaults, however its answers are averaged.

    With an output temperature it is not: that alone would calibrate it.
    """
    return label is not None and label.partition("+")[0] in VARIATIONAL and not label.endswith("+ts")


def seeds(rows: Rows) -> Line:
    """Three seeds that differ: stage 1 is embedded, so seeds change stage 2's noise, order and initial heads."""
    own = rows.only(**HOME, method="vglr-fc", metric="nll")
    values = {row["seed"]: row["value"] for row in own if row["seed"] is not None}
    passed = set(values) == SEEDS and len(set(values.values())) == len(SEEDS)
    return passed, "three seeds, each its own", ", ".join(f"{s}: NLL {v:.4f}" for s, v in sorted(values.items()))


def world(rows: Rows) -> Line:
    accuracy, ece, floor = (
        rows.one(**HOME, method="map", seed=0, metric=name)["value"] for name in ("accuracy", "ece", "ece_floor")
    )
    said = f"accuracy {accuracy:.3f}, ECE {ece:.3f}, floor {floor:.3f}"
    passed = 0.65 <= accuracy <= 0.9 and ece >= 3 * floor
    return passed, "map: 65% to 90% accuracy, ECE at least three times its floor", said


def key_line(rows: Rows) -> Line:
    """NLL, Brier and debiased ECE below map's with intervals that exclude zero, on every seed, at most one point lost."""

    def better(label: str, seed: int) -> bool:
        keys = {**HOME, "method": label, "seed": seed}
        lower = all(rows.one(**keys, metric=f"{m}_minus_map")["high"] < 0 for m in ("nll", "brier", "debiased_ece"))
        return lower and rows.one(**keys, metric="accuracy_minus_map")["value"] >= -0.01

    labels = sorted({row["method"] for row in rows.rows if default(row["method"])})
    winners = [label for label in labels if all(better(label, seed) for seed in SEEDS)]
    text = "a variational method beats map on NLL, Brier and dECE on 3 of 3 seeds, at no more than a point of accuracy"
    return bool(winners), text, ", ".join(winners) or "none"


def vtsr(rows: Rows) -> Line:
    """The default VTSR: over seeds, NLL not above map's beyond the interval, accuracy within two standard errors."""
    nll, accuracy = (rows.one(**HOME, method="vtsr", seed=None, metric=f"{m}_minus_map") for m in ("nll", "accuracy"))
    own = rows.one(**HOME, method="map", metric="accuracy", seed=0)
    two = (own["high"] - own["low"]) / 2  # half a 95% interval is about two standard errors
    said = f"NLL {nll['value']:+.3f} [{nll['low']:+.3f}, {nll['high']:+.3f}], accuracy {accuracy['value']:+.3f} of {two:.3f}"
    passed = nll["low"] <= 0 and accuracy["value"] >= -two
    return passed, "vtsr: NLL no worse than map's, accuracy within two errors", said


def verdicts(rows: Rows) -> Line:
    """Every method has its paired difference to map and to map+ts, with an interval."""
    labels = sorted({row["method"] for row in rows.only(**HOME, metric="nll")})
    names = [f"{m}_minus_{b}" for b in ("map", "map_ts") for m in ("nll", "brier", "debiased_ece", "accuracy")]
    wanted = [(a, name) for a in labels for name in names if not name.endswith("_minus_" + a.replace("+", "_"))]
    there = {(row["method"], row["metric"]) for row in rows.only(**HOME) if row["low"] is not None}
    lacking = [f"{label} {name}" for label, name in wanted if (label, name) not in there]
    text = f"verdicts of {len(labels)} methods against map and map+ts"
    return not lacking, text, ", ".join(lacking[:5]) or "complete"


def stable(rows: Rows) -> Iterator[Line]:
    """Differences are those over seeds, seeds resampled first and then prompts (vmoer.studies.stability.over_seeds)."""
    own = rows.only(study="stability", metric="jaccard", gamma=0)
    fixed = [row for row in own if "fresh" not in row["method"]]
    broken = [f"{row['method']} seed {row['seed']}" for row in fixed if row["value"] != 1]
    yield bool(fixed) and not broken, "fixed points: two identical passes agree exactly", ", ".join(broken) or "all 1"
    found = rows.only(study="stability", metric="jaccard_minus_map", seed=None)
    found = sorted((row for row in found if default(row["method"])), key=lambda row: (not row["gamma"], row["high"]))
    said = [f"{r['method']} at {r['gamma']:g}: {r['value']:+.4f} [{r['low']:+.4f}, {r['high']:+.4f}]" for r in found]
    below = [text for row, text in zip(found, said, strict=True) if row["high"] < 0]
    text = "fixed points: no variational method falls below map beyond the interval"
    yield bool(found) and not below, text, ", ".join(below) or f"nearest {said[0] if said else '-'}"
    fresh = {row["method"].partition(" ")[0]: row["value"] for row in own if "fresh" in row["method"]}
    shown = ", ".join(f"{name} {value:.2f}" for name, value in fresh.items())
    yield min(fresh.values(), default=1) < 1, "fresh noise: the floor is in the table", shown


def detection(rows: Rows) -> Iterator[Line]:
    def name(row: Row) -> str:
        return f"{row['method']} {row['signal']} {row['task']} {row['seed']}"

    known = [row for shift in SHIFTS for row in rows.only(study=None, task=shift) if row["signal"]]
    found = [row for row in known if row["metric"] == "auroc"]
    matched = {name(row) for row in known if row["metric"] == "auroc_matched" and row["value"] is not None}
    unmatched = [name(row) for row in found if name(row) not in matched]
    said = ", ".join(unmatched[:5]) or f"{len(found)} of {len(found)}"
    yield bool(found) and not unmatched, "length-matched AUROC for every signal", said
    null = [row["value"] for row in found if row["signal"] == "prompt_tokens"] or [0.0]
    text, said = "the null signal lies in [0.45, 0.55] on both shifts", f"{min(null):.3f} to {max(null):.3f}"
    yield all(0.45 <= v <= 0.55 for v in null), text, said
    near = [row["value"] for row in found if (row["signal"], row["task"]) == ("novelty", "demo-near")] or [0.0]
    text, said = "novelty reaches 0.85 on the near shift, with every method", f"{min(near):.3f} to {max(near):.3f}"
    yield min(near) >= 0.85, text, said


def costs(rows: Rows) -> Line:
    printed = {"mcdr": 20.9, "vglr-mf": 6.2, "vglr-fc": 9.2, "vtsr": 5.9}
    macs = {"vglr-fc": 0.0096, "vtsr": 0.0060}
    counted = rows.only(study="efficiency", model="granite-3b")
    got = {(row["method"], row["metric"]): row["value"] for row in counted}
    passed = all(round(got.get((key, "parameters"), 0) / 1e6, 1) == value for key, value in printed.items())
    passed &= all(abs(got.get((key, "macs"), 0) / 1e9 / value - 1) <= 0.03 for key, value in macs.items())
    said = ", ".join(f"{key} {got.get((key, 'parameters'), 0) / 1e6:.1f}M" for key in printed)
    said += "; " + ", ".join(f"{key} {got.get((key, 'macs'), 0) / 1e9:.4f} G" for key in macs)
    return passed, "parameters as printed, MACs within three percent", said


def figures(directory: Path) -> Line:
    page = directory / "report" / "index.html"
    text = page.read_text(encoding="utf-8") if page.exists() else ""
    ids = re.findall(r'<figure id="([^"]+)"', text)
    absent = [name for name in FIGURES if not any(found.startswith(name) for found in ids)]
    named = len(re.findall(r'<svg [^>]*role="img" aria-label="[^"]{20,}"', text))
    said = f"lacking {', '.join(absent)}" if absent else f"{len(ids)} figures, {named} with alt text"
    passed = bool(ids) and not absent and named == len(ids)
    return passed, "every figure of the list is on the page, with alt text", said


def main() -> int:
    directory = Path(sys.argv[-1])
    if len(sys.argv) != 2 or not stored(directory / "metrics.json").exists():
        usage = "usage: python benchmarks/demo_claims.py DIR    (with DIR/metrics.json, of `vmoer demo --full`)"
        print(usage, file=sys.stderr)
        return 2
    rows = Rows(read_rows(directory / "metrics.json"))
    found = [seeds(rows), world(rows), key_line(rows), verdicts(rows), *stable(rows), *detection(rows), costs(rows)]
    if stored(directory / "metrics.json").suffix != ".gz":  # what is kept in git comes without its page
        found.append(figures(directory))
    for passed, claim, said in found:
        print(f"{'pass' if passed else 'FAIL'}  {claim}: {said}")
    passed, claim, said = vtsr(rows)
    print(f"{'met ' if passed else 'MISS'}  aim: {claim}: {said}")
    return 0 if all(passed for passed, _, _ in found) else 1


if __name__ == "__main__":
    sys.exit(main())
