"""Every number of the specialisation stage."""

from __future__ import annotations

from dataclasses import dataclass

from vmoer.errors import InputError

TASKS = ("commonsense_qa", "social_iqa")


@dataclass(frozen=True)
class Recipe:
    tasks: tuple[str, ...] = TASKS
    epochs: int = 4
    per_task: int = 10_000
    """Questions of each task in an epoch; the next epoch goes on where this one stopped, and turns round at the end."""
    batch_size: int = 128
    lr: float = 2e-4
    router_lr: float = 1e-3
    warmup: float = 0.05
    lm: float = 0.2
    balance: float = 0.01
    answers: float = 0.002
    noise: float = 0.02
    """Standard deviation of what is added to each expert's weights, relative to theirs."""
    seed: int = 0
    log_every: int = 20
    steps: int | None = None
    """Stop after this many, with the schedule of so many."""
    seconds: float | None = None
    """Stop after this long, with the learning rate down by then; only then does the result depend on the machine's speed."""

    def __post_init__(self) -> None:
        counts = (self.epochs, self.batch_size, self.per_task, self.log_every, 1 if self.steps is None else self.steps)
        if min(counts) < 1:
            raise InputError("epochs, batch size, questions per task, steps and log-every must be at least 1")
        if not self.lr > 0 or not self.router_lr > 0 or (self.seconds is not None and not self.seconds > 0):
            raise InputError("learning rates and seconds must be above 0")
        if min(self.lm, self.balance, self.answers, self.noise) < 0:
            raise InputError("lm, balance, answers and noise must not be negative")
