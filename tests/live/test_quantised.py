"""Quantised bases: the routers stay in full precision and everything works, or the reason why not is one line.

A quantised layer's oracle is the full-precision layer with the weights it stands for. What no CPU can run is named: FP8 matrix
products are computed here from the stored 8-bit weights by a reference in place of transformers' GPU kernel.
"""

import copy
import json
from pathlib import Path
from types import MethodType
from typing import Any

import numpy as np
import pytest
import tiny
import torch
import transformers as tf
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import vmoer
from vmoer.errors import AttachError, InputError
from vmoer.live.attach import routers_of, switched_off
from vmoer.models import open_model
from vmoer.training.run import Examples, Plan, stage2

GGUF = pytest.importorskip("gguf")
BLOCK = 16


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        return model(**tiny.batch()).logits


def works_on(model: Any, *keys: str) -> None:
    """Switched off the model itself, bit for bit; switched on recorded and other, training the routers alone; taken off again."""
    plain = logits(model)
    for key in keys:
        vmoer.attach(model, vmoer.methods()[key]())
        if key == "laplace":
            vmoer.fit(model, [tiny.batch()])
        for router in routers_of(model).values():
            with torch.no_grad():
                for p in router.parameters():
                    p.add_(0.2 * torch.randn(p.shape, generator=torch.Generator().manual_seed(0)))
        with vmoer.record(model) as rec:
            on = logits(model)
        assert torch.isfinite(on).all()
        assert not torch.equal(on, plain)
        assert torch.equal(logits(model), on)
        assert len(rec.signals["gate_entropy"]) == len(routers_of(model))
        with switched_off(model):
            assert torch.equal(logits(model), plain)
        trained = [n for n, p in model.named_parameters() if p.requires_grad]
        if trained:
            with vmoer.record(model.train(), step=0) as rec:
                (model(**tiny.batch(), labels=tiny.batch()["input_ids"]).loss + rec.kl()).backward()
            assert [n for n, p in model.named_parameters() if p.grad is not None and p.grad.any()] == trained
        vmoer.detach(model.eval())
        assert torch.equal(logits(model), plain)


def refused(model: Any, reason: str, layers: Any = "all") -> None:
    """By attach, and by load; the model as it was."""
    kinds = [type(m) for m in model.modules()]
    with pytest.raises(AttachError, match=reason) as error:
        vmoer.attach(model, vmoer.MeanField(layers=layers))
    assert "\n" not in str(error.value)
    assert [type(m) for m in model.modules()] == kinds


# -- GGUF --------------------------------------------------------------------------------------------------------------

TENSORS = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate": "ffn_gate_inp",
    "mlp.experts.down_proj": "ffn_down_exps",
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
}


def write_gguf(model: Any, path: Path, gate: str = "F32") -> Any:
    """The model in 8-bit blocks, its routers as asked, with a tokenizer; returns it with the weights the file stands for."""
    c, kinds = model.config, GGUF.GGMLQuantizationType
    writer = GGUF.GGUFWriter(path, "qwen3moe")
    for name, value in {
        "context_length": c.max_position_embeddings,
        "block_count": c.num_hidden_layers,
        "feed_forward_length": c.intermediate_size,
        "embedding_length": c.hidden_size,
        "head_count": c.num_attention_heads,
        "head_count_kv": c.num_key_value_heads,
        "key_length": c.head_dim,
        "value_length": c.head_dim,
        "layer_norm_rms_eps": c.rms_norm_eps,
        "rope_freq_base": c.rope_parameters["rope_theta"],
        "expert_count": c.num_experts,
        "expert_used_count": c.num_experts_per_tok,
        "vocab_size": c.vocab_size,
        "tokenizer_model": "gpt2",
        "tokenizer_pre": "qwen2",
        "token_list": ["<pad>", "<s>", "</s>", *(chr(c) for c in range(65, 121)), "ab", "cd"],
        "token_types": [3] * 3 + [1] * 58,
        "token_merges": ["a b", "c d"],
        "eos_token_id": 2,
        "pad_token_id": 0,
    }.items():
        getattr(writer, f"add_{name}")(value)
    meant = copy.deepcopy(model)

    def put(name: str, tensor: Tensor) -> None:
        kind = kinds.F32 if tensor.dim() == 1 else kinds[gate] if "gate_inp" in name else kinds.Q8_0
        blocks = GGUF.quants.quantize(tensor.numpy(), kind)
        writer.add_tensor(f"{name}.weight", blocks, raw_dtype=kind)
        tensor.copy_(torch.from_numpy(np.copy(GGUF.quants.dequantize(blocks, kind))))

    for key, tensor in meant.state_dict().items():
        key = key.removesuffix(".weight")
        layer, _, inner = key.removeprefix("model.layers.").partition(".")
        if inner == "mlp.experts.gate_up_proj":
            for name, half in zip(("gate", "up"), tensor.chunk(2, 1), strict=True):
                put(f"blk.{layer}.ffn_{name}_exps", half)
        else:
            put(f"blk.{layer}.{TENSORS[inner]}" if inner in TENSORS else TENSORS[key], tensor)
    for write in ("header", "kv_data", "tensors"):
        getattr(writer, f"write_{write}{'_to_file'}")()
    writer.close()
    return meant


