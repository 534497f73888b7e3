"""`vmoer report` on every study alone and on all together: tables, or one clear line.

The rows are those of results/, which the studies themselves wrote; those of the paper's study are made from the demo's.
"""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from vmoer.cli import app
from vmoer.files import read_rows
from vmoer.report.studies import BUILDERS
from vmoer.studies import paper

RESULTS = Path(__file__).parents[2] / "results"
CALIBRATION = "calibration"  # its rows name no study


def stored() -> dict[str, list[dict]]:
    """Rows of each study: of the demo, and of the study on a real model where the demo has none."""
    found: dict[str, list[dict]] = {}
    for folder in ("demo-quick", "demo", "smolmoe"):
        own: dict[str, list[dict]] = {}
        for row in read_rows(RESULTS / folder / "metrics.json"):
            own.setdefault(row.get("study") or CALIBRATION, []).append(row)
        found = own | found
    demo = read_rows(RESULTS / "demo" / "metrics.json")
    return found | {"paper": paper.compare(demo, "demo")}


ROWS = stored()


def test_every_study_has_rows_to_test_with():
    assert set(ROWS) == {*BUILDERS, CALIBRATION}


def write(folder: Path, rows: list[dict]) -> list[str]:
    (folder / "metrics.json").write_text(json.dumps(rows))
    return ["report", str(folder)]


@pytest.mark.parametrize("study", [*ROWS, "all"])
def test_tables_of(study, tmp_path):
    """The command prints the title of every table that it writes, and there is one at least."""
    rows = [row for own in ROWS.values() for row in own] if study == "all" else ROWS[study]
    done = CliRunner().invoke(app, write(tmp_path, rows), catch_exceptions=False)
    assert done.exit_code == 0, done.output
    titles = [line[4:] for line in (tmp_path / "report" / "tables.md").read_text().splitlines() if line[:4] == "### "]
    assert titles
    for title in titles:
        assert title in done.output
    if study == "all":
        assert len(titles) >= len(ROWS)


@pytest.mark.parametrize("study", ROWS)
@pytest.mark.parametrize("lost", ["metric", "value"])
def test_damaged_rows_are_one_line(study, lost, tmp_path):
    """Rows under another name, and values that are no numbers."""
    damaged = [row | {lost: "?"} for row in ROWS[study]]
    done = CliRunner().invoke(app, write(tmp_path, damaged))
    if done.exit_code:  # nothing to show is an answer too
        assert type(done.exception).__name__ == "InputError"
        assert "metrics.json" in str(done.exception)
        assert "\n" not in str(done.exception)


def test_an_empty_folder_is_one_line(tmp_path):
    done = CliRunner().invoke(app, ["report", str(tmp_path)])
    assert type(done.exception).__name__ == "InputError"
    assert str(tmp_path) in str(done.exception)
