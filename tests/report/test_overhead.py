"""Measured overhead: bars and table from rows written by hand, wherever they lie."""

import json
import re
import shutil

import pytest

from vmoer.errors import InputError
from vmoer.report import overhead, report


def measured(method, phase, tokens, ratio, launch="eager", memory=None, geometry="granite-3b"):
    about = {"geometry": geometry, "method": method, "phase": phase, "launch": launch, "tokens": tokens}
    about |= {"batch": 16 if phase == "prefill" else tokens, "time_ratio": ratio, "memory_ratio": memory}
    return about | {"low": None if ratio is None else ratio - 0.001, "high": None if ratio is None else ratio + 0.002}


ROWS = [
    measured("map", "prefill", 16384, 1.0, memory=1.0),
    measured("vglr-fc", "prefill", 1024, 1.5, memory=1.01),
    measured("vglr-fc", "prefill", 16384, 1.008, memory=1.004),
    measured("vglr-fc", "decode", 64, 1.02, launch="graph"),
    measured("swag", "prefill", 16384, 1.25, memory=1.1),
    measured("swag", "decode", 64, None, launch="graph"),
]


def test_bars_show_the_largest_sizes_and_name_their_numbers():
    figure = overhead.bars("granite-3b", ROWS)
    assert "prefill, 16384 tokens: vglr-fc +0.8, swag +25.0" in figure.alt
    assert "decode, batch 64, CUDA graph: vglr-fc +2.0." in figure.alt  # swag did not run there
    assert "1024" not in figure.alt


def test_table_has_percentages_with_quartiles():
    table = overhead.table(ROWS)
    lines = {entries[1].text: dict(zip(table.columns, entries, strict=True)) for entries in table.rows}
    assert set(lines) == {"vglr-fc", "swag"}
    cell = lines["vglr-fc"]["prefill, 16384 tokens"]
    assert (cell.text, cell.detail) == ("0.8", "[0.7, 1.0]")
    assert lines["vglr-fc"]["memory"].text == "0.4"  # of the largest prefill
    assert lines["swag"]["decode, batch 64, CUDA graph"].text == "-"
    assert lines["swag"]["prefill, 1024 tokens"].text == "-"


@pytest.mark.parametrize("wrapped", [True, False])
def test_a_file_beside_the_metrics_gives_a_section(results, tmp_path, wrapped):
    for name in ("metrics.json", "meta.json"):
        shutil.copy(results / name, tmp_path)
    content = {"machine": {"device": "some GPU", "dtype": "bfloat16"}, "rows": ROWS} if wrapped else ROWS
    (tmp_path / "overhead.json").write_text(json.dumps(content))
    page = report(tmp_path).page.read_text()
    assert re.search(r'<figure id="overhead-granite-3b">\s*<svg [^>]*aria-label="Added time in percent', page)
    assert ("overhead.json (some GPU, bfloat16)" in page) == wrapped
    assert (tmp_path / "report" / "overhead.csv").exists()


def test_what_the_study_timed_stands_in_for_it(tmp_path):
    keys = {"study": "efficiency", "model": "demo", "task": None, "split": None, "seed": None, "signal": None}
    timed = keys | {"method": "vtsr", "metric": "time_ratio", "value": 1.2, "low": 1.1, "high": 1.3}
    (section,) = overhead.sections(tmp_path, [timed | {"phase": "prefill", "tokens": 768, "batch": 64}])
    assert section.tables[0].rows[0][2].text == "20.0"
    assert "metrics.json" in section.text[0]
    assert overhead.sections(tmp_path, []) == []


@pytest.mark.parametrize("text", ["{", "[]", "{}", '[{"geometry": "x"}]', "[1]"])
def test_bad_file(tmp_path, text):
    (tmp_path / "overhead.json").write_text(text)
    with pytest.raises(InputError, match=r"overhead\.json"):
        overhead.sections(tmp_path, [])