@pytest.fixture
def original() -> Any:
    return tiny.model(
        "qwen3_moe", moe_intermediate_size=768
    )  # GGUF does not say it, and 768 is what transformers assumes


def test_gguf(original: Any, tmp_path: Path) -> None:
    """transformers unpacks the blocks, so it is an ordinary model; a router of the original goes onto it, and the other way."""
    meant = write_gguf(original, tmp_path / "m.gguf")
    opened = open_model(tmp_path / "m.gguf", device="cpu")
    assert opened.tokenizer("ab")["input_ids"] == [59]
    torch.testing.assert_close(logits(opened.model), logits(meant), atol=1e-4, rtol=0)
    works_on(opened.model, "vglr-fc", "vtsr", "mcdr", "laplace")
    folder = vmoer.save(vmoer.attach(original, vmoer.FullCovariance()), tmp_path / "run")
    ours = vmoer.load(opened.model, folder)
    torch.testing.assert_close(logits(ours), logits(vmoer.load(meant, folder)), atol=1e-4, rtol=0)
    vmoer.load(tiny.model("qwen3_moe", moe_intermediate_size=768), vmoer.save(ours, tmp_path / "back"))


def test_gguf_whose_routers_are_quantised(original: Any, tmp_path: Path) -> None:
    """They are other routers then: attaching works, but nothing trained on the original is let onto them."""
    write_gguf(original, tmp_path / "m.gguf", gate="Q8_0")
    opened = open_model(tmp_path / "m.gguf", device="cpu")
    folder = vmoer.save(vmoer.attach(original, vmoer.MeanField()), tmp_path / "run")
    with pytest.raises(InputError, match="trained on another base model"):
        vmoer.load(opened.model, folder)
    works_on(opened.model, "vglr-mf")


# -- bitsandbytes ------------------------------------------------------------------------------------------------------


def hunyuan() -> Any:
    """A model whose router holds a linear layer, which quantisers take for one of their own."""
    torch.manual_seed(0)
    settings = dict(num_experts=16, moe_topk=2, head_dim=8, num_hidden_layers=2, num_attention_heads=4, hidden_size=32)
    settings |= dict(num_key_value_heads=2, intermediate_size=32, vocab_size=tiny.VOCAB, pad_token_id=0)
    return tf.HunYuanMoEV1ForCausalLM(tf.HunYuanMoEV1Config(**settings, max_position_embeddings=128)).eval()


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("name", ["granitemoe", "qwen3_moe"])
def test_bitsandbytes(name: str, bits: int, tmp_path: Path) -> None:
    """Attention is quantised, routers are not; what was trained on the quantised base goes onto the full one."""
    pytest.importorskip("bitsandbytes")
    tiny.model(name).save_pretrained(tmp_path / "base")
    quantised = tf.BitsAndBytesConfig(load_in_4bit=bits == 4, load_in_8bit=bits == 8)
    model = tf.AutoModelForCausalLM.from_pretrained(
        tmp_path / "base", quantization_config=quantised, dtype=torch.float32
    )
    assert any(p.dtype in (torch.uint8, torch.int8) for p in model.parameters())
    # every processor the same way: that for AVX512-BF16 takes no layers as narrow as these
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False
    works_on(model, "vglr-fc", "vtsr", "laplace")
    folder = vmoer.save(vmoer.attach(model, vmoer.MeanField()), tmp_path / "run")
    vmoer.load(tiny.model(name), folder)


