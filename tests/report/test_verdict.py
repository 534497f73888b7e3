"""The verdict sentence. Oracle: the paired differences of hand-written rows, and a paired bootstrap written here."""

import re
from pathlib import Path
from typing import Any

import numpy as np

from vmoer.evaluation.temperatures import load
from vmoer.report import read
from vmoer.report.verdict import verdict


def row(method: str, metric: str, value: float, low: float | None = None, high: float | None = None, **more: Any):
    known = {"study": None, "model": "m", "task": "t", "split": "test", "seed": 0, "signal": None}
    return known | {"method": method, "metric": metric, "value": value, "low": low, "high": high} | more


def answered(*differences: tuple[str, float, float, float], base: str = "map_ts") -> list[dict[str, Any]]:
    rows = [row(name, "questions", 500) for name in ("map", "map+ts")]
    return [*rows, *(row(name, f"nll_minus_{base}", *numbers) for name, *numbers in differences)]


def test_one_method_is_better_worse_or_neither():
    against = "Against the plain model with a temperature: NLL "
    for numbers, word in (
        ((-0.012, -0.02, -0.004), "-0.012 [-0.020, -0.004] over 500 questions: better."),
        ((0.3, 0.1, 0.5), "0.300 [0.100, 0.500] over 500 questions: worse."),
        ((-0.1, -0.2, 0.01), "-0.100 [-0.200, 0.010] over 500 questions: no difference beyond noise."),
    ):
        assert verdict(answered(("vtsr", *numbers))) == against + word


def test_a_method_has_the_same_help_as_the_base():
    rows = answered(("vtsr", 0.9, 0.8, 1.0), ("vtsr+ts", -0.1, -0.2, -0.05), ("map", 0.5, 0.4, 0.6))
    assert verdict(rows) == (
        "Against the plain model with a temperature: NLL -0.100 [-0.200, -0.050] over 500 questions: better."
    )


def test_several_methods_are_counted_and_the_first_is_named():
    rows = answered(("a", -0.1, -0.2, -0.05), ("b", 0.1, 0.05, 0.2), ("c", 0, -0.1, 0.1), ("d", 0.2, 0.1, 0.3))
    assert verdict(rows) == (
        "Against the plain model with a temperature, by NLL over 500 questions: 1 of 4 methods better, 2 worse, "
        "1 without a difference beyond noise."
    )


def test_without_a_temperature_the_plain_model_is_the_base():
    rows = [row("map", "questions", 40), row("vtsr", "nll_minus_map", -0.1, -0.2, -0.05)]
    assert verdict(rows) == "Against the plain model: NLL -0.100 [-0.200, -0.050] over 40 questions: better."


def test_a_plain_model_alone_is_held_against_itself_with_a_temperature():
    rows = [row("map", "questions", 40), row("map+ts", "nll_minus_map", -0.1, -0.2, -0.05)]
    assert verdict(rows) == (
        "Against the plain model a temperature gives: NLL -0.100 [-0.200, -0.050] over 40 questions: better."
    )


def test_nothing_to_compare_gives_nothing():
    assert verdict([]) is None
    assert verdict([row("vtsr", "nll", 0.4, 0.3, 0.5)]) is None
    assert verdict([row("vtsr", "nll_minus_map", -0.1, -0.2, -0.05, task="far", source="t")]) is None  # a shift


def test_the_numbers_are_those_of_a_paired_bootstrap(results: Path):
    (group,) = load(results)
    nll = {
        key.method: -np.array([p[a] for p, a in zip(cell.log_probs, cell.answers, strict=True)])
        for key, cell in group.cells.items()
        if key.task == "quiz" and group.scores(key) and key.seed == 0
    }
    rows = [r for r in read(results) if r["seed"] == 0 and r["method"] in ("map", "map+ts", "vglr-fc")]
    found = [float(x) for x in re.findall(r"-?\d+\.\d+", str(verdict(rows)))]
    difference = nll["vglr-fc"] - nll["map+ts"]
    drawn = [np.random.default_rng(i).choice(difference, len(difference)).mean() for i in range(2000)]
    assert abs(found[0] - difference.mean()) < 6e-4
    np.testing.assert_allclose(found[1:], np.quantile(drawn, [0.025, 0.975]), atol=0.012)


def test_a_notebook_shows_what_was_counted_with_nothing_taken_for_markup():
    """Oracle: the rows written here, whose names are hostile. Sorted by name, not by what gained most."""
    found = verdict(answered(("b<script>", -0.1, -0.2, -0.05), ("a&b", 0.1, 0.05, 0.2)))
    assert found is not None
    shown = found._repr_html_()
    assert "<script>" not in shown
    assert f"<caption>{found}</caption>" in shown
    cells = re.findall(r"<td>(.*?)</td>", shown)
    assert cells[1:4] == ["a&amp;b", "0.100 [0.050, 0.200]", "worse"]
    assert cells[5:] == ["b&lt;script&gt;", "-0.100 [-0.200, -0.050]", "better"]
