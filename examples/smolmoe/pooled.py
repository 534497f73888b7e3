"""Is a small difference there on all tasks together?

    python examples/smolmoe/pooled.py results/smolmoe vglr-fc+full+ts mean-only+ts --against map+ts

Markdown: NLL of each label less that of another on the test questions, task by task and as a mean over tasks that counts each
alike; with --shifts on the sets that the tasks were shifted to instead. Intervals are over questions and seeds, by which the two
labels are paired.
"""

import argparse
import sys
from pathlib import Path

import numpy as np
from table import interval

from vmoer.errors import InputError
from vmoer.evaluation import temperatures
from vmoer.evaluation.predictions import Answered
from vmoer.metrics import estimates
from vmoer.metrics.estimates import Estimate
from vmoer.metrics.resampling import percentiles
from vmoer.report.tables import grid

DRAWS = 2000
Cells = dict[str, dict[int, Answered]]
"""Of one set of questions: by label and seed."""


def read(results: Path, shifts: bool) -> dict[tuple[str, str], Cells]:
    """By source and task."""
    out: dict[tuple[str, str], Cells] = {}
    for group in temperatures.load(results):
        for key, cell in group.cells.items():
            if group.scores(key) and (key.task != group.source_task) == shifts:
                labels = out.setdefault((group.source_task, key.task), {})
                labels.setdefault(key.method, {})[key.seed] = cell
    return dict(sorted(out.items()))


def difference(label: str, other: str, cells: Cells, number: int, source: str) -> Estimate:
    """`number` draws this set's questions; `source` the seeds, on all sets of one source the same, since they trained once."""
    ours, theirs = cells.get(label, {}), cells.get(other, {})
    by_seed = [_nll(ours[seed], number) - _nll(theirs[seed], number) for seed in sorted(ours.keys() & theirs.keys())]
    if not by_seed or len({cell.ids for cell in (*ours.values(), *theirs.values())}) > 1:
        raise InputError(f"{label} and {other} have not answered the same questions of every set")
    return estimates.over_seeds(by_seed, int.from_bytes(source.encode(), "big"))


def _nll(cell: Answered, number: int) -> Estimate:
    losses = -cell.log_probs[np.arange(len(cell.answers)), cell.answers]
    counts = estimates.multiplicities((len(losses),), DRAWS, number)
    return Estimate(float(losses.mean()), counts @ losses / len(losses))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path)
    parser.add_argument("labels", nargs="+")
    parser.add_argument("--against", default="map+ts")
    parser.add_argument("--shifts", action="store_true")
    given = parser.parse_intermixed_args(arguments)
    try:
        sets = read(given.results, given.shifts)
        if not sets:
            raise InputError(f"{given.results} has no such sets")
        heads = [f"NLL - {given.against}", *(task for _, task in sets), "all"]
        body = []
        for label in given.labels:
            found = [
                difference(label, given.against, cells, number, source)
                for number, ((source, _), cells) in enumerate(sets.items())
            ]
            found.append(Estimate(float(np.mean([e.value for e in found])), np.mean([e.draws for e in found], 0)))
            cells = [dict(zip(("value", "low", "high"), percentiles(*e, 0.95), strict=True)) for e in found]
            body.append([label, *map(interval, cells)])
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print("\n".join(grid(heads, body)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
