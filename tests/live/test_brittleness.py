"""Brittleness and layer choice, against whole passes, a perturbation done by hand, and the paper's placements."""

import copy
import math
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import numpy as np
import pytest
import tiny
import torch
import transformers
from torch import Tensor

import vmoer
from vmoer.errors import AttachError, InputError
from vmoer.gates import Gate, find
from vmoer.live.attach import attachment_of
from vmoer.live.brittleness import GAMMAS, Brittleness, brittleness, parse_layers, select_layers
from vmoer.numerics import noise

Enter = Callable[[int, Tensor], Tensor]
BATCHES = [tiny.batch((12, 10, 8)), tiny.batch((7, 9), seed=1)]


@pytest.fixture
def model() -> Any:
    return tiny.model("granitemoe", num_hidden_layers=3)


def run(model: Any, batch: dict[str, Tensor], enter: Enter) -> dict[int, Tensor]:
    """The experts of each layer, [B, T, K], in one whole pass; `enter(layer, x)` says what goes into a layer for x."""
    experts: dict[int, Tensor] = {}

    def before(layer: int, _: Any, args: Any, kwargs: Any) -> Any:
        if args:
            return (enter(layer, args[0]), *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": enter(layer, kwargs["hidden_states"])}

    def after(layer: int, gate: Gate, _: Any, args: Any, out: Any) -> None:
        experts[layer] = gate.experts(out).view(*batch["input_ids"].shape, -1)

    with ExitStack() as hooks, torch.no_grad():
        for one in find(model):
            block = model.get_submodule(f"{one.path.partition(f'.{one.layer}.')[0]}.{one.layer}")
            gate = getattr(one.router, "vmoer_gate", None) or Gate.probe(one)
            hooks.enter_context(block.register_forward_pre_hook(partial(before, one.layer), with_kwargs=True))
            hooks.enter_context(one.router.register_forward_hook(partial(after, one.layer, gate)))
        model(**batch, use_cache=False)
    return experts


def whole_passes(model: Any, gammas: Sequence[float] = GAMMAS, seed: int = 0) -> dict[tuple[int, int], tuple[Any, Any]]:
    """The experts without noise [T, K] and at each level [G, T, K] by batch and layer: a whole pass for each of them."""
    states: dict[tuple[int, int], Tensor] = {}

    def keep(number: int, layer: int, x: Tensor) -> Tensor:
        states[number, layer] = x
        return x

    clean = [run(model, batch, partial(keep, number)) for number, batch in enumerate(BATCHES)]
    masks = [batch["attention_mask"].bool() for batch in BATCHES]
    found, first_row = {}, 0
    for number, (batch, mask) in enumerate(zip(BATCHES, masks, strict=True)):
        rows, places = first_row + torch.arange(len(mask)).view(-1, 1, 1), (mask.long().cumsum(1) - 1).unsqueeze(-1)
        first_row += len(mask)
        for layer in clean[number]:
            x = states[number, layer]
            unit = noise.normal(seed, layer, rows, places, torch.arange(x[0, 0].numel()))
            unit = torch.where(mask.unsqueeze(-1), unit, 0).view(x.shape)
            norms = [states[i, layer][m].flatten(1).float().norm(dim=-1).double() for i, m in enumerate(masks)]
            sds = [gamma * torch.cat(norms).mean().item() for gamma in gammas]

            def moved(
                sd: float, at: int, now: Tensor, x: Tensor = x, unit: Tensor = unit, layer: int = layer
            ) -> Tensor:
                return (x + sd * unit).to(x.dtype) if at == layer else now

            noisy = [run(model, batch, partial(moved, sd))[layer][mask] for sd in sds]
            found[number, layer] = clean[number][layer][mask].numpy(), torch.stack(noisy).numpy()
    return found


def overlaps(experts: dict[tuple[int, int], tuple[Any, Any]]) -> Any:
    """J by Python's sets, [L, G, T]."""
    by_layer: dict[int, list[Any]] = {}
    for (_, layer), (clean, noisy) in sorted(experts.items()):
        sets = [{*row} for row in clean.tolist()]
        values = [[len(a & {*b}) / len(a | {*b}) for a, b in zip(sets, level, strict=True)] for level in noisy.tolist()]
        by_layer.setdefault(layer, []).append(values)
    return np.array([np.concatenate(parts, axis=1) for _, parts in sorted(by_layer.items())])


def assert_same(a: Brittleness, b: Brittleness) -> None:
    assert (a.layers, a.gammas, a.norms_L, a.hidden_size) == (b.layers, b.gammas, b.norms_L, b.hidden_size)
    np.testing.assert_array_equal(a.jaccard_LGT, b.jaccard_LGT)
    np.testing.assert_array_equal(a.rows_T, b.rows_T)


# -- the measurement ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("attached", [False, True], ids=["plain", "vglr-fc"])
@pytest.mark.parametrize("name", tiny.ARCHITECTURES)
def test_it_equals_whole_passes(name: str, attached: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: the whole model run for each layer and level; the expert sets themselves are compared, bit for bit."""
    model = tiny.model(name)
    if attached:
        vmoer.attach(model, vmoer.FullCovariance())
        for parameter in (p for p in model.parameters() if p.requires_grad):
            parameter.data.normal_(0, 0.3)
    compared: list[tuple[np.ndarray, np.ndarray]] = []
    original = vmoer.live.brittleness.jaccard

    def spy(a: np.ndarray, b: np.ndarray) -> Any:
        compared.append((a.copy(), b.copy()))
        return original(a, b)

    monkeypatch.setattr(vmoer.live.brittleness, "jaccard", spy)
    result = brittleness(model, BATCHES)
    expected = whole_passes(model)
    assert len(compared) == len(expected) == len(BATCHES) * len(result.layers)
    for (clean, noisy), (clean_whole, noisy_whole) in zip(compared, expected.values(), strict=True):
        np.testing.assert_array_equal(clean, np.broadcast_to(clean_whole, noisy_whole.shape))
        np.testing.assert_array_equal(noisy, noisy_whole)
    np.testing.assert_allclose(result.jaccard_LGT, overlaps(expected), rtol=1e-6)
    means = result.mean_LG
    assert means.shape == (len(find(model)), len(GAMMAS))
    assert (means[:, -1] < means[:, 0]).all()
    assert means[:, -1].max() < 0.95, "the perturbation must reach the routers"


@pytest.mark.parametrize("config", [vmoer.VariationalTemperature(), vmoer.MCDropout(layers=[1])], ids=lambda c: c.key)
def test_it_equals_whole_passes_for_noise_keyed_by_position(model: Any, config: Any) -> None:
    vmoer.attach(model, config)
    np.testing.assert_allclose(brittleness(model, BATCHES).jaccard_LGT, overlaps(whole_passes(model)), rtol=1e-6)


def test_one_layer_by_hand(model: Any) -> None:
    """Oracle: the states from output_hidden_states, noise added here, the layer's own modules run one by one."""
    batch, gamma, seed, layer = BATCHES[0], 0.02, 5, 1
    mask = batch["attention_mask"].bool()
    block, inner = model.model.layers[layer], model.model
    with torch.no_grad():
        states = model(**batch, output_hidden_states=True).hidden_states[layer]
        sd = gamma * states[mask].norm(dim=-1).mean()
        rows, tokens = mask.shape
        unit = noise.normal(
            seed,
            layer,
            torch.arange(rows).view(-1, 1, 1),
            torch.arange(tokens).view(1, -1, 1),
            torch.arange(states.shape[-1]),
        )
        positions = torch.arange(tokens).unsqueeze(0)
        causal = torch.ones(tokens, tokens, dtype=torch.bool).tril() & mask.unsqueeze(1)
        bias = torch.zeros(rows, 1, tokens, tokens).masked_fill(~causal.unsqueeze(1), torch.finfo(torch.float32).min)

        def experts(x: Tensor) -> Tensor:
            attention, _ = block.self_attn(
                hidden_states=block.input_layernorm(x),
                attention_mask=bias,
                position_embeddings=inner.rotary_emb(x, positions),
            )
            x = block.post_attention_layernorm(x + attention * block.residual_multiplier)
            router: Any = next(found for found in find(model) if found.layer == layer).router
            logits = x @ router.weight.T
            return logits.topk(2, -1).indices[mask]

        clean, noisy = experts(states).tolist(), experts(states + sd * unit).tolist()
    expected = [len({*a} & {*b}) / len({*a} | {*b}) for a, b in zip(clean, noisy, strict=True)]
    result = brittleness(model, [batch], gammas=[gamma], layers=[layer], seed=seed)
    np.testing.assert_allclose(result.at(gamma)[0], expected, rtol=1e-6)
    assert min(expected) < 1
    assert result.norms_L[0] == pytest.approx(sd.item() / gamma, rel=1e-6)
    assert result.relative == (pytest.approx(gamma * math.sqrt(states.shape[-1])),)  # type: ignore[comparison-overlap]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_noise_changes_nothing(model: Any, dtype: torch.dtype) -> None:
    result = brittleness(model.to(dtype), BATCHES, gammas=[0, 0.05])
    assert (result.at(0) == 1).all()
    assert (result.at(0.05) < 1).any()


def test_batching_does_not_matter(model: Any) -> None:
    """Oracle: the same rows in one batch, one by one, and as a generator."""
    whole = tiny.batch((10, 8, 6, 10, 8, 6))
    singly = [{name: value[row : row + 1] for name, value in whole.items()} for row in range(6)]
    together, apart = brittleness(model, [whole]), brittleness(model, (batch for batch in singly))
    np.testing.assert_array_equal(together.jaccard_LGT, apart.jaccard_LGT)
    np.testing.assert_array_equal(together.rows_T, apart.rows_T)
    np.testing.assert_allclose(together.norms_L, apart.norms_L, rtol=1e-6)


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_is_ignored(model: Any, side: str) -> None:
    """Oracle: the rows without their padding; what stands at padded places must not matter."""
    batch = tiny.batch((12, 10, 8), side)
    rows = [
        {"input_ids": ids[mask.bool()].unsqueeze(0)}
        for ids, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True)
    ]
    bare, result = brittleness(model, rows), brittleness(model, [batch])
    np.testing.assert_array_equal(result.jaccard_LGT, bare.jaccard_LGT)
    assert result.jaccard_LGT.shape[-1] == int(batch["attention_mask"].sum())
    batch["input_ids"] = torch.where(batch["attention_mask"].bool(), batch["input_ids"], 7)
    np.testing.assert_array_equal(brittleness(model, [batch]).jaccard_LGT, result.jaccard_LGT)


def test_seed_and_layer_key_the_noise(model: Any) -> None:
    first, again, other = (brittleness(model, BATCHES, seed=seed) for seed in (0, 0, 1))
    assert_same(first, again)
    assert (first.jaccard_LGT != other.jaccard_LGT).any()
    np.testing.assert_array_equal(
        brittleness(model, BATCHES, layers=[2]).jaccard_LGT[0],
        first.jaccard_LGT[2],
        err_msg="a layer's numbers must not depend on which others are measured",
    )


@pytest.mark.parametrize("attached", [False, True])
def test_model_is_left_as_it_was(model: Any, attached: bool) -> None:
    if attached:
        vmoer.attach(model, vmoer.FullCovariance())
    model.train()
    model.model.layers[1].eval()
    modes = [module.training for module in model.modules()]
    hooks = [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()]
    state = copy.deepcopy(model.state_dict())
    grads = [p.requires_grad for p in model.parameters()]
    brittleness(model, BATCHES[:1], gammas=[0.01])
    calls: list[int] = []

    def fail(*_: Any) -> None:
        calls.append(1)
        if len(calls) == 2:
            raise KeyError("on the way")

    with model.model.layers[1].self_attn.register_forward_hook(fail), pytest.raises(KeyError, match="on the way"):
        brittleness(model, BATCHES[:1], gammas=[0.01])
    assert [module.training for module in model.modules()] == modes
    assert [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()] == hooks
    assert [p.requires_grad for p in model.parameters()] == grads
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())


