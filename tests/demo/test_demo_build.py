"""A build of a few steps runs through every stage, and gives the same weights twice."""

import torch
from demo_model.build import Balance, Recipe, build_base, build_map, new_model
from demo_model.tokenizer import build_tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from vmoer.demo import STAGES

SHORT = Recipe(steps=2, questions=8, statements=8, epochs=1, stage1_batch=1000)


def test_a_short_build(tmp_path):
    for run in ("one", "two"):
        build_base(tmp_path / run, SHORT)
    build_map(tmp_path / "one", SHORT)
    first, second = (AutoModelForCausalLM.from_pretrained(tmp_path / run / "base") for run in ("one", "two"))
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
    for stage in STAGES:
        assert AutoTokenizer.from_pretrained(tmp_path / "one" / stage)("heron")["input_ids"]
        assert AutoModelForCausalLM.from_pretrained(tmp_path / "one" / stage).dtype == torch.float32


def test_balance_is_one_for_equal_use_and_n_over_k_for_one_choice():
    """N sum f P: equal shares give 1; the same K of N experts for every token, with certainty, N / K."""
    tokenizer = build_tokenizer()
    model = new_model(tokenizer, seed=0)
    balance = Balance(model)
    inputs = torch.arange(256, 400)[None]
    with torch.no_grad():
        for layer in model.model.layers:
            layer.block_sparse_moe.router.weight.zero_()  # every logit 0: P is uniform, whatever f
        model(inputs)
    assert torch.isclose(balance.take(), torch.tensor(1.0))
    balance.remove()
    model(inputs)
    assert not balance._terms
