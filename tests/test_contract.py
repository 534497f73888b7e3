"""Every method on every architecture in every mode. The oracle is the model itself: before attach, run by hand, or run twice.

`prepare` attaches a method with something to be uncertain about: heads that are not zero, snapshots, statistics.
"""

import copy
import pickle
from typing import Any

import pytest
import tiny
import torch
from safetensors import safe_open
from torch import Tensor

import vmoer
from vmoer import gates
from vmoer.inference.averaging import shares_prompts
from vmoer.live.attach import routers_of, sampled, switched_off

METHODS = tuple(vmoer.methods())
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
UNTRAINED = ("map", "temp-scale", "laplace")

architecture = pytest.mark.parametrize("name", tiny.ARCHITECTURES)
method = pytest.mark.parametrize("key", METHODS)
dtypes = pytest.mark.parametrize("dtype", DTYPES)


def prepare(name: str, key: str, dtype: str = "float32", **settings: Any) -> Any:
    model = tiny.model(name, DTYPES[dtype])
    vmoer.attach(model, vmoer.methods()[key](**settings))
    generator = torch.Generator().manual_seed(5)
    for router in routers_of(model).values():
        with torch.no_grad():
            for p in router.parameters():
                p.add_(0.2 * p.shape[-1] ** -0.5 * torch.randn(p.shape, generator=generator))
            for _ in range(3 * (key == "swag")):
                router.collect()
                router.delta.add_(0.05 * torch.randn(router.delta.shape, generator=generator))
    if key == "laplace":
        vmoer.fit(model, [tiny.batch()])
    return model


def logits(model: Any, batch: dict[str, Tensor], **kwargs: Any) -> Tensor:
    with torch.no_grad():
        out = model(**batch, **kwargs).logits
    return out[batch["attention_mask"].bool()]


@architecture
@dtypes
@pytest.mark.parametrize(
    ("key", "sampling"), [(k, s) for k in METHODS for s in ("fixed", "mc") if (k, s) != ("map", "mc")]
)
def test_inference(name: str, key: str, dtype: str, sampling: str) -> None:
    """Switched off it is the model; switched on it routes otherwise (map apart); detached it is the model again."""
    plain, batch = tiny.model(name, DTYPES[dtype]), tiny.batch()
    before, keys = logits(plain, batch), list(plain.state_dict())
    # PyTorch's convolution rounds otherwise where weights need no gradient (jamba), so a frozen twin is the oracle
    frozen = logits(tiny.model(name, DTYPES[dtype]).requires_grad_(False), batch)
    model = prepare(name, key, dtype, **({} if key == "map" else {"sampling": sampling}))

    with vmoer.record(model, signals="all", kl=True) as rec:
        on = logits(model, batch)
    assert torch.isfinite(on).all()
    routers = routers_of(model)
    shape = (len(routers), *batch["input_ids"].shape)
    assert rec.experts.shape == (*shape, next(iter(routers.values())).gate.scoring.k)
    assert all(value.shape == shape and torch.isfinite(value).all() for value in rec.signals.values())
    assert rec.kl() >= -1e-4
    assert torch.equal(on, frozen) == (key == "map")
    assert torch.equal(logits(model, batch), on) == (sampling == "fixed")
    with switched_off(model):
        assert torch.equal(logits(model, batch), frozen)

    prompt = {k: v[:2, :6] for k, v in batch.items()}
    out = model.generate(**prompt, max_new_tokens=4, do_sample=False, use_cache=True, eos_token_id=None)
    assert out.shape == (2, 10)

    theirs, ours = (m(**batch, output_router_logits=True) for m in (plain, model))
    for a, b in zip(
        getattr(theirs, "router_logits", None) or (), getattr(ours, "router_logits", None) or (), strict=True
    ):
        assert a.shape == b.shape
        assert a.dtype == b.dtype

    vmoer.detach(model)
    assert torch.equal(logits(model, batch), before)
    assert list(model.state_dict()) == keys
    assert [p.requires_grad for p in model.parameters()] == [p.requires_grad for p in plain.parameters()]
    assert [type(m) for m in model.modules()] == [type(m) for m in plain.modules()]


