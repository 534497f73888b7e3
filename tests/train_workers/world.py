"""A small world to train in: words that have a class, labels that are wrong three times in ten, and prompts that differ.

A prompt is `filler* word other ANSWER`; its right letter is the word's class, and a label is another letter with probability
`noise`. Whoever memorises the labels of (word, other) pairs is overconfident on pairs it has not seen.
"""

import json
from pathlib import Path
from typing import Any

import torch
import transformers as tf

from vmoer.training.data import Examples

WORDS, OTHERS, LETTERS = 24, 40, [3, 4, 5, 6]
_WORD, _OTHER, _FILLER, _ANSWER = 10, 10 + WORDS, 7, 8
VOCAB = 10 + WORDS + OTHERS


def model(seed: int = 0, **changes: Any) -> Any:
    settings = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "max_position_embeddings": 64,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    torch.manual_seed(seed)
    built = tf.GraniteMoeForCausalLM(tf.GraniteMoeConfig(**(settings | changes))).eval()
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for name, p in built.named_parameters():
            if p.dim() > 1:
                scale = 0.5 if "embed" in name else 1.5 if "router" in name else 1.0
                p.copy_(
                    torch.randn(p.shape, generator=generator) * scale * p.shape[-1] ** (0 if "embed" in name else -0.5)
                )
    return built


def examples(n: int, seed: int = 0, noise: float = 0.3, fillers: int = 3) -> Examples:
    g = torch.Generator().manual_seed(seed)

    def draw(high: int) -> list[int]:
        return torch.randint(high, (n,), generator=g).tolist()

    word, other, filler = draw(WORDS), draw(OTHERS), draw(fillers + 1)
    wrong = (torch.rand(n, generator=g) < noise).tolist()
    shift = draw(3)
    answers = [(w % 4 + (1 + s if bad else 0)) % 4 for w, bad, s in zip(word, wrong, shift, strict=True)]
    prompts = [[_FILLER] * f + [_WORD + w, _OTHER + o, _ANSWER] for f, w, o in zip(filler, word, other, strict=True)]
    return Examples(prompts, answers, [4] * n, LETTERS)


def save(folder: Path, n: int = 90, validation: int = 24, test: int = 24) -> tuple[str, str]:
    """The world as a user has it: a model folder with a tokenizer, and a data root with one task. Returns both paths."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = ["<pad>", "<s>", "</s>", "A", "B", "C", "D", "filler", "answer", "<unk>"]
    words += [f"w{i}" for i in range(WORDS)] + [f"o{i}" for i in range(OTHERS)]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = tf.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", unk_token="<unk>", eos_token="</s>"
    )
    fast.save_pretrained(str(folder / "model"))
    model(max_position_embeddings=128, num_hidden_layers=2).save_pretrained(str(folder / "model"))
    root = folder / "data" / "sciq"
    root.mkdir(parents=True)
    for split, rows, seed in (("train", n, 1), ("validation", validation, 2), ("test", test, 3)):
        made = examples(rows, seed)
        lines = []
        for i, (prompt, answer) in enumerate(zip(made.prompts, made.answers, strict=True)):
            asked = " ".join(words[token] for token in prompt[:-1])
            choices = ["red", "green", "blue", "grey"]
            lines.append(json.dumps({"id": f"{split}-{i}", "question": asked, "choices": choices, "answer": answer}))
        (root / f"{split}.jsonl").write_text("\n".join(lines) + "\n")
    return str(folder / "model"), str(folder / "data")
