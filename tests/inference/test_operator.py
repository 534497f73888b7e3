"""The operator that engines call. Oracles: `torch.library.opcheck`, and what `vmoer.record` says of the same states."""

from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import tiny
import torch

import vmoer
from vmoer import gates
from vmoer.errors import InputError
from vmoer.inference import operator
from vmoer.live.attach import collected, routers_of
from vmoer.routers import Config, Router, Routing
from vmoer.serving import rows

LAYERS = [0, 1]
CONFIGS: list[Config] = [
    vmoer.FullCovariance(layers=LAYERS),
    vmoer.MeanField(layers=LAYERS),
    vmoer.LowRank(layers=LAYERS),
    vmoer.FullCovariance(layers=LAYERS, sampling="delta"),
    vmoer.Laplace(layers=LAYERS),
    vmoer.Deterministic(layers=LAYERS),
    vmoer.MCDropout(layers=LAYERS),
    vmoer.SWAG(layers=LAYERS),
]


def hosted(architecture: str, config: Config, dtype: torch.dtype = torch.float32):
    """An attached model, and its routers built again for the operator from their tensors alone."""
    model = tiny.model(architecture).to(dtype)
    vmoer.attach(model, config)
    ids = torch.randint(3, tiny.VOCAB, (4, 11))
    for router in routers_of(model).values():
        for parameter in router.parameters():
            torch.nn.init.normal_(parameter, 0, 0.2)
    vmoer.fit(model, [{"input_ids": ids}])
    operator.forget()
    for layer, theirs in routers_of(model).items():
        score = theirs.gate.scoring.score
        gate = operator.logits_gate(score, theirs.gate.num_experts, theirs.gate.scoring.k, theirs.gate.hidden_size)
        found = next(f for f in gates.find(model) if f.layer == layer)
        weight_ND = gates.router_weight(found.router, found.router.vmoer_gate).detach()  # type: ignore[arg-type, union-attr]
        ours = config.router(config, gate, weight_ND, layer, torch.device("cpu"))
        ours.novelty_root_RD = theirs.novelty_root_RD
        ours.load_state_dict(theirs.state_dict())
        operator.host(str(layer), ours, weight_ND, dtype)
    return model, ids


def inputs_of(model: torch.nn.Module, ids: torch.Tensor) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
    """Every layer's states and the model's own logits."""
    seen: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    with (
        collected(model, lambda layer, u, logits: seen.setdefault(layer, (u.clone(), logits.clone()))),  # type: ignore[arg-type]
        torch.no_grad(),
    ):
        model(input_ids=ids)
    return seen


@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: f"{c.key}-{getattr(c, 'sampling', '')}")
@pytest.mark.parametrize("architecture", ["granitemoe", "deepseek_v3"])
def test_it_says_what_the_attached_model_records(architecture: str, config: Config) -> None:
    """Logits chosen by the model's own rule give the recorded experts; signals are the recorded ones."""
    model, ids = hosted(architecture, config)
    with vmoer.record(model, signals="all") as rec, torch.no_grad():
        model(input_ids=ids)
    layer = LAYERS[0]  # where the collector's states are the same: below it nothing was routed
    u_TD, logits_TN = inputs_of(model, ids)[layer]
    averaged_TN, signals_TG = torch.ops.vmoer.route(u_TD, logits_TN, str(layer))
    router: Any = next(f for f in gates.find(model) if f.layer == layer).router
    chosen_TK = router.vmoer_gate.scoring.choose(averaged_TN, router.vmoer_gate.bias(router, (), {}))
    assert torch.equal(chosen_TK.sort(-1).values, rec.experts[0].flatten(0, 1).sort(-1).values)
    names = operator._HOSTED[str(layer)].signals
    assert set(names) == set(rec.signals)
    for place, name in enumerate(names):
        torch.testing.assert_close(signals_TG[:, place], rec.signals[name][0].reshape(-1), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: f"{c.key}-{getattr(c, 'sampling', '')}")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_torch_accepts_it_as_an_operator(config: Config, dtype: torch.dtype) -> None:
    """Schema, fake shapes and dtypes, tracing: PyTorch's own checks."""
    hosted("granitemoe", config)
    u_TD, logits_TN = torch.randn(7, 32).to(dtype), torch.randn(7, 6).to(dtype)
    tests = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    found = torch.library.opcheck(torch.ops.vmoer.route.default, (u_TD, logits_TN, "0"), test_utils=tests)
    assert set(found.values()) == {"SUCCESS"}
    averaged_TN, signals_TG = torch.ops.vmoer.route(u_TD, logits_TN, "0")
    assert (averaged_TN.dtype, signals_TG.dtype) == (torch.float32, torch.float32)
    assert averaged_TN.data_ptr() != logits_TN.data_ptr()