def test_outputs_are_the_same_afterwards(model: Any) -> None:
    with torch.no_grad():
        before = model(**BATCHES[0]).logits
        brittleness(model, BATCHES)
        assert torch.equal(model(**BATCHES[0]).logits, before)


def test_record_around_it_holds_nothing_perturbed(model: Any) -> None:
    vmoer.attach(model, vmoer.FullCovariance())
    with vmoer.record(model) as rec, torch.no_grad():
        brittleness(model, BATCHES, gammas=[0.05])
        assert not rec.passes
        model(**BATCHES[0])
    assert rec.experts.shape[0] == 3
    assert attachment_of(model) is not None


def test_experts_run_in_clean_passes_only(model: Any) -> None:
    """Oracle: a count of calls. One pass for the norms and one to measure, whatever the number of levels."""
    calls = []
    for layer in model.model.layers:
        layer.block_sparse_moe.experts.register_forward_hook(lambda *_: calls.append(1))
    brittleness(model, BATCHES)
    assert len(calls) == 2 * len(BATCHES) * 3


@pytest.mark.slow
def test_it_takes_a_quarter_of_the_time_of_whole_passes_at_most() -> None:
    """Processor time on one thread: what a clock on the wall shows when nothing else runs."""
    model, gammas = tiny.model("granitemoe", num_hidden_layers=16), GAMMAS[::3]

    def seconds(measure: Callable[[], object]) -> float:
        start = time.process_time()
        measure()
        return time.process_time() - start

    seconds(lambda: brittleness(model, BATCHES, gammas=gammas))
    ours = statistics.median(seconds(lambda: brittleness(model, BATCHES, gammas=gammas)) for _ in range(3))
    ratio = ours / statistics.median(seconds(lambda: whole_passes(model, gammas)) for _ in range(3))
    print(f"brittleness / whole passes: {ratio:.3f}")
    assert ratio <= 0.25


