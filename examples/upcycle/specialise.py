"""Make the experts differ, and the choice between them matter: `python specialise.py --model DIR --out DIR`.

All weights but the embeddings are trained for a few minutes on multiple-choice questions of everyday knowledge:

    -log p(letter) + lm * mean of -log p(question's tokens) + sum over layers (balance * B(all tokens) + answers * B(last tokens))

B is the Switch loss, N sum_i f_i P_i (f_i the share of choices that fall on expert i, P_i its mean probability; 1 where the
load is even). Language modelling gives the experts something to learn at every token; the second load term keeps the last token
of a prompt, which looks alike in all of them, from making two experts of a layer the only ones that ever answer. Identical
copies receive identical gradients wherever they meet, so each starts with a little noise of its own.

Weights are bfloat16 on a GPU, for its fast grouped matrix product, and copies in float32 take the optimiser's steps. A step never
waits for the device, and one whose gradient is not finite is skipped and counted.

Data order, option order and noise are functions of the seed. On a GPU sums may still be taken in another order.

Shapes: T tokens of the flattened batch, P predicted positions, L layers, N experts, M = 2 ways to weigh tokens (all, last).
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from batches import Batch, batches, steps_in_all
from recipe import TASKS, Recipe
from torch import Tensor, nn
from upcycle import refuse_existing, run, save_whole

from vmoer import gates, tasks
from vmoer.errors import InputError, RunError
from vmoer.files import write_json
from vmoer.tasks import Question
from vmoer.tasks._base import digest

# -- model -------------------------------------------------------------------------------------------------------------


class Routers:
    """The model's routers, and the logits of the last forward pass with their gradients."""

    def __init__(self, model: nn.Module) -> None:
        self.found = gates.find(model)
        if not self.found or any(found.reason for found in self.found):
            raise InputError(f"{type(model).__name__} has no router to train: make a model with upcycle.py first")
        probed = [gates.Gate.probe(found) for found in self.found]
        self.k = probed[0].scoring.k
        self._logits: dict[int, Tensor] = {}
        self._hooks = [
            found.router.register_forward_hook(self._hook(found.layer, gate))
            for found, gate in zip(self.found, probed, strict=True)
        ]

    def _hook(self, layer: int, gate: gates.Gate) -> Any:
        def see(router: nn.Module, inputs: Any, out: tuple[Tensor, ...]) -> None:
            self._logits[layer] = gate.logits(out)

        return see

    def take(self) -> Tensor:
        """[L, B * T, N]"""
        logits = torch.stack([self._logits[found.layer] for found in self.found])
        self._logits.clear()
        return logits

    def remove(self) -> None:
        for hook in self._hooks:
            hook.remove()


