"""Rules against each router class's own forward, run on modified logits; finding, probing, refusing."""

import dataclasses
import importlib
import re
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
import transformers
from torch import nn

import vmoer
from vmoer import gates
from vmoer.gates.table import REFUSED, RULES

_MODELS = Path(transformers.__file__).parent / "models"


def _classes() -> dict[str, str]:
    """Router classes of the installed transformers that a rule is written for, and their modules."""
    found = {}
    for file in sorted(_MODELS.glob("*/modeling_*.py")):
        for name in re.findall(r"^class (\w+)\(", file.read_text(), re.M):
            if name in RULES:
                found[name] = f"transformers.models.{file.parent.name}.{file.stem}"
    return found


CLASSES = _classes()
SMALL = dict(
    hidden_size=32, n_group=2, topk_group=1, topk_method="group_limited_greedy", num_experts=8, num_local_experts=8
)
SMALL |= dict(
    n_routed_experts=8,
    num_experts_per_tok=2,
    moe_num_experts=8,
    moe_k=2,
    moe_topk=2,
    top_k_experts=2,
    rms_norm_eps=1e-6,
)
SMALL |= dict(norm_topk_prob=True, routed_scaling_factor=1.5, zero_expert_num=0, use_expert_bias=True, route_scale=1.2)


def build(name: str) -> tuple[nn.Module, nn.Module]:
    """The class with random weights, eight experts and a correction bias that matters, and a block around it."""
    module = importlib.import_module(CLASSES[name])
    errors = []
    for config_name, config_class in vars(module).items():
        if not (config_name.endswith("Config") and isinstance(config_class, type)) or config_name == "PreTrainedConfig":
            continue
        try:
            config = config_class()
            for key, value in SMALL.items():
                setattr(config, key, value)
            router = getattr(module, name)(config).eval()
            break
        except (AttributeError, TypeError, ValueError) as error:
            errors.append(f"{config_name}: {error}")
    else:
        raise AssertionError(f"cannot build {name}: {errors}")
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for key, p in router.named_parameters():
            scale = 0.02 if "bias" in key else p.shape[-1] ** -0.5
            p.copy_(
                torch.rand(p.shape, generator=generator) + 0.5
                if p.dim() == 1 and "bias" not in key
                else scale * torch.randn(p.shape, generator=generator)
            )
        for key, b in router.named_buffers():
            if "bias" in key:
                b.copy_(0.05 * torch.randn(b.shape, generator=generator))
    block = nn.Module()
    block.expert_bias = block.e_score_correction_bias = 0.05 * torch.randn(8, generator=generator)
    return router, block


@pytest.mark.parametrize("name", CLASSES)
def test_rule_reproduces_the_class(name: str) -> None:
    """`Gate.probe` raises unless our experts and weights equal the router's own on random states."""
    router, block = build(name)
    gate = gates.Gate.probe(gates.FoundRouter("router", 0, router, block, block, RULES[name], ""))
    assert 0 < gate.scoring.k <= gate.num_experts


LINEAR = [n for n in CLASSES if RULES[n].weight and not RULES[n].mixer]


@pytest.mark.parametrize("name", LINEAR)
def test_rule_on_modified_logits(name: str) -> None:
    """The oracle: the class's own forward with its weight set to the identity, fed logits in place of states."""
    router, block = build(name)
    rule = RULES[name]
    gate = gates.Gate.probe(gates.FoundRouter("router", 0, router, block, block, rule, ""))
    modified = 2 * torch.randn(50, gate.num_experts, generator=torch.Generator().manual_seed(3))
    weight = gates.rules.lookup(rule.weight, router)  # type: ignore[arg-type]
    with torch.no_grad():
        weight.set_(torch.eye(gate.num_experts))
    for key in ("hidden_dim", "hidden_size"):
        if hasattr(router, key):
            setattr(router, key, gate.num_experts)
    args = [gates.rules.lookup(n, router, block) for n in gate.arguments]
    with torch.no_grad():
        theirs = gates.call_router(router, modified, args)
        ours, chosen = gate.route(router, theirs, gate.logits(theirs), gate.logits(theirs), gate.bias(router, args, {}))
    torch.testing.assert_close(gate.dense_weights(ours), gate.dense_weights(theirs), atol=1e-6, rtol=1e-5)
    assert torch.equal(chosen.sort(-1).values, gate.experts(theirs).sort(-1).values)


