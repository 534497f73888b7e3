"""Tables of a registered study, from OUT/results alone: python examples/smolmoe/labels.py OUT/results

Markdown: the labels, with their passes and the questions that they have seen; what people use in place of routers; whether
training moved the routers; the printed protocol. They describe, and test nothing (registered.py does).
"""

import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from comparisons import BASE, Comparison, of_results
from registered import (
    Home,
    Metas,
    complete,
    difference,
    difference_on,
    home_of,
    metas,
    read,
    seeds_of,
    shown,
)

from vmoer import metrics
from vmoer.evaluation import predictions
from vmoer.report.tables import grid


def table(of: Comparison, results: Path, said: Metas) -> str:
    """Every label: passes, questions seen in training and for choosing, and calibrated NLL and accuracy, a mean over seeds."""
    homes = read(of, results, of.labels())
    body = []
    for label in of.labels():
        if not complete(homes, label):
            continue
        own = [meta for (_, method, _), meta in said.items() if method == label]
        seen = {name: [m["seen"][name] for m in own if m.get("seen")] for name in ("training", "validation")}
        passes = "/".join(map(str, sorted({meta["passes"] for meta in own})))
        values = [_mean(homes, label, *column) for column in (("nll", False), ("nll", True), ("correct", False))]
        total = [f"{np.mean(values):.0f}" if values else "" for values in seen.values()]
        body.append([label, passes, *total, *(f"{value:.3f}" for value in values)])
    return "\n".join(grid(["label", "passes", "trained on", "chosen on", "NLL home", "NLL shifts", "accuracy"], body))


def _mean(homes: Mapping[str, Home], label: str, what: str, shifts: bool) -> float:
    """Over sets, each counted alike."""
    sets = [cells for name, home in homes.items() for task, cells in home.sets.items() if (task != name) == shifts]
    return float(
        np.mean([np.mean([getattr(scored, what).mean() for scored in cells[label].values()]) for cells in sets])
    )


def beside(of: Comparison, results: Path, said: Metas) -> str:
    """What people use in place of routers, against the baseline on the seeds that it was run for: described, not tested."""
    homes = read(of, results, [BASE, *of.adapters])
    body = []
    for label in of.adapters:
        seeds = [seed for seed in seeds_of(homes) if seed in seeds_of(homes, label)]
        if seeds:
            passes = "/".join(sorted({str(meta["passes"]) for (_, method, _), meta in said.items() if method == label}))
            less = partial(difference, homes, (label, BASE), seeds=seeds)
            nlls = [shown(less(shifts=shifts)) for shifts in (False, True)]
            accuracy = shown(less(shifts=False, what="correct"))
            body.append([label, passes, ", ".join(map(str, seeds)), *nlls, accuracy])
    return "\n".join(grid([f"less {BASE}", "passes", "seeds", "NLL home", "NLL shifts", "accuracy"], body))


def printed(of: Comparison, results: Path) -> str:
    """The printed protocol, each label against its own MAP model: answers as they are, and calibrated; a mean over seeds."""
    found = {group.source_task: group for group in predictions.load(results)}
    asked = [f"{head}{how}" for head, ways in of.printed.items() for how in ways]
    body = []
    for home in of.printed_on:
        ways = (
            [home_of(found[home], asked, calibrate=calibrate) for calibrate in (False, True)] if home in found else []
        )
        for label in asked:
            row = [home, label]
            for way in ways:
                cells, base = (way.sets.get(home, {}).get(name, {}) for name in (label, "map@printed"))
                if not cells or cells.keys() != base.keys():
                    break
                row.append(f"{np.mean([scored.nll.mean() for scored in cells.values()]):.3f}")
                ids = sorted({one for scored in base.values() for one in scored.ids})
                row.append(shown(difference_on((cells, base), sorted(cells), home, "nll", ids)))
            if len(row) == 6:
                body.append(row)
        if (scored := over_vocabulary(found[home]) if home in found else None) is not None:
            body.append([home, "map@printed, over the vocabulary", *scored, "", ""])
    heads = ["home", "label", "NLL", "less map@printed", "NLL, calibrated", "less map@printed"]
    return "\n".join(grid(heads, body))


def over_vocabulary(group: predictions.Predictions) -> tuple[str, str] | None:
    """NLL of the printed protocol's MAP with the whole vocabulary to choose from, and that less NLL over the letters."""
    whole, beside = [], []
    for key, cell in group.cells.items():
        if key[:3] == (group.source_task, "test", "map@printed") and "outside_letters" in cell.signals:
            beside.append(cell.signals["outside_letters"].mean())
            whole.append(metrics.nll(cell.log_probs, cell.answers) + beside[-1])
    return (f"{np.mean(whole):.3f}", f"{np.mean(beside):+.4f}") if whole else None


def moved(said: Metas) -> str:
    """Whether training moved the routers of every label: the epoch that was kept, by seed; over seeds the least change of the
    parameters, and the trace of the covariance at first and as it was kept, a mean over seeds."""
    found: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for (home, label, _), meta in sorted(said.items()):
        if meta.get("moved") and "+" not in label:
            found.setdefault((home, label), []).append(meta["moved"])
    body = []
    for (home, label), runs in found.items():
        epochs = ", ".join(str(run["kept_epoch"]) for run in runs)
        least = min(run["parameters"] for run in runs)
        traces = [run["logit_variance"] for run in runs if run.get("logit_variance")]
        trace = " to ".join(f"{value:.4f}" for value in np.mean(traces, axis=0)) if traces else ""
        body.append([home, label, epochs, f"{least:.2e}", trace, "" if least else "an untrained router among them"])
    return "\n".join(grid(["home", "label", "kept epochs", "least change", "trace", ""], body))


def main() -> int:
    of = of_results(Path(sys.argv[1])) if len(sys.argv) == 2 else None
    if of is None:
        print(
            "usage: python examples/smolmoe/labels.py OUT/results    (of run.py --registered --report)",
            file=sys.stderr,
        )
        return 2
    results = Path(sys.argv[1])
    said = metas(results)
    print("\n\n".join((table(of, results, said), beside(of, results, said), moved(said), printed(of, results))))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
