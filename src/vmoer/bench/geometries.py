"""The models of the benchmark: true shapes, random weights.

DeepSeek-MoE-16B is described as its repository describes it, and built as it is opened (vmoer/deepseek.py).
"""

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from vmoer import deepseek


@dataclass(frozen=True)
class Geometry:
    kind: str
    config: dict[str, Any]
    attached: int = 10

    def configuration(self) -> Any:
        if self.kind == deepseek.MODEL_TYPE:
            return deepseek.configuration(self.config)
        return AutoConfig.for_model(self.kind, **self.config)

    def build(self, device: str, dtype: torch.dtype) -> nn.Module:
        config = self.configuration()
        torch.manual_seed(0)
        with torch.device(device):
            model = AutoModelForCausalLM.from_config(config, dtype=dtype)
        return model.eval().requires_grad_(False)

    def layers(self) -> list[int]:
        """As many layers as are to be attached, evenly spread over those that have experts."""
        dense = getattr(self.configuration(), "mlp_only_layers", [])
        sparse = [i for i in range(self.config["num_hidden_layers"]) if i not in dense]
        count = min(self.attached, len(sparse))
        return [sparse[(2 * i + 1) * len(sparse) // (2 * count)] for i in range(count)]


GEOMETRIES = {
    "granite-3b": Geometry(
        "granitemoe",
        {
            "vocab_size": 49155,
            "hidden_size": 1536,
            "intermediate_size": 512,
            "num_hidden_layers": 32,
            "num_attention_heads": 24,
            "num_key_value_heads": 8,
            "num_local_experts": 40,
            "num_experts_per_tok": 8,
            "embedding_multiplier": 12.0,
            "logits_scaling": 6.0,
            "residual_multiplier": 0.22,
            "attention_multiplier": 0.015625,
            "tie_word_embeddings": True,
            "max_position_embeddings": 32768,
        },
    ),
    "qwen1.5-moe": Geometry(
        "qwen2_moe",
        {
            "vocab_size": 151936,
            "hidden_size": 2048,
            "intermediate_size": 5632,
            "moe_intermediate_size": 1408,
            "shared_expert_intermediate_size": 5632,
            "num_hidden_layers": 24,
            "num_attention_heads": 16,
            "num_key_value_heads": 16,
            "num_experts": 60,
            "num_experts_per_tok": 4,
            "norm_topk_prob": False,
            "max_position_embeddings": 32768,
        },
    ),
    "deepseek-moe-16b": Geometry(
        "deepseek",
        {
            "vocab_size": 102400,
            "hidden_size": 2048,
            "intermediate_size": 10944,
            "moe_intermediate_size": 1408,
            "num_hidden_layers": 28,
            "first_k_dense_replace": 1,
            "num_attention_heads": 16,
            "num_key_value_heads": 16,
            "n_routed_experts": 64,
            "n_shared_experts": 2,
            "num_experts_per_tok": 6,
            "norm_topk_prob": False,
            "max_position_embeddings": 4096,
        },
    ),
    "qwen3-30b-a3b": Geometry(
        "qwen3_moe",
        {
            "vocab_size": 151936,
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "moe_intermediate_size": 768,
            "num_hidden_layers": 48,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "norm_topk_prob": True,
            "max_position_embeddings": 32768,
        },
    ),
}

SMALL = {
    "small-granite": Geometry(
        "granitemoe",
        {
            "vocab_size": 1000,
            "hidden_size": 256,
            "intermediate_size": 128,
            "num_hidden_layers": 6,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "num_local_experts": 40,
            "num_experts_per_tok": 8,
            "max_position_embeddings": 4096,
        },
        attached=2,
    ),
}


def twin(model: nn.Module) -> nn.Module:
    """A second model of the same weights: what is attached to one does not touch the other."""
    shared = {id(x): x for x in (*model.parameters(), *model.buffers())}
    return copy.deepcopy(model, shared)
