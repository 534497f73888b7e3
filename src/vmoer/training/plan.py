"""How a stage is optimised, and how it runs."""

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from vmoer.errors import InputError
from vmoer.training.workers import Workers

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


@dataclass(frozen=True, kw_only=True)
class Running:
    """How a stage runs, without changing its result.

    Args:
        workers: the processes that train together.
        checkpoint_every: steps after which the state is written.
        checkpoint_seconds: the state is written at most this often. A short run then writes nothing before its end, and a killed
            one repeats at most these seconds.
        log_every: steps after which the log is read back from the device and written.
        skip_nonfinite: pass over steps whose gradient is not finite and count them, in place of stopping at the first.
        recompute: run the layers of stage 1 again in the backward pass (gradient checkpointing). That is one more forward pass,
            and saves the experts' adapted weights, 30 GB for a model of 16B parameters.
        tensorboard: write the log for TensorBoard too, where it is installed.
        progress: called after a step with the stage, the step, and how many there are.
        told: called with the stage and each row of the log: of a step, and of a validation (`validation_nll`).
    """

    workers: Workers = field(default_factory=Workers)
    checkpoint_every: int = 200
    checkpoint_seconds: float = 0.0
    log_every: int = 20
    skip_nonfinite: bool = False
    recompute: bool = False
    tensorboard: bool = False
    progress: Callable[[str, int, int], object] | None = None
    told: Callable[[str, dict[str, Any]], object] | None = None


def learning_rate(plan: Plan, step: int, total: int, hold: bool = False) -> float:
    """Linear warm-up, then half a cosine to zero; with `hold` constant from the middle on, where snapshots are taken."""
    warm = math.ceil(plan.warmup * total)
    if step < warm:
        return plan.lr * (step + 1) / warm
    step = min(step, total // 2) if hold else step
    return plan.lr * 0.5 * (1 + math.cos(math.pi * max(0, step - warm) / max(1, total - warm)))
