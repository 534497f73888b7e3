"""Orders of a question's options: a fixed, balanced set of them, and answers mapped back.

    p(y) = (1/M) sum_m p(the letter that y stands at in order m | options in order m)

A model prefers some letters whatever stands there. Over the n cyclic shifts of n options, a Latin square, each option stands
at each place once, so what it gains by its place it loses again. The first order is the question's own.

Shapes: n options, M orders.
"""

import math
from collections.abc import Iterator
from itertools import chain, islice, permutations

from vmoer.errors import InputError

Order = tuple[int, ...]
"""By place: which of the question's own options stands there."""


def orders(options: int, passes: int, *, again: bool = False) -> list[Order]:
    """At most `passes` orders of so many options, the same for every question.

    They are whole Latin squares where `passes` allows one: the largest multiple of `options`, but no order comes twice. With
    fewer passes than options no option stands at a place twice.

    Args:
        options: of the question.
        passes: at most this many orders, two or more.
        again: begin anew after the last order there is, for passes that differ in more than their order.
    """
    if passes < 2:
        raise InputError(f"passes={passes}: answers are averaged over at least 2 orders of the options")
    wanted = passes - passes % options if passes >= options else passes
    most = math.factorial(options)
    distinct = list(islice(_in_squares(options), min(wanted, most)))
    return [distinct[m % most] for m in range(wanted)] if again else distinct


def _in_squares(options: int) -> Iterator[Order]:
    """Every order once: the cyclic shifts of the question's own, of its reverse, and of all others."""
    own = tuple(range(1, options))
    known = dict.fromkeys((own, own[::-1]))
    for tail in chain(known, (tail for tail in permutations(own) if tail not in known)):
        first = (0, *tail)
        for shift in range(options):
            yield first[shift:] + first[:shift]


def places(order: Order) -> list[int]:
    """By the question's own options: the place where each stands in the order. What was answered there, maps back."""
    return [order.index(option) for option in range(len(order))]
