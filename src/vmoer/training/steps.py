"""One optimiser step: the shares of the loss, their gradients, AdamW.

A step does not wait for the device: a gradient that is not finite is passed over by the fused AdamW itself (`found_inf`), and
what the step has to say is read later (telemetry.py).
"""

import re
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from vmoer.errors import InputError
from vmoer.live.inputs import memory_for
from vmoer.training.data import Examples, collate
from vmoer.training.objective import micro_loss
from vmoer.training.plan import Plan
from vmoer.training.telemetry import SHARES
from vmoer.training.workers import Workers, local


class Steps:
    """AdamW on what requires grad, one step over a global batch at a time."""

    def __init__(self, model: nn.Module, train: Examples, plan: Plan, workers: Workers, passes: int = 1) -> None:
        self.model, self.train, self.plan, self.workers, self.passes = model, train, plan, workers, passes
        self.trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
        if not self.trainable:
            raise InputError("nothing of this model is trainable")
        refuse_inference_only(model)
        self.parameters = list(self.trainable.values())
        self.optimizer = torch.optim.AdamW(
            self.parameters, lr=plan.lr, weight_decay=plan.weight_decay, fused=not workers.sharded
        )
        groups = _groups(list(self.trainable))
        self.groups = list(dict.fromkeys(groups))
        self.group_P = torch.tensor([self.groups.index(group) for group in groups], device=workers.device)

    def take(self, rows: Sequence[int], lr: float, step: int) -> dict[str, Tensor]:
        """One optimiser step over the global batch `rows`; returns what to log, still on the device."""
        self.optimizer.zero_grad(set_to_none=True)
        tokens = sum(len(self.train.prompts[row]) for row in rows)
        pieces = self.workers.share(rows, self.plan.micro_batch)
        values: dict[str, Tensor] = {}
        for first, mine in pieces:
            found = self._backward(mine, step, first, len(rows), tokens)
            for name, value in found.items():
                value = value if name in SHARES else value / len(pieces)
                values[name] = values[name] + value if name in values else value
        self.workers.sum_gradients(self.parameters)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        square_P = self._apply()
        values["grad_square_G"] = square_P.new_zeros(len(self.groups)).index_add_(0, self.group_P, square_P)
        return values

    def _backward(self, mine: Sequence[int], step: int, first: int, rows: int, tokens: int) -> dict[str, Tensor]:
        """The gradient of a micro-batch's share of the loss, added to what is there."""
        batch = collate(self.train, mine, self.workers.device)
        with memory_for(batch.inputs, "--micro-batch, in stage 1 also --recompute"):
            loss, found = micro_loss(
                self.model, batch, step=step, first_row=first, rows=rows, tokens=tokens, passes=self.passes
            )
            self.workers.scaled(loss).backward()
        return found

    @torch.no_grad()
    def _apply(self) -> Tensor:
        """Clip and update, unless the gradient is not finite; returns each parameter's squared gradient norm, [P]."""
        given = [p for p in self.parameters if p.grad is not None]
        grads = [local(p.grad) for p in given]  # type: ignore[arg-type]
        square = torch.stack(torch._foreach_norm(grads)).float().square()
        if self.workers.sharded:
            self.workers.sum_(square)
        norm = square.sum().sqrt()
        torch._foreach_mul_(grads, (self.plan.max_grad_norm / (norm + 1e-6)).clamp(max=1.0))
        bad = ~torch.isfinite(norm)
        if not self.workers.sharded:
            self.optimizer.found_inf = bad.float()  # type: ignore[attr-defined]
            self.optimizer.step()
            torch.autograd.graph.increment_version(given)  # a fused update does not, and what is derived may be cached
        elif not bool(bad):  # fused updates do not take sharded tensors, so here the host has to ask
            self.optimizer.step()
        if len(given) == len(self.parameters):
            return square
        place = torch.tensor([i for i, p in enumerate(self.parameters) if p.grad is not None], device=square.device)
        return square.new_zeros(len(self.parameters)).index_copy_(0, place, square)


def refuse_inference_only(model: nn.Module) -> None:
    """bitsandbytes packs 4-bit layers for AVX512-BF16 at the first pass without gradients, and what is packed has no backward."""
    for module in model.modules():
        if getattr(module, "support_avx512bf16_for_cpu", False) and next(module.parameters()).device.type == "cpu":
            what = "bitsandbytes' 4-bit layers cannot be trained through on this processor"
            raise InputError(f"{what}: take a GPU, or the base in full precision")


def _groups(names: list[str]) -> list[str]:
    """The layer a parameter belongs to, by the first number in its path."""
    found = [re.search(r"\.(\d+)\.", name) for name in names]
    return [f"layer {m.group(1)}" if m else name for m, name in zip(found, names, strict=True)]
