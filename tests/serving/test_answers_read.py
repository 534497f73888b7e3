"""What choices say of vLLM's outputs. Oracles: the rows that went in, and outputs that were damaged on purpose."""

import json
import logging
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from vmoer.serving.reading import Reader, tell_lost
from vmoer.serving.rows import SIGNALS, pack
from vmoer.serving.values import Asked

PROMPT, NEW = 4, 6


@pytest.fixture(autouse=True)
def nothing_was_said() -> Iterator[None]:
    tell_lost.cache_clear()
    yield
    tell_lost.cache_clear()


def rows(seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Those of a text's tokens but the last, of two layers, and the mean of each signal, [T, G]."""
    generator = torch.Generator().manual_seed(seed)
    experts_TLK = torch.randint(0, 8, (PROMPT - 1 + NEW, 2, 2), generator=generator).to(torch.uint8)
    signals_TLG = torch.rand(PROMPT - 1 + NEW, 2, len(SIGNALS), generator=generator)
    return pack(experts_TLK, signals_TLG).numpy(), signals_TLG.mean(1).numpy()


def output(chunks: Any, tokens: int, end: bool = True, **more: Any) -> Any:
    about = {"token_ids": [5] * tokens, "finish_reason": "length" if end else None, "logprobs": None}
    return SimpleNamespace(**about | {"vmoer_rows": (chunks, PROMPT - 1)} | more)


def event(index: int = 0, **more: Any) -> str:
    return f"data: {json.dumps({'choices': [{'index': index, 'text': 'x', **more}]})}\n\n"


def said(line: str) -> Any:
    return json.loads(line.removeprefix("data: "))["choices"][0]


def test_streamed_is_whole_with_layers_and_the_prompt() -> None:
    """In events of two tokens from chunks of other sizes. Oracle: the rows' means, and the whole answer."""
    found, means_TG = rows()
    asked = Asked(layers=True, prompt=True)
    whole = Reader(asked, [])
    whole.read(0, output([found], NEW))
    choice = whole.give(0)
    assert choice is not None
    for place, name in enumerate(SIGNALS):
        np.testing.assert_allclose(choice["tokens"][name], means_TG[PROMPT - 1 :, place], rtol=1e-5)
        np.testing.assert_allclose(choice["prompt"][name], means_TG[:PROMPT, place], rtol=1e-5)
    streaming, chunks, events = Reader(asked, []), [found[: PROMPT + 1]], []
    for number in range(NEW // 2):
        if number == 1:
            chunks.append(found[PROMPT + 1 :])
        streaming.read(0, output(chunks, 2, end=number == NEW // 2 - 1))
        events.append(said(streaming.put(event()))["uncertainty"])
    for name in SIGNALS:
        assert [x for one in events for x in one["tokens"][name]] == choice["tokens"][name]
        assert [x for one in events for x in one["layers"]["signals"][name]] == choice["layers"]["signals"][name]
    assert [x for one in events for x in one["layers"]["experts"]] == choice["layers"]["experts"]
    assert events[0]["prompt"] == choice["prompt"]
    assert not any("prompt" in one for one in events[1:])
    assert events[-1]["sequence"] == choice["sequence"]


def test_an_answer_whose_rows_cannot_be_read_goes_out_with_null(caplog: pytest.LogCaptureFixture) -> None:
    """And the others with theirs. The log has one line, however many answers are lost."""
    found, _ = rows()
    damaged = {
        "rows of another shape": output([np.zeros((9, 2), np.uint8)], NEW),
        "rows that were lost": output([found], NEW, vmoer_rows=None),
        "an output of another version": SimpleNamespace(token_ids=[5], finish_reason="stop"),
    }
    with caplog.at_level(logging.ERROR, logger="vllm.vmoer"):
        for out in damaged.values():
            reader = Reader(Asked(), [])
            reader.read(0, out)
            reader.read(1, output([found], NEW))
            assert said(reader.put(event(0)))["uncertainty"] is None
            assert len(said(reader.put(event(1)))["uncertainty"]["tokens"]["novelty"]) == NEW
            assert reader.give(0) is None
    assert [record.getMessage() for record in caplog.records] == [
        "vmoer: the uncertainty of an answer cannot be read, and the answer goes out without it"
    ]


def test_letters_that_vllm_does_not_give_lose_the_uncertainty_alone(caplog: pytest.LogCaptureFixture) -> None:
    found, _ = rows()
    reader = Reader(Asked(options=2), [7, 8])
    reader.read(0, output([found], NEW, logprobs=[{7: SimpleNamespace(logprob=-1.0)}]))
    assert reader.give(0) is None
    assert "KeyError" in caplog.text


def test_a_stream_that_breaks_off_has_null_from_there_on() -> None:
    found, _ = rows()
    reader, chunks = Reader(Asked(), []), [found[: PROMPT + 1]]
    reader.read(0, output(chunks, 2, end=False))
    assert len(said(reader.put(event()))["uncertainty"]["tokens"]["novelty"]) == 2
    reader.read(0, output(chunks, 2, end=False, vmoer_rows=None))
    for _ in range(2):
        assert said(reader.put(event()))["uncertainty"] is None


def test_an_event_that_opens_a_chat_and_who_does_not_ask_see_nothing() -> None:
    found, _ = rows()
    reader = Reader(Asked(), [])
    reader.read(0, output([found], NEW))
    opening = event(delta={"role": "assistant", "content": ""}, finish_reason=None)
    assert "uncertainty" not in said(reader.put(opening))
    assert "uncertainty" in said(reader.put(event()))
    silent = Reader(None, [])
    silent.read(0, output([found], NEW))
    assert silent.put(event()) == event()
