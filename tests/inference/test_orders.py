"""Orders of options. Oracles: a count of who stands where, enumeration of all orders, and lists permuted by hand."""

import itertools
import math

import pytest

from vmoer.errors import InputError
from vmoer.inference.orders import orders, places


@pytest.mark.parametrize("passes", [2, 4, 5, 8, 30])
@pytest.mark.parametrize("options", range(2, 11))
def test_each_option_stands_at_each_place_equally_often(options: int, passes: int) -> None:
    """Oracle: a count. With fewer passes than options nobody stands at a place twice."""
    found = orders(options, passes)
    assert found[0] == tuple(range(options))
    assert len(set(found)) == len(found) <= passes
    assert all(sorted(order) == list(range(options)) for order in found)
    times = [[sum(order[place] == option for order in found) for place in range(options)] for option in range(options)]
    if passes < options:
        assert len(found) == passes
        assert max(map(max, times)) == 1
    else:
        assert {count for row in times for count in row} == {len(found) // options}
        assert len(found) == min(passes // options * options, math.factorial(options))


@pytest.mark.parametrize("options", [2, 3, 4, 5])
def test_enough_passes_see_every_order_once(options: int) -> None:
    """Oracle: itertools.permutations."""
    assert sorted(orders(options, 200)) == sorted(itertools.permutations(range(options)))


def test_passes_that_differ_otherwise_too_begin_anew() -> None:
    """Oracle: of two options there are two orders, so eight passes have each four times."""
    assert orders(2, 8) == [(0, 1), (1, 0)]
    assert orders(2, 8, again=True) == [(0, 1), (1, 0)] * 4


def test_places_lead_back() -> None:
    """Oracle: options put into an order by hand."""
    shown = ["c", "a", "b"]  # of a, b, c
    assert [shown[place] for place in places((2, 0, 1))] == ["a", "b", "c"]


def test_one_order_is_no_average() -> None:
    with pytest.raises(InputError, match="at least 2 orders"):
        orders(4, 1)
