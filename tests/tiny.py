"""Tiny random models of every architecture that must work, with routing that is not degenerate."""

import copy
import functools
from typing import Any

import torch
import transformers as tf

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
    "deepseek_v1": ("DeepseekOcr2Text", dict()),
}
ARCHITECTURES = tuple(_CONFIGS)


def config(name: str, **changes: Any) -> Any:
    family, own = _CONFIGS[name]
    return getattr(tf, f"{family}Config")(**(_COMMON | own | changes))


def _build(name: str, **changes: Any) -> Any:
    family, _ = _CONFIGS[name]
    if name == "deepseek_v1":
        return _deepseek_v1(**changes)
    cls = {"llama4": "Llama4ForCausalLM"}.get(name, f"{family}ForCausalLM")
    return getattr(tf, cls)(config(name, **changes))


def _deepseek_v1(**changes: Any) -> Any:
    """DeepSeek-MoE-16B's layout: multi-head attention, a dense first layer, softmax routing without groups."""
    from transformers.modeling_outputs import CausalLMOutputWithPast
    from transformers.models.deepseek_ocr2 import modeling_deepseek_ocr2 as m

    class DeepseekV1ForCausalLM(m.DeepseekOcr2TextPreTrainedModel, tf.GenerationMixin):
        config_class = m.DeepseekOcr2TextConfig

        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.model = m.DeepseekOcr2TextModel(config)
            self.lm_head = torch.nn.Linear(config.hidden_size, config.vocab_size, bias=False)
            self.post_init()

        def forward(self, input_ids=None, labels=None, logits_to_keep=0, **kwargs):  # type: ignore[no-untyped-def]
            kwargs.pop("output_router_logits", None)
            out = self.model(input_ids=input_ids, **kwargs)
            kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
            logits = self.lm_head(out.last_hidden_state[:, kept])
            loss = self.loss_function(logits, labels, VOCAB) if labels is not None else None
            return CausalLMOutputWithPast(loss=loss, logits=logits, past_key_values=out.past_key_values)

    globals()["DeepseekV1ForCausalLM"] = DeepseekV1ForCausalLM
    DeepseekV1ForCausalLM.__module__, DeepseekV1ForCausalLM.__qualname__ = __name__, "DeepseekV1ForCausalLM"
    settings = _COMMON | dict(
        num_hidden_layers=3,
        mlp_layer_types=["dense", "sparse", "sparse"],
        n_routed_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        n_shared_experts=1,
        topk_method="greedy",
        routed_scaling_factor=1.0,
        num_key_value_heads=4,
        n_group=None,
        topk_group=None,
    )
    return DeepseekV1ForCausalLM(m.DeepseekOcr2TextConfig(**(settings | changes)))


@functools.cache
def _cached(name: str, changes: tuple[tuple[str, Any], ...]) -> Any:
    torch.manual_seed(0)
    model = _build(name, **dict(changes)).eval()
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