@architecture
@method
@dtypes
def test_copies_and_files(name: str, key: str, dtype: str, tmp_path: Any) -> None:
    """A deep copy, a pickle and a saved and loaded router answer as the original; the base alone goes to save_pretrained."""
    model, batch = prepare(name, key, dtype), tiny.batch()
    on = logits(model, batch)
    assert torch.equal(logits(copy.deepcopy(model), batch), on)
    assert torch.equal(logits(pickle.loads(pickle.dumps(model)), batch), on)

    model.save_pretrained(tmp_path / "attached")
    tiny.model(name, DTYPES[dtype]).save_pretrained(tmp_path / "plain")
    names = []
    for folder in ("attached", "plain"):
        with safe_open(tmp_path / folder / "model.safetensors", "pt") as file:
            names.append(set(file.keys()))
    assert names[0] == names[1]

    vmoer.save(model, tmp_path / "run")
    assert torch.equal(logits(vmoer.load(tiny.model(name, DTYPES[dtype]), tmp_path / "run"), batch), on)


def train_step(
    model: Any, batch: dict[str, Tensor], step: int, first_row: int = 0, rows: int | None = None, tokens: Any = None
):
    """Loss on the last token of each row, as a sum over `rows`, and the KL."""
    from vmoer.live.inputs import last_positions

    target = torch.arange(first_row, first_row + len(batch["input_ids"])) % 7 + 3
    with vmoer.record(model, step=step, first_row=first_row) as rec:
        last = model(**batch).logits[torch.arange(len(target)), last_positions(batch)]
        loss = torch.nn.functional.cross_entropy(last.float(), target, reduction="sum") / (rows or len(target))
        return loss + rec.kl(tokens)


def gradients(model: Any) -> dict[str, Tensor]:
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


@architecture
@method
@dtypes
def test_training(name: str, key: str, dtype: str) -> None:
    """Two steps reach every new parameter and no old one; checkpointing changes no gradient, the KL's among them."""
    model, batch = prepare(name, key, dtype).train(), tiny.batch()
    ours = {n for n, p in model.named_parameters() if p.requires_grad}
    assert all(".vmoer." in n for n in ours)
    if key in UNTRAINED:
        assert not ours
        return
    twin = copy.deepcopy(model)
    twin.gradient_checkpointing_enable()
    for step in range(2):
        for m in (model, twin):
            m.zero_grad()
            train_step(m, batch, step).backward()
        grads, again = gradients(model), gradients(twin)
        assert grads.keys() == again.keys() == ours
        assert all(torch.equal(grads[n], again[n]) for n in ours)
        with torch.no_grad():
            for m in (model, twin):
                for p in m.parameters():
                    if p.grad is not None:
                        p -= 0.01 * p.grad
    assert all(g.abs().sum() > 0 for g in grads.values())


@architecture
@pytest.mark.parametrize("key", [k for k in METHODS if k not in UNTRAINED])
@dtypes
def test_accumulation(name: str, key: str, dtype: str) -> None:
    """Four batches of four rows give the gradient of one batch of sixteen: noise is keyed by the row, the KL by tokens."""
    model = prepare(name, key, dtype).train()
    whole = tiny.batch(tuple(5 + (3 * i) % 8 for i in range(16)))
    train_step(model, whole, step=3).backward()
    once = gradients(model)
    model.zero_grad()
    tokens = whole["attention_mask"].sum()
    for i in range(4):
        part = {k: v[4 * i : 4 * i + 4] for k, v in whole.items()}
        train_step(model, part, step=3, first_row=4 * i, rows=16, tokens=tokens).backward()
    # in bfloat16 the experts' products round by the shape of the batch
    tolerance = 1e-4 if dtype == "float32" else 0.1
    for n, g in gradients(model).items():
        assert (g - once[n]).norm() <= tolerance * once[n].norm() + 1e-7, n


