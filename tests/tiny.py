"""Tiny random models of every architecture that must work, with routing that is not degenerate."""

import copy
import functools
from typing import Any

import torch
import transformers as tf

from vmoer import deepseek
from vmoer.bench.geometries import Geometry

VOCAB = 61
_COMMON: dict[str, Any] = dict(
    vocab_size=VOCAB,
    hidden_size=32,
    intermediate_size=24,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=128,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
)
_GRANITE = dict(num_local_experts=6, num_experts_per_tok=2)
_QWEN = dict(num_experts=6, num_experts_per_tok=2, moe_intermediate_size=16)
_MLA = dict(
    q_lora_rank=None, kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8, num_key_value_heads=4
)
_DEEPSEEK = dict(
    n_routed_experts=8, num_experts_per_tok=2, n_group=2, topk_group=1, n_shared_experts=1, moe_intermediate_size=16
)

_CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "granitemoe": ("GraniteMoe", _GRANITE),
    "granitemoeshared": ("GraniteMoeShared", _GRANITE | dict(shared_intermediate_size=16)),
    "granitemoehybrid": (
        "GraniteMoeHybrid",
        _GRANITE
        | dict(
            shared_intermediate_size=16,
            layer_types=["mamba", "attention"],
            mamba_n_heads=8,
            mamba_d_head=8,
            mamba_d_state=8,
            mamba_n_groups=1,
            mamba_chunk_size=16,
            position_embedding_type="rope",
        ),
    ),
    "qwen2_moe": ("Qwen2Moe", _QWEN | dict(shared_expert_intermediate_size=16)),
    "qwen3_moe": ("Qwen3Moe", _QWEN | dict(head_dim=8, norm_topk_prob=True)),
    "mixtral": ("Mixtral", _GRANITE),
    "olmoe": ("Olmoe", _QWEN),
    "deepseek_v2": (
        "DeepseekV2",
        _MLA | _DEEPSEEK | dict(topk_method="group_limited_greedy", first_k_dense_replace=0, routed_scaling_factor=1.5),
    ),
    "deepseek_v3": ("DeepseekV3", _MLA | _DEEPSEEK | dict(first_k_dense_replace=0, routed_scaling_factor=1.5)),
    "gpt_oss": ("GptOss", _GRANITE | dict(head_dim=8, layer_types=["sliding_attention", "full_attention"])),
    "glm4_moe": ("Glm4Moe", _DEEPSEEK | dict(first_k_dense_replace=0, head_dim=8)),
    "phimoe": ("Phimoe", _GRANITE | dict(router_jitter_noise=0.2, input_jitter_noise=0.0)),
    "jamba": (
        "Jamba",
        dict(
            num_experts=6,
            num_experts_per_tok=2,
            num_hidden_layers=2,
            attn_layer_period=2,
            attn_layer_offset=1,
            expert_layer_period=1,
            expert_layer_offset=0,
            use_mamba_kernels=False,
            mamba_d_state=8,
            mamba_d_conv=4,
            mamba_expand=2,
            mamba_dt_rank=4,
        ),
    ),
    "llama4": (
        "Llama4Text",
        dict(
            num_local_experts=6,
            num_experts_per_tok=2,
            interleave_moe_layer_step=1,
            intermediate_size_mlp=24,
            head_dim=8,
            attention_chunk_size=64,
            no_rope_layers=[1, 0],
        ),
    ),
}
ARCHITECTURES = (*_CONFIGS, "deepseek_v1")

# config.json of deepseek-ai/deepseek-moe-16b-base with small numbers
DEEPSEEK_V1: dict[str, Any] = {
    "architectures": ["DeepseekForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "auto_map": {
        "AutoConfig": "configuration_deepseek.DeepseekConfig",
        "AutoModel": "modeling_deepseek.DeepseekModel",
        "AutoModelForCausalLM": "modeling_deepseek.DeepseekForCausalLM",
    },
    "aux_loss_alpha": 0.001,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "first_k_dense_replace": 1,
    "hidden_act": "silu",
    "hidden_size": 32,
    "initializer_range": 0.02,
    "intermediate_size": 40,
    "max_position_embeddings": 4096,
    "model_type": "deepseek",
    "moe_intermediate_size": 16,
    "moe_layer_freq": 1,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "norm_topk_prob": False,
    "num_attention_heads": 4,
    "num_experts_per_tok": 3,
    "num_hidden_layers": 3,
    "num_key_value_heads": 4,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 10000,
    "scoring_func": "softmax",
    "seq_aux": True,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.36.0",
    "use_cache": True,
    "vocab_size": VOCAB,
}


