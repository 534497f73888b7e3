"""DeepSeek-MoE-16B, and other checkpoints of its layout (`"model_type": "deepseek"`), without remote code.

transformers has no class for this layout: its repositories bring their own code, which is never run here. What the model
computes is what `Qwen2MoeForCausalLM` computes, but for the shared experts, whose output qwen2_moe multiplies by a gate:

    deepseek     y = sum_k w_k expert_k(u) +                          W_down h(u)
    qwen2_moe    y = sum_k w_k expert_k(u) + sigmoid(w_gate . u)   *  W_down h(u)

With w_gate = 0 the gate is exactly 1/2, so W_down is doubled. Doubling and halving are exact in floating point, so nothing is
approximated. Both shared experts together are one feed-forward network of twice the width in both layouts.
"""

import math
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from transformers import (
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedTokenizerFast,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
)
from transformers.activations import ACT2FN

from vmoer.errors import InputError, first_line, is_number, short
from vmoer.files import read_json

MODEL_TYPE = "deepseek"
_SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "moe_intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_experts_per_tok",
    "max_position_embeddings",
)
_EXPERTS = ("n_routed_experts", "n_shared_experts")
_SETTINGS = (
    "norm_topk_prob",
    "hidden_act",
    "initializer_range",
    "rms_norm_eps",
    "use_cache",
    "attention_dropout",
    "pad_token_id",
    "bos_token_id",
    "eos_token_id",
)
_ONLY = {
    "scoring_func": "softmax",
    "attention_bias": False,
    "rope_scaling": None,
    "tie_word_embeddings": False,
    "quantization_config": None,
}
"""Settings that have other values in the layout's own code, which qwen2_moe does not have or no published checkpoint uses."""
_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
_FREQUENCIES = re.compile(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq")


def described(name: str, revision: str | None = None) -> dict[str, Any] | None:
    """What a model's `config.json` says, in a folder or on the hub; None where it is not of this layout."""

    try:
        found, _ = PreTrainedConfig.get_config_dict(name, revision=revision)
    except (OSError, ValueError):  # whoever opens it as another model says what is wrong
        return None
    return found if found.get("model_type") == MODEL_TYPE else None


def configuration(found: Mapping[str, Any]) -> Any:
    """The `Qwen2MoeConfig` of a `config.json` of this layout."""

    _check_settings(found)
    first, every = found.get("first_k_dense_replace", 0), found.get("moe_layer_freq", 1)
    with _named("config.json"):
        return Qwen2MoeConfig(
            **{name: found[name] for name in (*_SIZES, *_SETTINGS) if name in found},
            num_key_value_heads=found.get("num_key_value_heads", found["num_attention_heads"]),
            num_experts=found["n_routed_experts"],
            shared_expert_intermediate_size=found["n_shared_experts"] * found["moe_intermediate_size"],
            mlp_only_layers=[i for i in range(found["num_hidden_layers"]) if i < first or i % every],
            rope_parameters={"rope_type": "default", "rope_theta": float(found.get("rope_theta", 10000.0))},
            qkv_bias=False,
            tie_word_embeddings=False,
        )


def _check_settings(found: Mapping[str, Any]) -> None:
    """Refuse a `config.json` whose settings are not of this layout, or do not go together."""

    def refuse(name: str, wanted: str) -> None:
        raise InputError(
            f"config.json of a deepseek model has {name} = {short(found.get(name))}, which must be {wanted}"
        )

    for name in (*_SIZES, *_EXPERTS):
        if not is_number(found.get(name), whole=True):
            raise InputError(f"config.json of a deepseek model has no number {name!r}")
        if found[name] < 1:
            refuse(name, "at least 1")
    for name, value in _ONLY.items():
        if found.get(name, value) != value:
            raise InputError(f"a deepseek model with {name} = {found[name]!r} cannot be opened: only {value!r} can")
    for name, least in (("first_k_dense_replace", 0), ("moe_layer_freq", 1), ("num_key_value_heads", 1)):
        if name in found and not (is_number(found[name], whole=True) and found[name] >= least):
            refuse(name, f"a whole number of at least {least}")
    heads = found["num_attention_heads"]
    if found["hidden_size"] % heads:
        refuse("num_attention_heads", f"a divisor of hidden_size = {found['hidden_size']}")
    if heads % found.get("num_key_value_heads", heads):
        refuse("num_key_value_heads", f"a divisor of num_attention_heads = {heads}")
    if found["num_experts_per_tok"] > found["n_routed_experts"]:
        refuse("num_experts_per_tok", f"at most n_routed_experts = {found['n_routed_experts']}")
    theta = found.get("rope_theta", 10000.0)
    if not is_number(theta) or theta <= 0:
        refuse("rope_theta", "a positive number")
    act = found.get("hidden_act", "silu")
    if not isinstance(act, str) or act not in ACT2FN:
        refuse("hidden_act", "an activation that transformers knows")


@contextmanager
def _named(file: str) -> Iterator[None]:
    """Whatever transformers or the tokenizers library raise at a damaged file, as one line that names it."""
    try:
        yield
    except InputError:
        raise
    except Exception as error:
        raise InputError(f"{file} cannot be read: {first_line(error)}") from None


def shapes(config: Any) -> dict[str, tuple[int, ...]]:
    """Every tensor that a checkpoint of this layout holds, by name."""
    width = config.hidden_size
    head = width // config.num_attention_heads
    keys = config.num_key_value_heads * head
    found: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config.vocab_size, width),
        "model.norm.weight": (width,),
        "lm_head.weight": (config.vocab_size, width),
    }

    def network(path: str, hidden: int) -> None:
        found[f"{path}.gate_proj.weight"] = found[f"{path}.up_proj.weight"] = (hidden, width)
        found[f"{path}.down_proj.weight"] = (width, hidden)

    for i in range(config.num_hidden_layers):
        layer = f"model.layers.{i}"
        found[f"{layer}.input_layernorm.weight"] = found[f"{layer}.post_attention_layernorm.weight"] = (width,)
        found[f"{layer}.self_attn.q_proj.weight"] = found[f"{layer}.self_attn.o_proj.weight"] = (width, width)
        found[f"{layer}.self_attn.k_proj.weight"] = found[f"{layer}.self_attn.v_proj.weight"] = (keys, width)
        if i in config.mlp_only_layers:
            network(f"{layer}.mlp", config.intermediate_size)
            continue
        found[f"{layer}.mlp.gate.weight"] = (config.num_experts, width)
        network(f"{layer}.mlp.shared_experts", config.shared_expert_intermediate_size)
        for j in range(config.num_experts):
            network(f"{layer}.mlp.experts.{j}", config.moe_intermediate_size)
    return found