def test_layers_without_a_backward_pass_are_not_trained_through(tmp_path: Path) -> None:
    """As bitsandbytes marks its 4-bit layers where the processor has AVX512-BF16; inference goes on."""
    model: Any = vmoer.attach(tiny.model("granitemoe"), vmoer.MeanField())
    examples = Examples([[5, 6, 7, 8]] * 4, [0, 1, 0, 1], [2] * 4, [3, 4])
    go: dict[str, Any] = {"plan": Plan(epochs=1, batch_size=2), "folder": tmp_path}
    arguments = tf.TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to="none")
    vmoer.VMoERTrainer(model=model, args=arguments)
    model.model.layers[0].self_attn.q_proj.support_avx512bf16_for_cpu = True
    logits(model)
    with pytest.raises(InputError, match="cannot be trained through on this processor"):
        vmoer.VMoERTrainer(model=model, args=arguments)
    vmoer.detach(model)
    with pytest.raises(InputError, match="cannot be trained through on this processor"):
        stage2(model, examples, examples, vmoer.MeanField(), **go)
    vmoer.detach(model)
    model.model.layers[0].self_attn.q_proj.support_avx512bf16_for_cpu = False
    assert stage2(model, examples, examples, vmoer.MeanField(), **go) is not None


def test_bitsandbytes_over_a_router(tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    folder = vmoer.save(vmoer.attach(hunyuan(), vmoer.MeanField()), tmp_path / "run")
    hunyuan().save_pretrained(tmp_path / "base")
    for skipped in (None, ["wg", "lm_head"]):
        quantised = tf.BitsAndBytesConfig(load_in_4bit=True, llm_int8_skip_modules=skipped)
        model = tf.AutoModelForCausalLM.from_pretrained(tmp_path / "base", quantization_config=quantised)
        if skipped is None:
            refused(model, r"its weight is quantised \(uint8\): leave routers out")
            with pytest.raises(InputError, match=r"its weight is quantised \(uint8\)"):
                vmoer.load(model, folder)
        else:
            vmoer.load(model, folder)


# -- FP8, MXFP4 --------------------------------------------------------------------------------------------------------


def to_fp8(weight: Tensor) -> tuple[Tensor, Tensor]:
    """float8 with a scale a block of 16 by 16, as checkpoints of DeepSeek-V3 and its kin store them; leading axes kept."""
    rows, columns = weight.shape[-2] // BLOCK, weight.shape[-1] // BLOCK
    blocks = weight.float().reshape(*weight.shape[:-2], rows, BLOCK, columns, BLOCK)
    scale = blocks.abs().amax((-3, -1)) / 448.0
    return (blocks / scale[..., :, None, :, None]).reshape(weight.shape).to(torch.float8_e4m3fn), scale


def from_fp8(weight: Tensor, scale: Tensor) -> Tensor:
    return weight.float() * scale.repeat_interleave(BLOCK, -2).repeat_interleave(BLOCK, -1)


def fp8_model(model: Any, skip: list[str], monkeypatch: pytest.MonkeyPatch) -> Any:
    """transformers' own replacement of its linear layers and experts, filled; its GPU kernel is the one thing replaced."""
    from transformers.integrations import finegrained_fp8

    config = tf.FineGrainedFP8Config(weight_block_size=(BLOCK, BLOCK), modules_to_not_convert=skip)
    full = dict(model.state_dict())
    model.config._experts_implementation = "eager"
    finegrained_fp8.replace_with_fp8_linear(model, modules_to_not_convert=skip, quantization_config=config)
    for name, module in model.named_modules():
        for key, p in list(module.named_parameters(recurse=False)):
            if not p.is_meta or key.endswith("scale_inv"):
                continue
            eight, scale = to_fp8(full[f"{name}.{key}"])
            setattr(module, key, nn.Parameter(eight, requires_grad=False))
            setattr(module, f"{key}_scale_inv", nn.Parameter(scale, requires_grad=False))

    def product(input: Tensor, weight: Tensor, scale: Tensor, *args: Any, bias: Any = None, **options: Any) -> Tensor:
        return nn.functional.linear(input, from_fp8(weight, scale).to(input.dtype), bias)

    monkeypatch.setattr(finegrained_fp8, "fp8_linear", product)
    monkeypatch.setattr(finegrained_fp8, "FP8LinearFunction", None, raising=False)
    monkeypatch.setattr(finegrained_fp8, "_apply_if_grad", lambda _, direct, *args: direct(*args), raising=False)
    return model.eval()


def test_fp8_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    full = tiny.model("qwen3_moe")
    model = fp8_model(tiny.model("qwen3_moe"), ["lm_head"], monkeypatch)
    kinds = {type(m).__name__ for m in model.modules()}
    assert {"FP8Linear", "FP8Experts", "Qwen3MoeTopKRouter"} <= kinds
    with torch.no_grad():
        for name, p in full.named_parameters():
            if model.get_parameter(name).dtype == torch.float8_e4m3fn:
                p.copy_(from_fp8(*to_fp8(p)))
    torch.testing.assert_close(logits(model), logits(full), atol=1e-4, rtol=0)
    works_on(model, "vglr-fc", "vtsr", "mcdr", "laplace")


def test_fp8_over_a_router(monkeypatch: pytest.MonkeyPatch) -> None:
    refused(fp8_model(hunyuan(), ["lm_head"], monkeypatch), r"its weight is quantised \(float8_e4m3fn\)")
    works_on(fp8_model(hunyuan(), ["lm_head", "wg"], monkeypatch), "vglr-mf")


def test_an_fp8_checkpoint_without_a_gpu(tmp_path: Path) -> None:
    """transformers loads it in bfloat16; its routers, never stored in 8 bits, are those of the full-precision base."""
    model = tiny.model("qwen3_moe", torch.bfloat16)
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    for name in list(tensors):
        if name.endswith("_proj.weight"):
            tensors[name], tensors[name.replace(".weight", ".weight_scale_inv")] = to_fp8(tensors[name])
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    loaded = tf.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16).eval()
    own = loaded.model.layers[0].self_attn.q_proj.weight
    meant = from_fp8(*to_fp8(model.model.layers[0].self_attn.q_proj.weight.detach()))
    torch.testing.assert_close(own.float(), meant.bfloat16().float(), atol=0.02, rtol=0)
    works_on(loaded, "vglr-fc", "laplace")
    vmoer.load(loaded, vmoer.save(vmoer.attach(model, vmoer.MeanField()), tmp_path / "run"))


