"""What a full run of the demo has to show, line by line, from its `metrics.json` and its page alone.

python benchmarks/demo_claims.py DIR          exit code 1 where a line fails; an aim that is missed is only said

Variational methods are those with a posterior and the library's defaults: vglr-mf, vglr-fc, vglr-lr, vtsr, in any averaging.
Differences to map come with paired bootstrap intervals (vmoer.scores, vmoer.studies.stability); an interval "excludes zero"
or it does not, and nothing here is rounded first.
"""

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from vmoer.studies import efficiency

VARIATIONAL = ("vglr-mf", "vglr-fc", "vglr-lr", "vtsr")
SEEDS = {0, 1, 2}
SHIFTS = ("demo-near", "demo-far")
FIGURES = ("reliability-", "stability-curves", "brittleness-layers", "brittleness-curve", "roc-", "histogram-", "risk-")
FIGURES += ("layer-count", "overhead-")

Row = dict[str, Any]
Line = tuple[bool, str, str]


class Rows:
    def __init__(self, rows: list[Row]) -> None:
        self.rows = rows

    def only(self, **keys: Any) -> list[Row]:
        return [row for row in self.rows if all(row.get(name) == value for name, value in keys.items())]

    def one(self, **keys: Any) -> Row | None:
        return next(iter(self.only(**keys)), None)


def default(label: str) -> bool:
    """Whether a label is a variational method with the library's defaults, however its answers are averaged.

    With an output temperature it is not: that alone would calibrate it.
    """
    return label.partition("+")[0] in VARIATIONAL and not label.endswith("+ts")


def seeds(rows: Rows) -> Line:
    """Three seeds that differ: stage 1 is embedded, so seeds change stage 2's noise, order and initial heads."""
    own = rows.only(study=None, task="demo", split="test", method="vglr-fc", metric="nll")
    values = {row["seed"]: row["value"] for row in own if row["seed"] is not None}
    passed = set(values) == SEEDS and len(set(values.values())) == len(SEEDS)
    return passed, "three seeds, each its own", ", ".join(f"{s}: NLL {v:.4f}" for s, v in sorted(values.items()))


def world(rows: Rows) -> Line:
    found = {
        row["metric"]: row["value"] for row in rows.only(study=None, task="demo", split="test", method="map", seed=0)
    }
    passed = 0.65 <= found["accuracy"] <= 0.9 and found["ece"] >= 3 * found["ece_floor"]
    said = f"accuracy {found['accuracy']:.3f}, ECE {found['ece']:.3f}, floor {found['ece_floor']:.3f}"
    return passed, "map: 65% to 90% accuracy, ECE at least three times its floor", said


def key_line(rows: Rows) -> Line:
    """NLL, Brier and debiased ECE below map's with intervals that exclude zero, on every seed, at most one point lost."""
    winners = []
    for label in sorted({row["method"] for row in rows.rows if row["method"] and default(row["method"])}):
        held = []
        for seed in SEEDS:
            keys = {"study": None, "task": "demo", "split": "test", "method": label, "seed": seed}
            better = [rows.one(**keys, metric=f"{m}_minus_map") for m in ("nll", "brier", "debiased_ece")]
            accuracy = rows.one(**keys, metric="accuracy_minus_map")
            held.append(
                accuracy is not None
                and accuracy["value"] >= -0.01
                and all(row is not None and row["high"] < 0 for row in better)
            )
        winners += [label] if all(held) else []
    text = "a variational method beats map on NLL, Brier and dECE on 3 of 3 seeds, at no more than a point of accuracy"
    return bool(winners), text, ", ".join(winners) or "none"


def vtsr(rows: Rows) -> Line:
    """The default VTSR: over seeds, NLL not above map's beyond the interval, accuracy within two standard errors."""
    keys = {"study": None, "task": "demo", "split": "test", "method": "vtsr", "seed": None}
    nll, accuracy = (rows.one(**keys, metric=f"{m}_minus_map") for m in ("nll", "accuracy"))
    if nll is None or accuracy is None:
        return False, "vtsr: NLL no worse than map's, accuracy within two errors", "no rows over seeds"
    own = rows.one(study=None, task="demo", split="test", method="map", metric="accuracy", seed=0)
    assert own is not None
    two = (own["high"] - own["low"]) / 2  # half a 95% interval is about two standard errors
    said = f"NLL {nll['value']:+.3f} [{nll['low']:+.3f}, {nll['high']:+.3f}], accuracy {accuracy['value']:+.3f} of {two:.3f}"
    return (
        nll["low"] <= 0 and accuracy["value"] >= -two,
        "vtsr: NLL no worse than map's, accuracy within two errors",
        said,
    )


def verdicts(rows: Rows) -> Line:
    """Every method has its paired difference to map and to map+ts, with an interval."""
    labels = {row["method"] for row in rows.only(study=None, task="demo", split="test", metric="nll")}
    lacking = []
    for label, baseline in ((a, b) for a in sorted(labels) for b in ("map", "map+ts") if a != b):
        for metric in ("nll", "brier", "debiased_ece", "accuracy"):
            name = f"{metric}_minus_{baseline.replace('+', '_')}"
            row = rows.one(study=None, task="demo", split="test", method=label, metric=name)
            lacking += [] if row and row["low"] is not None else [f"{label} {name}"]
    return (
        not lacking,
        f"verdicts of {len(labels)} methods against map and map+ts",
        ", ".join(lacking[:5]) or "complete",
    )


