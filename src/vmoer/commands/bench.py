"""`vmoer bench`: what every method costs on this machine."""

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from vmoer.commands._shared import Json, listed, quiet
from vmoer.errors import unknown


def bench(
    geometries: Annotated[
        str, typer.Option(help="Separated by commas; by default all that this machine can take.")
    ] = "",
    out: Annotated[Path | None, typer.Option(help="A JSON file; a table of the same name ends in .md.")] = None,
    methods: Annotated[str, typer.Option(help="Separated by commas; by default all. One of them may be novelty.")] = "",
    quick: Annotated[bool, typer.Option("--quick", help="Fewer sizes and rounds.")] = False,
    read: Annotated[
        bool,
        typer.Option("--reading", help="What reading the signals costs: recorded passes, generation, predict, fit."),
    ] = False,
    as_json: Json = False,
) -> None:
    """Time and memory of every method against the plain model, in one run; true geometries on a GPU, a small one without."""
    from vmoer.bench import overhead, reading
    from vmoer.bench.reading_rows import table

    quiet()
    names = list(listed(geometries)) or list(overhead.KNOWN)
    for name in names:
        if name not in overhead.KNOWN:
            raise unknown("geometry", name, overhead.KNOWN, " on this machine")
    known = reading.known() if read else overhead.methods()
    wanted = list(listed(methods)) or (reading.usual() if read else known)
    for name in wanted:
        if name not in known:
            raise unknown("method", name, known, " here")

    def say(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    if read:
        rows = reading.run(names, out, say, wanted, quick=quick, machine=overhead.machine())
        print(json.dumps(rows, indent=2) if as_json else table(rows))
        return
    report = overhead.run(names, out, quick, say, wanted)
    print(json.dumps(report, indent=2) if as_json else overhead.table(report))
