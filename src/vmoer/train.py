"""Training in two stages (paper, appendix D.2): what `vmoer train` does.

    RUN/map, RUN/map-early    stage 1: the adapter in its last state (the paper's) and in its best on validation
    RUN/                      stage 2: adapter, router.safetensors, router.json, and run.json, written last
    RUN/telemetry.jsonl       a line a step and a line a validation
    RUN/search/beta=0.01/     the same for each value tried by `search`

Each is opened by `vmoer.models.open_model`. Killed at any moment, the same command goes on to the same result.
"""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

import vmoer
from vmoer import store, tasks
from vmoer.attach import attach, detach, routers_of
from vmoer.errors import InputError
from vmoer.files import write_text
from vmoer.fitting import fit
from vmoer.models import open_model, read_run
from vmoer.routers import Config, Deterministic
from vmoer.training import checkpoint
from vmoer.training.data import Examples, by_length, collate, encode_questions, halves, held_out_share, hold_out
from vmoer.training.loop import Outcome, refuse_other_settings
from vmoer.training.objective import Objective
from vmoer.training.plan import Plan, Running
from vmoer.training.presets import DEFAULT, PAPER, PRESETS, STAGE1, STAGE2, Preset, preset_named
from vmoer.training.stages import search as search_stage2
from vmoer.training.stages import searched, stage1, stage2, with_value
from vmoer.training.telemetry import TrainingWarning
from vmoer.training.workers import Workers

__all__ = [
    "DEFAULT",
    "PAPER",
    "PRESETS",
    "STAGE1",
    "STAGE2",
    "Examples",
    "Outcome",
    "Plan",
    "Preset",
    "Running",
    "TrainingWarning",
    "Workers",
    "encode_questions",
    "stage1",
    "stage2",
    "train",
]

MEASURED = 200  # questions that susceptible layers are measured on
KEPT = 20.0  # seconds between two writings of an unfinished stage, at least


