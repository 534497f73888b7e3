"""Bootstrap intervals over questions, and over seeds where there are several.

A draw resamples the n questions with replacement. Given [seeds, n], it first resamples the seeds, then the questions:
the same ones for every seed, since all seeds answer the same questions. Few seeds say little about the spread between
seeds: resampling S of them understates its variance by the factor (S - 1)/S.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from vmoer.errors import InputError
from vmoer.metrics._inputs import Floats


class Interval(NamedTuple):
    """An estimate and the ends of its interval."""

    value: float
    low: float
    high: float


def percentiles(value: float, resampled: Floats | list[float], level: float) -> Interval:
    """The central `level` of the resampled values, around `value`."""
    low, high = np.quantile(resampled, [(1 - level) / 2, (1 + level) / 2])
    return Interval(float(value), float(low), float(high))


def bootstrap(values: npt.ArrayLike, draws: int = 2000, level: float = 0.95, seed: int = 0) -> Interval:
    """The mean of a per-question score [n] or [seeds, n], with its percentile interval."""
    table = np.atleast_2d(np.asarray(values, dtype=np.float64))
    if table.ndim != 2 or not table.size:
        raise InputError(f"values must have shape [n] or [seeds, n], got {list(np.shape(values))}")
    if np.isnan(table).any():
        raise InputError("values contain NaN")
    (seeds, n), rng = table.shape, np.random.default_rng(seed)
    means = np.empty(draws)
    for draw in range(draws):
        row = table[rng.integers(seeds, size=seeds)].mean(0) if seeds > 1 else table[0]
        means[draw] = row[rng.integers(n, size=n)].mean()
    return percentiles(table.mean(), means, level)


def paired_bootstrap(
    values_a: npt.ArrayLike, values_b: npt.ArrayLike, draws: int = 2000, level: float = 0.95, seed: int = 0
) -> Interval:
    """mean(a) - mean(b) of two methods on the same questions, each [n] or [seeds, n], with its percentile interval.

    Pairing removes the difficulty of the questions. Seeds are paired too: seed s of both starts from the same stage 1.
    """
    a, b = np.asarray(values_a, dtype=np.float64), np.asarray(values_b, dtype=np.float64)
    if a.shape[-1:] != b.shape[-1:] or (a.ndim == b.ndim and a.shape != b.shape):
        raise InputError(f"not paired: shapes {list(a.shape)} and {list(b.shape)}")
    return bootstrap(a - b, draws, level, seed)


def bootstrap_metric(
    metric: Callable[..., float], *arrays: npt.ArrayLike, draws: int = 1000, level: float = 0.95, seed: int = 0
) -> Interval:
    """[q_lo - bias, q_hi - bias],  bias = mean of the resampled metrics - the metric, for metrics that are not means.

    Resampling repeats questions. That adds noise, which an absolute value turns into bias: an ECE of 0.027 has a
    bootstrap mean of 0.046, so its percentile interval is too high. Shifted by that bias, the interval is one for the
    metric's expectation *at this n*, noise floor included. In simulation it covers that in 94% to 99% of data sets,
    where the percentile interval falls to 83% and the basic one (2 value - q) to 65%. It does not bound the calibration
    error of infinite data: for that read `noise_floor` and `debiased_ece`.

    `arrays` are indexed by question first. Two methods are compared on the same questions through one metric of both:
    `bootstrap_metric(lambda c, y, d, z: ece(c, y) - ece(d, z), c, y, d, z)`.
    """
    columns = [np.asarray(array) for array in arrays]
    lengths = {column.shape[:1] for column in columns}
    if len(lengths) != 1 or not columns[0].size:
        raise InputError(f"arrays must be non-empty and have one length, got {sorted(lengths)}")
    rng, n = np.random.default_rng(seed), len(columns[0])
    indices = (rng.integers(n, size=n) for _ in range(draws))
    resampled: Floats = np.array([metric(*(column[index] for column in columns)) for index in indices])
    value = metric(*columns)
    return percentiles(value, resampled - (resampled.mean() - value), level)
