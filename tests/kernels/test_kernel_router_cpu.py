"""The plain PyTorch path, which is what CPUs run, against the paper's listing: a ratio within one run."""

import pytest

from vmoer.bench.router import cpu_speedup


@pytest.mark.slow
def test_four_times_faster_than_the_listing() -> None:
    measured = cpu_speedup(tokens=2048, experts=40, samples=35)
    assert measured["speedup"] > 4, measured