def train(
    model: str,
    task: str,
    method: str | Config,
    *,
    out: str | Path,
    preset: Preset | str = DEFAULT,
    layers: str | None = None,
    stage1_plan: Plan = STAGE1,
    stage2_plan: Plan | None = None,
    rank: int = 16,
    objective: Objective = "elbo",
    passes: int = 4,
    stage2_data: str | None = None,
    noisy_stage1: bool = False,
    search: bool = False,
    from_map: str | Path | None = None,
    map_state: Literal["map", "map-early"] = "map",
    half_validation: bool = False,
    data_root: str | Path | None = None,
    data_seed: int = 0,
    limit: int | None = None,
    seed: int = 0,
    dtype: torch.dtype | str | None = None,
    running: Running | None = None,
) -> dict[str, Any]:
    """Both stages; returns what `run.json` says of them. A finished folder is returned as it is.

    `method` is a key, configured by the preset, or a configuration. `layers` are written as `all`, `susceptible:10` or
    `0,3,5`. `from_map` takes stage 1 from another run, so that methods share it; a plan of no epochs leaves it out.
    `search` chooses beta on validation; Temp-Scale's T is always chosen so. With `half_validation` stopping and choosing see
    one half of it (training.data.halves), and runs can be compared on the other. `seed` is that of training, `data_seed`
    that of the splits.
    """
    out, preset = Path(out), preset_named(preset)
    config = preset.config(method) if isinstance(method, str) else method
    config = with_value(config, "seed", seed)
    stage2_plan = stage2_plan or preset.stage2
    layers = layers or (preset.layers if isinstance(method, str) else None)
    if (Path(model) / "run.json").exists():
        raise InputError(
            f"{model} is a run folder: name its base model, and give the run as from_map to share its stage 1"
        )
    if noisy_stage1 and from_map is not None:
        raise InputError("from_map takes a finished stage 1, noisy_stage1 asks for another: give one of them")
    stage2_data = stage2_data or preset.stage2_data
    share = held_out_share(stage2_data)
    data = {"task": str(task), "data_seed": data_seed, "limit": limit, "paper_splits": preset.paper_splits}
    data["held_out"] = share
    first = {"plan": dataclasses.asdict(stage1_plan), "rank": rank, "seed": seed, **data}
    first |= {"noise": config.to_dict() | {"layers": layers or config.layers} if noisy_stage1 else None}
    second: dict[str, Any] = {"plan": dataclasses.asdict(stage2_plan), "objective": objective, "search": search}
    second |= {"passes": passes if objective == "predictive" else 1, "map_state": map_state, "layers": layers}
    second |= {"data": stage2_data}
    second |= {"from_map": None if from_map is None else str(from_map)} | ({"half": True} if half_validation else {})
    settings = _as_json({"model": model, "method": config.to_dict(), "stage1": first, "stage2": second})
    if (out / "run.json").exists():
        run = read_run(out)
        refuse_other_settings(out, run["settings"], settings)
        return run

    running = running or Running(workers=Workers.launched(), tensorboard=True, checkpoint_seconds=KEPT)
    device = running.workers.device
    where: dict[str, Any] = {"data_root": data_root, "seed": data_seed, "paper_splits": preset.paper_splits}
    questions = tasks.load(task, "train", limit=limit, **where)
    validation = tasks.load(task, "validation", **where)
    if half_validation:  # of all of it, whatever part of it the paper takes
        whole = tasks.load(task, "validation", **where | {"paper_splits": False})
        ours = {question.id for question in halves(whole, data_seed)[0]}
        validation = [question for question in validation if question.id in ours]
    known, unseen = hold_out(questions, share, data_seed) if share else (questions, questions)
    if stage2_data.startswith("split:"):
        unseen = tasks.load(task, stage2_data.removeprefix("split:"), limit=limit, **where)

    source = out if from_map is None else Path(from_map)
    done = (out / "map-early" / "run.json").exists()
    running.workers.wait()  # all have looked before one of them writes
    if from_map is not None:
        _check_stage1(source, map_state, _as_json({"model": model, **data}))
    elif done:
        _check_stage1(out, map_state, _as_json({"model": model, **first}))
    else:
        opened = open_model(model, device=device, dtype=dtype)
        examples = _encode(opened.model, opened.tokenizer, known, validation)
        noise = _with_layers(opened.model, config, layers, examples[0], device) if noisy_stage1 else None
        run = {"model": opened.name, "task": str(task), "method": "map", "preset": preset.name, "stage1": first}
        _stage1_folders(opened.model, examples, stage1_plan, out, rank, noise, run | {"seed": seed}, running)
        del opened

    # always from the files, the first time and after a kill alike
    opened = open_model(source / map_state, device=device, dtype=dtype)
    detach(opened.model)
    if hasattr(opened.model, "merge_adapter"):
        opened.model.merge_adapter()  # frozen from here on: one addition now, not one in every pass
    fresh, valid = _encode(opened.model, opened.tokenizer, unseen, validation)
    config = _with_layers(opened.model, config, layers, fresh, device)
    stage: dict[str, Any] = {"objective": objective, "passes": passes, "plan": stage2_plan, "seed": seed}
    stage |= {"settings": settings, "running": running}
    folder, tried = out, None
    if search or searched(config) == "temperature":
        config, folder, tried = search_stage2(opened.model, fresh, valid, config, folder=out / "search", **stage)
    outcome = stage2(opened.model, fresh, valid, config, folder=folder, **stage)
    run = {"model": opened.name, "task": str(task), "method": config.key, "preset": preset.name, "seed": seed}
    run |= {"stage1": opened.run["stage1"] if opened.run else first, "config": config.to_dict(), "settings": settings}
    run |= {"stage2": second | (outcome.summary() if outcome else {}) | {"tried": tried}, "vmoer": vmoer.__version__}
    trained = opened.model
    if running.workers.sharded:  # onto a whole copy, which is what can be saved
        trained = detach(open_model(source / map_state, device="cpu", dtype=dtype).model)
        attach(trained, config)
        if outcome:
            checkpoint.restore(outcome.best, {n: p for n, p in trained.named_parameters() if p.requires_grad}, trained)
    else:
        seen = known if _needs_fit(trained) else [*{question.id: question for question in (*known, *unseen)}.values()]
        _fit_novelty(trained, _encode(trained, opened.tokenizer, seen, validation)[0], device)
    _save(trained, out, _as_json(run), running.workers)
    if running.workers.main:
        for path in (out / "stage2.safetensors", *out.glob("search/*/stage2.safetensors")):
            path.unlink(missing_ok=True)
    return read_run(out)


