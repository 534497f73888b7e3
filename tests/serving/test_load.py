"""What `make serving-load` makes of its answers and bursts. Oracles: an answer changed on purpose, and sums by hand."""

from typing import Any

import load
import numpy as np
import pytest

pytestmark = pytest.mark.serving
WANT: dict[str, Any] = {
    "prompt_tokens": 2,
    "ids": [5, 6, *range(10, 10 + load.NEW)],
    "signals": {"novelty": np.arange(2.0 * (load.NEW + 1)).reshape(-1, 2)},
}
RIGHT: dict[str, Any] = {
    "token_ids": [*range(10, 10 + load.NEW)],
    "uncertainty": {"tokens": {"novelty": [2.0 * (n + 1) + 0.5 for n in range(load.NEW)]}},
}


@pytest.mark.parametrize(
    ("answer", "wrong"),
    [
        (RIGHT, False),
        (TimeoutError(), True),
        (RIGHT | {"token_ids": RIGHT["token_ids"][::-1]}, True),
        (RIGHT | {"uncertainty": {"tokens": {}}}, True),
        (RIGHT | {"uncertainty": {"tokens": {"novelty": RIGHT["uncertainty"]["tokens"]["novelty"][:-1]}}}, True),
        (
            RIGHT | {"uncertainty": {"tokens": {"novelty": [2.51, *RIGHT["uncertainty"]["tokens"]["novelty"][1:]]}}},
            True,
        ),
    ],
)
def test_an_answer_that_is_lost_or_mixed_up_is_seen(answer: Any, wrong: bool) -> None:
    assert load.wrong(answer, WANT, asks=True) is wrong


def test_what_is_wrong_is_named() -> None:
    other = WANT | {"prompt": "x", "ids": [5, 6, *range(20, 20 + load.NEW)]}
    mixed = RIGHT | {"token_ids": [*range(20, 20 + load.NEW)]}
    expected = [WANT | {"prompt": "y"}, other]
    found = [
        load.kind(answer, 2, expected, True) for answer in (RIGHT, TimeoutError(), mixed, RIGHT | {"token_ids": [1]})
    ]
    assert found == [None, "lost", "mixed", "other"]


def test_ratios_are_taken_burst_by_burst_and_memory_after_a_third() -> None:
    none = dict.fromkeys(load.KINDS, 0)
    plain = [{"requests": 2, "seconds": s, "cpu_seconds": 1.0, "megabytes": 100.0, **none} for s in (1.0, 10.0, 4.0)]
    ours = [
        {"requests": 2, "seconds": s, "cpu_seconds": 2.0, "megabytes": m, **none, "mixed": w}
        for s, w, m in ((1.0, 0, 50.0), (20.0, 1, 100.0), (5.0, 0, 103.0))
    ]
    found = load.summary({"plain": plain, "uncertainty": ours})
    assert found["throughput"] == pytest.approx(0.8)  # of 1, .5 and .8
    assert found["throughput_by_cpu_seconds"] == pytest.approx(0.5)
    assert (found["requests"], found["lost"], found["mixed"], found["other"]) == (6, 0, 1, 0)
    assert found["growth"] == pytest.approx({"plain": 0, "uncertainty": 0.03})
    assert "0.800" in load.text(found, {"plain": plain, "uncertainty": ours}, "vLLM")
