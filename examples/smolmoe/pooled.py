"""Is a small difference there on all tasks together?

    python examples/smolmoe/pooled.py results/smolmoe vglr-fc+full+ts mean-only+ts --against map+ts

Markdown: NLL of each label less that of another on the test questions, task by task and as a mean over tasks that counts each
alike; with --shifts on the sets that openbookqa was shifted to instead. `+ts` is a label's output temperature, of each task and
seed, fitted on validation. Intervals are over questions and seeds; the two labels are paired by both.
"""

import argparse
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from table import short

from vmoer import metrics
from vmoer.errors import InputError
from vmoer.metrics.resampling import percentiles

DRAWS = 2000
Losses = dict[tuple[str, str], dict[str, dict[int, np.ndarray]]]
"""-log p of the answers by (source, task), label and seed."""


def read(results: Path, wanted: set[str]) -> Losses:
    out: Losses = {}
    ids: dict[tuple[str, str], pa.ChunkedArray] = {}
    for path in sorted(results.glob("*/predictions.parquet")):
        source, columns = path.parent.name, ["id", "task", "split", "method", "seed", "answer", "log_probs"]
        table = pq.read_table(path, columns=columns)
        for label in wanted:
            method = label.removesuffix("+ts")
            own = table.filter(pc.equal(table["method"], method))
            for seed in sorted({*own["seed"].to_pylist()}):
                here = own.filter(pc.equal(own["seed"], seed))
                parts = {split: here.filter(pc.equal(here["split"], split)) for split in ("validation", "test")}
                temperature = metrics.fit_temperature(*_arrays(parts["validation"])) if label != method else 1.0
                for task in sorted({*parts["test"]["task"].to_pylist()}):
                    asked = parts["test"].filter(pc.equal(parts["test"]["task"], task))
                    if asked["id"] != ids.setdefault((source, task), asked["id"]):
                        raise InputError(
                            f"{path}: not all labels answer the same questions of {task} in the same order"
                        )
                    log_probs, answers = _arrays(asked)
                    scaled = metrics.apply_temperature(log_probs, temperature)
                    found = out.setdefault((source, task), {}).setdefault(label, {})
                    found[seed] = -scaled[np.arange(len(answers)), answers]
    return out


def _arrays(table: pa.Table) -> tuple[np.ndarray, np.ndarray]:
    return metrics.pad(table["log_probs"].to_pylist()), table["answer"].to_numpy()


def draws(differences: np.ndarray, number: int, source: str) -> np.ndarray:
    """Means [DRAWS] of a table [seeds, questions], both resampled: on sets of one source the same seeds, which trained once."""
    seeds, n = differences.shape
    drawn, asked = np.random.default_rng(list(source.encode())), np.random.default_rng(number)
    return np.array(
        [differences[drawn.integers(seeds, size=seeds)].mean(0)[asked.integers(n, size=n)].mean() for _ in range(DRAWS)]
    )


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path)
    parser.add_argument("labels", nargs="+")
    parser.add_argument("--against", default="map+ts")
    parser.add_argument("--shifts", action="store_true")
    given = parser.parse_intermixed_args(arguments)
    try:
        losses = read(given.results, {given.against, *given.labels})
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    sets = [key for key in sorted(losses) if (key[0] != key[1]) == given.shifts]
    if not sets or any(given.against not in losses[key] for key in sets):
        print(f"error: {given.results} has no {given.against} to compare with", file=sys.stderr)
        return 2
    heads = [f"NLL - {given.against}", *(task for _, task in sets), "all"]
    print(f"| {' | '.join(heads)} |\n" + "|---" * len(heads) + "|")
    for label in given.labels:
        tables = []
        for key in sets:
            other, own = losses[key][given.against], losses[key].get(label, {})
            if common := sorted(own.keys() & other.keys()):
                tables.append(np.stack([own[seed] - other[seed] for seed in common]))
        if len(tables) < len(sets):
            print(f"error: {label} is missing on {len(sets) - len(tables)} of {len(sets)} sets", file=sys.stderr)
            return 2
        drawn = [draws(table, i, source) for i, (table, (source, _)) in enumerate(zip(tables, sets, strict=True))]
        means = [table.mean() for table in tables]
        rows = [*zip(means, drawn, strict=True), (np.mean(means), np.mean(drawn, 0))]
        cells = [percentiles(float(mean), many, 0.95) for mean, many in rows]
        texts = [f"{short(value, True)} [{short(low, True)}, {short(high, True)}]" for value, low, high in cells]
        print(f"| {' | '.join([label, *texts])} |")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