def _stage1_folders(
    model: Any,
    examples: tuple[Examples, Examples],
    plan: Plan,
    out: Path,
    rank: int,
    noise: Config | None,
    run: dict[str, Any],
    running: Running,
) -> None:
    """Train stage 1 and write RUN/map and RUN/map-early, each a run folder with the model's own routing."""
    states: list[dict[str, torch.Tensor]] = [{}, {}]
    if plan.epochs:
        settings = _as_json({"model": run["model"], **run["stage1"]})
        model, outcome = stage1(
            model,
            *examples,
            plan,
            folder=out,
            rank=rank,
            noise=noise,
            seed=run["seed"],
            settings=settings,
            running=running,
        )
        states = [outcome.last, outcome.best]
        run = run | {"stage1": run["stage1"] | outcome.summary()}
    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
    for name, state in zip(("map", "map-early"), states, strict=True):
        if state:
            checkpoint.restore(state, trainable, model)
        attach(model, Deterministic())
        _save(model, out / name, _as_json(run | {"state": name, "vmoer": vmoer.__version__}), running.workers)
        detach(model)
    if running.workers.main:
        (out / "stage1.safetensors").unlink(missing_ok=True)


def _check_stage1(source: Path, map_state: str, wanted: dict[str, Any]) -> None:
    if not (source / map_state / "run.json").exists():
        raise InputError(f"{source} holds no finished stage 1: {source / map_state / 'run.json'} is missing")
    run = read_run(source / map_state)
    refuse_other_settings(source, {name: {**run, **run["stage1"]}.get(name) for name in wanted}, wanted)


def _fit_novelty(model: nn.Module, seen: Examples, device: torch.device) -> None:
    """How far a token lies from questions seen before: a signal of every method, and all that Laplace needs.

    The signal is read at the prompts' last tokens, so those are counted, of both stages' questions: of stage 1's alone it would
    be half a sign of memory, since their answers are known by heart, which no new question's are. Laplace routes every token,
    and is a posterior given what stage 1 was trained on.
    """
    last: dict[str, Any] = {"tokens": "last", "rank": min(256, next(iter(routers_of(model).values())).gate.hidden_size)}
    fit(model, _batches(seen, device, tokens=16384), **({} if _needs_fit(model) else last))


def _needs_fit(model: nn.Module) -> bool:
    return any(router.needs_fit for router in routers_of(model).values())


def _save(model: nn.Module, folder: Path, run: dict[str, Any], workers: Workers) -> None:
    """Adapter and routers, then `run.json`: where that is, the folder is complete."""
    if workers.main:
        store.save(model, folder, about=run)
        write_text(folder / "run.json", json.dumps(run, indent=2) + "\n")
    workers.wait()


def _encode(
    model: Any, tokenizer: Any, train: Sequence[tasks.Question], valid: Sequence[tasks.Question]
) -> tuple[Examples, Examples]:
    text = model.config.get_text_config() if hasattr(model.config, "get_text_config") else model.config
    longest = int(getattr(text, "max_position_embeddings", None) or 2**31)
    letters = max(len(question.choices) for question in (*train, *valid))
    return encode_questions(tokenizer, train, longest, letters), encode_questions(tokenizer, valid, longest, letters)


def _with_layers(model: Any, config: Config, layers: str | None, examples: Examples, device: torch.device) -> Config:
    """The configuration with its layers chosen on this model."""
    if layers is None:
        return config
    from vmoer.layers import parse_layers, select_layers

    strategy, n = parse_layers(layers)
    chosen = select_layers(model, _batches(examples, device, MEASURED), strategy=strategy, n=n)
    return with_value(config, "layers", tuple(chosen))


def _batches(examples: Examples, device: torch.device, limit: int | None = None, tokens: int = 4096) -> list[Any]:
    lengths = examples.lengths[:limit]
    return [collate(examples, rows, device).inputs for rows in by_length(lengths, tokens)]


def _as_json(value: Any) -> Any:
    """As it reads back from a file, so that settings compare equal."""
    return json.loads(json.dumps(value))