# -- what comes of it --------------------------------------------------------------------------------------------------


def by_hand(jaccard_LGT: Any, rows_T: Any, gammas: tuple[float, ...] = (0.01,)) -> Brittleness:
    values = np.asarray(jaccard_LGT, dtype=np.float32)
    layers = tuple(range(2, 2 + len(values)))
    return Brittleness(layers, gammas, values, np.asarray(rows_T), (1.0,) * len(layers), 16, 0, {})


def test_ranking_puts_the_lower_index_first_in_a_tie() -> None:
    result = by_hand([[[1.0, 0.5]], [[0.0, 0.5]], [[0.5, 0.0]], [[1.0, 0.0]]], [0, 1])
    assert result.ranking() == [3, 4, 5, 2]
    with pytest.raises(InputError, match=r"gamma=0\.5 was not measured"):
        result.ranking(0.5)


# -- the choice --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def deep() -> Any:
    """32 layers, as the model of the paper's placement study has."""
    return tiny.model("granitemoe", num_hidden_layers=32)


@pytest.mark.parametrize(
    ("strategy", "expected"),
    [("first", range(10)), ("middle", range(11, 21)), ("last", range(22, 32)), ("all", range(32))],
)
def test_placements_are_those_of_the_paper(deep: Any, strategy: str, expected: range) -> None:
    assert select_layers(deep, strategy=strategy) == list(expected)