@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: f"{c.key}-{getattr(c, 'sampling', '')}")
def test_signals_go_where_they_are_wanted(config: Config) -> None:
    """Into every other row of a wider tensor. Oracle: the operator that returns them; PyTorch's own checks."""
    hosted("granitemoe", config)
    u_TD, logits_TN = torch.randn(7, 32), torch.randn(7, 6)
    averaged_TN, signals_TG = torch.ops.vmoer.route(u_TD, logits_TN, "0")
    room = torch.full((7, 3, len(operator.LANES)), torch.nan)
    assert torch.equal(torch.ops.vmoer.route_into(u_TD, logits_TN, "0", room[:, 1]), averaged_TN)
    names = operator._HOSTED["0"].signals
    for place, name in enumerate(operator.LANES):
        if name in names:
            assert torch.equal(room[:, 1, place], signals_TG[:, names.index(name)])
        else:
            assert bool(room[:, 1, place].isnan().all())
    assert bool(room[:, [0, 2]].isnan().all())
    tests = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    given = (u_TD, logits_TN, "0", torch.zeros(7, len(operator.LANES)))
    found = torch.library.opcheck(torch.ops.vmoer.route_into.default, given, test_utils=tests)
    assert set(found.values()) == {"SUCCESS"}
    with pytest.raises(InputError, match="do not fit"):
        torch.ops.vmoer.route_into(u_TD, logits_TN, "0", torch.zeros(6, len(operator.LANES)))


def test_an_engines_rows_have_the_operators_lanes() -> None:
    assert rows.SIGNALS == operator.LANES


def test_weights_that_are_rounded_once_give_what_those_of_float32_do() -> None:
    """In bfloat16 an attached router rounds its weights on every call. Oracle: the recorded signals and experts, bit for bit."""
    model, _ = hosted("granitemoe", CONFIGS[0], torch.bfloat16)
    ids = torch.randint(5, 60, (40, 25), generator=torch.Generator().manual_seed(1))  # enough of them for near ties
    with vmoer.record(model, signals="all") as rec, torch.no_grad():
        model(input_ids=ids)
    assert {p.dtype for p in routers_of(model)[0].parameters()} == {torch.float32}
    router = operator._HOSTED["0"].router
    assert {p.dtype for p in router.parameters()} == {torch.bfloat16}
    averaged_TN, signals_TG = torch.ops.vmoer.route(*(x.to(torch.bfloat16) for x in inputs_of(model, ids)[0]), "0")
    chosen_TK, narrow_TK = (x.topk(2).indices.sort(-1).values for x in (averaged_TN, averaged_TN.bfloat16().float()))
    assert torch.equal(chosen_TK, rec.experts[0].flatten(0, 1).sort(-1).values)
    assert not torch.equal(chosen_TK, narrow_TK)
    for place, name in enumerate(operator._HOSTED["0"].signals):
        assert torch.equal(signals_TG[:, place], rec.signals[name][0].reshape(-1)), name


def test_signals_on_request() -> None:
    """Those that were asked for, and none, with the same routing. Oracle: all of them."""
    u_TD, logits_TN = torch.randn(5, 32), torch.randn(5, 6)
    hosted("granitemoe", CONFIGS[0])
    every = operator._HOSTED["0"]
    averaged_TN, signals_TG = torch.ops.vmoer.route(u_TD, logits_TN, "0")
    for wanted in ((), ("novelty",)):
        operator.host("some", every.router, every.weight_ND, torch.float32, wanted)
        ours_TN, fewer_TG = torch.ops.vmoer.route(u_TD, logits_TN, "some")
        assert torch.equal(ours_TN, averaged_TN)
        assert torch.equal(fewer_TG, signals_TG[:, [every.signals.index(name) for name in wanted]])