@architecture
@pytest.mark.parametrize("key", [k for k in METHODS if k != "map"])
def test_vanishing_uncertainty(name: str, key: str) -> None:
    """With variance or temperature at zero the model's own experts come back, with its own weights to 1e-6."""
    settings: dict[str, dict[str, Any]] = {
        "temp-scale": {"temperature": 0.0},
        "mcdr": {"dropout": 0.0},
        "vtsr": {"t_min": 1e-6},
        **{key: {"prior_scale": 1e-6} for key in ("vglr-mf", "vglr-fc", "vglr-lr")},
    }
    model, batch = tiny.model(name), tiny.batch()
    vmoer.attach(model, vmoer.methods()[key](**settings.get(key, {})))
    if key == "laplace":
        vmoer.fit(model, [batch], damping=1e14)
    for router in routers_of(model).values():
        with torch.no_grad():
            for p in router.parameters():
                p.zero_()
            if key == "vtsr":
                router.head.bias.fill_(-40.0)  # T at its lower bound
    first = next(m for m in model.modules() if hasattr(m, "vmoer_gate"))
    gate = first.vmoer_gate
    states = gates.probe_states(first, gates.router_weight(first, gate))
    args = [gates.rules.lookup(n, first) for n in gate.arguments]
    on = gates.call_router(first, states, args)
    with switched_off(model):
        off = gates.call_router(first, states, args)
        assert torch.equal(gate.experts(on).sort(-1).values, gate.experts(off).sort(-1).values)
        if key == "vtsr":  # its weights come from l / T: those of the model's own router with its logits divided by T
            temperature = first.vmoer.temperature(states)
            assert temperature.max() < 1e-5
            return
    torch.testing.assert_close(gate.dense_weights(on), gate.dense_weights(off), atol=1e-6, rtol=0)


@architecture
def test_vtsr_weights_are_the_models_own_at_l_over_t(name: str) -> None:
    """At T = 1 and T = 2: the chosen experts carry the weights the model's own rule gives them on l / T."""
    for temperature in (1.0, 2.0):
        model = tiny.model(name)
        vmoer.attach(model, vmoer.VariationalTemperature(t_max=10.0))
        first = next(m for m in model.modules() if hasattr(m, "vmoer_gate"))
        gate, router = first.vmoer_gate, first.vmoer
        if temperature != 1.0:
            low, a = router.config.t_min, (1 - router.config.t_min) / (router.config.t_max - 1)
            ratio = (temperature - low) / (1 - low)
            s = torch.tensor(ratio / (1 + a - a * ratio)) * torch.nn.functional.softplus(torch.zeros(()))
            with torch.no_grad():
                router.head.bias.copy_(torch.log(torch.expm1(s)))
        states = gates.probe_states(first, gates.router_weight(first, gate))
        on = gates.call_router(first, states, [])
        assert torch.allclose(router.temperature(states), torch.tensor(temperature), atol=1e-6)
        with switched_off(model):
            own = gate.logits(gates.call_router(first, states, []))
        chosen = gate.experts(on) if gate.scoring.rule.returns == "topk" else gate.dense_weights(on).topk(2).indices
        weights = gate.scoring.weigh(own / temperature, chosen, first)
        torch.testing.assert_close(gate.dense_weights(on).gather(1, chosen), weights, atol=1e-6, rtol=0)


