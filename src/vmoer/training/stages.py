"""The two stages on a model in memory.

stage 1   LoRA, cross-entropy over the answer letters: the MAP model
stage 2   everything frozen but the attached routers: answer loss + beta KL
"""

import dataclasses
from pathlib import Path
from typing import Any

from torch import nn

from vmoer import metrics
from vmoer.attach import attach, detach, routers_of
from vmoer.errors import InputError
from vmoer.routers import SWAG, Config
from vmoer.training import checkpoint
from vmoer.training.data import Examples
from vmoer.training.loop import Outcome, optimise
from vmoer.training.lora import add_lora, folded_quickly
from vmoer.training.objective import Objective, evaluate
from vmoer.training.plan import Plan, Running
from vmoer.training.presets import GRIDS, STAGE1, STAGE2
from vmoer.training.workers import Workers

SNAPSHOTS = 20  # SWAG takes at least so many, over the second half


def stage1(
    model: Any,
    train: Examples,
    valid: Examples,
    plan: Plan = STAGE1,
    *,
    folder: str | Path,
    rank: int = 16,
    noise: Config | None = None,
    seed: int = 0,
    settings: dict[str, Any] | None = None,
    running: Running | None = None,
) -> tuple[Any, Outcome]:
    """Fine-tune by LoRA; returns the PEFT model in its last state, and both states.

    With `noise` the method's routers are on, at their prior and not trained: the adapter learns under their noise.
    """
    running = running or Running(workers=Workers.launched())
    if running.workers.sharded:
        raise InputError("stage 1 does not run under FSDP2: train it on whole copies and take it over by from_map")
    tuned = add_lora(model, rank=rank, seed=seed)
    if noise is not None:
        attach(tuned, noise, freeze=False)
        for router in routers_of(tuned).values():
            router.requires_grad_(False)
    if running.recompute:
        tuned.gradient_checkpointing_enable({"use_reentrant": False})
    with folded_quickly(tuned):
        outcome = optimise(
            tuned,
            train,
            valid,
            plan,
            stage=1,
            folder=Path(folder),
            settings={"plan": dataclasses.asdict(plan), "rank": rank, "seed": seed, **(settings or {})},
            running=running,
            seed=seed,
            training_mode=True,
        )
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
) -> Outcome | None:
    """Attach the method, train its routers alone, and leave the model with the best state; None if nothing is to train.

    `passes` are those of the predictive objective. Validation averages as the objective does: inside the router for the
    ELBO, over that many whole passes for the predictive one. SWAG keeps its last state, with the snapshots of its path.
    """
    running = running or Running(workers=Workers.launched())
    attach(model, config)
    if not any(p.requires_grad for p in model.parameters()):
        return None
    snapshots = max(SNAPSHOTS, config.rank) if isinstance(config, SWAG) else 0
    if snapshots and running.workers.sharded:
        raise InputError("swag keeps its snapshots whole: it does not train under FSDP2")
    passes = passes if objective == "predictive" else 1
    here = {"method": config.to_dict(), "plan": dataclasses.asdict(plan), "objective": objective, "passes": passes}
    outcome = optimise(
        running.workers.prepare(model),
        train,
        valid,
        plan,
        stage=2,
        folder=Path(folder),
        settings={**here, "seed": seed, **(settings or {})},
        running=running,
        seed=seed,
        passes=passes,
        snapshots=snapshots,
    )
    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
    checkpoint.restore(outcome.last if snapshots else outcome.best, trainable, model)
    return outcome


def searched(config: Config) -> str | None:
    """The setting that validation chooses: beta, Temp-Scale's temperature, or the size of noise that nothing trains."""
    if getattr(config, "learn", None) == "nothing":
        return "prior_scale"
    if config.router.needs_fit:  # in closed form: its KL is never weighed
        return None
    return next((name for name in GRIDS if hasattr(config, name)), None)


def search(
    model: Any, train: Examples, valid: Examples, config: Config, *, folder: str | Path, running: Running, **stage: Any
) -> tuple[Config, Path, dict[str, float]]:
    """Stage 2 for each value of the method's grid, each in a folder of its own, and nothing attached afterwards.

    Returns the best configuration, its folder (where `stage2` finds it finished), and every validation NLL.
    """
    name = searched(config)
    if name is None:
        raise InputError(f"{config.key} has no beta or temperature to search")
    if running.workers.sharded:
        raise InputError("search attaches again and again, which a sharded model refuses: search on whole copies")
    running = dataclasses.replace(running, checkpoint_seconds=0.0)  # the finished state is what is taken up again
    found: dict[float, float] = {}
    for value in GRIDS[name]:
        candidate = with_value(config, name, value)
        place = Path(folder) / f"{name}={value}"
        outcome = stage2(model, train, valid, candidate, folder=place, running=running, **stage)
        if outcome:
            found[value] = outcome.state.best_nll
        elif name == "prior_scale":
            found[value] = averaged_nll(model, valid, running.workers)
        else:
            found[value] = validation_nll(model, valid, running.workers)
        detach(model)
    best = min(found, key=lambda value: found[value])
    nll = {f"{name}={value}": nll for value, nll in found.items()}
    return with_value(config, name, best), Path(folder) / f"{name}={best}", nll


def with_value(config: Config, name: str, value: Any) -> Config:
    return dataclasses.replace(config, **{name: value})


def averaged_nll(model: nn.Module, valid: Examples, workers: Workers, passes: int = 8) -> float:
    """Averaged over whole passes, and with an output temperature: noise is not to be chosen for what one number does."""
    log_probs = evaluate(model, valid, workers, passes=passes).numpy()
    return metrics.nll(metrics.cross_tempered(log_probs, valid.answers), valid.answers)


def validation_nll(model: nn.Module, valid: Examples, workers: Workers, seed: int = 0) -> float:
    """Averaged inside the router."""
    return metrics.nll(evaluate(model, valid, workers, seed=seed).numpy(), valid.answers)
