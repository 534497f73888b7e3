"""`vmoer bench`, for a machine without the command line's packages: [--out FILE] [--geometries A,B] [--quick]."""

import argparse
from pathlib import Path

from vmoer.bench import overhead

parser = argparse.ArgumentParser(description=overhead.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--geometries", default=",".join(overhead.KNOWN), help=", ".join(overhead.KNOWN))
parser.add_argument("--out", type=Path, default=None)
parser.add_argument("--quick", action="store_true")
args = parser.parse_args()
names = args.geometries.split(",")
if unknown := [name for name in names if name not in overhead.KNOWN]:
    parser.error(f"unknown geometry {unknown[0]!r} (known here: {', '.join(overhead.KNOWN)})")
print(overhead.table(overhead.run(names, args.out, args.quick, lambda line: print(line, flush=True))))
