"""`vmoer.replay`: routers take the experts they are given.

The oracle is the model's own code, whose Top-K is made to answer them.
"""

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import replay_worker
import tiny
import torch
from replay_worker import TopK, drawn, gradients, loss_of, two_batches
from test_contract import prepare
from test_packed import HYBRID, MASKED, blocks, packed, texts
from torch import Tensor

import vmoer
from vmoer import gates
from vmoer.errors import AttachError, InputError, RunError
from vmoer.live.attach import switched_off
from vmoer.serving.rows import SIGNALS, pack

WITH_TOP_K = [name for name in tiny.ARCHITECTURES if name != "phimoe"]  # which finds its experts one after the other


def logits_of(model: Any, batch: dict[str, Any]) -> Tensor:
    with torch.no_grad():
        return model(**batch).logits


def own_experts(model: Any, batch: dict[str, Any]) -> Tensor:
    """What the model chooses by itself."""
    vmoer.attach(model, vmoer.Deterministic())
    with vmoer.record(model) as rec:
        logits_of(model, batch)
    vmoer.detach(model)
    return rec.experts


def as_rows(experts_LBTK: Tensor, lengths: tuple[int, ...]) -> list[np.ndarray]:
    """[token, layer, K] a text, without padding on the right."""
    return [experts_LBTK[:, row, :n].transpose(0, 1).numpy() for row, n in enumerate(lengths)]


@pytest.mark.parametrize("name", WITH_TOP_K)
def test_experts_weights_and_gradients_are_those_of_the_model_made_to_choose_them(name: str) -> None:
    """Experts that it would not choose, in training mode, with every parameter's gradient."""
    batch = tiny.batch()
    model, oracle = tiny.model(name).train(), tiny.model(name).train()
    experts = drawn(model, batch)
    assert not torch.equal(experts.sort(-1).values, own_experts(tiny.model(name), batch).sort(-1).values)
    with TopK(oracle, experts) as top_k:
        expected = loss_of(oracle, batch)
    assert top_k.answered == len(experts)
    expected.backward()
    with vmoer.replay(model, experts):
        loss = loss_of(model, batch)
    loss.backward()
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-5)
    theirs, ours = gradients(oracle), gradients(model)
    assert ours.keys() == theirs.keys()
    assert any("router" in key or "gate" in key for key in ours)
    for key, value in theirs.items():
        torch.testing.assert_close(ours[key], value, rtol=1e-4, atol=1e-5, msg=key)
    with torch.no_grad():  # and outside of the block it is as it was
        assert torch.equal(model.eval()(**batch).logits, tiny.model(name)(**batch).logits)


@pytest.mark.parametrize("name", tiny.ARCHITECTURES)
def test_its_own_experts_change_nothing(name: str) -> None:
    """Nor does a token that has none. Oracle: the plain model."""
    batch = tiny.batch()
    plain = logits_of(tiny.model(name), batch)
    experts = own_experts(tiny.model(name), batch)
    model = tiny.model(name)
    for given in (experts, torch.full_like(experts, -1)):
        with vmoer.replay(model, given):
            torch.testing.assert_close(logits_of(model, batch), plain, rtol=1e-5, atol=1e-5)
    other = experts.clone()
    other[:, 1, 2] = drawn(model, batch)[:, 1, 2]
    with vmoer.replay(model, other):
        assert not torch.allclose(logits_of(model, batch)[1, 2], plain[1, 2], atol=1e-3)


@pytest.mark.parametrize("key", ["vglr-fc", "vtsr", "map"])
@pytest.mark.parametrize("name", ["granitemoe", "deepseek_v3", "llama4"])
def test_an_attached_method_weighs_the_experts_it_is_given(name: str, key: str) -> None:
    """Recorded and replayed, with another point set in between; the record has what was taken. Oracle: the first pass."""
    batch, model = tiny.batch(), prepare(name, key)
    with vmoer.record(model) as rec:
        first = logits_of(model, batch)
    with vmoer.replay(model, rec.experts), vmoer.record(model) as again:
        torch.testing.assert_close(logits_of(model, batch), first, rtol=1e-5, atol=1e-5)
    assert torch.equal(again.experts, rec.experts)
    experts = drawn(model, batch)
    with vmoer.replay(model, experts), vmoer.record(model) as other:
        changed = logits_of(model, batch)
    assert torch.equal(other.experts, experts)
    assert not torch.allclose(changed, first, atol=1e-3)
    plain = tiny.model(name)
    with vmoer.replay(plain, experts):
        expected = logits_of(plain, batch)
    with vmoer.replay(model, experts), switched_off(model):
        torch.testing.assert_close(logits_of(model, batch), expected, rtol=1e-5, atol=1e-5)


