"""What reading the uncertainty costs on this machine, and whether what is read is right: see vmoer/bench/reading.py.

python benchmarks/signals.py --out DIR [--parts check,prefill,generate,fit,predict,compiled] [--geometries A,B]
                             [--methods A,B] [--seconds 450]

DIR keeps the rows of former runs, so that parts, geometries and methods can be measured in runs of their own; a row that is
measured again replaces its former one. The table and the claims at the end are those of all rows.
"""

import argparse
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "src"))
sys.path.insert(0, str(Path(__file__).resolve().parent))

import signals_check
import signals_claims

from vmoer.bench import overhead, reading, reading_rows
from vmoer.errors import InputError


def main() -> int:
    parser = argparse.ArgumentParser(description=reading.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=None)
    parts = ("check", *(part for part in reading.PARTS if part not in ("decode", "sweep")))
    parser.add_argument("--parts", default=",".join(parts))
    parser.add_argument("--geometries", default=",".join(overhead.KNOWN))
    parser.add_argument("--methods", default=",".join(reading.usual()))
    parser.add_argument("--seconds", type=float, default=450)
    args = parser.parse_args()
    parts, names = args.parts.split(","), args.geometries.split(",")
    unknown = [x for x in parts if x not in ("check", *reading.PARTS)] + [x for x in names if x not in overhead.KNOWN]
    if unknown:
        parser.error(f"unknown: {', '.join(unknown)}")
    start = time.perf_counter()

    def say(text: str) -> None:
        print(f"[{time.perf_counter() - start:4.0f} s] {text}", flush=True)

    checks = []
    if args.out is not None:
        args.out.mkdir(parents=True, exist_ok=True)
    if "check" in parts:
        with torch.no_grad():
            checks = signals_check.run(say)
        if args.out is not None:
            (args.out / "checks.txt").write_text("\n".join(checks) + "\n")
    measured = tuple(part for part in reading.PARTS if part in parts)
    rows = reading.run(
        names if measured else [],
        None if args.out is None else args.out / "signals.json",
        say,
        tuple(args.methods.split(",")),
        parts=measured,
        later=tuple(part for part in measured if part in ("prefill", "fit")),
        until=start + args.seconds,
        machine=overhead.machine(),
        go_on=True,
    )
    print("\n".join(["", reading_rows.table(rows), *checks, ""]), flush=True)
    signals_claims.table(rows)
    return 0


if __name__ == "__main__":
    try:
        raise SystemExit(main())
    except InputError as error:
        print(error, file=sys.stderr)
        raise SystemExit(2) from None