def build(config: Any, tensors: Mapping[str, Tensor], dtype: torch.dtype | str) -> Any:
    """The model of a checkpoint's tensors. Every one of them is used and every parameter is filled, or it is an InputError."""

    tensors = _without_frequencies(config, tensors)
    _check(shapes(config), tensors)
    state = {}
    for name, tensor in tensors.items():
        if ".shared_experts." in name:
            tensor = 2 * tensor if "down_proj" in name else tensor
            name = name.replace(".shared_experts.", ".shared_expert.")
        state[name] = tensor
    for i in set(range(config.num_hidden_layers)) - set(config.mlp_only_layers):
        state[f"model.layers.{i}.mlp.shared_expert_gate.weight"] = torch.zeros(1, config.hidden_size)
    model, info = Qwen2MoeForCausalLM.from_pretrained(
        None, config=config, state_dict=state, dtype=dtype, output_loading_info=True
    )
    for what, names in info.items():  # transformers would only say so in its log
        if names:
            raise InputError(f"transformers did not take the checkpoint whole: {what.replace('_', ' ')}: {min(names)}")
    for name, parameter in model.named_parameters():
        if name.endswith(".shared_expert_gate.weight"):
            parameter.requires_grad_(False)
    return model.eval()


def open_checkpoint(name: str, found: Mapping[str, Any], dtype: torch.dtype | str, revision: str | None = None) -> Any:
    """The model in a folder or on the hub whose `config.json` says `found`."""

    folder = _fetched(name, revision, "*.json", "*.safetensors")
    config = configuration(found)
    tensors: dict[str, Tensor] = {}
    for file in _shards(folder):
        try:
            more = load_file(folder / file)
        except SafetensorError as error:
            raise InputError(f"{file} cannot be read: {error}") from None
        if twice := tensors.keys() & more.keys():
            raise InputError(f"{file} has {min(twice)}, which another file of the checkpoint has too")
        tensors |= more
    model = build(config, tensors, dtype)
    path = folder / "generation_config.json"
    if path.exists():
        _object(path)
        with _named(path.name):
            model.generation_config = GenerationConfig.from_pretrained(folder, trust_remote_code=False)
    return model