def test_mxfp4_routes_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers' MXFP4 block reads the router's weight and never runs it: an attached method would do nothing."""
    from transformers.integrations import hub_kernels
    from transformers.integrations.mxfp4 import replace_with_mxfp4_linear

    monkeypatch.setattr(hub_kernels, "get_kernel", lambda *args, **options: None)  # a download, for GPUs
    model = tiny.model("gpt_oss", intermediate_size=32)
    replace_with_mxfp4_linear(model, quantization_config=tf.Mxfp4Config(), modules_to_not_convert=["lm_head"])
    refused(model, r"never calls it: load with Mxfp4Config\(dequantize=True\)")


def test_an_mxfp4_checkpoint_without_its_kernels(tmp_path: Path) -> None:
    """Unpacked on loading it is an ordinary gpt-oss; the oracle of the unpacking is the format's own table of sixteen values."""
    model = tiny.model("gpt_oss", torch.bfloat16, intermediate_size=32)
    model.save_pretrained(tmp_path)
    tensors, generator = load_file(tmp_path / "model.safetensors"), torch.Generator().manual_seed(0)
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, inner, outer = tensors.pop(name).shape
        shape = (experts, outer, inner // 32)
        tensors[f"{name}_blocks"] = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8, generator=generator)
        tensors[f"{name}_scales"] = torch.full(shape, 124, dtype=torch.uint8)  # 2 ** (124 - 127)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "dequantize": True}
    (tmp_path / "config.json").write_text(json.dumps(config))
    loaded = tf.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16).eval()
    bits = tensors["model.layers.0.mlp.experts.down_proj_blocks"][0, 0, 0]
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    values = torch.cat([values, -values]) / 8
    expected = torch.stack([values[(bits & 15).long()], values[(bits >> 4).long()]], -1).reshape(-1)
    assert torch.equal(loaded.model.layers[0].mlp.experts.down_proj[0, :, 0].float(), expected)
    works_on(loaded, "vglr-fc")


def test_a_replaced_block_that_forgets_its_router() -> None:
    """As fused kernels leave one. A replacement that calls the router is no obstacle."""
    forgetful, faithful = tiny.model("granitemoe"), tiny.model("granitemoe")
    block = forgetful.model.layers[1].block_sparse_moe
    block.forward = MethodType(lambda self, hidden: hidden @ self.router.weight.mT @ self.router.weight, block)
    refused(forgetful, "a forward of its own that never calls it")
    refused(forgetful, "a forward of its own that never calls it", layers=[1])
    vmoer.attach(forgetful, vmoer.MeanField(layers=[0]))
    block = faithful.model.layers[1].block_sparse_moe
    block.forward = MethodType(type(block).forward, block)
    works_on(faithful, "vglr-mf")
