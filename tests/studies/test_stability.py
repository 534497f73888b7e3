"""Differences over seeds from each seed's differences by prompt."""

import numpy as np
import pytest

from vmoer.studies import stability


def row(seed: int, by_prompt: list[float], method: str = "vglr-fc") -> dict[str, object]:
    keys = {"study": stability.STUDY, "model": "m", "task": "t", "method": method, "seed": seed, "gamma": 0.01}
    value = float(np.mean(by_prompt))
    return keys | {"metric": "jaccard_minus_map", "value": value, "low": -1.0, "high": 1.0, "by_prompt": by_prompt}


def test_seeds_that_disagree_are_no_difference() -> None:
    """Oracle by hand: prompts that agree leave the seeds alone; the mean of two resampled seeds is -0.1, 0 or 0.1."""
    rows = stability.over_seeds([row(0, [0.1] * 20), row(1, [-0.1] * 20)])
    assert [one["seed"] for one in rows] == [0, 1, None]
    assert not any("by_prompt" in one for one in rows)
    assert (rows[-1]["value"], rows[-1]["low"], rows[-1]["high"]) == (0, pytest.approx(-0.1), pytest.approx(0.1))


def test_seeds_that_agree_leave_the_prompts() -> None:
    """Oracle: the normal interval of a mean, for many prompts and one set of differences in all three seeds."""
    values = np.random.default_rng(0).normal(0.02, 0.1, 400).round(7)
    *_, over = stability.over_seeds([row(seed, values.tolist()) for seed in range(3)])
    half = 1.96 * values.std() / 20
    assert over["value"] == pytest.approx(values.mean())
    assert [over["low"], over["high"]] == pytest.approx([values.mean() - half, values.mean() + half], abs=0.1 * half)


def test_one_seed_has_its_own_interval_and_methods_stay_apart() -> None:
    rows = stability.over_seeds([row(0, [0.1, 0.2]), row(0, [0.1, 0.3], method="vtsr"), {"study": "other", "value": 1}])
    assert [one.get("method") for one in rows] == ["vglr-fc", "vtsr", None]