def test_susceptible_takes_the_lowest_means() -> None:
    """Oracle: numpy's argsort of the mean similarities from whole passes."""
    model = tiny.model("granitemoe", num_hidden_layers=6)
    mean = overlaps(whole_passes(model, [0.02], seed=3)).mean(-1)[:, 0]
    chosen = select_layers(model, BATCHES, n=2, gamma=0.02, seed=3)
    assert chosen == sorted(np.argsort(mean, kind="stable")[:2].tolist())
    vmoer.attach(model, vmoer.FullCovariance(layers=chosen))


def test_only_moe_layers_count() -> None:
    model = tiny.model("deepseek_v1")  # its first layer is dense
    assert select_layers(model, strategy="all") == [1, 2]
    assert select_layers(model, strategy="first", n=1) == [1]
    assert brittleness(model, BATCHES, gammas=[0.01]).layers == (1, 2)


def test_a_router_that_cannot_be_read_is_named(model: Any) -> None:
    unknown = find(model)[0].router
    unknown.__class__ = type("UnheardOfRouter", (type(unknown),), {})
    result = brittleness(model, BATCHES, gammas=[0.01])
    assert result.layers == (1, 2)
    assert "UnheardOfRouter" in result.left_out[0]
    assert select_layers(model, strategy="all") == [1, 2]
    with pytest.raises(InputError, match="UnheardOfRouter"):
        select_layers(model, strategy=[0])
    with pytest.raises(InputError, match="2 MoE layers whose router can be attached"):
        select_layers(model, strategy="first", n=3)


