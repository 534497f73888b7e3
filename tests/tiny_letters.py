"""A tiny random MoE that answers with letters, and its tokenizer of characters."""

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import GraniteMoeConfig, GraniteMoeForCausalLM, PreTrainedTokenizerFast

from vmoer.tasks import LETTERS


def tiny_tokenizer() -> Any:
    """Characters, and the letters with a space before them: the token that follows `Answer:`."""
    pieces = ["<unk>", "▁", "\n", *map(chr, range(33, 127)), *(f"▁{letter}" for letter in LETTERS)]
    merges = [("▁", letter) for letter in LETTERS]
    core = Tokenizer(models.BPE(vocab={p: i for i, p in enumerate(pieces)}, merges=merges, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    return PreTrainedTokenizerFast(tokenizer_object=core, unk_token="<unk>")


def tiny_model(seed: int = 0, **changes: Any) -> Any:
    torch.manual_seed(seed)
    sizes: dict[str, Any] = {
        "vocab_size": 128,
        "hidden_size": 32,
        "intermediate_size": 24,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_local_experts": 6,
        "num_experts_per_tok": 2,
        "max_position_embeddings": 2048,
        "initializer_range": 0.2,
    }
    return GraniteMoeForCausalLM(GraniteMoeConfig(**sizes | changes)).eval()


def save_tiny(folder: Path, **changes: Any) -> Path:
    tiny_model(**changes).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


TOKENIZER = tiny_tokenizer()
