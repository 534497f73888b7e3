"""One attached model, many threads and asyncio tasks: each has its own record, samples, generation and answers.

Oracle: the same work done alone, one after the other, on the same model.
"""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import tiny
import torch
from test_contract import METHODS, prepare
from tiny_letters import TOKENIZER, tiny_model

import vmoer
from vmoer.live.attach import attachment_of, sampled, switched_off

THREADS, PASSES = 16, 12


def batches() -> list[dict[str, torch.Tensor]]:
    return [tiny.batch((9, 5 + i % 4), seed=i) for i in range(THREADS)]


@torch.no_grad()
def passes_of(model: Any, batch: dict[str, torch.Tensor], number: int) -> list[torch.Tensor]:
    """A recorded pass, one drawn by its own sample number, one with the method switched off."""
    with vmoer.record(model) as rec:
        logits = model(**batch).logits
    with vmoer.record(model) as drawn, sampled(model, number):
        model(**batch)
    with switched_off(model):
        own = model(**batch).logits
    answers = vmoer.predict(model, batch, averaging="answer", passes=2)
    signals = [rec.signals[name] for name in sorted(rec.signals)]
    return [logits, rec.experts, *signals, drawn.experts, own, answers]


def same(found: list[torch.Tensor], expected: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_threads_share_a_model(method: str) -> None:
    model = prepare("granitemoe", method)
    expected = [passes_of(model, batch, i) for i, batch in enumerate(batches())]
    start = threading.Barrier(THREADS)

    def work(number: int) -> int:
        start.wait()
        batch = batches()[number]
        return sum(not same(passes_of(model, batch, number), expected[number]) for _ in range(PASSES))

    with ThreadPoolExecutor(THREADS) as pool:
        wrong = list(pool.map(work, range(THREADS)))
    assert wrong == [0] * THREADS
    assert model.config._attn_implementation == "sdpa"
    assert same(passes_of(model, batches()[0], 0), expected[0])


@pytest.mark.parametrize("method", ["vglr-mf", "vtsr"])
def test_tasks_share_a_thread(method: str) -> None:
    """Records stay open while other tasks run: each holds its own passes and nothing else."""
    model = prepare("granitemoe", method)

    @torch.no_grad()
    async def work(number: int, pause: Callable[[], Any]) -> list[torch.Tensor]:
        batch = tiny.batch((7,), seed=number)
        with vmoer.record(model) as rec:
            await pause()
            with sampled(model, number):
                await pause()
                model(**batch)
                await pause()
        assert len(rec.passes) == 1
        return [rec.experts, rec.signals["gate_entropy"]]

    async def at_once() -> list[Any]:
        return await asyncio.gather(*(work(i, lambda: asyncio.sleep(0)) for i in range(200)))

    async def nothing() -> None:
        pass

    found = asyncio.run(at_once())
    for number in range(0, 200, 20):
        assert same(found[number], asyncio.run(work(number, nothing)))


@pytest.mark.parametrize("bare", [False, True])
def test_threads_generate(bare: bool) -> None:
    """`vmoer.generate`; with nothing attached the first one in attaches, the last one out detaches."""
    model = tiny_model()
    if not bare:
        vmoer.attach(model, vmoer.MeanField(prior_scale=2.0))
    prompts = [f"What is {i} of tea?" for i in range(THREADS)]
    expected = [vmoer.generate(model, TOKENIZER, prompt, max_new_tokens=4) for prompt in prompts]
    with ThreadPoolExecutor(THREADS) as pool:
        found = list(pool.map(lambda prompt: vmoer.generate(model, TOKENIZER, prompt, max_new_tokens=4), prompts))
    assert found == expected
    assert (attachment_of(model) is None) == bare


def test_two_models_in_one_thread() -> None:
    """A pass belongs to the model it is of."""
    first, second = prepare("granitemoe", "vglr-mf"), prepare("granitemoe", "vtsr")
    batch = tiny.batch((6,))
    with torch.no_grad():
        with vmoer.record(first) as alone:
            first(**batch)
        with vmoer.record(first) as one, vmoer.record(second) as two:
            second(**batch)
            first(**batch)
            second(**batch)
    assert torch.equal(one.experts, alone.experts)
    assert len(two.passes) == 2