@pytest.mark.parametrize("strategy", [[2, 0], (0, 2), "2,0", " 0 , 2 "])
def test_explicit_layers(model: Any, strategy: Any) -> None:
    assert select_layers(model, strategy=strategy) == [0, 2]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "n=10 layers were asked for, but this model has 3 MoE layers"),
        ({"n": 2}, "needs batches"),
        ({"n": 0, "strategy": "first"}, "n=0"),
        ({"strategy": "best"}, "choose one of susceptible, first, middle, last, all"),
        ({"strategy": "first:2"}, "choose one of"),
        ({"strategy": [0, 7]}, r"layer 7 has no MoE router: those that have are \[0, 1, 2\]"),
        ({"strategy": "0,0"}, "distinct"),
        ({"strategy": []}, "not empty"),
    ],
)
def test_bad_choices(model: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        select_layers(model, **options)


@pytest.mark.parametrize(
    ("batches", "options", "message"),
    [
        ([], {}, "no batches"),
        ([{"labels": torch.ones(1, 2)}], {}, "input_ids"),
        ([{"input_ids": torch.ones(1, 2).long(), "attention_mask": torch.zeros(1, 2)}], {}, "attention_mask"),
        ([{"input_ids": torch.ones(1, 2).long(), "attention_mask": torch.ones(1, 3)}], {}, r"shape \[1, 2\]"),
        (BATCHES, {"gammas": []}, "gammas"),
        (BATCHES, {"gammas": [-0.1]}, "gammas"),
        (BATCHES, {"gammas": [math.nan]}, "gammas"),
        (BATCHES, {"layers": [3]}, "layer 3 has no MoE router"),
    ],
)
def test_bad_measurements(model: Any, batches: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        brittleness(model, batches, **options)


def test_states_that_are_not_finite(model: Any) -> None:
    model.model.layers[0].self_attn.o_proj.weight.data.fill_(math.inf)
    with pytest.raises(vmoer.errors.RunError, match="entering layer 1 are not finite"):
        brittleness(model, BATCHES)


def test_dense_model() -> None:
    dense = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1
        )
    )
    with pytest.raises(AttachError, match="no MoE router"):
        select_layers(dense, strategy="all")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("susceptible:10", ("susceptible", 10)),
        ("susceptible", ("susceptible", 10)),
        ("first:4", ("first", 4)),
        ("all", ("all", 10)),
        ("0,3,5", ([0, 3, 5], 10)),
        ("7", ([7], 10)),
    ],
)
def test_parse(text: str, expected: Any) -> None:
    assert parse_layers(text) == expected


@pytest.mark.parametrize(
    "text", ["", "best:3", "first:", "first:0", "first:-1", "first:x", "all:3", "1,,2", "1;2", "-1"]
)
def test_parse_refuses(text: str) -> None:
    with pytest.raises(InputError, match="layers"):
        parse_layers(text)


def test_what_an_attached_router_selects_is_what_counts(model: Any) -> None:
    plain = brittleness(model, BATCHES, gammas=[0.05])
    vmoer.attach(model, vmoer.MeanField(layers=[2]))
    for parameter in (p for p in model.parameters() if p.requires_grad):
        parameter.data.normal_(0, 1.0)
    moved = brittleness(model, BATCHES, gammas=[0.05])
    np.testing.assert_array_equal(plain.jaccard_LGT[:2], moved.jaccard_LGT[:2])
    assert (plain.jaccard_LGT[2] != moved.jaccard_LGT[2]).any()
