"""Recording compiled code: the signals of the same passes in eager code, compiled once.

The backend keeps PyTorch's own kernels, so that the numbers must be the same bit for bit. Oracles: the eager model, and
torch.compile's own count of what it compiled.
"""

import sys
from collections.abc import Iterator
from typing import Any

import pytest
import tiny
import torch
from torch._dynamo.utils import counters
from transformers import CompileConfig

import vmoer
from vmoer.errors import InputError
from vmoer.live import tape

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*lru_cache"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.skipif(sys.version_info >= (3, 15), reason="torch.compile of PyTorch 2.13 refuses it"),
]


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def attached(key: str) -> Any:
    model = vmoer.attach(tiny.model("granitemoe"), vmoer.methods()[key]()).eval()
    return vmoer.fit(model, [tiny.batch()])


def check(ours: Any, theirs: Any) -> None:
    assert list(ours.signals) == list(theirs.signals)
    for name, value in theirs.signals.items():
        assert torch.equal(ours.signals[name], value), name
    assert torch.equal(ours.experts, theirs.experts)
    assert torch.equal(ours.mask, theirs.mask)


@pytest.mark.parametrize(
    ("key", "signals"), [("vglr-fc", None), ("vtsr", None), ("map", ["novelty"]), ("vglr-mf", "all")]
)
def test_passes_and_records_compile_nothing_anew(key: str, signals: Any) -> None:
    model, batch = attached(key), tiny.batch()
    compiled: Any = torch.compile(model, fullgraph=True, backend="eager")
    with torch.no_grad():
        for passes in (1, 3, 2):
            with vmoer.record(compiled, signals=signals) as ours:
                for _ in range(passes):
                    logits = compiled(**batch).logits
            with vmoer.record(model, signals=signals) as theirs:
                for _ in range(passes):
                    expected = model(**batch).logits
            assert torch.equal(logits, expected)
            check(ours, theirs)
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]


def test_a_record_keeps_what_the_next_one_writes_over() -> None:
    model, batch = attached("vglr-fc"), tiny.batch()
    compiled: Any = torch.compile(model, fullgraph=True, backend="eager")
    other = {**batch, "input_ids": batch["input_ids"].flip(0)}
    with torch.no_grad():
        with vmoer.record(compiled) as first:
            compiled(**batch)
        with vmoer.record(compiled) as second:
            compiled(**other)
        with vmoer.record(model) as expected:
            model(**batch)
    check(first, expected)
    assert not torch.equal(second.signals["novelty"], first.signals["novelty"])


def test_eager_and_compiled_passes_of_one_record_keep_their_order() -> None:
    model, batch = attached("vtsr"), tiny.batch()
    compiled: Any = torch.compile(model, fullgraph=True, backend="eager")
    other = {**batch, "input_ids": batch["input_ids"].flip(0)}
    with torch.no_grad():
        with vmoer.record(compiled) as ours:
            compiled(**batch)
            model(**other)
            compiled(**other)
        with vmoer.record(model) as theirs:
            for given in (batch, other, other):
                model(**given)
    check(ours, theirs)


def test_more_tokens_than_the_tape_holds_are_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tape, "COLUMNS", 40)
    model, batch = attached("vglr-mf"), tiny.batch()
    compiled: Any = torch.compile(model, fullgraph=True, backend="eager")
    with torch.no_grad(), vmoer.record(compiled) as rec:
        for _ in range(3):
            compiled(**batch)
    with pytest.raises(InputError, match="more than 40 tokens of compiled passes"):
        _ = rec.signals


@pytest.mark.parametrize("key", ["vglr-fc", "vtsr"])
@pytest.mark.filterwarnings("ignore")
def test_transformers_compiles_a_recorded_generation(key: str) -> None:
    """A static cache is the switch. Oracle: the same generation with compiling switched off."""
    model, batch = attached(key), tiny.batch()
    ids = batch["input_ids"][:, :5]
    config = CompileConfig(backend="eager", fullgraph=True, mode=None)
    config._compile_all_devices = True
    settings = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "do_sample": False}
    settings |= {"cache_implementation": "static", "max_new_tokens": 6}
    for _ in range(2):
        with vmoer.record(model) as ours, torch.no_grad():
            text = model.generate(**settings, compile_config=config)
            assert (len(ours._passes), ours.count) == (1, 6)  # the tape is taken apart by whoever reads it
        with vmoer.record(model) as theirs, torch.no_grad():
            expected = model.generate(**settings, disable_compile=True)
        assert torch.equal(text, expected)
        check(ours, theirs)
        assert ours.generated.signals["novelty"].shape == theirs.generated.signals["novelty"].shape
    assert counters["stats"]["unique_graphs"] == 1
