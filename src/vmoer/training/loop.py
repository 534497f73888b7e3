"""The loop that both stages run: AdamW, warm-up and cosine, validation after every epoch, resumable at any step.

A step does not wait for the device: a gradient that is not finite is passed over by the fused AdamW itself (`found_inf`), and
what the step has to say is read later (telemetry.py). Data order, noise and learning rate are functions of the seed and the
step, so a resumed run is the uninterrupted one.
"""

import dataclasses
import json
import math
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vmoer import metrics
from vmoer.attach import attachment_of, routers_of
from vmoer.errors import InputError, RunError
from vmoer.training import checkpoint
from vmoer.training.data import Examples, collate, epoch_batches
from vmoer.training.objective import evaluate, micro_loss
from vmoer.training.plan import Plan, Running, learning_rate
from vmoer.training.telemetry import SHARES, Telemetry
from vmoer.training.workers import Workers, local


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
class Outcome:
    """The last and the best state of what was trained, by name, and the validation after each epoch."""

    last: dict[str, Tensor]
    best: dict[str, Tensor]
    state: State
    skipped: int

    def summary(self) -> dict[str, Any]:
        return {
            "steps": self.state.step,
            "best_epoch": self.state.best_epoch,
            "best_validation_nll": self.state.best_nll if math.isfinite(self.state.best_nll) else None,
            "skipped_steps": self.skipped,
            "history": self.state.history,
        }


