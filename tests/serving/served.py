"""Tiny models that vLLM can run, routers for them, and what transformers says about the same texts: the oracle of these tests."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers as tf
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

import vmoer
from vmoer.evaluation.threshold import FORMAT, write_threshold
from vmoer.live.attach import routers_of
from vmoer.metrics.calibrators import Choice, VectorScaling
from vmoer.saved import calibrator as calibrators
from vmoer.saved.store import read_folder
from vmoer.training.lora import add_lora

VOCAB, LAYERS, NEW = 384, [1, 3], 12
_TEXT = [
    "the quick brown fox jumps over the lazy dog " * 3,
    "why is the sky blue because light scatters in the air",
    "uncertainty of experts in a mixture of experts model, token by token",
    "0123456789 (){}[] hello world",
]
PROMPTS = ["the quick brown fox", "why is the sky blue because light", "uncertainty of experts in a mixture"]
LONG = " ".join(_TEXT) * 2
_COMMON: dict[str, Any] = dict(
    vocab_size=VOCAB,
    hidden_size=128,
    num_hidden_layers=4,
    num_attention_heads=2,
    max_position_embeddings=512,
    bos_token_id=1,
    eos_token_id=2,
    pad_token_id=3,
    tie_word_embeddings=False,
)
_GQA = _COMMON | dict(num_key_value_heads=1)
_MHA = _COMMON | dict(num_key_value_heads=2)
_QWEN = dict(intermediate_size=64, moe_intermediate_size=64, num_experts=8, num_experts_per_tok=2)
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "granite": (
        "GraniteMoe",
        _GQA
        | dict(intermediate_size=64, num_local_experts=8, num_experts_per_tok=2)
        | dict(attention_multiplier=0.125, logits_scaling=1.0, residual_multiplier=0.5, embedding_multiplier=4.0),
    ),
    "qwen3_moe": ("Qwen3Moe", _GQA | _QWEN | dict(head_dim=64, norm_topk_prob=True)),
    "mixtral": ("Mixtral", _GQA | dict(intermediate_size=64, num_local_experts=8, num_experts_per_tok=2, head_dim=64)),
    "olmoe": ("Olmoe", _MHA | dict(intermediate_size=64, num_experts=8, num_experts_per_tok=2)),
    "glm4_moe": (  # DeepSeek-V3's gate (sigmoid, groups, bias) with plain attention: vLLM has no prefix cache for MLA on a CPU
        "Glm4Moe",
        _GQA
        | dict(intermediate_size=128, moe_intermediate_size=64, n_routed_experts=8, num_experts_per_tok=2, head_dim=64)
        | dict(n_group=2, topk_group=1, n_shared_experts=1, first_k_dense_replace=1, routed_scaling_factor=1.5),
    ),
}
REFUSED: dict[str, tuple[str, dict[str, Any]]] = {
    "phimoe": ("Phimoe", _GQA | dict(intermediate_size=64, num_local_experts=8, num_experts_per_tok=2, head_dim=64)),
}
"""vLLM's classes of these choose experts by a function of their own."""
METHODS: dict[str, vmoer.routers.Config] = {
    "vglr-fc": vmoer.FullCovariance(layers=LAYERS, prior_scale=1.5),
    "vglr-mf": vmoer.MeanField(layers=LAYERS, prior_scale=1.5),
    "vglr-lr": vmoer.LowRank(layers=LAYERS, prior_scale=1.5),
    "laplace": vmoer.Laplace(layers=LAYERS, prior_scale=2.0),
    "map": vmoer.Deterministic(layers=LAYERS),
    "mcdr": vmoer.MCDropout(layers=LAYERS, dropout=0.3),
    "swag": vmoer.SWAG(layers=LAYERS),
    "everywhere": vmoer.FullCovariance(prior_scale=1.5),
}

TEMPERATURE, BIASES = 1.7, (0.3, 0.1, -0.4)
CALIBRATOR = calibrators.described(
    Choice(VectorScaling(TEMPERATURE, BIASES), {}, np.empty((0, 3))),
    options=[3],
    averaging="router",
    passes=1,
    task="t",
    method="vglr-fc",
)


def tokenizer() -> Any:
    built = Tokenizer(models.BPE(unk_token="<unk>"))
    built.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    built.decoder = decoders.ByteLevel()
    special, letters = ["<unk>", "<s>", "</s>", "<pad>"], pre_tokenizers.ByteLevel.alphabet()
    built.train_from_iterator(
        _TEXT,
        trainers.BpeTrainer(vocab_size=VOCAB, special_tokens=special, initial_alphabet=letters, show_progress=False),
    )
    made = tf.PreTrainedTokenizerFast(
        tokenizer_object=built, unk_token="<unk>", bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    )
    made.chat_template = (
        "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    return made


def build(name: str, folder: Path) -> Path:
    """Write a model with weights large enough for routing that is not degenerate."""
    family, settings = (CONFIGS | REFUSED)[name]
    torch.manual_seed(0)
    model = getattr(tf, f"{family}ForCausalLM")(getattr(tf, f"{family}Config")(**settings)).float()
    with torch.no_grad():
        for key, value in model.named_parameters():
            if value.dim() >= 2:
                value.normal_(0, 0.15 if "router" in key or key.endswith("gate.weight") else 0.08)
        for key, value in model.named_buffers():
            if key.endswith("e_score_correction_bias"):
                value.uniform_(-0.05, 0.05)
    model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


def opened(folder: Path, dtype: torch.dtype = torch.float32, **more: Any) -> Any:
    """In a dtype from the start: `.to(dtype)` would round the frequencies of rotary embeddings too, which engines do not."""
    return tf.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **more).eval()


