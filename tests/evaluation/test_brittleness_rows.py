"""Oracles: rows written by hand, numpy's quantiles, and the bootstrap over questions."""

from typing import Any

import numpy as np
import pytest

from vmoer.evaluation.brittleness import intervals, mean_rows, quantile_rows
from vmoer.live.brittleness import Brittleness
from vmoer.metrics import bootstrap


def by_hand(jaccard_LGT: Any, rows_T: Any, gammas: tuple[float, ...] = (0.01,)) -> Brittleness:
    values = np.asarray(jaccard_LGT, dtype=np.float32)
    layers = tuple(range(2, 2 + len(values)))
    return Brittleness(layers, gammas, values, np.asarray(rows_T), (1.0,) * len(layers), 16, 0, {})


def test_rows_for_the_metrics_file() -> None:
    result = by_hand([[[1.0, 0.5, 0.0], [1.0, 1.0, 1.0]]], [0, 0, 4], gammas=(0.01, 0.0))
    first, second = mean_rows(result, model="m", task="t", split="test", method="map")
    assert (first["low"], first["high"]) == (pytest.approx(0.0), pytest.approx(0.75))
    del first["low"], first["high"]
    assert first == {
        "study": "brittleness",
        "model": "m",
        "task": "t",
        "split": "test",
        "method": "map",
        "seed": 0,
        "signal": None,
        "metric": "jaccard",
        "value": pytest.approx(0.5),
        "layer": 2,
        "gamma": 0.01,
        "relative": pytest.approx(0.04),
    }
    assert (second["value"], second["low"], second["high"]) == (1, 1, 1)
    assert mean_rows(by_hand([[[1.0, 0.5]]], [0, 0]))[0]["low"] is None


def test_intervals_agree_with_the_bootstrap_over_questions() -> None:
    """Oracle: metrics.bootstrap of the rows' means, which is the same thing where every row has one length."""
    rng = np.random.default_rng(0)
    values = rng.random((1, 1, 60)) ** 2
    interval = intervals(by_hand(values, np.repeat(np.arange(20), 3)))[0][0]
    expected = bootstrap(values.reshape(20, 3).mean(1))
    np.testing.assert_allclose(interval, expected, atol=0.01)


def test_quantiles_over_tokens() -> None:
    """Oracle: numpy's quantile of the tokens of one layer, in rows keyed as the rows of means are."""
    values = np.random.default_rng(0).random((2, 1, 30)).astype(np.float32)
    result = by_hand(values, np.arange(30))
    means = mean_rows(result, model="m")
    rows = quantile_rows(result, means[0])
    assert [row["layer"] for row in rows] == [2] * 5 + [3] * 5
    assert rows[7]["value"] == pytest.approx(np.median(values[1, 0]))
    assert {**rows[7], "value": 0} == {
        **{name: value for name, value in means[0].items() if name != "relative"},
        "metric": "quantile_0.5",
        "value": 0,
        "low": None,
        "high": None,
        "layer": 3,
    }