def optimise(
    model: nn.Module,
    train: Examples,
    valid: Examples,
    plan: Plan,
    *,
    stage: int,
    folder: Path,
    settings: dict[str, Any],
    running: Running,
    seed: int = 0,
    passes: int = 1,
    snapshots: int = 0,
    training_mode: bool = False,
) -> Outcome:
    """Train what requires grad. The state is kept in `folder`; if it is there already, the run goes on from it.

    In stage 2 the untrained state is a candidate for the best too. `snapshots` is how many the routers collect over the
    second half (SWAG), in which case nothing stops early; `training_mode` switches the model's own dropout on.
    """
    workers, settings = running.workers, json.loads(json.dumps(settings))
    path = folder / f"stage{stage}.safetensors"
    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if not trainable:
        raise InputError("nothing of this model is trainable")
    refuse_inference_only(model)
    groups = _groups(list(trainable))
    parameters = list(trainable.values())
    optimizer = torch.optim.AdamW(parameters, lr=plan.lr, weight_decay=plan.weight_decay, fused=not workers.sharded)
    names = list(dict.fromkeys(groups))
    group_P = torch.tensor([names.index(g) for g in groups], device=workers.device)
    log = _telemetry(model, folder, stage, names, running)
    state, best = _resume(path, settings, model, trainable, optimizer, log)

    per_epoch = len(epoch_batches(train.lengths, plan.batch_size, seed, 0))
    total = plan.epochs * per_epoch
    collect_at = {total - i * (total - total // 2) // snapshots for i in range(snapshots)}
    if len(collect_at) < snapshots:
        remedy = "train for more epochs or on more questions"
        message = f"only {len(collect_at)} snapshots fit into the second half, where swag wants {snapshots}; {remedy}"
        log.warn("snapshots", {"step": state.step, "epoch": 0}, message)

    kept_at = time.monotonic()

    def keep() -> None:
        nonlocal kept_at
        if workers.size == 1 and time.monotonic() - kept_at < running.checkpoint_seconds:
            return
        kept_at = time.monotonic()
        counters = {"settings": settings, "telemetry": log.state(), **dataclasses.asdict(state)}
        checkpoint.save(path, model, trainable, optimizer, best, counters, workers)

    def validate(epoch: int) -> None:
        nonlocal best
        log_probs = evaluate(model, valid, workers, passes=passes, seed=seed).numpy()
        nll = metrics.nll(log_probs, valid.answers)
        row = {
            "epoch": epoch,
            "step": state.step,
            "train_nll": sum(state.epoch_nll) / len(state.epoch_nll) if state.epoch_nll else None,
            "validation_nll": nll,
            "validation_accuracy": metrics.accuracy(log_probs, valid.answers),
        }
        state.epoch_nll = []
        state.history.append(row)
        log.write({"stage": stage, **row})
        if epoch > 0 and stage == 2:
            log.check_memorised(row)
        if nll < state.best_nll and (epoch > 0 or (stage == 2 and not snapshots)):
            state.best_nll, state.best_epoch, state.since_best = nll, epoch, 0
            best = checkpoint.state_of(trainable, model)
        elif epoch > 0:
            state.since_best += 1

    if not state.history:
        validate(0)
        keep()
    bar = _bar(f"stage {stage}", total, state.step, running)
    state.finished = state.finished or total == 0
    while not state.finished:
        epoch = state.step // per_epoch
        model.train(training_mode)
        for rows in epoch_batches(train.lengths, plan.batch_size, seed, epoch)[state.step % per_epoch :]:
            lr = learning_rate(plan, state.step, total, hold=bool(snapshots))
            torch.manual_seed((seed * 1_000_003 + state.step) * workers.size + workers.rank)  # the model's own dropout
            values = _step(model, train, rows, plan, optimizer, parameters, lr, state.step, workers, passes)
            values["grad_square_G"] = _by_group(values.pop("grad_square_P"), group_P, len(names))
            log.add(state.step + 1, epoch + 1, lr, values)
            state.step += 1
            bar(state.step)
            if state.step in collect_at:
                for router in routers_of(model).values():
                    router.collect()
            if log.due:
                state.epoch_nll += log.flush()
            if state.step % running.checkpoint_every == 0 and state.step % per_epoch:
                state.epoch_nll += log.flush()
                keep()
        state.epoch_nll += log.flush()
        validate(epoch + 1)
        stop = plan.patience is not None and not snapshots and state.since_best >= plan.patience
        state.finished = stop or state.step >= total
        keep()
    bar(total)
    model.eval()
    last = checkpoint.state_of(trainable, model)
    return Outcome(last, best or last, state, log.skipped)


def _resume(
    path: Path,
    settings: dict[str, Any],
    model: nn.Module,
    trainable: dict[str, nn.Parameter],
    optimizer: torch.optim.Optimizer,
    log: Telemetry,
) -> tuple[State, dict[str, Tensor]]:
    found = checkpoint.load(path, model, trainable, optimizer)
    if found is None:
        log.rewind(-1, {})
        return State(), {}
    counters, best = found
    refuse_other_settings(path, counters.pop("settings"), settings)
    log_state = counters.pop("telemetry")
    state = State(**counters)
    log.rewind(state.step, log_state)
    return state, best


def refuse_inference_only(model: nn.Module) -> None:
    """bitsandbytes packs 4-bit layers for AVX512-BF16 at the first pass without gradients, and what is packed has no backward."""
    for module in model.modules():
        if getattr(module, "support_avx512bf16_for_cpu", False) and next(module.parameters()).device.type == "cpu":
            what = "bitsandbytes' 4-bit layers cannot be trained through on this processor"
            raise InputError(f"{what}: take a GPU, or the base in full precision")


def refuse_other_settings(path: Path, theirs: dict[str, Any], ours: dict[str, Any]) -> None:
    """A folder goes on only with what it was begun with; the first difference is named."""
    for name in sorted({*theirs, *ours}):
        if theirs.get(name) != ours.get(name):
            raise InputError(
                f"{path} was begun with {name}={theirs.get(name)!r}, and now it is {ours.get(name)!r}: "
                "give the same settings to go on, or another folder"
            )


def _step(
    model: nn.Module,
    train: Examples,
    rows: list[int],
    plan: Plan,
    optimizer: torch.optim.Optimizer,
    parameters: list[nn.Parameter],
    lr: float,
    step: int,
    workers: Workers,
    passes: int,
) -> dict[str, Tensor]:
    """One optimiser step over the global batch `rows`; returns what to log, still on the device."""
    optimizer.zero_grad(set_to_none=True)
    tokens = sum(len(train.prompts[row]) for row in rows)
    pieces = workers.share(rows, plan.micro_batch)
    values: dict[str, Tensor] = {}
    for first, mine in pieces:
        batch = collate(train, mine, workers.device)
        try:
            loss, found = micro_loss(
                model, batch, step=step, first_row=first, rows=len(rows), tokens=tokens, passes=passes
            )
            workers.scaled(loss).backward()
        except torch.OutOfMemoryError:
            size = f"{len(mine)} questions of {max(len(train.prompts[row]) for row in mine)} tokens"
            raise RunError(
                f"out of memory on {size}: take a smaller --micro-batch, in stage 1 also --recompute"
            ) from None
        for name, value in found.items():
            value = value if name in SHARES else value / len(pieces)
            values[name] = values[name] + value if name in values else value
    workers.sum_gradients(parameters)
    for group in optimizer.param_groups:
        group["lr"] = lr
    values["grad_square_P"] = _apply(optimizer, parameters, plan.max_grad_norm, workers)
    return values


@torch.no_grad()
def _apply(
    optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter], max_norm: float, workers: Workers
) -> Tensor:
    """Clip and update, unless the gradient is not finite; returns each parameter's squared gradient norm, [P]."""
    given = [p for p in parameters if p.grad is not None]
    grads = [local(p.grad) for p in given]  # type: ignore[arg-type]
    square = torch.stack(torch._foreach_norm(grads)).float().square()
    if workers.sharded:
        workers.sum_(square)
    norm = square.sum().sqrt()
    torch._foreach_mul_(grads, (max_norm / (norm + 1e-6)).clamp(max=1.0))
    bad = ~torch.isfinite(norm)
    if not workers.sharded:
        optimizer.found_inf = bad.float()  # type: ignore[attr-defined]
        optimizer.step()
        torch.autograd.graph.increment_version(given)  # a fused update does not, and what is derived may be cached
    elif not bool(bad):  # fused updates do not take sharded tensors, so here the host has to ask
        optimizer.step()
    if len(given) == len(parameters):
        return square
    place = torch.tensor([i for i, p in enumerate(parameters) if p.grad is not None], device=square.device)
    return square.new_zeros(len(parameters)).index_copy_(0, place, square)


def _by_group(square_P: Tensor, group_P: Tensor, groups: int) -> Tensor:
    return square_P.new_zeros(groups).index_add_(0, group_P, square_P)


def _groups(names: list[str]) -> list[str]:
    """The layer a parameter belongs to, by the first number in its path."""
    found = [re.search(r"\.(\d+)\.", name) for name in names]
    return [f"layer {m.group(1)}" if m else name for m, name in zip(found, names, strict=True)]


def _bar(name: str, total: int, done: int, running: Running) -> Callable[[int], None]:
    """A progress bar on the main process's standard error, where it is a terminal."""
    if not (running.progress and running.workers.main):
        return lambda step: None
    from tqdm import tqdm  # type: ignore[import-untyped]  # transformers brings it

    bar = tqdm(desc=name, total=total, initial=done, unit="step", disable=None)

    def at(step: int) -> None:
        bar.update(step - bar.n)
        if step >= total:
            bar.close()

    return at


def _telemetry(model: nn.Module, folder: Path, stage: int, groups: list[str], running: Running) -> Telemetry:
    attachment, routers = attachment_of(model), routers_of(model)
    config: Any = attachment.config if attachment else None
    return Telemetry(
        folder,
        stage,
        running.workers,
        layers=attachment.layers if attachment else [],
        groups=groups,
        experts=next(iter(routers.values())).gate.num_experts if routers else None,
        bounds=(config.t_min, config.t_max) if hasattr(config, "t_max") else None,
        skip=running.skip_nonfinite,
        every=running.log_every,
        tensorboard=running.tensorboard,
    )
