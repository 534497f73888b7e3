"""`vmoer report` on every study alone and on all together: tables, or one clear line.

The rows are those of results/, which the studies themselves wrote; those of the paper's study are made from the demo's.
"""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from vmoer.cli import app
from vmoer.files import read_rows
from vmoer.report.studies import BUILDERS, OF_THE_MODEL
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


def refused(done, *said):
    """One line that names the file, and what is said of it."""
    assert done.exit_code
    assert type(done.exception).__name__ == "InputError"
    for text in ("metrics.json", *said):
        assert text in str(done.exception)
    assert "\n" not in str(done.exception)


@pytest.mark.parametrize("study", ROWS)
@pytest.mark.parametrize("lost", ["metric", "value"])
def test_damaged_rows_are_one_line(study, lost, tmp_path):
    """Rows under another name, and values that are no numbers: never a report that shows nothing and ends well."""
    damaged = [row | {lost: "?"} for row in ROWS[study]]
    refused(CliRunner().invoke(app, write(tmp_path, damaged)))
    assert not (tmp_path / "report").exists()


@pytest.mark.parametrize("study", [study for study in ROWS if study not in OF_THE_MODEL])
@pytest.mark.parametrize("value", [None, 3])
def test_a_row_without_a_method_is_one_line(study, value, tmp_path):
    """One row among the whole ones; nothing is written."""
    first, *rest = ROWS[study]
    done = CliRunner().invoke(app, write(tmp_path, [*rest, first | {"method": value}]))
    refused(done, "method is no text")
    assert not (tmp_path / "report").exists()


@pytest.mark.parametrize("name", ["metric", "task", "model", "signal", "study"])
def test_a_number_in_place_of_a_text_is_one_line(name, tmp_path):
    first, *rest = ROWS[CALIBRATION]
    refused(CliRunner().invoke(app, write(tmp_path, [*rest, first | {name: 3}])), f"{name} is no text")


def test_the_papers_tables_of_two_models_stand_side_by_side(tmp_path):
    """Oracle: one of two values in each model's own tables. A table of one model keeps its name."""
    other = "Qwen/Qwen1.5-MoE-A2.7B-Chat"
    both = [*ROWS["paper"], *(row | {"model": other, "value": 0.123456} for row in ROWS["paper"])]
    done = CliRunner().invoke(app, write(tmp_path, both), catch_exceptions=False)
    assert done.exit_code == 0, done.output
    files = {path.name: path.read_text() for path in (tmp_path / "report").glob("paper-*.csv")}
    mine, theirs = ({name for name in files if name.endswith(f"-{part}.csv")} for part in ("demo", other.split("/")[1]))
    assert mine | theirs == set(files)
    assert len(mine) == len(theirs) > 1
    assert all("0.123456" in files[name] for name in theirs)
    assert not any("0.123456" in files[name] for name in mine)
    page = (tmp_path / "report" / "index.html").read_text()
    assert {f'id="paper-{part}"' in page for part in ("demo", other.split("/")[1])} == {True}


def test_an_empty_folder_is_one_line(tmp_path):
    done = CliRunner().invoke(app, ["report", str(tmp_path)])
    assert type(done.exception).__name__ == "InputError"
    assert str(tmp_path) in str(done.exception)
