"""Recording compiled code: the signals of the same passes in eager code, compiled once.

The backend keeps PyTorch's own kernels, so that the numbers must be the same bit for bit. Oracles: the eager model, and
torch.compile's own count of what it compiled.
"""

import copy
import gc
import sys
import weakref
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import tiny
import torch
from torch._dynamo.utils import counters
from transformers import CompileConfig

import vmoer
from vmoer.errors import InputError
from vmoer.live import compiled, tape
from vmoer.live.attach import reconfigured, routers_of
from vmoer.live.variational import VariationalGate

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*lru_cache"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.skipif(sys.version_info >= (3, 15), reason="torch.compile of PyTorch 2.13 refuses it"),
]


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Routers are operators here as they are on a GPU; `lines` goes through them line by line, as on a CPU."""
    monkeypatch.setattr(compiled, "on_gpu", lambda x: True)
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


@pytest.fixture(params=["operators", "lines"])
def either(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "lines":
        monkeypatch.setattr(compiled, "on_gpu", lambda x: False)
    return str(request.param)


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
def test_passes_and_records_compile_nothing_anew(key: str, signals: Any, either: str) -> None:
    model, batch = attached(key), tiny.batch()
    fast: Any = torch.compile(model, fullgraph=True, backend="eager")
    with torch.no_grad():
        for passes in (1, 3, 2):
            with vmoer.record(fast, signals=signals) as ours:
                for _ in range(passes):
                    logits = fast(**batch).logits
            with vmoer.record(model, signals=signals) as theirs:
                for _ in range(passes):
                    expected = model(**batch).logits
            assert torch.equal(logits, expected)
            check(ours, theirs)
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]


@pytest.mark.parametrize("key", ["vglr-fc", "vglr-mf", "vtsr", "map"])
def test_compiled_code_compares_nothing_of_a_router_but_its_number(key: str) -> None:
    """Guards are evaluated by the host on every pass, and a tensor's are many. Oracle: what PyTorch says it compares."""
    model, batch = attached(key), tiny.batch()
    compared: list[str] = []

    def every(guards: Any) -> list[bool]:
        compared.extend(guard.name for guard in guards)
        return [True for _ in guards]

    fast: Any = torch.compile(model, fullgraph=True, backend="eager", options={"guard_filter_fn": every})
    with torch.no_grad(), vmoer.record(fast):
        fast(**batch)
    assert any("vmoer_number" in name for name in compared)
    of_routers = {name.partition("['router']")[2] for name in compared if "['router']" in name}
    assert not [name for name in of_routers if "vmoer" in name and not name.startswith(".vmoer_number")]


