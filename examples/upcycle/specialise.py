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
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from batches import TASKS, Batch, Recipe, batches, steps_in_all
from torch import Tensor, nn
from upcycle import refuse_existing, run, save_whole

from vmoer import gates, tasks
from vmoer.errors import InputError, RunError
from vmoer.models import open_model
from vmoer.tasks import Question, digest


def load_shares(logits_LTN: Tensor, token_MT: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """f and P, each [M, L, N]: the share of the choices that fall on an expert, and its mean probability."""
    chosen_LTN = torch.zeros_like(logits_LTN).scatter(-1, logits_LTN.topk(k).indices, 1 / k)
    return (
        torch.einsum("ltn,mt->mln", chosen_LTN, token_MT),
        torch.einsum("ltn,mt->mln", logits_LTN.softmax(-1), token_MT),
    )


@torch.no_grad()
def perturb(blocks: Sequence[Any], noise: float, seed: int) -> None:
    """Expert copies that differ a little, each by noise of `noise` times its weights' standard deviation."""
    device = next(blocks[0].parameters()).device
    generator = torch.Generator(device).manual_seed(seed)
    for block in blocks:
        for p in block.experts.parameters():
            sd = p.flatten(1).std(1).view(-1, *[1] * (p.dim() - 1))
            p.add_(torch.randn(p.shape, generator=generator, device=device, dtype=p.dtype) * sd * noise)


class Optimiser:
    """AdamW on float32 copies of the weights, which are cast to the model's dtype after every step.

    With bfloat16's eight bits a weight would not move by less than a few thousandths of itself.
    """

    def __init__(self, groups: Sequence[tuple[list[nn.Parameter], float]], dtype: torch.dtype) -> None:
        self._weights: list[Tensor] = [p for parameters, _ in groups for p in parameters]
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


def schedule(done: float, warmup: float) -> float:
    """Linear warm-up, then half a cosine to zero, over `done` from 0 to 1."""
    if done < warmup:
        return (done + 1e-3) / (warmup + 1e-3)
    return 0.5 * (1 + math.cos(math.pi * min(1.0, (done - warmup) / (1 - warmup))))


class Log:
    """What the steps since the last line had to say, still on the device; a line and a row of the history when asked."""

    def __init__(self, recipe: Recipe) -> None:
        self.recipe, self.start = recipe, time.monotonic()
        self.history: list[dict[str, float]] = []
        self.values: list[Tensor] = []
        self.loads: list[Tensor] = []

    def seconds(self) -> float:
        return time.monotonic() - self.start

    def line(self, step: int, steps: int, skipped: float) -> None:
        if not self.values:
            return
        values_S = torch.stack(self.values)
        values = torch.where(values_S.isfinite(), values_S, math.nan).nanmean(0).tolist()
        load_MLN = torch.stack(self.loads).mean(0)
        even = torch.special.entr(load_MLN).sum(-1).mean(-1) / math.log(load_MLN.shape[-1])
        row = dict(zip(("letter", "accuracy", "lm", "load", "load_answers"), values, strict=True))
        row |= dict(zip(("entropy", "entropy_answers"), even.tolist(), strict=True))
        row |= {"step": step, "skipped": skipped, "seconds": self.seconds()}
        if skipped > max(2, 0.1 * step) or not all(map(math.isfinite, row.values())):
            raise RunError(f"{skipped:.0f} of {step} steps had a gradient that is not finite; nothing was saved")
        self.history.append(row)
        left = row["seconds"] / step * (steps - step)
        if self.recipe.seconds is not None:
            left = min(left, self.recipe.seconds - row["seconds"])
        print(
            f"step {step}/{steps}: letter {row['letter']:.3f}, accuracy {row['accuracy']:.3f}, text {row['lm']:.3f}, "
            f"load {row['load']:.3f} and {row['load_answers']:.3f} on answers, usage entropy {row['entropy']:.3f} and "
            f"{row['entropy_answers']:.3f}, {skipped:.0f} skipped, {row['seconds']:.0f} s, {max(0, left):.0f} s left",
            flush=True,
        )
        self.values, self.loads = [], []


def specialise(model: Any, tokenizer: Any, recipe: Recipe, pools: Sequence[list[Question]], dtype: torch.dtype) -> dict:
    """Train the model in place; returns what happened."""
    log, found = Log(recipe), gates.find(model)
    if not found or any(one.reason for one in found):
        raise InputError(f"{type(model).__name__} has no router to train: make a model with upcycle.py first")
    perturb([one.block for one in found], recipe.noise, recipe.seed)
    embeddings = {model.get_input_embeddings().weight, model.get_output_embeddings().weight}
    routers: list[Any] = [one.router.weight for one in found]
    rest = [p for p in model.parameters() if p not in embeddings and all(p is not q for q in routers)]
    optimiser = Optimiser([(rest, recipe.lr), (routers, recipe.router_lr)], dtype)
    for p in embeddings:
        p.requires_grad_(False)
        p.data = p.data.to(dtype)
    step, total = 0, steps_in_all(pools, recipe)
    model.train()
    for batch in batches(tokenizer, pools, recipe, model.config.max_position_embeddings):
        done = step / total
        if recipe.seconds is not None:
            done = max(done, log.seconds() / recipe.seconds)
        if done >= 1:
            break
        loss, values, share_MLN = losses(model, batch.to(routers[0].device), recipe)
        loss.backward()
        optimiser.step(schedule(done, recipe.warmup))
        log.values.append(values)
        log.loads.append(share_MLN)
        step += 1
        if step % recipe.log_every == 0 or step == total:
            log.line(step, total, float(optimiser.skipped))
    log.line(step, step, float(optimiser.skipped))
    model.eval()
    return {
        "recipe": dataclasses.asdict(recipe),
        "dtype": str(dtype).removeprefix("torch."),
        "steps": step,
        "questions": sum(map(len, pools)),
        "skipped_steps": int(optimiser.skipped),
        "seconds": round(log.seconds(), 1),
        "history": log.history,
    }


@cache
def probed(model: Any) -> list[tuple[nn.Module, gates.Gate]]:
    """The routers, and where each has its logits."""
    return [(found.router, gates.Gate.probe(found)) for found in gates.find(model)]


@contextmanager
def router_logits(model: Any) -> Iterator[list[Tensor]]:
    """Each layer's logits of the pass inside the block. Not every transformers gives a GraniteMoe's when it is asked for them."""
    seen: list[Tensor] = []
    hooks = [
        router.register_forward_hook(lambda module, args, out, gate=gate: seen.append(gate.logits(out)))  # type: ignore[misc]
        for router, gate in probed(model)
    ]
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()


def losses(model: Any, batch: Batch, recipe: Recipe) -> tuple[Tensor, Tensor, Tensor]:
    """The loss; what to log of it [letter, accuracy, lm, load, load on answers]; and the load itself, [M, L, N]."""
    inputs = {"input_ids": batch.ids_BT, "attention_mask": batch.mask_BTT}
    with router_logits(model) as logits_LTN:
        out = model.get_decoder()(**inputs, use_cache=False)
    states_PD = out.last_hidden_state.flatten(0, 1)[batch.place_P]
    scaling = getattr(model.config, "logits_scaling", 1.0)  # a Qwen2Moe has none
    logits_PV = model.get_output_embeddings()(states_PD).float() / scaling
    nll_P = F.cross_entropy(logits_PV, batch.target_P, reduction="none")
    chosen_MLN, mean_MLN = load_shares(torch.stack(logits_LTN), batch.token_MT, model.config.num_experts_per_tok)
    load_M = chosen_MLN.shape[-1] * (chosen_MLN * mean_MLN).sum((1, 2))
    loss = (nll_P * batch.weight_P).sum() + recipe.balance * load_M[0] + recipe.answers * load_M[1]
    with torch.no_grad():
        letter_P = batch.letter_P.float() / batch.letter_P.sum()
        text_P = (~batch.letter_P).float() / (~batch.letter_P).sum()
        right_P = (logits_PV.argmax(-1) == batch.target_P).float()
        shown = [(nll_P * letter_P).sum(), (right_P * letter_P).sum(), (nll_P * text_P).sum()]
        values = torch.stack([*shown, *(load_M / chosen_MLN.shape[1])])
    return loss, values, chosen_MLN.detach()


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description="Train an upcycled model until its experts differ and routing matters."
    )
    parser.add_argument("--model", required=True, help="what upcycle.py wrote")
    parser.add_argument("--out", type=Path, required=True, help="folder for the model, in bfloat16, and its tokenizer")
    parser.add_argument("--data-root", help="DIR/<task>/<split>.jsonl; default VMOER_DATA, or the hub")
    parser.add_argument("--limit", type=int, help="questions read of each task")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tasks", default=",".join(TASKS))
    for field in dataclasses.fields(Recipe)[1:]:
        kind = int if str(field.type).startswith("int") else float
        shown: dict[str, Any] = {"default": field.default, "help": f"default {field.default}"}
        parser.add_argument(f"--{field.name.replace('_', '-')}", type=kind, **shown)
    args = parser.parse_args(arguments)
    start = time.monotonic()
    refuse_existing(args.out)
    args.tasks = tuple(args.tasks.split(","))
    recipe = Recipe(**{f.name: getattr(args, f.name) for f in dataclasses.fields(Recipe)})
    pools = [tasks.load(task, "train", data_root=args.data_root, limit=args.limit) for task in recipe.tasks]
    pools = [sorted(pool, key=lambda question: digest("specialise", recipe.seed, question.id)) for pool in pools]
    model, tokenizer, *_ = open_model(args.model, device=args.device, dtype=torch.float32)
    print(f"{sum(map(len, pools))} questions, model loaded ({time.monotonic() - start:.0f} s)", flush=True)
    dtype = torch.bfloat16 if model.device.type == "cuda" else torch.float32
    report = specialise(model.requires_grad_(True), tokenizer, recipe, pools, dtype)
    save_whole(args.out, model.to(torch.bfloat16), tokenizer, {"specialise.json": report})
    print(f"saved to {args.out} ({time.monotonic() - start:.0f} s)")


if __name__ == "__main__":
    sys.exit(run(main))
