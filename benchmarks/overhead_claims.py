"""What routing may cost, line by line, from what `vmoer bench --out FILE` leaves on a GPU: exit code 1 where a line fails.

python benchmarks/overhead_claims.py results/overhead/h200.json

Overheads are medians of paired rounds, in percent over the plain model.
"""

import json
import sys
from pathlib import Path
from typing import Any

PAPER = ("granite-3b", "qwen1.5-moe", "deepseek-moe-16b")
MANY = "qwen3-30b-a3b"
METHODS = ("vglr-mf", "vglr-fc", "vglr-lr", "vtsr")
PREFILL, ANSWER = 16384, 65536

Line = tuple[bool, str]


def lines(report: dict[str, Any]) -> list[Line]:
    def over(geometry: str, method: str, phase: str, **keys: Any) -> float:
        wanted = {"geometry": geometry, "method": method, "phase": phase, **keys}
        row = next((row for row in report["rows"] if all(row[name] == value for name, value in wanted.items())), None)
        if row is None:
            raise SystemExit(f"error: the file has no row with {wanted}")
        return 100 * (float(row["time_ratio"]) - 1)

    def at_most(bound: float, what: str, values: list[float]) -> Line:
        return max(values) <= bound, f"{what}: {max(values):.2f}, at most {bound:g}"

    def prefill(geometry: str, method: str) -> float:
        return over(geometry, method, "prefill", tokens=PREFILL)

    found = [at_most(1.0, "vglr-fc, prefill", [prefill(g, "vglr-fc") for g in PAPER])]
    found += [at_most(0.7, f"{m}, prefill", [prefill(g, m) for g in PAPER]) for m in ("vglr-mf", "vtsr")]
    found += [at_most(1.0, "vglr-lr with 128 experts, prefill", [prefill(MANY, "vglr-lr")])]
    everywhere = (*PAPER, MANY)
    for batch, bound in ((1, 4.0), (16, 2.0), (64, 2.0)):
        steps = [over(g, m, "decode", batch=batch, launch="graph") for g in everywhere for m in METHODS]
        found += [at_most(bound, f"decode under CUDA graphs, batch {batch}", steps)]
    ours = [row for row in report["rows"] if row["method"] in METHODS]
    memory = [100 * (row["memory_ratio"] - 1) for row in ours if row["memory_ratio"] is not None]
    found += [at_most(0.5, "peak memory", memory)]
    found += [at_most(6.0, "32 answers averaged", [over(g, "answer-32", "answer", tokens=ANSWER) for g in everywhere])]
    found += [at_most(0.5, "novelty, rank 128", [prefill(g, "novelty") for g in everywhere])]
    for method, bound in (("listing", 15.0), ("mcdr", 3.0)):
        times = min(prefill(g, method) / max(prefill(g, "vglr-fc"), 1e-9) for g in everywhere)
        found += [(times >= bound, f"{method} over vglr-fc: {times:.1f} times, at least {bound:g}")]
    floors = [row["over_floor"] for row in report["routers"] if row["method"] in METHODS]
    return [*found, at_most(2.5, "router alone, times its floor", floors)]


def main() -> int:
    if len(sys.argv) != 2 or not Path(sys.argv[1]).is_file():
        print(
            "usage: python benchmarks/overhead_claims.py FILE    (of `vmoer bench --out FILE`, on a GPU)",
            file=sys.stderr,
        )
        return 2
    found = lines(json.loads(Path(sys.argv[1]).read_text()))
    for passed, line in found:
        print(f"{'holds' if passed else 'FAILS':6} {line}")
    return 0 if all(passed for passed, _ in found) else 1


if __name__ == "__main__":
    raise SystemExit(main())