def stable(rows: Rows) -> Iterator[Line]:
    """Differences are those over seeds, seeds resampled first and then prompts (vmoer.studies.stability.over_seeds)."""
    own = rows.only(study="stability", metric="jaccard")
    fixed = [row for row in own if row["gamma"] == 0 and "fresh" not in row["method"]]
    broken = [f"{row['method']} seed {row['seed']}" for row in fixed if row["value"] != 1]
    yield bool(fixed) and not broken, "fixed points: two identical passes agree exactly", ", ".join(broken) or "all 1"
    below, worst = [], (9.0, "")
    found = rows.only(study="stability", metric="jaccard_minus_map", seed=None)
    differences = [row for row in found if default(row["method"])]
    for row in differences:
        said = f"{row['method']} at {row['gamma']:g}: {row['value']:+.4f} [{row['low']:+.4f}, {row['high']:+.4f}]"
        worst = min(worst, (row["high"], said)) if row["gamma"] else worst
        below += [said] if row["high"] < 0 else []
    text = "fixed points: no variational method falls below map beyond the interval"
    yield bool(differences) and not below, text, ", ".join(below) or f"nearest {worst[1]}"
    fresh = {row["method"]: row["value"] for row in own if row["gamma"] == 0 and "fresh" in row["method"]}
    shown = ", ".join(f"{name.partition(' ')[0]} {value:.2f}" for name, value in fresh.items())
    yield bool(fresh) and min(fresh.values()) < 1, "fresh noise: the floor is in the table", shown


def detection(rows: Rows) -> Iterator[Line]:
    found = [row for shift in SHIFTS for row in rows.only(study=None, task=shift, metric="auroc") if row["signal"]]
    unmatched = [
        f"{row['method']} {row['signal']} {row['task']}"
        for row in found
        if not any(
            other["value"] is not None
            for other in rows.only(
                study=None,
                task=row["task"],
                method=row["method"],
                signal=row["signal"],
                metric="auroc_matched",
                seed=row["seed"],
            )
        )
    ]
    said = ", ".join(unmatched[:5]) or f"{len(found)} of {len(found)}"
    yield bool(found) and not unmatched, "length-matched AUROC for every signal", said
    null = [row["value"] for row in found if row["signal"] == "prompt_tokens"]
    text = "the null signal lies in [0.45, 0.55] on both shifts"
    yield (
        bool(null) and all(0.45 <= v <= 0.55 for v in null),
        text,
        f"{min(null):.3f} to {max(null):.3f}" if null else "-",
    )
    near = [row["value"] for row in found if row["signal"] == "novelty" and row["task"] == "demo-near"]
    said = f"{min(near):.3f} to {max(near):.3f}" if near else "no rows"
    yield bool(near) and min(near) >= 0.85, "novelty reaches 0.85 on the near shift, with every method", said


def costs(rows: Rows) -> Line:
    printed = {"mcdr": 20.9, "vglr-mf": 6.2, "vglr-fc": 9.2, "vtsr": 5.9}
    macs = {"vglr-fc": 0.0096, "vtsr": 0.0060}
    got: dict[tuple[str, str], float] = {}
    for row in rows.only(study=efficiency.STUDY, model="granite-3b"):
        got[row["method"], row["metric"]] = row["value"]
    passed = all(round(got.get((key, "parameters"), 0) / 1e6, 1) == value for key, value in printed.items())
    passed &= all(abs(got.get((key, "macs"), 0) / 1e9 / value - 1) <= 0.03 for key, value in macs.items())
    said = ", ".join(f"{key} {got.get((key, 'parameters'), 0) / 1e6:.1f}M" for key in printed)
    said += "; " + ", ".join(f"{key} {got.get((key, 'macs'), 0) / 1e9:.4f} G" for key in macs)
    return passed, "parameters as printed, MACs within three percent", said


def figures(directory: Path) -> Line:
    places = (directory / "report" / "index.html", directory / "index.html")
    text = next((path.read_text(encoding="utf-8") for path in places if path.exists()), "")
    ids = re.findall(r'<figure id="([^"]+)"', text)
    absent = [name for name in FIGURES if not any(found.startswith(name) for found in ids)]
    named = len(re.findall(r'<svg [^>]*role="img" aria-label="[^"]{20,}"', text))
    said = f"lacking {', '.join(absent)}" if absent else f"{len(ids)} figures, {named} with alt text"
    return (
        bool(ids) and not absent and named == len(ids),
        "every figure of the list is on the page, with alt text",
        said,
    )


def lines(directory: Path) -> Iterator[Line]:
    rows = Rows(json.loads((directory / "metrics.json").read_text(encoding="utf-8")))
    yield seeds(rows)
    yield world(rows)
    yield key_line(rows)
    yield verdicts(rows)
    yield from stable(rows)
    yield from detection(rows)
    yield costs(rows)
    yield figures(directory)


def main() -> int:
    if len(sys.argv) != 2 or not (Path(sys.argv[1]) / "metrics.json").exists():
        print(
            "usage: python benchmarks/demo_claims.py DIR    (with DIR/metrics.json, of `vmoer demo --full`)",
            file=sys.stderr,
        )
        return 2
    found = list(lines(Path(sys.argv[1])))
    for passed, claim, said in found:
        print(f"{'pass' if passed else 'FAIL'}  {claim}: {said}")
    passed, claim, said = vtsr(Rows(json.loads((Path(sys.argv[1]) / "metrics.json").read_text(encoding="utf-8"))))
    print(f"{'met ' if passed else 'MISS'}  aim: {claim}: {said}")
    return 0 if all(passed for passed, _, _ in found) else 1


if __name__ == "__main__":
    sys.exit(main())
