"""How a stage is optimised, and how it runs."""

import math
from dataclasses import dataclass, field

from vmoer.errors import InputError
from vmoer.training.workers import Workers


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How a stage is optimised. `batch_size` is the effective one, over accumulation steps and processes.

    `micro_batch` is the number of rows in one forward pass (all of a process's by default); `patience` the epochs without a
    better validation NLL after which to stop (None: never).
    """

    epochs: int
    lr: float = 1e-4
    warmup: float = 0.05
    batch_size: int = 16
    micro_batch: int | None = None
    patience: int | None = None
    max_grad_norm: float = 1.0
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        if self.epochs < 0 or self.batch_size < 1 or not self.lr > 0 or not 0 <= self.warmup < 1:
            raise InputError(f"this plan cannot be run: {self}")


@dataclass(frozen=True, kw_only=True)
class Running:
    """What does not change the result: which processes, how often the state is kept and the log read, in steps.

    With `checkpoint_seconds` the state is kept at most that often, and not at the end: a short run is over before it would be
    worth writing several times what is trained to a disk, and a killed one does at most those seconds again.
    `skip_nonfinite` counts steps whose gradient is not finite and passes over them, in place of stopping at the first.
    `recompute` runs the layers of stage 1 again in the backward pass (gradient checkpointing): one more forward pass, and the
    experts' adapted weights are not all kept at once, which for a model of 16B parameters are 30 GB.
    """

    workers: Workers = field(default_factory=Workers)
    checkpoint_every: int = 200
    checkpoint_seconds: float = 0.0
    log_every: int = 20
    skip_nonfinite: bool = False
    recompute: bool = False
    tensorboard: bool = False
    progress: bool = False


def learning_rate(plan: Plan, step: int, total: int, hold: bool = False) -> float:
    """Linear warm-up, then half a cosine to zero; with `hold` constant from the middle on, where SWAG collects."""
    warm = math.ceil(plan.warmup * total)
    if step < warm:
        return plan.lr * (step + 1) / warm
    step = min(step, total // 2) if hold else step
    return plan.lr * 0.5 * (1 + math.cos(math.pi * max(0, step - warm) / max(1, total - warm)))
