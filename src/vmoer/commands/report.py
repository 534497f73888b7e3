"""`vmoer report DIR`: tables and one HTML page."""

import json
from pathlib import Path
from typing import Annotated

import typer

from vmoer.commands._shared import Json, print_tables


def report(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A folder that `vmoer eval` wrote.")],
    as_json: Json = False,
) -> None:
    """Tables, and one HTML page with figures, from the predictions in a folder."""
    from vmoer.report import read, tables
    from vmoer.report import report as write_report

    page = write_report(folder)
    rows = read(folder)
    if as_json:
        print(json.dumps(rows, indent=2))
    else:
        print_tables(tables(rows))
        print(page)
