"""Brittleness as rows of `metrics.json`: means with intervals, and the distribution over tokens.

Shapes: L layers, G noise levels, T tokens, R rows of the run (prompts), S bootstrap draws.
"""

import numpy as np
import numpy.typing as npt

from vmoer.evaluation.scores import Row
from vmoer.live.brittleness import DIAGNOSTIC, Brittleness
from vmoer.metrics import Interval
from vmoer.metrics.resampling import percentiles


def intervals(result: Brittleness, draws: int = 2000, level: float = 0.95) -> list[list[Interval]]:
    """[L][G] means with percentile intervals. Prompts are resampled, not tokens: those of a prompt share their noise."""
    row_T = np.unique(result.rows_T, return_inverse=True)[1]
    count_R = np.bincount(row_T)
    weights_SR = np.random.default_rng(result.seed).multinomial(len(count_R), 1 / len(count_R) + 0 * count_R, draws)

    def interval(value: float, jaccard_T: npt.NDArray[np.float32]) -> Interval:
        sum_R = np.bincount(row_T, weights=jaccard_T)
        return percentiles(value, (weights_SR @ sum_R) / (weights_SR @ count_R), level)

    return [
        [interval(*cell) for cell in zip(means_G, jaccard_GT, strict=True)]
        for means_G, jaccard_GT in zip(result.mean_LG.tolist(), result.jaccard_LGT, strict=True)
    ]


def mean_rows(result: Brittleness, **keys: str) -> list[Row]:
    """A row for each layer and noise level, with `keys` (model, task, split, method); one prompt has no interval."""
    common = {"study": "brittleness", "model": None, "task": None, "split": None, "method": None, **keys}
    several = len(set(result.rows_T.tolist())) > 1
    return [
        {**common, "seed": result.seed, "signal": None, "metric": "jaccard", "value": value}
        | {"low": low if several else None, "high": high if several else None}
        | {"layer": layer, "gamma": gamma, "relative": relative}
        for layer, intervals_G in zip(result.layers, intervals(result), strict=True)
        for gamma, relative, (value, low, high) in zip(result.gammas, result.relative, intervals_G, strict=True)
    ]


def quantile_rows(result: Brittleness, like: Row, gamma: float = DIAGNOSTIC) -> list[Row]:
    """The distribution over tokens at one noise level: a row for each layer and quantile, keyed as the row `like`."""
    shared = {name: value for name, value in like.items() if name != "relative"} | {"low": None, "high": None}
    return [
        shared | {"metric": f"quantile_{q:g}", "value": float(np.quantile(values, q)), "layer": layer, "gamma": gamma}
        for layer, values in zip(result.layers, result.at(gamma), strict=True)
        for q in (0.05, 0.25, 0.5, 0.75, 0.95)
    ]