def _shards(folder: Path) -> list[str]:
    """The files of a checkpoint: those of its index, or the only one."""
    index = folder / "model.safetensors.index.json"
    files = ["model.safetensors"]
    if index.exists():
        places = _object(index).get("weight_map")
        if not isinstance(places, dict) or not places or not all(isinstance(file, str) for file in places.values()):
            raise InputError(f"{index.name} has no weight_map of a file for each tensor")
        files = sorted(set(places.values()))
    for file in files:
        if not file or Path(file).name != file:
            raise InputError(f"{index.name} names {short(file)}, which is not a file beside it")
        if not (folder / file).is_file():
            raise InputError(f"there is no {file}: weights are read from safetensors alone")
    return files


def _object(path: Path) -> dict[str, Any]:
    """The object in a JSON file of the checkpoint. The hub's cache holds links to its own store, and these are read."""
    found = read_json(path)
    if not isinstance(found, dict):
        raise InputError(f"{path.name} is not a JSON object")
    return found


def open_tokenizer(name: str, revision: str | None = None) -> Any:
    """`tokenizer.json` as it is, with the first token that the repository asks for.

    The class that its configuration names, LlamaTokenizerFast, put that token there by itself; in transformers 5 a class of
    this name splits words in another way, and the configuration's `add_bos_token` is ignored unless it is passed.
    """

    folder = _fetched(name, revision, "*.json", "*.jinja")
    path = folder / "tokenizer_config.json"
    said = _object(path) if path.exists() else {}
    added = {name: said[name] for name in ("add_bos_token", "add_eos_token") if name in said}
    with _named("tokenizer.json"):
        return PreTrainedTokenizerFast.from_pretrained(folder, trust_remote_code=False, **added)


def _fetched(name: str, revision: str | None, *patterns: str) -> Path:
    """The folder of a model: a local one as it is, of a repository these files alone, among which is no code."""
    from huggingface_hub import snapshot_download

    folder = Path(name)
    return folder if folder.is_dir() else Path(snapshot_download(name, revision=revision, allow_patterns=patterns))


def _check(wanted: Mapping[str, tuple[int, ...]], tensors: Mapping[str, Tensor]) -> None:
    for what, names in (
        ("lacks", [name for name in wanted if name not in tensors]),
        ("has an extra tensor", [name for name in tensors if name not in wanted]),
    ):
        if names:
            more = f", and {len(names) - 1} more" if len(names) > 1 else ""
            raise InputError(f"the checkpoint {what} {names[0]}{more}")
    for name, shape in wanted.items():
        if tuple(tensors[name].shape) != shape:
            got = list(tensors[name].shape)
            raise InputError(f"{name} has shape {got}, and by config.json it is {list(shape)}")
        if tensors[name].dtype not in _DTYPES:
            kind = str(tensors[name].dtype).removeprefix("torch.")
            raise InputError(f"{name} is of {kind}: only weights in floating point of 16 bits or more are read")


def _without_frequencies(config: Any, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Without the rotary frequencies that old checkpoints of Llama's kin carry, which must be those of `rope_theta`."""
    head = config.hidden_size // config.num_attention_heads
    theta = config.rope_parameters["rope_theta"]
    expected = torch.tensor([math.pow(theta, -i / head) for i in range(0, head, 2)])
    rest = {}
    for name, tensor in tensors.items():
        if not _FREQUENCIES.fullmatch(name):
            rest[name] = tensor
        elif tensor.shape != expected.shape or not torch.allclose(tensor.float(), expected, rtol=0.01, atol=0):
            raise InputError(f"{name} is not what rope_theta = {theta:g} gives")
    return rest
