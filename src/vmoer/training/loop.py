"""The loop that both stages run: AdamW, warm-up and cosine, validation after every epoch, resumable at any step.

Data order, noise and learning rate are functions of the seed and the step, so a resumed run is the uninterrupted one.
"""

import dataclasses
import json
import math
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vmoer import metrics
from vmoer.errors import InputError
from vmoer.live.attach import attached, attachment_of, routers_of
from vmoer.training import checkpoint
from vmoer.training.data import Examples, epoch_batches
from vmoer.training.objective import evaluate
from vmoer.training.plan import Plan, learning_rate
from vmoer.training.steps import Steps
from vmoer.training.telemetry import Telemetry
from vmoer.training.workers import Running


@dataclass
class State:
    """What a resumed run needs besides tensors."""

    step: int = 0
    best_nll: float = math.inf
    best_epoch: int = 0
    since_best: int = 0
    epoch_nll: list[float] = field(default_factory=list)
    """Of the steps of the current epoch."""
    history: list[dict[str, Any]] = field(default_factory=list)
    finished: bool = False


@dataclass(frozen=True)
class StageOutcome:
    """The last and the best state of what was trained, by name, and the validation after each epoch."""

    last: dict[str, Tensor]
    best: dict[str, Tensor]
    state: State
    skipped: int
    moved: dict[str, Any] | None = None
    """Of stage 2: how far the kept state is from where it began (moved.py)."""

    def summary(self) -> dict[str, Any]:
        return {
            "steps": self.state.step,
            "best_epoch": self.state.best_epoch,
            "best_validation_nll": self.state.best_nll if math.isfinite(self.state.best_nll) else None,
            "skipped_steps": self.skipped,
            "history": self.state.history,
        } | ({} if self.moved is None else {"moved": self.moved})


@dataclass(frozen=True, kw_only=True)
class Stage:
    """What is particular to a stage, besides its data and its plan.

    Args:
        number: 1 or 2. In stage 2 the untrained state is a candidate for the best too (`Plan.keep`).
        folder: where the state is kept; if it is there already, the run goes on from it.
        settings: what the state was made with; a folder that was begun with others is refused.
        passes: passes of a step, and of validation, whose likelihoods are averaged.
        snapshots: how many the routers collect over the second half, in which case nothing stops early.
        dropout: whether the model's own dropout is on.
    """

    number: int
    folder: Path
    settings: dict[str, Any]
    seed: int = 0
    passes: int = 1
    snapshots: int = 0
    dropout: bool = False


def optimise(
    model: nn.Module, train: Examples, valid: Examples, plan: Plan, stage: Stage, running: Running
) -> StageOutcome:
    """Train what requires grad."""
    return _Loop(model, train, valid, plan, stage, running).run()


