"""What the study says to each claim, line by line, from OUT/results alone: python examples/smolmoe/verdicts.py OUT/results

Of a registered study: the tests of REGISTERED.md, or of LARGER.md, and no others (registered.py). Of the first study:

The variational method that is held to the goals is chosen on validation: the least NLL, a mean over tasks and seeds, among
vglr-mf, vglr-fc, vglr-lr and vtsr with any averaging, as they are or with an output temperature (+ts), which is fitted on one
half of the validation questions and scored on the other. Differences come with paired bootstrap intervals over questions and
seeds (vmoer.evaluation.scores). A line that fails is an answer too: the exit code is 0.
"""

import json
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.compute as pc
import pyarrow.parquet as pq
import registered
from comparisons import of_results

from vmoer import metrics
from vmoer.evaluation.predictions import SIGNALS
from vmoer.evaluation.scores import Row
from vmoer.files import read_rows, stored

VARIATIONAL = ("vglr-mf", "vglr-fc", "vglr-lr", "vtsr")
TASKS = ("openbookqa", "arc_challenge", "sciq", "medmcqa")
SOURCE, FAR, GAMMA = "openbookqa", "medmcqa", 0.01
ROUTING = tuple(name for name in SIGNALS if name != "predictive_entropy")

Line = tuple[bool | None, str, str]
"""Whether it holds (None: nothing to judge by), the claim, what was found."""


class Rows:
    def __init__(self, rows: list[Row]) -> None:
        self.rows = rows

    def all(self, **keys: Any) -> list[Row]:
        """Over seeds where there are several, else the one seed's."""
        found = [row for row in self.rows if all(row.get(name) == value for name, value in keys.items())]
        return [row for row in found if row["seed"] is None] or found

    def one(self, **keys: Any) -> Row | None:
        return next((row for row in self.all(**keys) if row["value"] is not None), None)

    def own(self, task: str, method: str, metric: str) -> Row | None:
        """Of a method trained on the task itself."""
        return self.one(study=None, task=task, source=None, split="test", method=method, metric=metric)


def show(row: Row | None) -> str:
    if row is None:
        return "-"
    if row.get("low") is None or row.get("high") is None:
        return f"{row['value']:.3f}"
    return f"{row['value']:+.3f} [{row['low']:+.3f}, {row['high']:+.3f}]"


# -- the choice --------------------------------------------------------------------------------------------------------


def candidates(results: Path) -> dict[str, float]:
    """Validation NLL of every variational label that all tasks and seeds have, the least first."""
    found: dict[str, dict[tuple[str, int], float]] = {}
    wanted: set[tuple[str, int]] = set()
    for task in TASKS:
        path = results / task / "predictions.parquet"
        if not path.exists():
            continue
        table = pq.read_table(path)
        table = table.filter(pc.equal(table["split"], "validation"))
        for (method, seed), own in _groups(table):
            wanted.add((task, seed))
            if method.partition("+")[0] not in VARIATIONAL:
                continue
            log_probs, answers = metrics.pad(own["log_probs"].to_pylist()), own["answer"].to_numpy()
            tempered = metrics.cross_tempered(log_probs, answers)
            found.setdefault(method, {})[task, seed] = metrics.nll(log_probs, answers)
            found.setdefault(f"{method}+ts", {})[task, seed] = metrics.nll(tempered, answers)
    complete = {name: float(np.mean([*by.values()])) for name, by in found.items() if by.keys() == wanted}
    return dict(sorted(complete.items(), key=lambda item: item[1]))


def _groups(table: Any) -> Iterator[tuple[tuple[str, int], Any]]:
    keys = sorted({*zip(table["method"].to_pylist(), table["seed"].to_pylist(), strict=True)})
    for method, seed in keys:
        yield (method, seed), table.filter(pc.and_(pc.equal(table["method"], method), pc.equal(table["seed"], seed)))


# -- the lines ---------------------------------------------------------------------------------------------------------


def model(rows: Rows) -> Line:
    accuracy, ece = (rows.own(SOURCE, "map", name) for name in ("accuracy", "ece"))
    passed = None if accuracy is None or ece is None else accuracy["value"] >= 0.4 and ece["value"] > 0.1
    return passed, "map: at least 40% accuracy, ECE above 0.10", f"accuracy {show(accuracy)}, ECE {show(ece)}"


def calibration(rows: Rows, label: str) -> Iterator[Line]:
    third, likelier, tempered, said, against = [], [], [], [], []
    for task in TASKS:
        ours, theirs = (rows.own(task, method, "debiased_ece") for method in (label, "map"))
        accuracy, own = rows.own(task, label, "accuracy_minus_map"), rows.own(task, "map", "accuracy")
        nll = rows.own(task, label, "nll_minus_map")
        if not (ours and theirs and accuracy and own and nll):
            said.append(f"{task}: not measured")
            continue
        error = (own["high"] - own["low"]) / 4  # a 95% interval is about four standard errors wide
        third.append(ours["value"] <= theirs["value"] / 3 and accuracy["value"] >= -error)
        likelier.append(nll["high"] < 0)
        ece = f"dECE {ours['value']:.3f} of {theirs['value']:.3f}"
        said.append(f"{task}: {ece}, accuracy {show(accuracy)}, NLL {show(nll)}")
        for metric in ("nll", "debiased_ece"):
            difference = rows.own(task, label, f"{metric}_minus_map_ts")
            tempered.append(difference is not None and difference["low"] <= 0)
            against.append(f"{task} {metric} {show(difference)}")
    judged = len(likelier) == len(TASKS)
    text = f"{label}: debiased ECE at most a third of map's on three of four tasks, accuracy within an error"
    yield sum(third) >= 3 if judged else None, text, "; ".join(said)
    text = f"{label}: NLL below map's on all four tasks"
    yield all(likelier) if judged else None, text, f"{sum(likelier)} of {len(likelier)}"
    yield all(tempered) if judged else None, f"{label}: no worse than map+ts on its own tasks", "; ".join(against)


