"""What attach refuses, and that a refusal leaves the model as it was; what record offers."""

import copy
from typing import Any

import pytest
import tiny
import torch

import vmoer
from vmoer import gates
from vmoer.errors import AttachError, InputError, RunError
from vmoer.live.attach import routers_of


def state(model: Any) -> tuple[Any, ...]:
    """Everything that attach could have left behind."""
    return (
        [type(m) for m in model.modules()],
        list(model.state_dict()),
        [p.requires_grad for p in model.parameters()],
        [(len(m._forward_pre_hooks), len(m._forward_hooks)) for m in model.modules()],
        [sorted(m.__dict__) for m in model.modules()],
        sorted(model._keys_to_ignore_on_save or ()),
    )


def refused(model: Any, config: Any, message: str) -> None:
    before = state(model)
    with pytest.raises((AttachError, InputError), match=message) as caught:
        vmoer.attach(model, config)
    assert "\n" not in str(caught.value)
    assert state(model) == before


def test_bad_layers() -> None:
    refused(
        tiny.model("granitemoe"),
        vmoer.MeanField(layers=[0, 7]),
        "layer 7 has no MoE router: those that have are 0 to 1",
    )
    refused(
        tiny.model("deepseek_v1"), vmoer.MeanField(layers=[0]), "layer 0 has no MoE router: those that have are 1 to 2"
    )
    refused(tiny.model("granitemoe"), vmoer.MeanField(layers=[]), "not empty")
    refused(tiny.model("granitemoe"), vmoer.MeanField(layers=[1, 1]), "distinct")