@pytest.mark.parametrize(
    ("name", "operators"),
    [("qwen3_moe", True), ("mixtral", True), ("jamba", True), ("deepseek_v3", False), ("llama4", False)],
)
def test_other_families_compile_alike(name: str, operators: bool) -> None:
    """By operators where the gate is a softmax over W_r u, else line by line."""
    model: Any = vmoer.attach(tiny.model(name), vmoer.FullCovariance()).eval()
    batch = tiny.batch()
    vmoer.fit(model, [batch])
    model.set_experts_implementation("batched_mm")
    fast: Any = torch.compile(model, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        with vmoer.record(fast) as ours:
            fast(**batch)
        with vmoer.record(model) as theirs:
            model(**batch)
    for signal, value in theirs.signals.items():
        torch.testing.assert_close(ours.signals[signal], value, rtol=1e-4, atol=1e-5)
    assert torch.equal(ours.experts, theirs.experts)
    assert {gate.vmoer_number > 0 for gate in model.modules() if isinstance(gate, VariationalGate)} == {operators}


@pytest.mark.parametrize(
    ("key", "names"), [("vglr-fc", "gate_entropy,logit_variance,novelty"), ("vtsr", "temperature"), ("vglr-lr", "")]
)
def test_torch_accepts_the_operator(key: str, names: str) -> None:
    model = attached(key)
    with torch.no_grad(), vmoer.record(torch.compile(model)):  # type: ignore[arg-type]
        gate: Any = next(gate for gate in model.modules() if isinstance(gate, VariationalGate))
        u_TD = torch.randn(7, gate.vmoer_gate.hidden_size)
        given = (u_TD, torch.arange(7), gate.vmoer_number, names)
        tests = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
        found = torch.library.opcheck(torch.ops.vmoer.answer.default, given, test_utils=tests)
    assert set(found.values()) == {"SUCCESS"}, found


@pytest.mark.parametrize("change", ["parameter", "statistics", "settings"])
def test_a_router_that_has_changed_is_compiled_again(change: str) -> None:
    """Compiled code finds it by a number, so what it read before must not be read again."""
    model, batch = attached("vglr-fc"), tiny.batch()
    fast: Any = torch.compile(model, fullgraph=True, backend="eager")
    with torch.no_grad():
        with vmoer.record(fast) as before:
            fast(**batch)
        if change == "parameter":
            for router in routers_of(model).values():
                router.heads.weight = torch.nn.Parameter(router.heads.weight + 0.5, requires_grad=False)
        elif change == "statistics":
            vmoer.fit(model, [{**batch, "input_ids": batch["input_ids"] // 2}])
        with reconfigured(model, samples=2) if change == "settings" else nullcontext():
            with vmoer.record(fast) as ours:
                fast(**batch)
            with vmoer.record(model) as theirs:
                model(**batch)
    check(ours, theirs)
    assert not all(torch.equal(before.signals[name], value) for name, value in ours.signals.items())


def test_nothing_of_a_detached_method_is_held() -> None:
    model, batch = attached("vglr-mf"), tiny.batch()
    fast: Any = torch.compile(model, fullgraph=True, backend="eager")
    with torch.no_grad(), vmoer.record(fast) as rec:
        fast(**batch)
    router = weakref.ref(next(iter(routers_of(model).values())).heads.weight)
    vmoer.detach(model)
    torch._dynamo.reset()
    del rec, fast
    gc.collect()
    assert router() is None


def test_a_copy_is_another_router() -> None:
    model, batch = attached("vglr-mf"), tiny.batch()
    with torch.no_grad():
        fast: Any = torch.compile(model, fullgraph=True, backend="eager")
        with vmoer.record(fast) as first:
            fast(**batch)
        other = copy.deepcopy(model)
        for router in routers_of(other).values():
            router.heads.weight += 0.5
        fast = torch.compile(other, fullgraph=True, backend="eager")
        with vmoer.record(fast) as ours:
            fast(**batch)
        with vmoer.record(other) as theirs:
            other(**batch)
    check(ours, theirs)
    assert not torch.equal(first.signals["logit_variance"], ours.signals["logit_variance"])


def test_a_record_keeps_what_the_next_one_writes_over() -> None:
    model, batch = attached("vglr-fc"), tiny.batch()
    fast: Any = torch.compile(model, fullgraph=True, backend="eager")
    other = {**batch, "input_ids": batch["input_ids"].flip(0)}
    with torch.no_grad():
        with vmoer.record(fast) as first:
            fast(**batch)
        with vmoer.record(fast) as second:
            fast(**other)
        with vmoer.record(model) as expected:
            model(**batch)
    check(first, expected)
    assert not torch.equal(second.signals["novelty"], first.signals["novelty"])


def test_eager_and_compiled_passes_of_one_record_keep_their_order(either: str) -> None:
    model, batch = attached("vtsr"), tiny.batch()
    fast: Any = torch.compile(model, fullgraph=True, backend="eager")
    other = {**batch, "input_ids": batch["input_ids"].flip(0)}
    with torch.no_grad():
        with vmoer.record(fast) as ours:
            fast(**batch)
            model(**other)
            fast(**other)
        with vmoer.record(model) as theirs:
            for given in (batch, other, other):
                model(**given)
    check(ours, theirs)


def test_more_tokens_than_the_tape_holds_are_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tape, "COLUMNS", 40)
    model, batch = attached("vglr-mf"), tiny.batch()
    fast: Any = torch.compile(model, fullgraph=True, backend="eager")
    with torch.no_grad(), vmoer.record(fast) as rec:
        for _ in range(3):
            fast(**batch)
    with pytest.raises(InputError, match="more than 40 tokens of compiled passes"):
        _ = rec.signals


@pytest.mark.parametrize("key", ["vglr-fc", "vtsr"])
@pytest.mark.filterwarnings("ignore")
def test_transformers_compiles_a_recorded_generation(key: str, either: str) -> None:
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


@pytest.mark.parametrize("key", ["vglr-fc", "map"])
@pytest.mark.filterwarnings("ignore")
def test_a_generation_that_nobody_records_is_compiled_by_operators(key: str) -> None:
    """Oracle: the same generation with compiling switched off, before and after a parameter has been replaced."""
    model, ids = attached(key), tiny.batch()["input_ids"][:, :5]
    config = CompileConfig(backend="eager", fullgraph=True, mode=None)
    config._compile_all_devices = True
    settings = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "do_sample": False, "max_new_tokens": 6}
    texts = []
    for change in range(2):
        for _ in range(2):
            text = model.generate(**settings, cache_implementation="static", compile_config=config)
            assert torch.equal(text, model.generate(**settings))
        assert all(gate.vmoer_number > 0 for gate in model.modules() if isinstance(gate, VariationalGate))
        texts.append(text)
        assert counters["stats"]["unique_graphs"] == (1 if key == "map" else change + 1)
        for router in routers_of(model).values():
            for layer in [module for module in router.modules() if isinstance(module, torch.nn.Linear)]:
                layer.weight = torch.nn.Parameter(8 * layer.weight.detach().flip(0), requires_grad=False)
    assert torch.equal(*texts) == (key == "map")