def shifted(rows: Rows, label: str) -> Line:
    keys = {"study": None, "source": SOURCE, "split": "test", "method": label}
    found = [row for row in rows.all(**keys, metric="nll_minus_map_ts") if row["task"] != SOURCE]
    said = []
    for row in found:
        ece = rows.one(**keys, task=row["task"], metric="debiased_ece_minus_map_ts")
        said.append(f"{row['task']}: NLL {show(row)}, dECE {show(ece)}")
    passed = any(row["high"] < 0 for row in found) if found else None
    return passed, f"{label}: NLL below map+ts on a shifted set", "; ".join(said) or "-"


def detection(rows: Rows) -> Line:
    """The best routing signal of any method against map's gate entropy and predictive entropy, prompts of equal length."""
    matched = rows.all(study=None, task=FAR, source=SOURCE, metric="auroc_matched")
    values = {(row["method"], row["signal"]): row for row in matched if row["value"] is not None}
    gate, answer = (values.pop(("map", signal), None) for signal in ("gate_entropy", "predictive_entropy"))
    ours = [row for (_, signal), row in values.items() if signal in ROUTING]
    text = "a routing signal is 0.10 above map's gate entropy and above predictive entropy on medmcqa, length-matched"
    if not ours or gate is None or answer is None:
        return None, text, "not measured"
    best = max(ours, key=lambda row: row["value"])
    said = f"gate entropy {gate['value']:.3f}, predictive entropy {answer['value']:.3f}"
    passed = best["value"] >= gate["value"] + 0.1 and best["value"] > answer["value"]
    highest = f"highest of {len(ours)} on test: {best['signal']} of {best['method']} {show(best)}"
    return passed, text, f"{highest}; {said}"


def stability(rows: Rows) -> Line:
    found = rows.all(study="stability", metric="jaccard_minus_map", gamma=GAMMA)
    found = [row for row in found if row["method"].partition("@")[0] in VARIATIONAL]
    better = [row for row in found if row["low"] > 0]
    said = "; ".join(f"{row['method']} {row['value']:+.4f} [{row['low']:+.4f}, {row['high']:+.4f}]" for row in found)
    return bool(better) if found else None, f"routing is stabler than map's at noise {GAMMA:g}", said or "not measured"


def gpu_minutes(timing: list[Row]) -> dict[int, float]:
    """Of each seed's part of the main table and its stage 1: of every moment the share that one of so many jobs has of the GPU.

    Rows are written as jobs end, so a row that ended before the one above it began another run.
    """
    out: dict[int, float] = {}
    runs: list[list[tuple[float, float, Row]]] = []
    for row in timing:
        end = row["start"] + row["seconds"]
        if not runs or end < runs[-1][-1][1] - 1:  # they are rounded, and told in the order in which they were found
            runs.append([])
        runs[-1].append((row["start"], end, row))
    seeds = {_seed(row) for row in timing if row["tier"] == "main"}
    for run in runs:
        times = sorted({time for start, end, _ in run for time in (start, end)})
        for begin, until in pairwise(times):
            now = [row for start, end, row in run if start < until and end > begin]
            for row in now:
                stage1 = row["job"].startswith(f"{SOURCE}: stage 1, seed")
                if (row["tier"] == "main" or stage1) and _seed(row) in seeds:
                    out[_seed(row)] = out.get(_seed(row), 0.0) + (until - begin) / 60 / len(now)
    return dict(sorted(out.items()))


def _seed(row: Row) -> int:
    return int(row["job"].rpartition("seed ")[2])


def cost(results: Path) -> Line:
    path, text = results / "timing.jsonl", "a seed of the main table in less than 20 minutes of the GPU"
    timing = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    found = gpu_minutes(timing)
    said = ", ".join(f"seed {seed} {minutes:.1f}" for seed, minutes in found.items())
    return max(found.values()) < 20 if found else None, text, said or "not measured"


def lines(results: Path) -> Iterator[Line]:
    rows = Rows(read_rows(results / "metrics.json"))
    yield model(rows)
    ranked = candidates(results)
    if ranked:
        label = next(iter(ranked))
        first = ", ".join(f"{name} {value:.4f}" for name, value in list(ranked.items())[:5])
        yield None, f"chosen on validation: {label}", first
        yield from calibration(rows, label)
        yield shifted(rows, label)
    yield detection(rows)
    yield stability(rows)
    for head in ("vglr-fc@paper", "vglr-mf@paper", "vtsr@paper"):
        difference = rows.own(SOURCE, head, "nll_minus_map@paper")
        if difference is not None:
            yield difference["high"] < 0, f"{head}: NLL below map@paper's on {SOURCE}", show(difference)
    yield cost(results)


def main() -> int:
    if len(sys.argv) != 2 or not stored(Path(sys.argv[1]) / "metrics.json").is_file():
        print("usage: python examples/smolmoe/verdicts.py OUT/results    (of run.py --report)", file=sys.stderr)
        return 2
    results = Path(sys.argv[1])
    for passed, claim, found in registered.lines(results) if of_results(results) else lines(results):
        print(f"{ {True: 'yes', False: 'no', None: '-'}[passed]:4}{claim}\n      {found}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