def test_a_method_on_some_layers_and_experts_for_all() -> None:
    """As `vmoer serve` gives them. Oracle: the same model with experts recorded on every layer."""
    batch, both = tiny.batch(), tiny.model("granitemoe")
    model = vmoer.attach(tiny.model("granitemoe"), vmoer.FullCovariance(layers=[1], prior_scale=2))
    first = logits_of(model, batch)
    vmoer.attach(both, vmoer.Deterministic())
    with vmoer.record(both) as below, torch.no_grad():
        both(**batch)
    with vmoer.record(model) as above:
        logits_of(model, batch)
    whole = torch.cat([below.experts[:1], above.experts])  # layer 0 is the same in both
    for given, layers in ((whole, None), (whole[1:], None), (whole[:1], [0])):
        with vmoer.replay(model, given, layers=layers):
            torch.testing.assert_close(logits_of(model, batch), first, rtol=1e-5, atol=1e-5)
    vmoer.detach(model)
    assert not any(module._forward_hooks for module in model.modules())
    with vmoer.replay(model, whole):
        assert not torch.allclose(logits_of(model, batch), first, atol=1e-4)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", tiny.ARCHITECTURES)
def test_rows_of_texts_find_their_tokens_in_a_padded_batch(name: str, side: str) -> None:
    """Without their last token, narrow, and with signals behind the experts, as vLLM returns them. Oracle: each text alone."""
    lengths, model = (9, 6, 11), tiny.model(name)
    right = tiny.batch(lengths)
    experts = drawn(model, right)
    rows = [row[:-1].astype(np.uint8) for row in as_rows(experts, lengths)]
    batch = tiny.batch(lengths, side)
    with vmoer.replay(model, rows):
        together = logits_of(model, batch)
    for kind in (np.uint8, np.uint16, np.int32):
        signals = (torch.zeros(*row.shape[:2], len(SIGNALS)) for row in rows)
        wide = [
            pack(torch.from_numpy(row.astype(kind)), zeros).numpy() for row, zeros in zip(rows, signals, strict=True)
        ]
        with vmoer.replay(model, wide):
            assert torch.equal(logits_of(model, batch), together)
    for row, (n, given) in enumerate(zip(lengths, rows, strict=True)):
        with vmoer.replay(model, [given]):
            alone = logits_of(model, {"input_ids": right["input_ids"][row : row + 1, :n]})[0]
        real = together[row][batch["attention_mask"][row].bool()]
        torch.testing.assert_close(real[:-1], alone[:-1], rtol=1e-4, atol=1e-4)
    plain = logits_of(model, batch)
    assert not torch.allclose(
        plain[batch["attention_mask"].bool()], together[batch["attention_mask"].bool()], atol=1e-2
    )


def test_rows_of_every_layer_of_a_decoder_whose_first_layer_is_dense() -> None:
    """As vLLM has them. Oracle: the rows of the layers with experts alone."""
    model, batch = tiny.model("deepseek_v3", first_k_dense_replace=1), tiny.batch((9,))
    (rows,) = as_rows(drawn(model, batch), (9,))
    dense = model.config.num_hidden_layers - rows.shape[1]
    assert dense > 0
    with vmoer.replay(model, [rows]):
        expected = logits_of(model, batch)
    with vmoer.replay(model, [np.concatenate([np.zeros_like(rows[:, :dense]), rows], 1)]):
        assert torch.equal(logits_of(model, batch), expected)


@pytest.mark.parametrize("name", [name for name in tiny.ARCHITECTURES if name not in HYBRID])
def test_packed_documents(name: str) -> None:
    """Several texts in one row, their rows in the same order. Oracle: each text alone."""
    model, documents = tiny.model(name), texts((9, 3, 11))
    lengths = tuple(len(row) for row in documents)
    given = as_rows(drawn(model, tiny.batch(lengths)), lengths)
    batch = packed(documents)
    if name in MASKED:
        batch["attention_mask"] = dict.fromkeys(("full_attention", "sliding_attention"), blocks(batch))
    with vmoer.replay(model, given):
        together = logits_of(model, batch)[0]
    start = 0
    for row, rows in zip(documents, given, strict=True):
        with vmoer.replay(model, [rows]):
            alone = logits_of(model, {"input_ids": row.unsqueeze(0), "use_cache": False})[0]
        torch.testing.assert_close(together[start : start + len(row)], alone, rtol=1e-4, atol=1e-4)
        start += len(row)


