"""Routers replayed as CUDA graphs: when they are captured, when again, and that the answer is the same.

There is no GPU here, so a graph is played by the work that was captured: run again on the tensors it was captured with, its
results written over those of the capture, which is what a replay does. Oracle: the same model with capturing switched off.
"""

import contextlib
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import tiny
import torch
import transformers as tf
from torch.utils._python_dispatch import TorchDispatchMode

import vmoer
from vmoer.live import capturing
from vmoer.live.attach import reconfigured, routers_of
from vmoer.live.variational import VariationalGate


class Graph:
    """Remembers the last thing described while it was capturing."""

    captures: int = 0
    replays: int = 0
    described: Any = None
    work: Any = None

    def capture_begin(self, **settings: Any) -> None:
        Graph.captures += 1

    def capture_end(self) -> None:
        self.args, self.answer = Graph.described

    def replay(self) -> None:
        Graph.replays += 1
        again = Graph.work(*self.args)
        for old, new in zip((*self.answer.out, self.answer.signals_GT), (*again.out, again.signals_GT), strict=True):
            if old is not None:
                old.copy_(new)


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> type[Graph]:
    Graph.captures = Graph.replays = 0
    Graph.work = own = VariationalGate._described

    def described(*args: Any) -> Any:
        answer = own(*args)
        Graph.described = args, answer
        return answer

    stream = SimpleNamespace(cuda_stream=7, wait_stream=lambda other: None, synchronize=lambda: None)
    monkeypatch.setattr(VariationalGate, "_described", described)
    monkeypatch.setattr(capturing, "on_gpu", lambda states: True)
    monkeypatch.setattr(capturing, "stream_of", lambda device: 7)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    monkeypatch.setattr(torch.cuda, "Stream", lambda: stream)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    for name in ("device", "stream"):
        monkeypatch.setattr(torch.cuda, name, lambda x: contextlib.nullcontext())
    monkeypatch.setattr(capturing, "_LOCAL", capturing._Local())
    monkeypatch.setattr(capturing, "_place", lambda device: capturing._Place(stream, None, None))
    return Graph


def attached(key: str) -> torch.nn.Module:
    model = vmoer.attach(tiny.model("granitemoe"), vmoer.methods()[key]()).eval()
    for router in routers_of(model).values():
        for parameter in router.parameters():
            torch.nn.init.normal_(parameter, 0, 0.2)
    return vmoer.fit(model, [tiny.batch()])


def outcome(model: torch.nn.Module, ids: torch.Tensor, **settings: Any) -> list[torch.Tensor]:
    with vmoer.record(model, **settings) as rec, torch.no_grad():
        logits = model(input_ids=ids).logits
    return [logits, rec.experts, *rec.signals.values()]