class _Loop:
    """A stage under way: its steps, its log, its counters and the best state so far."""

    def __init__(
        self, model: nn.Module, train: Examples, valid: Examples, plan: Plan, stage: Stage, running: Running
    ) -> None:
        self.model, self.train, self.valid, self.plan = model, train, valid, plan
        self.stage, self.running = stage, running
        self.settings = json.loads(json.dumps(stage.settings))
        self.path = stage.folder / f"stage{stage.number}.safetensors"
        self.steps = Steps(model, train, plan, running.workers, stage.passes)
        self.log = _telemetry(model, stage, self.steps.groups, running)
        self.state, self.best = self._resume()
        self.per_epoch = len(epoch_batches(train.lengths, plan.batch_size, stage.seed, 0))
        self.total = plan.epochs * self.per_epoch
        self.collect_at = self._snapshots()
        self.kept_at = time.monotonic()

    def run(self) -> StageOutcome:
        state = self.state
        if not state.history:
            self._validate(0)
            self._keep()
        state.finished = state.finished or self.total == 0
        while not state.finished:
            self._epoch()
            patience = None if self.stage.snapshots else self.plan.patience
            state.finished = state.step >= self.total or (patience is not None and state.since_best >= patience)
            self._keep()
        self._show(self.total)
        self.model.eval()
        last = checkpoint.state_of(self.steps.trainable, self.model)
        return StageOutcome(last, self.best or last, state, self.log.skipped)

    def _show(self, step: int) -> None:
        if self.running.progress and self.running.workers.main:
            self.running.progress(f"stage {self.stage.number}", step, self.total)

    def _epoch(self) -> None:
        """What is left of the current epoch, and its validation."""
        state, log, workers, seed = self.state, self.log, self.running.workers, self.stage.seed
        epoch = state.step // self.per_epoch
        self.model.train(self.stage.dropout)
        self.steps.train = train = self.train.at(epoch)
        batches = epoch_batches(train.lengths, self.plan.batch_size, seed, epoch)
        for rows in batches[state.step % self.per_epoch :]:
            lr = learning_rate(self.plan, state.step, self.total, hold=bool(self.stage.snapshots))
            torch.manual_seed((seed * 1_000_003 + state.step) * workers.size + workers.rank)  # the model's own dropout
            log.add(state.step + 1, epoch + 1, lr, self.steps.take(rows, lr, state.step))
            state.step += 1
            self._show(state.step)
            if state.step in self.collect_at:
                for router in routers_of(self.model).values():
                    router.collect()
            if log.due:
                state.epoch_nll += log.flush()
            if state.step % self.running.checkpoint_every == 0 and state.step % self.per_epoch:
                state.epoch_nll += log.flush()
                self._keep()
        state.epoch_nll += log.flush()
        self._validate(epoch + 1)

    def _validate(self, epoch: int) -> None:
        state, stage = self.state, self.stage
        found = evaluate(self.model, self.valid, self.running.workers, passes=stage.passes, seed=stage.seed)
        log_probs = found.numpy()
        nll = metrics.nll(log_probs, self.valid.answers)
        row = {
            "epoch": epoch,
            "step": state.step,
            "train_nll": sum(state.epoch_nll) / len(state.epoch_nll) if state.epoch_nll else None,
            "validation_nll": nll,
            "validation_accuracy": metrics.accuracy(log_probs, self.valid.answers),
        }
        state.epoch_nll = []
        state.history.append(row)
        self.log.write({"stage": stage.number, **row})
        self.log.tell(row | {"best": nll < state.best_nll})
        if epoch > 0 and stage.number == 2:
            self.log.check_memorised(row)
        untrained = stage.number == 2 and not stage.snapshots and self.plan.keep == "best"
        if nll < state.best_nll and (epoch > 0 or untrained):
            state.best_nll, state.best_epoch, state.since_best = nll, epoch, 0
            self.best = checkpoint.state_of(self.steps.trainable, self.model)
        elif epoch > 0:
            state.since_best += 1

    def _keep(self) -> None:
        """Write the state, but not more often than asked for. Processes that train together all take part."""
        workers = self.running.workers
        if workers.size == 1 and time.monotonic() - self.kept_at < self.running.checkpoint_seconds:
            return
        self.kept_at = time.monotonic()
        counters = {"settings": self.settings, "telemetry": self.log.state(), **dataclasses.asdict(self.state)}
        checkpoint.save(self.path, self.model, self.steps.trainable, self.steps.optimizer, self.best, counters, workers)

    def _resume(self) -> tuple[State, dict[str, Tensor]]:
        """The counters and the best state of the folder, or new ones."""
        found = checkpoint.load(self.path, self.model, self.steps.trainable, self.steps.optimizer)
        if found is None:
            self.log.rewind(-1, {})
            return State(), {}
        counters, best = found
        refuse_other_settings(self.path, counters.pop("settings"), self.settings)
        log_state = counters.pop("telemetry")
        state = State(**counters)
        self.log.rewind(state.step, log_state)
        return state, best

    def _snapshots(self) -> set[int]:
        """Steps after which the routers collect: evenly spread over the second half."""
        wanted, total = self.stage.snapshots, self.total
        steps = {total - i * (total - total // 2) // wanted for i in range(wanted)}
        if len(steps) < wanted:
            remedy = "train for more epochs or on more questions"
            wants = f"{attached(self.model).config.key} wants {wanted}"
            message = f"only {len(steps)} snapshots fit into the second half, where {wants}; {remedy}"
            self.log.warn("snapshots", {"step": self.state.step, "epoch": 0}, message)
        return steps


def refuse_other_settings(path: Path, theirs: dict[str, Any], ours: dict[str, Any]) -> None:
    """Refuse a folder that was begun with other settings; the error names the first difference."""
    for name in sorted({*theirs, *ours}):
        if theirs.get(name) != ours.get(name):
            raise InputError(
                f"{path} was begun with {name}={theirs.get(name)!r}, and now it is {ours.get(name)!r}: "
                "give the same settings to go on, or another folder"
            )


def _telemetry(model: nn.Module, stage: Stage, groups: list[str], running: Running) -> Telemetry:
    attachment, routers = attachment_of(model), routers_of(model)
    config: Any = attachment.config if attachment else None
    return Telemetry(
        stage.folder,
        stage.number,
        running.workers,
        layers=attachment.layers if attachment else [],
        groups=groups,
        experts=next(iter(routers.values())).gate.num_experts if routers else None,
        bounds=(config.t_min, config.t_max) if hasattr(config, "t_max") else None,
        skip=running.skip_nonfinite,
        every=running.log_every,
        tensorboard=running.tensorboard,
        told=running.told,
    )
