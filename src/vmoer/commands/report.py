"""`vmoer report DIR`: tables and one HTML page."""

import json
from pathlib import Path
from typing import Annotated

import typer

from vmoer.commands._shared import Json, print_tables, sentence
from vmoer.errors import InputError
from vmoer.files import locked


def report(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A folder that `vmoer eval` wrote.")],
    as_json: Json = False,
) -> None:
    """Tables, and one HTML page with figures, from the predictions in a folder."""
    if not folder.is_dir():
        raise InputError(f"{folder}: no such folder")
    from vmoer.report import report as write_report
    from vmoer.report.studies import BUILDERS
    from vmoer.report.verdict import verdict

    with locked(folder / "report"):
        written = write_report(folder)
    if as_json:
        print(json.dumps(written.rows, indent=2))
    else:
        if said := verdict([row for row in written.rows if row.get("study") not in BUILDERS]):
            sentence(said)
            print()
        print_tables(written.tables)
        print(written.page)
