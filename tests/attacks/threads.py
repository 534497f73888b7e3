"""One attached model in many threads and asyncio tasks, and what the context variables cost that make it safe.

    python tests/attacks/threads.py PART [--methods ...] [--passes 1000]

The parts are

    threads   16 threads run passes of their own on one model: recorded, drawn by number, switched off, averaged, generating
    tasks     200 asyncio tasks of one thread keep records open while the others run
    cost      a recorded pass of one thread, against the same with all state in plain attributes of the attachment

The oracle is the same work alone. A line of JSON is printed for each method.
"""

import argparse
import asyncio
import json
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import FunctionType, SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
import tiny
import torch
from test_contract import METHODS, prepare

import vmoer
from vmoer.live import context
from vmoer.live.attach import attached, sampled, switched_off

THREADS, TASKS = 16, 200
Found = list[torch.Tensor]


def batches() -> list[dict[str, torch.Tensor]]:
    return [tiny.batch((9, 5 + i % 4), seed=i) for i in range(THREADS)]


@torch.no_grad()
def passes_of(model: Any, batch: dict[str, torch.Tensor], number: int) -> tuple[Found, Found]:
    """What some passes answer, and what their records hold: recorded, drawn by number, switched off, averaged, generating."""
    with vmoer.record(model) as rec:
        logits = model(**batch).logits
    with vmoer.record(model) as drawn, sampled(model, number):
        model(**batch)
    with switched_off(model):
        own = model(**batch).logits
    answers = vmoer.predict(model, batch, averaging="answer", passes=2)
    whole = vmoer.predict(model, batch, averaging="full", passes=2)
    with vmoer.record(model) as written:
        text = model.generate(batch["input_ids"][:1], max_new_tokens=3, do_sample=False, pad_token_id=0)
    recorded = [rec.experts, drawn.experts, written.experts, *(rec.signals[name] for name in sorted(rec.signals))]
    counts = torch.tensor([len(one.passes) for one in (rec, drawn, written)])
    return [logits, own, answers, whole, text], [*recorded, counts]


def same(found: Found, expected: Found) -> bool:
    return all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def judged(found: tuple[Found, Found], expected: tuple[Found, Found]) -> str:
    """wrong: other answers; mixed: a record that holds something else."""
    return "wrong" if not same(found[0], expected[0]) else "mixed" if not same(found[1], expected[1]) else "right"


