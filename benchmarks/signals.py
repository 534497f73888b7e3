"""What reading the uncertainty costs on this machine, and whether what is read is right: see vmoer/bench/reading.py.

python benchmarks/signals.py --out DIR [--parts check,prefill,generate,fit,predict,compiled] [--geometries A,B]
                             [--methods A,B] [--seconds 450]
"""

import argparse
import sys
import time
import traceback
from pathlib import Path

import torch
import transformers

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "src"))
sys.path.insert(0, str(Path(__file__).resolve().parent))

import signals_check
import signals_claims

from vmoer.bench import overhead, reading


def main() -> int:
    parser = argparse.ArgumentParser(description=reading.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("--parts", default=",".join(("check", *reading.PARTS)))
    parser.add_argument("--geometries", default=",".join(overhead.KNOWN))
    parser.add_argument("--methods", default=",".join(reading.METHODS))
    parser.add_argument("--seconds", type=float, default=450)
    args = parser.parse_args()
    parts, names = args.parts.split(","), args.geometries.split(",")
    unknown = [x for x in parts if x not in ("check", *reading.PARTS)] + [x for x in names if x not in overhead.KNOWN]
    if unknown:
        parser.error(f"unknown: {', '.join(unknown)}")
    start = time.perf_counter()

    def say(text: str) -> None:
        print(f"[{time.perf_counter() - start:4.0f} s] {text}", flush=True)

    # transformers looks for packed rows on the host, which would forbid a graph; there are none here
    transformers.masking_utils.find_packed_sequence_indices = lambda position_ids: None
    bench = reading.Bench(args.out, start + args.seconds, say, machine=overhead.machine())
    checks = []
    with torch.no_grad():
        if "check" in parts:
            checks = signals_check.run(say)
            if args.out is not None:
                args.out.mkdir(parents=True, exist_ok=True)
                (args.out / "checks.txt").write_text("\n".join(checks) + "\n")
        measured = tuple(part for part in reading.PARTS if part in parts)
        for number, name in enumerate(names if measured else ()):
            if bench.left < 40:
                say(f"{name}: no time left")
                continue
            own = measured if number == 0 else tuple(part for part in measured if part in ("prefill", "fit"))
            try:
                reading.measure(bench, name, overhead.KNOWN[name], own, tuple(args.methods.split(",")))
            except Exception:
                traceback.print_exc()
            reading.clean()
    print("\n".join(["", reading.table(bench.rows), *checks, ""]), flush=True)
    signals_claims.table(bench.rows)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