def test_signals_that_an_engine_does_not_know_are_left_out() -> None:
    """With the same routing. Oracle: all signals."""
    u_TD, logits_TN = torch.randn(5, 32), torch.randn(5, 6)
    hosted("granitemoe", CONFIGS[0])
    every = operator._HOSTED["0"]
    averaged_TN, signals_TG = torch.ops.vmoer.route(u_TD, logits_TN, "0")
    for known in ((), ("novelty", "of_another_engine"), every.signals):
        some = operator.host("some", every.router, every.weight_ND, torch.float32, known=known)
        assert some.signals == tuple(name for name in every.signals if name in known)
        assert set(some.left_out) == set(every.signals) - set(known)
        ours_TN, fewer_TG = torch.ops.vmoer.route(u_TD, logits_TN, "some")
        assert torch.equal(ours_TN, averaged_TN)
        assert torch.equal(fewer_TG, signals_TG[:, [every.signals.index(name) for name in some.signals]])


def test_compiled_code_gives_the_same() -> None:
    hosted("granitemoe", CONFIGS[0])
    u_TD, logits_TN = torch.randn(5, 32), torch.randn(5, 6)

    def both(u: torch.Tensor, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        averaged, signals = torch.ops.vmoer.route(u * 2, logits + 1, "1")
        return averaged.softmax(-1), signals + 1

    compiled = torch.compile(both, fullgraph=True, backend="aot_eager")
    for ours, theirs in zip(compiled(u_TD, logits_TN), both(u_TD, logits_TN), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_rows_do_not_depend_on_their_batch() -> None:
    """A padded batch, as CUDA graphs have it, gives each token what it has alone."""
    hosted("granitemoe", CONFIGS[0])
    u_TD, logits_TN = torch.randn(9, 32), torch.randn(9, 6)
    whole = torch.ops.vmoer.route(u_TD, logits_TN, "0")
    for row in range(9):
        alone = torch.ops.vmoer.route(u_TD[row : row + 1], logits_TN[row : row + 1], "0")
        for ours, theirs in zip(alone, whole, strict=True):
            torch.testing.assert_close(ours[0], theirs[row])


def test_what_lies_in_padded_rows_does_not_matter() -> None:
    """CUDA graphs pad a batch with whatever the memory held. Oracle: the same rows without padding."""
    for config in (vmoer.FullCovariance(layers=LAYERS), vmoer.LowRank(layers=LAYERS), vmoer.MCDropout(layers=LAYERS)):
        hosted("granitemoe", config)
        u_TD, logits_TN = torch.randn(5, 32), torch.randn(5, 6)
        expected = torch.ops.vmoer.route(u_TD, logits_TN, "0")
        for filling in (float("nan"), float("inf"), 1e30):
            padded = (
                torch.cat([u_TD, torch.full((3, 32), filling)]),
                torch.cat([logits_TN, torch.full((3, 6), filling)]),
            )
            found = torch.ops.vmoer.route(*padded, "0")
            for ours, theirs in zip(found, expected, strict=True):
                torch.testing.assert_close(ours[:5], theirs)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (vmoer.VariationalTemperature(), "sampled logits"),
        (vmoer.Temperature(), "sampled logits"),
        (vmoer.FullCovariance(sampling="mc"), "fresh noise"),
        (vmoer.MCDropout(sampling="mc"), "fresh noise"),
    ],
    ids=str,
)
def test_what_does_not_fit_is_named(config: Config, reason: str) -> None:
    assert reason in str(operator.unfit(config))
    assert all(operator.unfit(fits) is None for fits in CONFIGS)


def test_a_new_method_that_splits_is_refused_even_where_it_does_not_say_so() -> None:
    """A method that no list names: by what it says of itself, and by what it answers."""

    class Apart(Router):
        def forward(self, u_TD: torch.Tensor, logits_TN: torch.Tensor, call: Any, weight_ND: Any) -> Routing:
            return Routing(-logits_TN, logits_TN)

    @dataclass(frozen=True, kw_only=True)
    class Says(Config):
        key: ClassVar[str] = "apart"
        router: ClassVar[type[Router]] = Apart
        splits: ClassVar[bool] = True

    assert "apart chooses experts by sampled logits" in str(operator.unfit(Says()))
    silent = Apart(Says(), operator.logits_gate("softmax", 6, 2, 32), None, 0, torch.device("cpu"))
    with pytest.raises(InputError, match="apart chooses experts by other logits"):
        operator.host("0", silent, None, torch.float32)


def test_routing_that_is_not_finite_is_refused() -> None:
    gate = operator.logits_gate("softmax", 6, 2, 32)
    router: Any = vmoer.FullCovariance().router(vmoer.FullCovariance(), gate, None, 0, torch.device("cpu"))
    torch.nn.init.constant_(router.heads.weight, torch.inf)
    with pytest.raises(InputError, match="not finite"):
        operator.host("broken", router, None, torch.float32)
