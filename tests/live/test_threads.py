"""One attached model, many threads and asyncio tasks: each has its own record, samples, generation and answers.

Oracle: the same work done alone, one after the other, on the same model.
"""

from concurrent.futures import ThreadPoolExecutor

import pytest
import tiny
import torch
from attacks.threads import THREADS, cost, in_tasks, in_threads
from test_contract import METHODS, prepare
from tiny_letters import TOKENIZER, tiny_model

import vmoer
from vmoer.live.attach import attachment_of


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_threads_share_a_model(method: str) -> None:
    """`make attack` gives each thread a thousand passes."""
    found = in_threads(method, passes=24)
    assert found["right"] == found["passes"] > 16 * 24
    assert (found["wrong"], found["mixed"]) == (0, 0)


@pytest.mark.parametrize("method", METHODS)
def test_tasks_share_a_thread(method: str) -> None:
    """Records stay open while other tasks run: each holds its own passes and nothing else."""
    assert in_tasks(method, every=10) == {"method": method, "passes": 20, "right": 20, "wrong": 0, "mixed": 0}


def test_what_threads_cost_is_measured() -> None:
    """The bound is that of `make attack`, with thousands of passes: here, that both kinds of attachment still run."""
    found = cost("map", 5)
    assert 0 < found["low"] <= found["ratio"] <= found["high"] < 3


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
