"""Rows there and back, and what a client is given. Oracles: the arrays that went in, and numpy's and scipy's own formulas."""

from typing import Any

import numpy as np
import pytest
import torch
from scipy.special import softmax
from scipy.stats import entropy

from vmoer.errors import InputError
from vmoer.metrics.calibrators import Choice, VectorScaling
from vmoer.saved import calibrator
from vmoer.serving.options import options
from vmoer.serving.rows import SIGNALS, pack, unpack
from vmoer.serving.values import Answer, Asked, Threshold, joined, parse


def some_rows(tokens: int = 7, dtype: torch.dtype = torch.uint8) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Rows of four layers, of which 1 and 3 have signals, and what is in them."""
    generator = torch.Generator().manual_seed(tokens)
    experts_TLK = torch.randint(0, 250, (tokens, 4, 2), generator=generator)
    signals_TLG = torch.full((tokens, 4, len(SIGNALS)), torch.nan)
    signals_TLG[:, [1, 3]] = torch.rand(tokens, 2, len(SIGNALS), generator=generator) * 1e3
    signals_TLG[:, :, SIGNALS.index("mc_logit_variance")] = torch.nan  # a method without it
    return pack(experts_TLK.to(dtype), signals_TLG).numpy(), experts_TLK.numpy(), signals_TLG.numpy()


@pytest.mark.parametrize("dtype", [torch.uint8, torch.uint16])
def test_rows_come_back_bit_for_bit(dtype: torch.dtype) -> None:
    rows, experts, signals = some_rows(dtype=dtype)
    found = unpack(rows)
    assert np.array_equal(found.experts, experts)
    assert found.layers == [1, 3]
    assert list(found.signals) == ["gate_entropy", "logit_variance", "novelty"]
    for name, values in found.signals.items():
        assert np.array_equal(values, signals[:, [1, 3], SIGNALS.index(name)])


def test_an_answer_in_parts_is_the_answer() -> None:
    rows, experts, signals = some_rows(9)
    asked = Asked(("novelty",), layers=True, prompt=True)
    whole, growing = Answer(asked, None), Answer(asked, None)
    all_at_once = joined([whole.add(rows[:2], rows[2:]), whole.end()])
    parts = [growing.add(rows[:2], rows[2:3]), growing.add(rows[:0], rows[3:7]), growing.add(rows[:0], rows[7:])]
    assert joined([*parts, growing.end()]) == all_at_once
    novelty = signals[:, [1, 3], SIGNALS.index("novelty")]
    np.testing.assert_allclose(all_at_once["tokens"]["novelty"], novelty[2:].mean(-1), rtol=1e-6)
    np.testing.assert_allclose(all_at_once["prompt"]["novelty"], novelty[:3].mean(-1), rtol=1e-6)
    np.testing.assert_allclose(all_at_once["layers"]["signals"]["novelty"], novelty[2:], rtol=1e-6)
    assert np.array_equal(all_at_once["layers"]["experts"], experts[2:, [1, 3]])
    scores = all_at_once["sequence"]
    assert scores.keys() == {"mean_novelty", "max_novelty"}
    np.testing.assert_allclose(scores["mean_novelty"], novelty[2:].mean(-1).mean(), rtol=1e-6)
    np.testing.assert_allclose(scores["max_novelty"], novelty[2:].mean(-1).max(), rtol=1e-6)


@pytest.mark.parametrize(
    ("form", "signal", "value"),
    [("letters", "novelty", 3.0), ("text", "mean_novelty", 2.0), ("text", "max_novelty", 4.0)],
)
def test_a_threshold_is_on_the_first_token_or_the_sequence(form: str, signal: str, value: float) -> None:
    tokens = {"novelty": [3.0, 1.0, 0.0, 4.0], "gate_entropy": [9.0] * 4}
    for limit, abstain in ((value - 1e-3, True), (value, False)):
        said = Threshold(form, signal, limit, 0.1, 0.9).verdict(tokens)
        assert said["abstain"] is abstain
        assert said["decision"]["value"] == value
    assert Threshold(form, signal, 1.0, 0.1, 0.9).verdict({}) == {}
    with pytest.raises(InputError, match="does not compute"):
        Threshold(form, "sequence_nll", 1.0, 0.1, 0.9)


def test_options_go_through_the_calibrator() -> None:
    """Letters' log-probabilities among all tokens, as vLLM has them."""
    scaling = VectorScaling(temperature=2.0, biases=(0.3, 0.1, -0.4))
    choice = Choice(scaling, {}, np.empty((0, 3)))
    content = calibrator.described(choice, options=[3], averaging="router", passes=1, task="t", method="map")
    stored, raw = calibrator.checked(content, "here"), np.array([-7.0, -9.5, -8.2])
    own, mapped = softmax(raw), softmax(raw / 2 + scaling.biases)
    for given, want, kind in ((None, own, None), (stored, mapped, "vector")):
        found = options(raw.tolist(), given)
        assert list(found.said["probabilities"]) == ["A", "B", "C"]
        np.testing.assert_allclose(list(found.said["probabilities"].values()), want)
        assert found.said["calibrator"] == kind
        for signals, chances in ((found.own, own), (found.calibrated, want)):
            assert signals == pytest.approx(
                {"predictive_entropy": entropy(chances), "least_confidence": 1 - chances.max()}
            )
    with pytest.raises(InputError, match="questions with 3 options, and one has 2"):
        options(raw[:2].tolist(), stored)
    answer = Answer(Asked(options=3), None)
    assert answer.choose(found) == {"options": found.said}
    for calibrated, chances in ((True, mapped), (False, own)):  # held against what it was chosen on
        limit = Threshold("letters", "least_confidence", 0.3, 0.1, 0.9, calibrated)
        said = limit.verdict({}, found)
        assert said["abstain"] is bool(1 - chances.max() > 0.3)
        assert said["decision"]["value"] == pytest.approx(1 - chances.max())
        assert limit.verdict({"novelty": [1.0]}) == {}
    assert own.max() > 0.7 > mapped.max()


@pytest.mark.parametrize(
    ("asked", "found"),
    [
        (None, None),
        (False, None),
        (True, Asked()),
        (["novelty"], Asked(("novelty",))),
        ({"layers": True, "prompt": True}, Asked(layers=True, prompt=True)),
        ({"options": 4}, Asked(options=4)),
    ],
)
def test_what_can_be_asked(asked: Any, found: Asked | None) -> None:
    assert parse(asked) == found


WRONG = ["true", 1, {"signals": "novelty"}, ["entropy"], [3], {"layers": "yes"}, {"what": 1}]


@pytest.mark.parametrize("asked", [*WRONG, *({"options": count} for count in (0, 1, 11, True, "4", None))])
def test_what_cannot_be_asked(asked: Any) -> None:
    with pytest.raises(InputError):
        parse(asked)