def config(name: str, **changes: Any) -> Any:
    family, own = _CONFIGS[name]
    return getattr(tf, f"{family}Config")(**(_COMMON | own | changes))


def _build(name: str, **changes: Any) -> Any:
    if name == "deepseek_v1":  # as users open it
        found = DEEPSEEK_V1 | changes
        return deepseek.build(deepseek.configuration(found), deepseek_tensors(found), torch.float32)
    family, _ = _CONFIGS[name]
    cls = {"llama4": "Llama4ForCausalLM"}.get(name, f"{family}ForCausalLM")
    return getattr(tf, cls)(config(name, **changes))


def deepseek_tensors(config: dict[str, Any], seed: int = 1) -> dict[str, torch.Tensor]:
    """Random weights by the names that a checkpoint of DeepSeek-MoE-16B has."""
    generator = torch.Generator().manual_seed(seed)
    width, vocabulary = config["hidden_size"], config["vocab_size"]
    values = width // config["num_attention_heads"] * config["num_key_value_heads"]
    found = {}

    def matrix(name: str, rows: int, columns: int, size: float | None = None) -> None:
        found[f"{name}.weight"] = torch.randn(rows, columns, generator=generator) * (size or columns**-0.5)

    def norm(name: str) -> None:
        found[f"{name}.weight"] = 1 + 0.2 * torch.randn(width, generator=generator)

    def network(name: str, hidden: int) -> None:
        matrix(f"{name}.gate_proj", hidden, width)
        matrix(f"{name}.up_proj", hidden, width)
        matrix(f"{name}.down_proj", width, hidden)

    matrix("model.embed_tokens", vocabulary, width, 0.7)
    for i in range(config["num_hidden_layers"]):
        layer = f"model.layers.{i}"
        norm(f"{layer}.input_layernorm")
        norm(f"{layer}.post_attention_layernorm")
        for part, rows in (("q", width), ("k", values), ("v", values), ("o", width)):
            matrix(f"{layer}.self_attn.{part}_proj", rows, width)
        if i < config["first_k_dense_replace"] or i % config["moe_layer_freq"]:
            network(f"{layer}.mlp", config["intermediate_size"])
            continue
        matrix(f"{layer}.mlp.gate", config["n_routed_experts"], width)
        network(f"{layer}.mlp.shared_experts", config["n_shared_experts"] * config["moe_intermediate_size"])
        for j in range(config["n_routed_experts"]):
            network(f"{layer}.mlp.experts.{j}", config["moe_intermediate_size"])
    norm("model.norm")
    matrix("lm_head", vocabulary, width)
    return found


@functools.cache
def _cached(name: str, changes: tuple[tuple[str, Any], ...]) -> Any:
    torch.manual_seed(0)
    model = _build(name, **dict(changes)).eval()
    if name == "deepseek_v1":
        return model
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for key, p in model.named_parameters():
            if p.dim() > 1 and not any(part in key for part in ("A_log", "conv1d", "dt_proj")):
                p.copy_(torch.randn(p.shape, generator=generator) * (0.7 if "embed" in key else p.shape[-1] ** -0.5))
        for key, b in model.named_buffers():
            if "correction_bias" in key:
                b.copy_(torch.randn(b.shape, generator=generator) * 0.05)
    return model


def model(name: str, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    """A fresh copy, in evaluation mode."""
    return copy.deepcopy(_cached(name, tuple(changes.items()))).to(dtype)


def batch(lengths: tuple[int, ...] = (9, 6, 11), side: str = "right", seed: int = 0) -> dict[str, torch.Tensor]:
    """Random prompts of these lengths, padded on the side asked for."""
    generator = torch.Generator().manual_seed(seed)
    rows = [torch.randint(3, VOCAB, (n,), generator=generator) for n in lengths]
    width = max(lengths)
    ids, mask = torch.zeros(len(rows), width, dtype=torch.long), torch.zeros(len(rows), width, dtype=torch.long)
    for i, row in enumerate(rows):
        place = slice(0, len(row)) if side == "right" else slice(width - len(row), width)
        ids[i, place], mask[i, place] = row, 1
    return {"input_ids": ids, "attention_mask": mask}


# what `vmoer bench` measures in tests
GEOMETRY = Geometry(
    "granitemoe",
    {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    },
)