def test_a_dense_model() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    dense = LlamaForCausalLM(
        LlamaConfig(vocab_size=20, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
    )
    refused(dense, vmoer.MeanField(), "has no MoE router: it is a dense model")


def test_attach_twice_and_detach_twice() -> None:
    model = tiny.model("granitemoe")
    vmoer.attach(model, vmoer.MeanField())
    with pytest.raises(AttachError, match="attached already"):
        vmoer.attach(model, vmoer.FullCovariance())
    vmoer.detach(model)
    with pytest.raises(InputError, match="nothing is attached"):
        vmoer.detach(model)


def test_a_configuration_is_needed() -> None:
    with pytest.raises(InputError, match=r"such as vmoer\.FullCovariance"):
        vmoer.attach(tiny.model("granitemoe"), "vglr-fc")  # type: ignore[arg-type]


def test_a_shadowed_forward_is_refused() -> None:
    """As accelerate's hooks do: an instance attribute `forward` that a class swap never reaches."""
    model = tiny.model("granitemoe")
    router: Any = gates.find(model)[1].router
    router.forward = router.forward
    refused(model, vmoer.MeanField(), "forward is shadowed")
    vmoer.attach(model, vmoer.MeanField(layers=[0]))


def test_accelerate_hooks_are_refused() -> None:
    from accelerate.hooks import ModelHook, add_hook_to_module

    model = tiny.model("granitemoe")
    add_hook_to_module(gates.find(model)[0].router, ModelHook())
    refused(model, vmoer.MeanField(), "forward is shadowed")


def test_sharded_models_are_refused(tmp_path: Any) -> None:
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        model = tiny.model("granitemoe")
        fully_shard(model, mesh=dist.device_mesh.init_device_mesh("cpu", (1,)))
        with pytest.raises(AttachError, match="attach before fully_shard"):
            vmoer.attach(model, vmoer.MeanField())
    finally:
        dist.destroy_process_group()


def test_a_method_that_cannot_go_on_a_router_says_so() -> None:
    """Dropout on the input needs logits linear in it; a failure in the second layer undoes the first."""
    model = tiny.model("granitemoe")
    found = gates.find(model)
    refused_rule = copy.copy(gates.table.RULES["GraniteMoeTopKRouter"])
    import dataclasses

    gates.table.RULES["GraniteMoeTopKRouter"] = dataclasses.replace(refused_rule, weight=None)
    try:
        refused(model, vmoer.MCDropout(), "linear in its input")
    finally:
        gates.table.RULES["GraniteMoeTopKRouter"] = refused_rule
    assert len(found) == 2


def test_training_without_a_step_is_an_error() -> None:
    model = tiny.model("granitemoe").train()
    vmoer.attach(model, vmoer.MeanField())
    with pytest.raises(InputError, match=r"record\(model, step=step\)"):
        model(**tiny.batch())


def test_reentrant_checkpointing_is_refused() -> None:
    model = tiny.model("granitemoe").train()
    vmoer.attach(model, vmoer.MeanField())
    model.gradient_checkpointing_enable({"use_reentrant": True})
    with pytest.raises(InputError, match="reentrant"), vmoer.record(model, step=0):
        pass


def test_laplace_before_fit() -> None:
    model = tiny.model("granitemoe")
    vmoer.attach(model, vmoer.Laplace())
    with pytest.raises(RunError, match=r"vmoer\.fit"):
        model(**tiny.batch())
    with pytest.raises(InputError, match="no batches"):
        vmoer.fit(model, [])


def test_two_passes_before_one_backward_keep_their_noise() -> None:
    """Checkpointing recomputes the first pass after the second has begun: gradients equal those without it."""
    batches = [tiny.batch((9, 6)), tiny.batch((5, 8), seed=3)]
    grads = []
    for checkpointing in (False, True):
        model = tiny.model("granitemoe").train()
        vmoer.attach(model, vmoer.FullCovariance())
        if checkpointing:
            model.gradient_checkpointing_enable()
        total = torch.zeros(())
        for step, batch in enumerate(batches):
            with vmoer.record(model, step=step) as rec:
                total = total + model(**batch, labels=batch["input_ids"]).loss + rec.kl()
        total.backward()
        grads.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


def test_record_without_gradients_keeps_scalars() -> None:
    """The KL's value is the one with gradients at the same weights, and no posterior is held."""
    model, batch = tiny.model("granitemoe"), tiny.batch()
    vmoer.attach(model, vmoer.FullCovariance())
    for r in routers_of(model).values():
        r.heads.weight.data.normal_(std=0.2)
    with vmoer.record(model, step=1) as trained:
        model(**batch)
    with vmoer.record(model, signals="all", kl=True) as rec, torch.no_grad():
        model(**batch)
    entries = list(rec.passes[0][1].values())
    assert all(e.posterior is None and e.divergence_T is not None for e in entries)
    first = trained.passes[0][1][0].posterior
    assert first is not None
    torch.testing.assert_close(entries[0].divergence_T, first.divergence().detach())
    assert set(rec.signals) == {"gate_entropy", "logit_variance", "mc_logit_variance"}


def test_an_empty_record_says_so() -> None:
    model = tiny.model("granitemoe")
    with pytest.raises(InputError, match="no method is attached"), vmoer.record(model):
        pass
    vmoer.attach(model, vmoer.MeanField())
    with vmoer.record(model) as rec:
        pass
    with pytest.raises(InputError, match="nothing was recorded"):
        rec.kl()


def test_signals_against_their_definitions() -> None:
    """Gate entropy and the trace of the covariance of one layer, by hand; sigmoid scores are normalised first."""
    for name in ("granitemoe", "deepseek_v3"):
        model, batch = tiny.model(name), tiny.batch((8,))
        outputs: list[Any] = []
        vmoer.attach(model, vmoer.FullCovariance())
        router: Any = next(m for m in model.modules() if hasattr(m, "vmoer_gate"))
        router.register_forward_hook(lambda m, a, out, outputs=outputs: outputs.append(out))
        with vmoer.record(model) as rec, torch.no_grad():
            model(**batch)
        effective = router.vmoer_gate.logits(outputs[0])
        p = torch.softmax(effective, -1) if name == "granitemoe" else torch.sigmoid(effective)
        entropy = torch.distributions.Categorical(probs=p).entropy()
        torch.testing.assert_close(rec.signals["gate_entropy"][0, 0], entropy, atol=1e-4, rtol=1e-4)
    assert rec.mask.shape == (1, 8)


def test_peft_models(tmp_path: Any) -> None:
    """Attached after get_peft_model: LoRA stays frozen, the routers train, and PEFT saves the adapter alone."""
    from peft import LoraConfig, get_peft_model
    from safetensors.torch import load_file

    model = get_peft_model(tiny.model("granitemoe"), LoraConfig(target_modules=["q_proj", "v_proj"], r=2))
    vmoer.attach(model, vmoer.MeanField())
    assert all(".vmoer." in n for n, p in model.named_parameters() if p.requires_grad)
    model.train()
    with vmoer.record(model, step=0) as rec:
        (model(**tiny.batch()).logits.sum() + rec.kl()).backward()
    assert all(p.grad is not None for p in model.parameters() if p.requires_grad)
    model.save_pretrained(tmp_path)
    assert not any("vmoer" in key for key in load_file(tmp_path / "adapter_model.safetensors"))
    vmoer.detach(model)
    assert sum(p.requires_grad for p in model.parameters()) == 8


def test_the_kl_of_padding_alone_is_zero() -> None:
    model = vmoer.attach(tiny.model("granitemoe"), vmoer.MeanField())
    batch = tiny.batch()
    with vmoer.record(model, kl=True) as rec, torch.no_grad():
        model(input_ids=batch["input_ids"], attention_mask=torch.zeros_like(batch["input_ids"]))
    assert rec.kl() == 0


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_states_that_are_not_finite_are_not_fitted(value: float) -> None:
    model: Any = vmoer.attach(tiny.model("granitemoe"), vmoer.Laplace())
    with torch.no_grad():
        model.get_input_embeddings().weight[5] = value
    before = [router.novelty_root_RD for router in routers_of(model).values()]
    with pytest.raises(InputError, match="are not finite numbers; nothing was fitted"):
        vmoer.fit(model, [{"input_ids": torch.tensor([[5, 6, 7]])}])
    assert all(a is b.novelty_root_RD for a, b in zip(before, routers_of(model).values(), strict=True))


def test_layers_are_hooked_when_training_begins() -> None:
    """Compiled code compares every hook on every pass, and at inference they have nothing to do."""
    model: Any = vmoer.attach(tiny.model("granitemoe"), vmoer.MeanField())
    batch = tiny.batch()

    def hooks() -> list[int]:
        return [len(layer._forward_pre_hooks) for layer in model.model.layers]

    with torch.no_grad():
        model.eval()(**batch)
    assert not any(hooks())
    for step in range(2):
        with vmoer.record(model, step=step):
            model.train()(**batch)
        assert hooks() == [1] * len(hooks())
    vmoer.detach(model)
    assert not any(hooks())
