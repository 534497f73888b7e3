"""The two stages on a model in memory.

stage 1   LoRA, cross-entropy over the answer letters: the MAP model
stage 2   everything frozen but the attached routers: answer loss + beta KL
"""

import dataclasses
from pathlib import Path
from typing import Any

from torch import nn

from vmoer import metrics
from vmoer.errors import InputError
from vmoer.live import adapters
from vmoer.live.attach import attach, detach, routers_of
from vmoer.routers import Config, Deterministic
from vmoer.training import checkpoint
from vmoer.training.data import Examples
from vmoer.training.loop import Stage, StageOutcome, optimise
from vmoer.training.lora import add_lora, folded_quickly
from vmoer.training.moved import Moved
from vmoer.training.objective import Objective, evaluate
from vmoer.training.plan import Plan
from vmoer.training.presets import STAGE1, STAGE2
from vmoer.training.workers import Running, Workers


def stage1(
    model: Any,
    train: Examples,
    valid: Examples,
    plan: Plan = STAGE1,
    *,
    folder: str | Path,
    rank: int = 16,
    noise: Config | None = None,
    adapter: adapters.AdapterNoise | None = None,
    seed: int = 0,
    settings: dict[str, Any] | None = None,
    running: Running | None = None,
) -> tuple[Any, StageOutcome]:
    """Fine-tune by LoRA; returns the PEFT model in its last state, and both states.

    With `noise` the method's routers are on, at their prior and not trained: the adapter learns under their noise. With `adapter`
    the adapter itself is drawn in every step, and stays so: `live.adapters.taken_off` gives the plain one.
    """
    running = running or Running(workers=Workers.launched())
    if running.workers.sharded:
        raise InputError("stage 1 does not run under FSDP2: train it on whole copies and take it over by from_map")
    tuned = add_lora(model, rank=rank, seed=seed)
    if noise is None and adapter is not None:
        noise = Deterministic()  # it knows the step, and routes as the model does
    if noise is not None:
        attach(tuned, noise, freeze=False)
        for router in routers_of(tuned).values():
            router.requires_grad_(False)
    if adapter is not None:
        adapters.draw(tuned, adapter, seed=seed, questions=len(train))
    if running.recompute:
        tuned.gradient_checkpointing_enable({"use_reentrant": False})
    with folded_quickly(tuned):
        here = {"plan": plan.described(), "rank": rank, "seed": seed, **(settings or {})}
        here |= {} if adapter is None else {"adapter": adapter.described()}
        stage = Stage(number=1, folder=Path(folder), settings=here, seed=seed, dropout=True)
        outcome = optimise(tuned, train, valid, plan, stage, running)
    if running.recompute:
        tuned.gradient_checkpointing_disable()
    if noise is not None:
        detach(tuned)
    return tuned.eval(), outcome


def stage2(
    model: Any,
    train: Examples,
    valid: Examples,
    config: Config,
    plan: Plan = STAGE2,
    *,
    folder: str | Path,
    objective: Objective = "elbo",
    passes: int = 4,
    seed: int = 0,
    settings: dict[str, Any] | None = None,
    running: Running | None = None,
) -> StageOutcome | None:
    """Attach the method, train its routers alone, and leave the model with the best state; None if nothing is to train.

    `passes` are those of the predictive objective. Validation averages as the objective does: inside the router for the
    ELBO, over that many whole passes for the predictive one. A method with snapshots keeps its last state.
    """
    running = running or Running(workers=Workers.launched())
    attach(model, config)
    if not any(p.requires_grad for p in model.parameters()):
        return None
    if config.snapshots and running.workers.sharded:
        raise InputError(f"{config.key} keeps its snapshots whole: it does not train under FSDP2")
    passes = passes if objective == "predictive" else 1
    here = {"method": config.to_dict(), "plan": plan.described(), "objective": objective, "passes": passes}
    stage = Stage(
        number=2,
        folder=Path(folder),
        settings={**here, "seed": seed, **(settings or {})},
        seed=seed,
        passes=passes,
        snapshots=config.snapshots,
    )
    moved = None if running.workers.sharded else Moved(model, valid, running.workers)
    outcome = optimise(running.workers.prepare(model), train, valid, plan, stage, running)
    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
    last = bool(config.snapshots) or plan.keep == "last"
    checkpoint.restore(outcome.last if last else outcome.best, trainable, model)
    kept = outcome.state.history[-1]["epoch"] if last else outcome.state.best_epoch
    return dataclasses.replace(outcome, moved=moved.after(kept) if moved else None)


def search(
    model: Any, train: Examples, valid: Examples, config: Config, *, folder: str | Path, running: Running, **stage: Any
) -> tuple[Config, Path, dict[str, float]]:
    """Stage 2 for each value of the method's grid, each in a folder of its own, and nothing attached afterwards.

    Returns the best configuration, its folder (where `stage2` finds it finished), and every validation NLL.
    """
    if config.search is None:
        raise InputError(f"{config.key} has no beta or temperature to search")
    name, values, _, passes = config.search
    if running.workers.sharded:
        raise InputError("search attaches again and again, which a sharded model refuses: search on whole copies")
    running = dataclasses.replace(running, checkpoint_seconds=0.0)  # the finished state is what is taken up again
    found: dict[float, float] = {}
    for value in values:
        candidate = with_value(config, name, value)
        place = Path(folder) / f"{name}={value}"
        outcome = stage2(model, train, valid, candidate, folder=place, running=running, **stage)
        if outcome:
            found[value] = outcome.state.best_nll
        elif passes > 1:
            found[value] = averaged_nll(model, valid, running.workers, passes)
        else:
            found[value] = validation_nll(model, valid, running.workers)
        detach(model)
    best = min(found, key=lambda value: found[value])
    nll = {f"{name}={value}": nll for value, nll in found.items()}
    return with_value(config, name, best), Path(folder) / f"{name}={best}", nll


def with_value(config: Config, name: str, value: Any) -> Config:
    return dataclasses.replace(config, **{name: value})


def averaged_nll(model: nn.Module, valid: Examples, workers: Workers, passes: int) -> float:
    """NLL of answers averaged over whole passes, with an output temperature: else noise would be chosen for doing what a single
    temperature does as well."""
    log_probs = evaluate(model, valid, workers, passes=passes).numpy()
    return metrics.nll(metrics.cross_tempered(log_probs, valid.answers), valid.answers)


def validation_nll(model: nn.Module, valid: Examples, workers: Workers, seed: int = 0) -> float:
    """NLL of answers averaged inside the router."""
    return metrics.nll(evaluate(model, valid, workers, seed=seed).numpy(), valid.answers)