def train(base: Path, method: str, folder: Path, lora: bool = False, seed: int = 7, calibrator: Any = None) -> Path:
    """Write a run: routers that changed from where they start, novelty fitted; over a random adapter where one is wanted."""
    model, seeded = opened(base), torch.Generator().manual_seed(seed)
    if lora:
        model = add_lora(model, rank=2)
        for key, value in model.named_parameters():
            if ".lora_" in key:
                with torch.no_grad():
                    value.normal_(0, 0.1, generator=seeded)
    vmoer.attach(model, METHODS[method])
    for router in routers_of(model).values():
        for _ in range(3):
            for key, value in router.named_parameters():
                if key.startswith(("heads", "delta")):
                    with torch.no_grad():
                        value.normal_(0, 0.15 if key.startswith("heads") else 0.05, generator=seeded)
            if method == "swag":
                router.collect()
    ids = torch.randint(4, VOCAB, (8, 24), generator=seeded)
    vmoer.fit(model, [{"input_ids": ids, "attention_mask": torch.ones_like(ids)}])
    vmoer.save(model, folder, run={"model": str(base)} if lora else None, calibrator=calibrator)
    return folder


def recorded(base: Path, run: Path, prompts: list[str], new: int = NEW) -> list[dict[str, Any]]:
    """What `vmoer.record` says about greedy texts of the same model in transformers."""
    model, words = opened(base), tf.AutoTokenizer.from_pretrained(base)
    vmoer.load(model, run)
    out = []
    for prompt in prompts:
        batch = words(prompt, return_tensors="pt")
        with vmoer.record(model, signals="all") as rec, torch.no_grad():
            ids = model.generate(**batch, max_new_tokens=new, min_new_tokens=new, do_sample=False, pad_token_id=3)
        out.append(
            {
                "prompt": prompt,
                "ids": ids[0].tolist(),
                "prompt_tokens": batch["input_ids"].shape[1],
                "experts": rec.experts[:, 0].permute(1, 0, 2).tolist(),
                "signals": {name: value[:, 0].T.tolist() for name, value in rec.signals.items()},
            }
        )
    return out


def teacher_forced(base: Path, run: Path, texts: list[list[int]], dtype: torch.dtype, **more: Any) -> dict[str, Any]:
    """What `vmoer.record` says in a dtype about tokens that are given: experts [T, L, K] and signals [T, L], text after text."""
    model = opened(base, dtype, **more)
    vmoer.load(model, run)
    experts, signals = [], []
    for ids in texts:
        with vmoer.record(model, signals="all") as rec, torch.no_grad():
            model(input_ids=torch.tensor([ids]))
        experts.append(rec.experts[:, 0].transpose(0, 1))
        signals.append({name: value[:, 0].T.float() for name, value in rec.signals.items()})
    joined = {name: torch.cat([one[name] for one in signals]).numpy() for name in signals[0]}
    return {"experts": torch.cat(experts).numpy(), "signals": joined}


def options_of(base: Path, run: Path, text: str) -> np.ndarray:
    """The probabilities of A, B and C as the next token of a chat, through the calibrator."""
    model, words = opened(base), tf.AutoTokenizer.from_pretrained(base)
    vmoer.load(model, run)
    ids = words(
        words.apply_chat_template([{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True)
    )
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([ids["input_ids"]])).logits[0, -1]
    letters = logits[words.convert_tokens_to_ids(["A", "B", "C"])].double()
    return torch.softmax(torch.log_softmax(letters, -1) / TEMPERATURE + torch.tensor(BIASES), -1).numpy()


def threshold(folder: Path, base: Path, run: Path) -> Path:
    """A threshold file, as `vmoer threshold` writes it, on the mean novelty of an answer: some of the prompts' are above it."""
    found = [
        np.array(x["signals"]["novelty"])[x["prompt_tokens"] - 1 :].mean() for x in recorded(base, run, PROMPTS, 8)
    ]
    value = (min(found) + max(found)) / 2
    return _written(folder / "threshold.json", "text", "mean_novelty", value)


def letters_threshold(path: Path, base: Path, run: Path) -> Path:
    """The same on the confidence in an option, between those of the two most and least certain prompts."""
    found = [1 - options_of(base, run, prompt).max() for prompt in PROMPTS]
    stored = calibrators.of(read_folder(run))
    assert stored is not None
    return _written(path, "letters", "least_confidence", (min(found) + max(found)) / 2, calibrator=stored.digest)


def _written(path: Path, form: str, signal: str, value: float, **more: Any) -> Path:
    chosen = {"format": FORMAT, "form": form, "signal": signal, "threshold": value, "risk": 0.1, "confidence": 0.9}
    write_threshold(path, chosen | more)
    return path


def environment() -> dict[str, str]:
    """Of a process that runs vLLM without a GPU and without a network."""
    here = Path(__file__).parent
    path = os.pathsep.join([str(here / "stand_in"), str(here.parent.parent / "src"), os.environ.get("PYTHONPATH", "")])
    return os.environ | {
        "PYTHONPATH": path.rstrip(os.pathsep),
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_USE_V2_MODEL_RUNNER": "1",
        "TRITON_INTERPRET": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_DO_NOT_TRACK": "1",
    }