def in_threads(method: str, passes: int) -> dict[str, Any]:
    """At least so many passes in each thread."""
    model = prepare("granitemoe", method)
    expected = [passes_of(model, batch, i) for i, batch in enumerate(batches())]
    counted = [0]
    hook = model.register_forward_pre_hook(lambda *_: counted.__setitem__(0, counted[0] + 1))
    passes_of(model, batches()[0], 0)
    hook.remove()
    rounds, start = -(-passes // counted[0]), threading.Barrier(THREADS)

    def work(number: int) -> list[str]:
        batch = batches()[number]
        start.wait()
        return [judged(passes_of(model, batch, number), expected[number]) for _ in range(rounds)]

    with ThreadPoolExecutor(THREADS) as pool:
        outcomes = [outcome for found in pool.map(work, range(THREADS)) for outcome in found]
    outcomes.append(judged(passes_of(model, batches()[0], 0), expected[0]))
    if model.config._attn_implementation != "sdpa":  # what averages answers sets another for a while
        outcomes.append("mixed")
    counts = {name: outcomes.count(name) * counted[0] for name in ("right", "wrong", "mixed")}
    return {"method": method, "passes": (rounds * THREADS + 1) * counted[0], **counts}


def in_tasks(method: str, every: int = 1) -> dict[str, Any]:
    """Records stay open while other tasks run. Every so many tasks are compared with the same work alone."""
    model = prepare("granitemoe", method)

    @torch.no_grad()
    async def work(number: int, pause: Callable[[], Any]) -> tuple[Found, Found]:
        batch = tiny.batch((7,), seed=number)
        with vmoer.record(model) as rec:
            await pause()
            with sampled(model, number):
                await pause()
                logits = model(**batch).logits
                await pause()
        return [logits], [rec.experts, rec.signals["gate_entropy"], torch.tensor(len(rec.passes))]

    async def at_once() -> list[Any]:
        return await asyncio.gather(*(work(i, lambda: asyncio.sleep(0)) for i in range(TASKS)))

    async def nothing() -> None:
        pass

    found = asyncio.run(at_once())
    outcomes = [judged(found[number], asyncio.run(work(number, nothing))) for number in range(0, TASKS, every)]
    counts = {name: outcomes.count(name) for name in ("right", "wrong", "mixed")}
    return {"method": method, "passes": len(outcomes), **counts}


# -- what it costs -----------------------------------------------------------------------------------------------------


def plain_kind() -> type[context.Attachment]:
    """An attachment with all state in attributes, as for one thread: no context variable, no copies, nothing thread-local."""
    names = {**vars(context), "_LOCAL": SimpleNamespace(now=None, asked={})}

    def own(method: Any) -> Any:
        """The same code, where `_LOCAL` is a plain object."""
        return FunctionType(method.__code__.replace(), names, method.__name__, method.__defaults__, method.__closure__)

    ours: Any = context.Attachment

    class Plain(ours):
        plain = context.NOTHING
        begin, resume = own(ours.begin), own(ours.resume)
        within = contextmanager(own(ours.within.__wrapped__))
        now = property(own(ours.now.fget))

        @property
        def asked(self) -> context.Asked:
            return self.plain

        @contextmanager
        def asking(self, **changes: Any) -> Iterator[None]:
            before, self.plain = self.plain, replace(self.plain, **changes)
            try:
                yield
            finally:
                self.plain = before

    return Plain


@torch.no_grad()
def cost(method: str, passes: int) -> dict[str, Any]:
    """Seconds of the processor for a recorded pass, with context variables over without, of passes in turn on one model.

    The ratio is the median over pairs of neighbours; its interval is that of a median: the pairs whose ranks lie within
    1.96 standard errors of the middle.
    """
    model, batch = prepare("granitemoe", method), tiny.batch((48, 40, 45, 31))
    attachment, kinds = attached(model), (context.Attachment, plain_kind())

    def milliseconds(kind: type) -> float:
        attachment.__class__ = kind
        began = time.thread_time_ns()
        with vmoer.record(model):
            model(**batch)
        return (time.thread_time_ns() - began) / 1e6

    for _ in range(20):
        milliseconds(kinds[0]), milliseconds(kinds[1])
    # garbage is collected after a fixed count of allocations: pairs in turn would fall into step with it
    rng = random.Random(0)
    steps = [rng.choice((1, -1)) for _ in range(passes)]
    pairs = [[milliseconds(kind) for kind in kinds[::step]][::step] for step in steps]
    found, without = np.array(pairs).T
    ratios, middle, reach = np.sort(found / without), passes / 2, 0.98 * passes**0.5
    return {
        "method": method,
        "ratio": float(np.median(ratios)),
        "low": float(ratios[max(0, int(middle - reach))]),
        "high": float(ratios[min(passes - 1, int(np.ceil(middle + reach)))]),
        "milliseconds": float(np.median(without)),
    }


def main() -> None:
    asked = argparse.ArgumentParser(description=__doc__)
    asked.add_argument("part", choices=["threads", "tasks", "cost"])
    asked.add_argument("--methods", default=",".join(METHODS))
    asked.add_argument("--passes", type=int, default=1000)
    given = asked.parse_args()
    torch.set_num_threads(1)
    for method in given.methods.split(","):
        if given.part == "threads":
            found = in_threads(method, given.passes)
        else:
            found = in_tasks(method) if given.part == "tasks" else cost(method, given.passes)
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
