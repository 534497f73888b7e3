"""Tables from fixed predictions against golden files, which were read before they were kept.

After a wanted change: `VMOER_REGENERATE_GOLDEN=1 pytest tests/report/test_tables.py`, then read the difference.
"""

import csv
import io
import os
from pathlib import Path

import pytest

from vmoer.report import Entry, Table, read, to_csv, to_latex, to_markdown, to_terminal
from vmoer.report.summaries import best_within_noise, calibration_table, floor_notes, settings, tables, verdict
from vmoer.report.tables import number

GOLDEN = Path(__file__).parent / "golden"
FORMATS = {"tables.txt": to_terminal, "tables.md": to_markdown, "tables.csv": to_csv, "tables.tex": to_latex}


@pytest.mark.parametrize("name", FORMATS)
def test_golden(results, name):
    text = "\n".join(FORMATS[name](table) for table in tables(read(results)))
    if os.environ.get("VMOER_REGENERATE_GOLDEN"):
        (GOLDEN / name).write_text(text, encoding="utf-8")
    assert text == (GOLDEN / name).read_text(encoding="utf-8")


def row(method, metric, value, low=None, high=None, signal=None, seed=0, **more):
    """A row of metrics.json on the task `quiz`."""
    keys = {"study": None, "model": None, "task": "quiz", "split": "test", "method": method, "seed": seed}
    return keys | {"signal": signal, "metric": metric, "value": value, "low": low, "high": high} | more


def test_best_within_noise_is_paired_where_it_can_be():
    """By overlap b would count as equal to a; its paired difference excludes zero, and that of c does not."""
    rows = [row("a", "nll", 1.0, 0.8, 1.2), row("b", "nll", 1.1, 0.9, 1.3), row("c", "nll", 1.3, 1.25, 1.4)]
    (unpaired,) = settings(rows)
    assert best_within_noise(unpaired, "nll") == ({"a", "b"}, False)
    assert any("overlapping intervals" in note for note in calibration_table(unpaired).notes)
    rows += [row("b", "nll_minus_best", 0.1, 0.05, 0.15), row("c", "nll_minus_best", 0.3, -0.01, 0.5)]
    (paired,) = settings(rows)
    assert best_within_noise(paired, "nll") == ({"a", "c"}, True)


@pytest.mark.parametrize(
    ("metric", "low", "high", "expected"),
    [
        ("nll", -0.2, -0.1, "better"),
        ("nll", 0.1, 0.2, "worse"),
        ("nll", -0.1, 0.2, "within noise"),
        ("nll", 0.0, 0.0, "within noise"),
        ("accuracy", 0.1, 0.2, "better"),
        ("accuracy", -0.2, -0.1, "worse"),
        ("nll", None, None, None),
    ],
)
def test_verdict(metric, low, high, expected):
    (scores,) = settings([row("a", f"{metric}_minus_map_ts", 0.0, low, high)])
    assert verdict(scores, "a", metric, "map+ts") == expected
    assert verdict(scores, "a", metric, "map") is None


def test_floor_is_put_in_words_only_where_a_difference_lies_below_it():
    rows = [row("a", "ece", 0.015), row("b", "ece", 0.026), row("c", "ece", 0.2)]
    rows += [row(method, "ece_floor", 0.04) for method in "abc"]
    (near,) = settings(rows)
    (note,) = floor_notes(near)
    assert "0.040" in note
    assert "b (0.026)" in note
    assert "c (" not in note
    assert not floor_notes(settings([r for r in rows if r["method"] != "b"])[0])


def test_seeds_are_shown_together():
    rows = [row("a", "nll", 1.0), row("a", "nll", 2.0, seed=1), row("a", "nll", 1.5, 1.4, 1.6, seed=None)]
    for order in (rows, rows[::-1]):
        (scores,) = settings(order)
        assert scores.value("a", "nll") == 1.5
        assert "2 seeds" in scores.size()


def test_special_characters():
    """Oracle: a CSV reader, and what Markdown and LaTeX ask for."""
    table = Table("t", "A & B", ["Method", "50% | x_1"], [[Entry('a,"b"|{c}'), Entry("1", best=True)]], ["~^\\ $5 #1"])
    assert list(csv.reader(io.StringIO(to_csv(table)))) == [
        ["Method", "50% | x_1", "50% | x_1 best"],
        ['a,"b"|{c}', "1", "1"],
    ]
    assert '| a,"b"\\|{c} | **1** |' in to_markdown(table)
    latex = to_latex(table)
    assert r"\caption{A \& B}" in latex
    assert r"50\% | x\_1" in latex
    assert r"\{c\} & \textbf{1} \\" in latex
    assert r"\textasciitilde{}\textasciicircum{}\textbackslash{} \$5 \#1" in latex
    assert "1*" in to_terminal(table)
    assert "\x1b[1m" in to_terminal(table, colour=True)
    assert "\x1b" not in to_terminal(table)


def test_terminal_keeps_to_a_width(results):
    assert max(len(line) for line in to_terminal(tables(read(results))[0], width=80).splitlines()) <= 80


def test_rows_of_other_studies_make_no_tables():
    assert tables([row("map", "jaccard", 0.9, 0.8, 1.0)]) == []


def test_a_narrow_terminal_gets_the_columns_below_each_other():
    """Oracle: a table written here. Nothing is folded at 80 columns, and every number is there once."""
    columns = ["method", *(f"score {i}" for i in range(8))]
    rows = [[Entry(f"vglr-fc+full+ts{n}"), *(number(n + i / 10, n, n + 1) for i in range(8))] for n in range(2)]
    text = to_terminal(Table("t", "a title", columns, rows), 80)
    assert max(map(len, text.splitlines())) <= 80
    assert all(text.count(f"score {i}") == 1 for i in range(8))
    assert text.count("[1.000, 2.000]") == 8
    assert text.count("vglr-fc+full+ts0") == text.count("method") > 1


def test_a_narrow_terminal_folds_no_cell_of_a_table_that_is_all_text():
    """Oracle: `vmoer info`'s table, written here: each text stands whole on a line, and each block says of which layers."""
    columns = ["layers", "router", "class", "scoring", "attach"]
    texts = ["0-7", "model.layers.N.block_sparse_moe.router", "GraniteMoeTopKRouter", "softmax, normalised", "yes"]
    text = to_terminal(Table("", "a title", columns, [list(map(Entry, texts))], labels=5), 80)
    assert max(map(len, text.splitlines())) <= 80
    assert all(text.count(one) == 1 for one in texts[1:])
    assert text.count("layers ") == text.count("0-7") > 1