def same(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> bool:
    return len(ours) == len(theirs) and all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def batches(n: int, columns: int = 7) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(columns)
    return [torch.randint(3, tiny.VOCAB, (2, columns), generator=generator) for _ in range(n)]


@pytest.mark.parametrize("key", ["map", "vglr-mf", "vglr-fc", "vglr-lr", "vtsr", "laplace"])
@pytest.mark.parametrize("signals", [None, "all", ["novelty"]])
def test_a_replay_says_what_the_kernels_say(
    key: str, signals: Any, graphs: type[Graph], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, passes = attached(key), capturing.SIGHTS + 3
    found = [outcome(model, ids, signals=signals) for ids in batches(passes)]
    assert graphs.captures == 2  # of two layers, once each
    assert graphs.replays == 2 * (passes - capturing.SIGHTS)
    monkeypatch.setattr(capturing, "enabled", False)
    for ours, ids in zip(found, batches(passes), strict=True):
        assert same(ours, outcome(model, ids, signals=signals))


def test_what_was_answered_before_stays(graphs: type[Graph]) -> None:
    """A later replay writes over nothing that was handed out. Oracle: a copy."""
    model = attached("vglr-fc")
    for ids in batches(capturing.SIGHTS + 1):
        before = outcome(model, ids)
    copies = [x.clone() for x in before]
    outcome(model, batches(9)[-1])
    assert same(before, copies)


@pytest.mark.parametrize("change", ["in place", "moved", "refitted", "reconfigured", "recorded otherwise"])
def test_what_a_graph_reads_may_change(change: str, graphs: type[Graph], monkeypatch: pytest.MonkeyPatch) -> None:
    """New numbers in the same place are read by the old graph; anything else makes a new one."""
    model, settings, stack = attached("vglr-fc"), {}, contextlib.ExitStack()
    for ids in batches(capturing.SIGHTS + 1):
        outcome(model, ids)
    captures = graphs.captures
    for router in routers_of(model).values():
        if change == "in place":
            router.heads.weight.data.mul_(3)
        elif change == "moved":
            router.heads.weight.data = router.heads.weight.data * 3
    if change == "refitted":
        vmoer.fit(model, [{"input_ids": ids} for ids in batches(2)], rank=3)
    elif change == "reconfigured":
        stack.enter_context(reconfigured(model, samples=5))
    elif change == "recorded otherwise":
        settings = {"signals": ["gate_entropy"]}
    with stack:
        found = [outcome(model, ids, **settings) for ids in batches(capturing.SIGHTS + 2)]
        assert graphs.captures == captures + (0 if change == "in place" else 2)
        monkeypatch.setattr(capturing, "enabled", False)
        for ours, ids in zip(found, batches(capturing.SIGHTS + 2), strict=True):
            assert same(ours, outcome(model, ids, **settings))


def test_a_record_leaves_the_graphs_of_passes_without_one(graphs: type[Graph]) -> None:
    """Two routers, captured once without a record and once with one, which finds the halves of novelty's root first."""
    model, counts = attached("vglr-fc"), []
    for recorded in (False, True, False):
        for ids in batches(capturing.SIGHTS + 1):
            with torch.no_grad(), vmoer.record(model) if recorded else contextlib.nullcontext():
                model(input_ids=ids)
        counts.append(graphs.captures)
    assert counts == [2, 4, 4]


def test_nothing_is_captured_where_it_may_not_be(graphs: type[Graph]) -> None:
    model, ids = attached("vglr-fc"), batches(1)[0]
    noisy = vmoer.attach(tiny.model("granitemoe"), vmoer.MCDropout()).eval()
    for _ in range(capturing.SIGHTS + 2):
        model(input_ids=ids)  # with gradients
        with torch.no_grad(), vmoer.record(model, kl=True):
            model(input_ids=ids)
        with torch.no_grad():
            noisy(input_ids=ids)
        with torch.inference_mode():
            model(input_ids=ids)
        vmoer.predict(model, {"input_ids": ids}, averaging="full", passes=2)
        with vmoer.record(model, step=3):
            model(input_ids=ids)
    assert graphs.captures == 0


def test_a_router_holds_few_tokens(graphs: type[Graph], monkeypatch: pytest.MonkeyPatch) -> None:
    """Passes of three lengths, and room for the graphs of two: the longest unused goes."""
    model = attached("vglr-fc")
    monkeypatch.setattr(capturing, "HELD", 2 * 8)
    for columns in (2, 3, 4):
        for ids in batches(capturing.SIGHTS + 1, columns):
            outcome(model, ids)
    gate = next(module for module in model.modules() if isinstance(module, VariationalGate))
    kept = capturing._LOCAL.kept[gate.vmoer]
    assert [key[1][0] for key in kept.takes] == [6, 8]


def test_a_router_keeps_few_graphs_and_one_place_for_what_comes_in(
    graphs: type[Graph], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Passes of five lengths, and two graphs at most: those of the last two lengths, and room that has not grown."""
    model = attached("vtsr")
    monkeypatch.setattr(capturing, "GRAPHS", 2)
    for columns in (2, 3, 4, 5, 6):
        for ids in batches(capturing.SIGHTS + 1, columns):
            outcome(model, ids)
    gate = next(module for module in model.modules() if isinstance(module, VariationalGate))
    assert [key[1][0] for key in capturing._LOCAL.kept[gate.vmoer].takes] == [10, 12]
    (place,) = capturing._LOCAL.places.values()
    assert sorted(len(room) for room in place.room.values()) == [capturing.MOST, capturing.MOST]  # states, positions


def test_a_router_that_cannot_be_captured_is_launched_as_before(
    graphs: type[Graph], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = attached("vglr-mf")
    monkeypatch.setattr(Graph, "capture_end", lambda self: (_ for _ in ()).throw(RuntimeError("not today")))
    with pytest.warns(UserWarning, match="not today"):
        found = [outcome(model, ids) for ids in batches(capturing.SIGHTS + 2)]
    monkeypatch.setattr(capturing, "enabled", False)
    assert all(same(ours, outcome(model, ids)) for ours, ids in zip(found, batches(len(found)), strict=True))


class Operators(TorchDispatchMode):
    """Counts what is dispatched."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def host_work(run: Callable[[], object]) -> tuple[int, int]:
    """Functions entered, Python's and C's, and operators dispatched: the same on every run."""
    calls = 0

    def seen(frame: Any, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(seen)
    try:
        run()
    finally:
        sys.setprofile(before)
    with Operators() as operators:
        run()
    return calls, operators.count


@pytest.mark.parametrize("key", ["map", "vglr-fc", "vtsr"])
def test_a_token_costs_the_host_little_more(key: str, graphs: type[Graph], monkeypatch: pytest.MonkeyPatch) -> None:
    """One token through 32 layers, ten of them attached, their graphs' replays left out: what is done beside launching them.
    Oracle: the plain model's own count."""
    monkeypatch.setattr(Graph, "replay", lambda self: None)
    sizes = dict(
        hidden_size=16, intermediate_size=8, num_attention_heads=2, num_key_value_heads=1, vocab_size=tiny.VOCAB
    )
    config = tf.GraniteMoeConfig(num_hidden_layers=32, num_local_experts=40, num_experts_per_tok=8, **sizes)
    plain = tf.GraniteMoeForCausalLM(config).eval()
    model = tf.GraniteMoeForCausalLM(config).eval()
    vmoer.fit(vmoer.attach(model, vmoer.methods()[key](layers=range(0, 30, 3))), [tiny.batch()])
    ids = torch.tensor([[5]])

    def run() -> None:
        model(input_ids=ids)

    with torch.no_grad():
        calls, operators = host_work(lambda: plain(input_ids=ids))
        for _ in range(capturing.SIGHTS + 1):
            run()
        more_calls, more_operators = host_work(run)
        assert graphs.captures == (0 if key == "map" else 10)
        assert more_calls <= 1.06 * calls
        assert more_operators <= 1.02 * operators
        with vmoer.record(model):
            for _ in range(capturing.SIGHTS + 1):
                run()
            more_calls, more_operators = host_work(run)
        assert more_calls <= 1.10 * calls
        assert more_operators <= 1.02 * operators


def test_a_pool_outlives_its_routers(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch ends a pool with its last graph and captures no more into it. Oracle: the calls of a graph that notes them."""
    calls: list[Any] = []

    class Noted:
        def capture_begin(self, **settings: Any) -> None:
            calls.append(settings["pool"])

        def capture_end(self) -> None:
            calls.append("end")

    stream = SimpleNamespace(synchronize=lambda: None)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Noted)
    monkeypatch.setattr(torch.cuda, "Stream", lambda: stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda x: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: "pool")
    place = capturing._place(torch.device("cpu"))
    assert calls == ["pool", "end"]
    assert place.pool == "pool"
    assert isinstance(place.anchor[0], Noted)
