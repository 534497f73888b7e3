"""What reading the uncertainty costs on this machine, and whether what is read is right: see vmoer/bench/reading.py.

python benchmarks/signals.py --out DIR [--parts check,prefill,generate,fit,predict,compiled] [--geometries A,B]
                             [--methods A,B] [--batches 1,16] [--tokens 1024] [--seconds 450]
                             [--meet FOLDER --among 10 --patience 300]

DIR keeps the rows of former runs, so that parts, geometries and methods can be measured in runs of their own; a row that is
measured again replaces its former one. The table and the claims at the end are those of all rows.

To compile a model for generation takes minutes of one core. Several processes that `--meet` in a folder compile beside each other
and time one after the other, none before as many as `--among` says have come, or `--patience` seconds are over.
"""

import argparse
import contextlib
import fcntl
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "src"))
sys.path.insert(0, str(Path(__file__).resolve().parent))

import signals_check
import signals_claims

from vmoer.bench import overhead, reading, reading_rows
from vmoer.errors import InputError


def turns(folder: Path, among: int, until: float) -> Callable[[], contextlib.AbstractContextManager[None]]:
    """One process at a time, once as many have come as there are or it is too late to wait for them."""
    folder.mkdir(parents=True, exist_ok=True)

    @contextlib.contextmanager
    def turn() -> Iterator[None]:
        (folder / f"came-{os.getpid()}").touch()
        while len([*folder.glob("came-*")]) < among and time.perf_counter() < until:
            time.sleep(0.2)
        with (folder / "turn").open("w") as held:
            fcntl.flock(held, fcntl.LOCK_EX)
            yield

    return turn


def main() -> int:
    parser = argparse.ArgumentParser(description=reading.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=None)
    parts = ("check", *(part for part in reading.PARTS if part not in ("decode", "sweep")))
    parser.add_argument("--parts", default=",".join(parts))
    parser.add_argument("--geometries", default=",".join(overhead.KNOWN))
    parser.add_argument("--methods", default=",".join(reading.usual()))
    parser.add_argument("--batches", default="1,16", help="of generation")
    parser.add_argument("--tokens", default="", help="of prefills; every size by default")
    parser.add_argument("--seconds", type=float, default=450)
    parser.add_argument(
        "--meet", type=Path, help="a folder where processes that measure at the same time wait for their turn"
    )
    parser.add_argument("--among", type=int, default=0, help="how many of them compile before the first one is timed")
    parser.add_argument("--patience", type=float, default=300, help="seconds that they wait for each other")
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
        batches=tuple(int(size) for size in args.batches.split(",")),
        sizes=tuple(int(size) for size in args.tokens.split(",") if size),
        turn=contextlib.nullcontext if args.meet is None else turns(args.meet, args.among, start + args.patience),
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
