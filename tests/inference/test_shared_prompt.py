"""Copies of the last token behind a shared prompt, against rows of their own over a repeated cache."""

from contextlib import nullcontext
from typing import Any

import pytest
import tiny
import torch

import vmoer
from vmoer.inference import averaging
from vmoer.live.attach import attached

NAMES = ("granitemoe", "qwen2_moe", "qwen3_moe", "mixtral", "olmoe", "deepseek_v2", "glm4_moe")


def passes_over(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return averaging.predict_passes(model, batch, averaging="answer", passes=5)


def prepared(name: str) -> Any:
    model: Any = vmoer.attach(tiny.model(name).eval(), vmoer.MeanField(prior_scale=2.0))
    assert model.config._attn_implementation == "sdpa"
    return model


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("side", ["left", "right", "none"])
@pytest.mark.parametrize("name", NAMES)
def test_equals_rows_of_their_own(name: str, side: str, attention: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = prepared(name)
    model.set_attn_implementation(attention)
    batch = tiny.batch((9, 9) if side == "none" else (9, 6, 11), side="left" if side == "none" else side)
    if side == "none":
        del batch["attention_mask"]
    with vmoer.record(model) as shared_record, monkeypatch.context() as patch:
        patch.setattr(averaging, "_over_cache", lambda *a: pytest.fail("not in one pass"))
        shared = passes_over(model, batch)
    assert model.config._attn_implementation == attention
    averaging._SHARES[attached(model)] = False
    with vmoer.record(model) as record:
        apart = passes_over(model, batch)
    assert (shared[0] - shared[1]).abs().max() > 1e-3  # the passes do differ
    torch.testing.assert_close(shared, apart, atol=2e-5, rtol=0)
    assert [now.shape for now, _ in shared_record.passes] == [
        (len(shared[0]), batch["input_ids"].shape[1] - 1),
        (len(shared[0]), 5),
    ]
    prompt, prompt_apart = (next(iter(r.passes[0][1].values())) for r in (shared_record, record))
    real: Any = (
        torch.ones(record.passes[0][0].shape, dtype=torch.bool) if side == "none" else record.passes[0][0].mask_BT
    )
    entropies = [entry.signals["gate_entropy"].view(real.shape)[real] for entry in (prompt, prompt_apart)]
    torch.testing.assert_close(*entropies, atol=2e-5, rtol=0)
    if side != "none":
        masks: list[Any] = [r.passes[0][0].mask_BT for r in (shared_record, record)]
        assert torch.equal(*masks)


def test_a_model_with_attention_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that never comes for its attention, and one whose attention is no plain softmax, take rows of their own."""
    model, batch = prepared("granitemoe"), tiny.batch((9, 6))
    expected = passes_over(model, batch)
    with monkeypatch.context() as patch:
        patch.setattr(averaging, "attending", lambda *a: nullcontext())
        torch.testing.assert_close(passes_over(model, batch), expected, atol=2e-5, rtol=0)
    assert averaging._SHARES.pop(attached(model)) is False

    def capped(module: Any, *args: Any, **kwargs: Any) -> Any:
        return original(module, *args, **kwargs, softcap=30.0)

    from vmoer.inference import shared_prompt

    original = shared_prompt.attention
    monkeypatch.setattr(shared_prompt, "attention", capped)
    torch.testing.assert_close(passes_over(model, batch), expected, atol=2e-5, rtol=0)
    assert averaging._SHARES[attached(model)] is False
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("name", ["gpt_oss", "granitemoehybrid"])
def test_layers_that_see_less_take_rows_of_their_own(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = vmoer.attach(tiny.model(name).eval(), vmoer.MeanField(prior_scale=2.0))
    monkeypatch.setattr(
        averaging, "_in_one_pass", lambda *a: pytest.fail("a window, or a state, is not a softmax over all")
    )
    assert passes_over(model, tiny.batch((7, 7), side="left")).isfinite().all()
