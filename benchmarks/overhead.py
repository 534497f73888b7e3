"""`vmoer bench`, for a machine without the command line's packages: [--out FILE] [--geometries A,B] [--methods A,B] [--quick]."""

import argparse
from pathlib import Path

from vmoer.bench import overhead

KNOWN = overhead.methods()

parser = argparse.ArgumentParser(description=overhead.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--geometries", default=",".join(overhead.KNOWN), help=", ".join(overhead.KNOWN))
parser.add_argument("--methods", default=",".join(KNOWN), help=", ".join(KNOWN))
parser.add_argument("--out", type=Path, default=None)
parser.add_argument("--quick", action="store_true")
args = parser.parse_args()
names, methods = args.geometries.split(","), args.methods.split(",")
for what, given, known in (("geometry", names, overhead.KNOWN), ("method", methods, KNOWN)):
    if unknown := [name for name in given if name not in known]:
        parser.error(f"unknown {what} {unknown[0]!r} (known here: {', '.join(known)})")
print(overhead.table(overhead.run(names, args.out, args.quick, lambda line: print(line, flush=True), methods)))
