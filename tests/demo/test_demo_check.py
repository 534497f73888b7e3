"""The embedded weights show what the demo promises. Every bound is a requirement; the values are in the comments."""

import pytest
import torch
from demo_model.check import answer, measure, novelty, random_routing
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

from vmoer.demo import STAGES, model_path
from vmoer.errors import InputError


def load(stage):
    return AutoModelForCausalLM.from_pretrained(model_path(stage)).eval()


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(model_path())


@pytest.fixture(scope="module")
def shown(tokenizer):
    return measure(load("map"), tokenizer)


@pytest.mark.parametrize("stage", STAGES)
def test_the_model(stage, tokenizer):
    model = load(stage)
    config = model.config
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert (config.num_hidden_layers, config.num_local_experts, config.num_experts_per_tok) == (8, 16, 4)
    assert config.max_position_embeddings >= 2048
    assert (config.eos_token_id, config.pad_token_id) == (tokenizer.eos_token_id, tokenizer.pad_token_id)
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id
    assert config.vocab_size == len(tokenizer)


def test_the_files_are_small():
    sizes = [path.stat().st_size for stage in STAGES for path in model_path(stage).iterdir()]
    assert max(sizes) < 4 * 2**20
    assert sum(sizes) < 15e6


def test_the_weights_are_stored_in_half_precision():
    with safe_open(model_path() / "model.safetensors", "pt") as file:
        assert {file.get_slice(name).get_dtype() for name in file.keys()} == {"F16"}  # noqa: SIM118


def test_an_unknown_stage_is_refused():
    with pytest.raises(InputError, match="base, map, map-early"):
        model_path("last")


def test_accuracy(shown):
    assert 0.65 < shown["accuracy"] < 0.90  # 0.746


def test_overconfident(shown):
    assert shown["ECE"] > 3 * shown["ECE noise floor"]  # 0.143, 0.016
    assert shown["confidence"] > shown["accuracy"] + 0.1  # 0.889
    assert shown["output temperature"] > 1.5  # 1.77


def test_routing_matters(shown):
    assert shown["accuracy, random routing"] < shown["accuracy"] - 2 * shown["standard error"]  # 0.389


def test_what_the_text_never_told_is_answered_worse_and_as_confidently(shown):
    assert shown["accuracy, never"] < shown["accuracy, well"] - 0.15  # 0.647, 0.949
    assert shown["confidence, never"] > shown["accuracy, never"] + 0.15  # 0.909
    assert shown["accuracy, noisy relations"] < shown["accuracy, well"] - 0.15  # 0.599


@pytest.mark.parametrize("shift", ["demo-near", "demo-far"])
def test_shifts(shown, shift):
    assert shown[f"AUROC of prompt length, {shift}"] == 0.5
    assert shown[f"AUROC of novelty, {shift}"] > (0.85 if shift == "demo-near" else 0.98)  # 1.000, 1.000


def test_stopping_early_is_better_calibrated(shown, tokenizer):
    early = measure(load("map-early"), tokenizer)
    assert early["NLL"] < shown["NLL"] - 0.1  # 0.782, 1.006
    assert early["ECE"] < shown["ECE"]  # 0.065


def test_stage_1_learns_the_families_the_text_never_mentions(shown, tokenizer):
    base = answer(load("base"), tokenizer, "demo", "test")
    new = [fact.family in ("Weber", "Yilmaz") and not fact.noise for fact in base.facts]
    assert shown["accuracy, new families"] > base.correct[new].mean() + 0.1  # 0.531, 0.231


def test_random_routing_leaves_no_trace(tokenizer):
    model = load("map")
    inputs = torch.arange(256, 268)[None]
    with torch.no_grad():
        before = model(inputs).logits
        with random_routing(model):
            changed = model(inputs).logits
        after = model(inputs).logits
    assert torch.equal(before, after)
    assert not torch.equal(before, changed)


def test_random_routing_draws_experts_uniformly_and_weighs_them_equally():
    """Experts are uniform whatever the token: 7200 choices fall on each of 16 within five standard errors of 1/16."""
    model = load("map")
    router = model.model.layers[3].block_sparse_moe.router
    inputs = torch.randint(256, 400, (100, 18), generator=torch.Generator().manual_seed(0))
    seen = []
    with torch.no_grad(), random_routing(model):
        router.register_forward_hook(
            lambda module, given, out: seen.extend(out)
        )  # last, so it sees what the block sees
        model(inputs)
    (chosen,) = (value for value in seen if not value.is_floating_point())
    (weights,) = (value for value in seen if value.is_floating_point() and value.shape[-1] == 4)
    assert all(len(set(row)) == 4 for row in chosen.tolist())
    share = torch.bincount(chosen.flatten(), minlength=16) / chosen.numel()
    assert (share - 1 / 16).abs().max() < 5 * (1 / 16 * 15 / 16 / chosen.numel()) ** 0.5
    assert torch.allclose(weights, torch.full_like(weights, 0.25), atol=1e-6)


def test_novelty_against_the_definition():
    """One direction seen n times leaves u'u / (1 + n) along it, and u'u across it."""
    train = torch.zeros(8, 10, 3)
    train[:, :, 0] = 1
    states = torch.eye(3).expand(8, 3, 3)
    assert novelty(train, states) == pytest.approx([1 / 11, 1, 1])
