"""How a stage is optimised, and how it runs."""

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, Literal, get_args

from vmoer.errors import InputError

Keep = Literal["best", "trained", "last"]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How a stage is optimised, and which of its states is kept.

    Args:
        warmup: the share of steps in which the learning rate rises.
        batch_size: rows of a step, over accumulation steps and processes.
        micro_batch: rows of one forward pass; by default all that a process has of the step.
        patience: stop after so many epochs without a better validation NLL; None never stops early.
        keep: of stage 2, the state that is "best" on validation, the untrained one included; the best that was "trained" for
            at least an epoch; or the "last". A method with snapshots keeps its last.
    """

    epochs: int
    lr: float = 1e-4
    warmup: float = 0.05
    batch_size: int = 16
    micro_batch: int | None = None
    patience: int | None = None
    max_grad_norm: float = 1.0
    weight_decay: float = 0.0
    keep: Keep = "best"

    def __post_init__(self) -> None:
        if self.keep not in get_args(Keep):
            raise InputError(f"keep={self.keep!r}: choose one of {', '.join(get_args(Keep))}")
        if self.epochs < 0 or self.batch_size < 1 or not self.lr > 0 or not 0 <= self.warmup < 1:
            raise InputError(f"this plan cannot be run: {self}")

    def described(self) -> dict[str, Any]:
        """As files say it. What is kept is said where it is not the best, which older files do not name."""
        said = dataclasses.asdict(self)
        return said if self.keep != "best" else {name: value for name, value in said.items() if name != "keep"}


def learning_rate(plan: Plan, step: int, total: int, hold: bool = False) -> float:
    """Linear warm-up, then half a cosine to zero; with `hold` constant from the middle on, where snapshots are taken."""
    warm = math.ceil(plan.warmup * total)
    if step < warm:
        return plan.lr * (step + 1) / warm
    step = min(step, total // 2) if hold else step
    return plan.lr * 0.5 * (1 + math.cos(math.pi * max(0, step - warm) / max(1, total - warm)))


def held_out_share(stage2_data: str) -> float:
    """0 for "train" and "permuted", s for "held-out:s"; 0 too for "split:name", a split that stage 1 never trains on."""
    if stage2_data in ("train", "permuted") or stage2_data.startswith("split:"):
        return 0.0
    name, _, share = stage2_data.partition(":")
    try:
        value = float(share or "0.2")
    except ValueError:
        value = -1.0
    if name != "held-out" or not 0 < value < 1:
        raise InputError(
            f"stage2_data={stage2_data!r}: write train, permuted, split:NAME, or held-out:0.2 with a share between 0 and 1"
        )
    return value