@architecture
@method
def test_routing_is_a_function_of_the_input(name: str, key: str) -> None:
    """The same prompt alone, in a batch, padded on either side, with a cache or without, twice: the same experts."""
    model = prepare(name, key)
    lengths = (9, 6, 11)
    right, left = tiny.batch(lengths), tiny.batch(lengths, side="left")

    def experts(inputs: dict[str, Tensor], **kwargs: Any) -> Tensor:
        with vmoer.record(model) as rec, torch.no_grad():
            model(**inputs, **kwargs)
        return rec.experts.sort(-1).values

    together = experts(right)
    assert torch.equal(experts(right), together)
    positions = (left["attention_mask"].cumsum(-1) - 1).clamp_min(0)
    from_left = experts(left, position_ids=positions)
    for row, n in enumerate(lengths):
        ids = right["input_ids"][row : row + 1, :n]
        assert torch.equal(experts({"input_ids": ids})[:, 0], together[:, row, :n])
        assert torch.equal(from_left[:, row, -n:], together[:, row, :n])
    with vmoer.record(model) as rec, torch.no_grad():
        cache = model(input_ids=right["input_ids"][:1, :6], use_cache=True).past_key_values
        for i in range(6, 9):
            model(input_ids=right["input_ids"][:1, i : i + 1], past_key_values=cache, use_cache=True)
    assert torch.equal(rec.experts.sort(-1).values[:, 0], together[:, 0, :9])


class LastTokenSampled(torch.nn.Module):
    """A router that averages everywhere but at the last position of each row, where it draws the pass's sample."""

    def __init__(self, inner: Any, lengths: Tensor) -> None:
        super().__init__()
        self.inner, self.lengths = inner, lengths
        self.gate, self.config, self.fitted, self.needs_fit = inner.gate, inner.config, inner.fitted, inner.needs_fit
        self.replaces, self.reads_narrow = inner.replaces, inner.reads_narrow
        self.silent, self.repeats = inner.silent, False

    def forward(self, u: Tensor, own: Tensor, call: Any, weight: Any) -> Any:
        import dataclasses

        drawn = self.inner(u, own, call, weight)
        averaged = self.inner(u, own, dataclasses.replace(call, passes_T=None), weight)
        if drawn is None:
            return None
        last = (call.positions_T == self.lengths.repeat_interleave(len(u) // len(self.lengths)) - 1).unsqueeze(-1)
        select = torch.where(last, drawn.select_TN, averaged.select_TN)
        weigh = torch.where(last, drawn.weight_TN, averaged.weight_TN)
        return dataclasses.replace(averaged, select_TN=select, weight_TN=weigh)


@architecture
@method
def test_answer_and_full_averaging(name: str, key: str) -> None:
    """answer: equals M passes over the whole prompt that differ in the last token's routing alone; full: M passes by hand."""
    model, passes = prepare(name, key), 3
    batch = tiny.batch((7, 7), side="left")
    calls = []
    handle = gates.find(model)[0].decoder.register_forward_pre_hook(lambda *a: calls.append(1))
    answer = vmoer.predict(model, batch, averaging="answer", passes=passes)
    handle.remove()
    assert len(calls) == (1 if shares_prompts(model) else 2)

    by_hand = []
    for number in range(passes):
        with sampled(model, number), torch.no_grad():
            by_hand.append(torch.log_softmax(model(**batch).logits[:, -1], -1))
    full = torch.stack(by_hand).logsumexp(0) - torch.tensor(float(passes)).log()
    torch.testing.assert_close(vmoer.predict(model, batch, averaging="full", passes=passes), full, atol=1e-5, rtol=0)

    for module in model.modules():
        if hasattr(module, "vmoer_gate"):
            module.vmoer = LastTokenSampled(module.vmoer, batch["attention_mask"].sum(-1))
    expected = []
    for number in range(passes):
        with sampled(model, number), torch.no_grad():
            expected.append(torch.log_softmax(model(**batch).logits[:, -1], -1))
    expected_mean = torch.stack(expected).logsumexp(0) - torch.tensor(float(passes)).log()
    torch.testing.assert_close(answer, expected_mean, atol=1e-4, rtol=0)