def test_every_router_class_of_transformers_is_known() -> None:
    """No class that looks like a router beside experts is missing from both tables: it would be refused as unknown."""
    known = set(RULES) | set(REFUSED)
    names = set()
    for file in _MODELS.glob("*/modeling_*.py"):
        text = file.read_text()
        if "experts" in text:
            names |= set(
                re.findall(
                    r"^class (\w*(?:TopKRouter|TopkRouter|TextRouter|TokenChoiceRouter|TopKGating))\(", text, re.M
                )
            )
    assert names <= known, sorted(names - known)


def test_unknown_and_refused_routers_are_named() -> None:
    model = tiny.model("granitemoe")

    class NovelRouter(type(gates.find(model)[0].router)):  # type: ignore[misc]
        pass

    gates.find(model)[0].router.__class__ = NovelRouter
    assert "unknown" in gates.find(model)[0].reason
    with pytest.raises(vmoer.errors.AttachError, match=r"NovelRouter.*table\.py"):
        vmoer.attach(model, vmoer.MeanField())
    NovelRouter.__name__ = "DeepseekV4HashRouter"
    with pytest.raises(vmoer.errors.AttachError, match="token id"):
        vmoer.attach(model, vmoer.MeanField())
    vmoer.attach(model, vmoer.MeanField(layers=[1]))


def test_a_block_that_routes_by_itself_is_named() -> None:
    """Jamba before transformers 5.18: a linear layer called router, and the choice made in the block."""
    model = tiny.model("jamba")
    found = gates.find(model)[0]
    found.block.router = nn.Linear(32, 6)
    assert "the block around it chooses" in gates.find(model)[0].reason


def test_both_return_orders(monkeypatch: pytest.MonkeyPatch) -> None:
    """Granite returned (indices, weights, logits) before transformers 5.21: a router of that order routes the same."""
    plain, batch = tiny.model("granitemoe"), tiny.batch()
    order = gates.Gate.probe(gates.find(plain)[0]).places
    forward = type(gates.find(plain)[0].router).forward

    def other(self: Any, hidden_states: torch.Tensor) -> Any:
        return tuple(reversed(forward(self, hidden_states)))

    def block_forward(self: Any, layer_input: torch.Tensor) -> torch.Tensor:
        states = layer_input.reshape(-1, layer_input.shape[-1])
        out = tuple(reversed(self.router(states)))
        return self.experts(states, out[order["indices"]], out[order["weights"]]).view_as(layer_input)

    def run(reverse: bool) -> tuple[torch.Tensor, dict[str, int]]:
        model = tiny.model("granitemoe")
        with monkeypatch.context() as patch:
            if reverse:
                patch.setattr(type(gates.find(model)[0].router), "forward", other)
                patch.setattr(type(gates.find(model)[0].block), "forward", block_forward)
            vmoer.attach(model, vmoer.FullCovariance())
            with torch.no_grad():
                return model(**batch).logits, model.model.layers[0].block_sparse_moe.router.vmoer_gate.places

    (straight, places), (reverse, reversed_places) = run(False), run(True)
    assert places != reversed_places
    assert torch.equal(straight, reverse)


def test_a_wrong_rule_is_caught_at_attach() -> None:
    """If transformers changed a class's rule the probe says so, and the model is untouched."""
    found = gates.find(tiny.model("mixtral"))[0]
    with pytest.raises(vmoer.errors.AttachError, match="does not reproduce"):
        gates.Gate.probe(dataclasses.replace(found, rule=gates.Rule(normalise=False)))