def test_a_generated_text_is_replayed_without_its_last_token() -> None:
    """`rec.experts` of a generation has a column less than its text. Oracle: the probabilities it was sampled with."""
    model, prompt = prepare("granitemoe", "vglr-fc"), tiny.batch((6, 4), "left")
    with vmoer.record(model) as rec, torch.no_grad():
        out = model.generate(
            **prompt,
            max_new_tokens=5,
            do_sample=True,
            output_logits=True,
            return_dict_in_generate=True,
            eos_token_id=None,
        )
    mask = torch.cat([prompt["attention_mask"], torch.ones(2, 5, dtype=torch.long)], 1)
    with vmoer.replay(model, rec.experts):
        logits = logits_of(model, {"input_ids": out.sequences, "attention_mask": mask})
    for n, theirs in enumerate(out.logits):
        torch.testing.assert_close(logits[:, 5 + n], theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("name", "key"),
    [
        *((name, None) for name in tiny.ARCHITECTURES),
        *((n, "vglr-mf") for n in ("granitemoe", "deepseek_v3", "llama4")),
    ],
)
def test_checkpointing_and_accumulation_change_no_gradient(name: str, key: str | None) -> None:
    """Two batches, each with experts of its own, both run before either goes backward, outside of the blocks.

    Oracle: one after the other without checkpointing.
    """
    found = []
    for recomputes in (False, True):
        model = (tiny.model(name) if key is None else prepare(name, key)).train()
        if recomputes:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        losses = []
        for number, batch in enumerate(two_batches()):
            with vmoer.replay(model, drawn(model, batch, seed=number)):
                if key is None:
                    losses.append(loss_of(model, batch))
                else:
                    with vmoer.record(model, step=3, first_row=number * 3):
                        losses.append(loss_of(model, batch))
            if not recomputes:
                losses.pop().backward()
        for loss in losses:
            loss.backward()
        found.append(gradients(model))
    assert found[0].keys() == found[1].keys()
    for name_, value in found[0].items():
        torch.testing.assert_close(found[1][name_], value, rtol=1e-4, atol=1e-6, msg=name_)


def test_sharded_by_fsdp2_in_two_processes(tmp_path: Path) -> None:
    """Each process replays rows of its own, on models that were sharded before, and on one with a method, sharded afterwards.

    Oracle: the gradients of one process.
    """
    command = [sys.executable, "-W", "error", replay_worker.__file__, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    for name, key in replay_worker.CASES:
        model = replay_worker.model_of(name, key)
        for number in range(2):
            (replay_worker.passed(model, key, number) / 2).backward()
        ours, theirs = gradients(model), torch.load(tmp_path / f"{name}.{key}.pt")
        assert ours.keys() == theirs.keys()
        for parameter, value in ours.items():
            torch.testing.assert_close(theirs[parameter], value, rtol=1e-4, atol=1e-6, msg=f"{name} {parameter}")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x: x[:, :, :4], r"experts for 3 x 4 tokens were given, and the model runs on 3 x 11"),
        (lambda x: x[:1], "experts of 1 layers were given: say by layers= which they are"),
        (lambda x: x[0], r"experts must be \[layer, batch, token, K\] or a list"),
        (lambda x: x[..., :1], "layer 0 chooses 2 experts a token, and 1 were given"),
        (lambda x: x + 5, r"expert \d+ was given, and model.layers.0.\S+ has 6, from 0"),
        (lambda x: x[..., :1].expand(-1, -1, -1, 2), "layer 0, token 0: an expert is given twice"),
        (lambda x: torch.cat([x[..., :1], -torch.ones_like(x[..., 1:])], -1), "must all be given, or all be -1"),
        (lambda x: as_rows(x, (9, 6, 4)), r"texts of \[9, 6, 4\] tokens were given, .* texts of \[9, 6, 11\]"),
        (lambda x: as_rows(x, (9, 6)), r"texts of \[9, 6\] tokens were given"),
        (lambda x: as_rows(torch.cat([x, x]), (9, 6, 11)), "experts of 4 layers were given: say by layers="),
        (
            lambda x: as_rows(torch.cat([x, x + 2], -1), (9, 6, 11)),
            "layer 0 chooses 2 experts a token, and 4 were given",
        ),
        (lambda x: [], r"experts must be one \[token, layer, K\] a text"),
    ],
)
def test_what_does_not_fit_is_refused_in_one_line(change: Any, message: str) -> None:
    model, batch = tiny.model("granitemoe"), tiny.batch()
    with pytest.raises(InputError, match=message), vmoer.replay(model, change(drawn(model, batch))):
        logits_of(model, batch)
    assert logits_of(model, batch).isfinite().all()


def test_other_layers_and_models_are_refused() -> None:
    model, batch = tiny.model("granitemoe"), tiny.batch()
    with (
        pytest.raises(InputError, match="layer 7 has no MoE router"),
        vmoer.replay(model, drawn(model, batch), layers=[7, 1]),
    ):
        pass
    with (
        pytest.raises(InputError, match="experts of 2 layers were given: say by layers= which they are"),
        vmoer.replay(model, drawn(model, batch), layers=[1]),
    ):
        pass
    with (
        pytest.raises(AttachError, match="Linear has no MoE router"),
        vmoer.replay(torch.nn.Linear(2, 2), torch.zeros(1)),
    ):
        pass
    router = gates.find(model)[0].router
    with vmoer.replay(model, drawn(model, batch)), pytest.raises(RunError, match="not those of the pass"):
        router(torch.zeros(3, 32))