def load_shares(logits_LTN: Tensor, token_MT: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """f and P, each [M, L, N]: the share of the choices that fall on an expert, and its mean probability."""
    chosen_LTN = torch.zeros_like(logits_LTN).scatter(-1, logits_LTN.topk(k).indices, 1 / k)
    return (
        torch.einsum("ltn,mt->mln", chosen_LTN, token_MT),
        torch.einsum("ltn,mt->mln", logits_LTN.softmax(-1), token_MT),
    )


@torch.no_grad()
def perturb(routers: Routers, noise: float, seed: int) -> None:
    """Expert copies that differ a little, each by noise of `noise` times its weights' standard deviation."""
    device = next(routers.found[0].block.parameters()).device
    generator = torch.Generator(device).manual_seed(seed)
    for found in routers.found:
        for p in found.block.experts.parameters():
            sd = p.flatten(1).std(1).view(-1, *[1] * (p.dim() - 1))
            p.add_(torch.randn(p.shape, generator=generator, device=device, dtype=p.dtype) * sd * noise)


class Optimiser:
    """AdamW on float32 copies of the weights, which are cast to the model's dtype after every step.

    With bfloat16's eight bits a weight would not move by less than a few thousandths of itself.
    """

    def __init__(self, groups: Sequence[tuple[list[nn.Parameter], float]], dtype: torch.dtype) -> None:
        self._weights = [p for parameters, _ in groups for p in parameters]
        self._masters = [p.detach() for p in self._weights]
        for p in self._weights:
            p.data = p.data.to(dtype)  # float32 stays the master itself
        masters = iter(self._masters)
        self._adam = torch.optim.AdamW(
            [{"params": [next(masters) for _ in parameters], "lr": lr, "peak": lr} for parameters, lr in groups],
            betas=(0.9, 0.95),
            weight_decay=0.0,
            fused=True,
        )
        self.skipped = torch.zeros((), device=self._weights[0].device)

    @torch.no_grad()
    def step(self, scale: float, max_norm: float = 1.0) -> None:
        """Clip, and move unless the gradient is not finite; nothing is read back from the device."""
        grads = [p.grad.float() for p in self._weights]  # type: ignore[union-attr]
        norm = torch.stack(torch._foreach_norm(grads)).norm()
        torch._foreach_mul_(grads, (max_norm / (norm + 1e-6)).clamp(max=1.0))
        bad = (~torch.isfinite(norm)).float()
        self.skipped += bad
        for group in self._adam.param_groups:
            group["lr"] = group["peak"] * scale
        for master, grad in zip(self._masters, grads, strict=True):
            master.grad = grad
        self._adam.found_inf = bad  # type: ignore[attr-defined]  # the fused kernel passes such a step over
        self._adam.step()
        torch._foreach_copy_(self._weights, self._masters)
        for tensor in (*self._weights, *self._masters):
            tensor.grad = None


# -- training ----------------------------------------------------------------------------------------------------------


def schedule(done: float, warmup: float) -> float:
    """Linear warm-up, then half a cosine to zero, over `done` from 0 to 1."""
    if done < warmup:
        return (done + 1e-3) / (warmup + 1e-3)
    return 0.5 * (1 + math.cos(math.pi * min(1.0, (done - warmup) / (1 - warmup))))


def specialise(model: Any, tokenizer: Any, recipe: Recipe, pools: Sequence[list[Question]], dtype: torch.dtype) -> dict:
    """Train the model in place; returns what happened."""
    start = time.monotonic()
    routers = Routers(model)
    perturb(routers, recipe.noise, recipe.seed)
    embeddings = {model.get_input_embeddings().weight, model.get_output_embeddings().weight}
    gates_only = [found.router.weight for found in routers.found]
    rest = [p for p in model.parameters() if p not in embeddings and all(p is not q for q in gates_only)]
    optimiser = Optimiser([(rest, recipe.lr), (gates_only, recipe.router_lr)], dtype)
    for p in embeddings:
        p.requires_grad_(False)
        p.data = p.data.to(dtype)
    device, total = optimiser.skipped.device, steps_in_all(pools, recipe)
    experts = len(gates_only[0])
    history: list[dict[str, float]] = []
    seen: list[Tensor] = []
    load_MLN = torch.zeros(2, len(gates_only), experts, device=device)

    def log(step: int, steps: int) -> None:
        nonlocal load_MLN
        values_S = torch.stack(seen)
        values = torch.where(values_S.isfinite(), values_S, math.nan).nanmean(0).tolist()
        even = torch.special.entr(load_MLN / len(seen)).sum(-1).mean(-1) / math.log(experts)
        row = dict(zip(("letter", "accuracy", "lm", "load", "load_answers"), values, strict=True))
        row |= dict(zip(("entropy", "entropy_answers"), even.tolist(), strict=True))
        row |= {"step": step, "skipped": float(optimiser.skipped), "seconds": time.monotonic() - start}
        if row["skipped"] > max(2, 0.1 * step) or not all(map(math.isfinite, row.values())):
            raise RunError(f"{row['skipped']:.0f} of {step} steps had a gradient that is not finite; nothing was saved")
        history.append(row)
        left = row["seconds"] / step * (steps - step)
        if recipe.seconds is not None:
            left = min(left, recipe.seconds - row["seconds"])
        print(
            f"step {step}/{steps}: letter {row['letter']:.3f}, accuracy {row['accuracy']:.3f}, text {row['lm']:.3f}, "
            f"load {row['load']:.3f} and {row['load_answers']:.3f} on answers, usage entropy {row['entropy']:.3f} and "
            f"{row['entropy_answers']:.3f}, {row['skipped']:.0f} skipped, {row['seconds']:.0f} s, {max(0, left):.0f} s left",
            flush=True,
        )
        seen.clear()
        load_MLN = torch.zeros_like(load_MLN)

    model.train()
    step = 0
    for batch in batches(tokenizer, pools, recipe, model.config.max_position_embeddings):
        done = step / total
        if recipe.seconds is not None:
            done = max(done, (time.monotonic() - start) / recipe.seconds)
        if done >= 1:
            break
        batch = batch.to(device)
        loss, values, share_MLN = losses(model, batch, routers, recipe)
        loss.backward()
        optimiser.step(schedule(done, recipe.warmup))
        seen.append(values)
        load_MLN += share_MLN
        step += 1
        if step % recipe.log_every == 0 or step == total:
            log(step, total)
    if seen:
        log(step, step)
    model.eval()
    routers.remove()
    return {
        "recipe": dataclasses.asdict(recipe),
        "dtype": str(dtype).removeprefix("torch."),
        "steps": step,
        "questions": sum(map(len, pools)),
        "skipped_steps": int(history[-1]["skipped"]),
        "seconds": round(time.monotonic() - start, 1),
        "history": history,
    }


def losses(model: Any, batch: Batch, routers: Routers, recipe: Recipe) -> tuple[Tensor, Tensor, Tensor]:
    """The loss; what to log of it [letter, accuracy, lm, load, load on answers]; and the load itself, [M, L, N]."""
    states = model.get_decoder()(
        input_ids=batch.ids_BT, attention_mask=batch.mask_BTT, use_cache=False
    ).last_hidden_state
    logits_PV = model.get_output_embeddings()(states.flatten(0, 1)[batch.place_P]).float() / model.config.logits_scaling
    nll_P = F.cross_entropy(logits_PV, batch.target_P, reduction="none")
    chosen_MLN, mean_MLN = load_shares(routers.take(), batch.token_MT, routers.k)
    load_M = chosen_MLN.shape[-1] * (chosen_MLN * mean_MLN).sum((1, 2))
    loss = (nll_P * batch.weight_P).sum() + recipe.balance * load_M[0] + recipe.answers * load_M[1]
    with torch.no_grad():
        letter_P = batch.letter_P.float() / batch.letter_P.sum()
        text_P = (~batch.letter_P).float() / (~batch.letter_P).sum()
        right_P = (logits_PV.argmax(-1) == batch.target_P).float()
        shown = [(nll_P * letter_P).sum(), (right_P * letter_P).sum(), (nll_P * text_P).sum()]
        values = torch.stack([*shown, *(load_M / chosen_MLN.shape[1])])
    return loss, values, chosen_MLN.detach()


def open_upcycled(name: str, device: torch.device) -> tuple[Any, Any]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(name)
        model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32)
    except (OSError, ValueError) as error:
        raise InputError(f"cannot load the model {name}: {(str(error).strip().splitlines() or [''])[0]}") from None
    return model.to(device), tokenizer


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description="Train an upcycled model until its experts differ and routing matters."
    )
    parser.add_argument("--model", required=True, help="what upcycle.py wrote")
    parser.add_argument("--out", type=Path, required=True, help="folder for the model, in bfloat16, and its tokenizer")
    parser.add_argument("--data-root", help="DIR/<task>/<split>.jsonl; default VMOER_DATA, or the hub")
    parser.add_argument("--limit", type=int, help="questions read of each task")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), help="default: bfloat16 on a GPU, else float32")
    parser.add_argument("--experts-implementation", help="transformers' own choice by default; eager where it fails")
    parser.add_argument("--tasks", default=",".join(TASKS))
    for field in dataclasses.fields(Recipe):
        if field.name != "tasks":
            kind = int if str(field.type).startswith("int") else float
            shown = {"default": field.default, "help": f"default {field.default}"}
            parser.add_argument(f"--{field.name.replace('_', '-')}", type=kind, **shown)
    args = parser.parse_args(arguments)
    start = time.monotonic()
    refuse_existing(args.out)
    settings = {f.name: getattr(args, f.name) for f in dataclasses.fields(Recipe)}
    recipe = Recipe(**settings | {"tasks": tuple(args.tasks.split(","))})
    device = torch.device(args.device)
    dtype = getattr(torch, args.dtype or ("bfloat16" if device.type == "cuda" else "float32"))
    pools = [tasks.load(task, "train", data_root=args.data_root, limit=args.limit) for task in recipe.tasks]
    pools = [sorted(pool, key=lambda question: digest("specialise", recipe.seed, question.id)) for pool in pools]
    model, tokenizer = open_upcycled(args.model, device)
    if args.experts_implementation:
        model.set_experts_implementation(args.experts_implementation)
    print(f"{sum(map(len, pools))} questions, model loaded ({time.monotonic() - start:.0f} s)", flush=True)
    report = specialise(model, tokenizer, recipe, pools, dtype)

    def write(folder: Path) -> None:
        for p in model.parameters():
            p.data = p.data.to(torch.bfloat16)
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        write_json(folder / "specialise.json", report)

    save_whole(args.out, write)
    print(f"saved to {args.out} ({time.monotonic() - start:.0f} s)")


if __name__ == "__main__":
    sys.exit(run(main))
