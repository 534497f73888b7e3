"""Training in two stages (paper, appendix D.2): what `vmoer train` does.

    RUN/map, RUN/map-early    stage 1: the adapter in its last state (the paper's) and in its best on validation
    RUN/                      stage 2: adapter, router.safetensors, router.json, run.json, and manifest.json, written last
    RUN/telemetry.jsonl       a line a step and a line a validation
    RUN/search/beta=0.01/     the same for each value tried by `search`

Each is opened by `vmoer.models.open_model`. Killed at any moment, the same command goes on to the same result.
"""

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from vmoer import tasks
from vmoer._version import __version__
from vmoer.errors import InputError
from vmoer.files import digest
from vmoer.live.attach import attach, detach, routers_of
from vmoer.live.brittleness import parse_layers, select_layers
from vmoer.live.fitting import fit
from vmoer.live.inputs import context_length
from vmoer.models import Opened, open_model
from vmoer.routers import Config, Deterministic
from vmoer.saved import manifest, store
from vmoer.saved.store import read_folder, read_run
from vmoer.tasks.batches import by_length
from vmoer.tasks.prompt import ask_with, fitting
from vmoer.training import checkpoint, drawn
from vmoer.training.data import Examples, collate, encode_questions, halves, hold_out
from vmoer.training.layers import preset_layers
from vmoer.training.loop import StageOutcome, refuse_other_settings
from vmoer.training.plan import Plan, held_out_share
from vmoer.training.presets import DEFAULT, PAPER, PRESETS, STAGE1, STAGE2, Preset, preset_named
from vmoer.training.reference import reference
from vmoer.training.request import Data, Request, Stages, as_json
from vmoer.training.stages import search as search_stage2
from vmoer.training.stages import stage1, stage2, with_value
from vmoer.training.telemetry import TrainingWarning
from vmoer.training.workers import Running, Workers

__all__ = [
    "DEFAULT",
    "PAPER",
    "PRESETS",
    "STAGE1",
    "STAGE2",
    "Data",
    "Examples",
    "Plan",
    "Preset",
    "Running",
    "StageOutcome",
    "Stages",
    "TrainingWarning",
    "Workers",
    "encode_questions",
    "fit_novelty",
    "stage1",
    "stage2",
    "train",
]

MEASURED = 200  # questions that susceptible layers are measured on
CHECKPOINT_SECONDS = 20.0  # between two writings of an unfinished stage, at least


def train(
    model: str,
    task: str,
    method: str | Config,
    *,
    out: str | Path,
    preset: Preset | str = DEFAULT,
    layers: str | None = None,
    stages: Stages | None = None,
    data: Data | None = None,
    seed: int = 0,
    dtype: torch.dtype | str | None = None,
    running: Running | None = None,
) -> dict[str, Any]:
    """Both stages; returns what `run.json` says of them. A finished folder is returned as it is.

    Args:
        model: a hub id, a local folder, or `demo`.
        task: a built-in task, or the path of a JSONL file.
        method: a key, configured by the preset, or a configuration, of which nothing is searched unless `stages` says so.
        out: the run folder.
        layers: written as `all`, `susceptible:10` or `0,3,5`.
        seed: of training; that of the splits is in `data`.
    """
    preset = preset_named(preset)
    if layers is None and isinstance(method, str):
        layers, note = preset_layers(preset, model)
        if note:
            warnings.warn(note, stacklevel=2)
    run = Request(model, task, method, Path(out), preset, layers, stages or Stages(), data or Data(), seed, dtype)
    if (finished := _finished(run)) is not None:
        return finished
    running = running or Running(workers=Workers.launched(), tensorboard=True, checkpoint_seconds=CHECKPOINT_SECONDS)
    questions = _questions(run)
    _first_stage(run, questions, running)
    _second_stage(run, questions, running)
    return read_run(run.out)


def _finished(run: Request) -> dict[str, Any] | None:
    """What a finished run says of itself, once all of its files are found to be there and whole."""
    if not manifest.complete(run.out):
        return None
    try:
        found = read_folder(run.out).run
    except InputError as error:
        again = "remove that folder, or only its manifest.json, and run the same command to make it again"
        raise InputError(f"{error}; this run was finished: {again}") from None
    if found is None or "settings" not in found:
        raise InputError(f"{run.out} holds saved routers that are not those of vmoer train: choose another folder")
    refuse_other_settings(run.out, found["settings"], run.settings())
    checkpoint.sweep(run.out)
    return found


class _Questions(NamedTuple):
    known: list[tasks.Question]
    """What stage 1 trains on."""
    unseen: list[tasks.Question]
    """What stage 2 trains on: other questions, or the same."""
    validation: list[tasks.Question]

    def seen(self) -> dict[str, Any]:
        """How many questions the run has seen, for training and for choosing, and which: a digest of their ids."""
        trained = {question.id for question in (*self.known, *self.unseen)}
        chosen = {question.id for question in self.validation}
        which = digest({"ids": sorted(trained | chosen)})
        return {"training": len(trained), "validation": len(chosen), "questions": which}


def _questions(run: Request) -> _Questions:
    data = run.data
    where: dict[str, Any] = {"data_root": data.root, "seed": data.seed, "recut": data.recut}
    paper, share = run.preset.paper_splits, held_out_share(run.stage2_data)
    known = unseen = tasks.load(run.task, "train", limit=data.limit, paper_splits=paper, **where)
    validation = tasks.load(run.task, "validation", paper_splits=paper, **where)
    if data.half_validation:  # of all of it, whatever part of it the paper takes
        ours = {question.id for question in halves(tasks.load(run.task, "validation", **where), data.seed)[0]}
        validation = [question for question in validation if question.id in ours]
    if share:
        known, unseen = hold_out(known, share, data.seed)
    if run.stage2_data.startswith("split:"):
        split = run.stage2_data.removeprefix("split:")
        unseen = tasks.load(run.task, split, limit=data.limit, paper_splits=paper, **where)
    return _Questions(known, unseen, validation)


def _fitting(run: Request, opened: Opened, questions: _Questions) -> _Questions:
    """The questions that fit into the model's context, where the others are to be left out."""
    if not run.data.skip_long:
        return questions
    kept = []
    for name, asked in questions._asdict().items():
        found, long = fitting(opened.tokenizer, asked, context_length(opened.model))
        for count in long.values():
            said = f"{count} of {len(asked)} {name} questions left out: longer than the model's context"
            warnings.warn(said, TrainingWarning, stacklevel=2)
        if not found:
            raise InputError(f"none of the {name} questions fits into the model's context")
        kept.append(found)
    return _Questions(*kept)


# -- stage 1 -----------------------------------------------------------------------------------------------------------


def _first_stage(run: Request, questions: _Questions, running: Running) -> None:
    """Stage 1 in its folders, unless it is finished or another run's is taken."""
    done = all(_whole(run.out / state) for state in ("map", "map-early"))
    running.workers.wait()  # all have looked before one of them writes
    if run.stages.from_map is not None:
        _check_stage1(run, as_json({"model": run.model, **run.about_data()}))
        return
    if done:
        _check_stage1(run, as_json({"model": run.model, "adapter": None, **run.about_stage1()}))
        return
    device = running.workers.device
    opened = open_model(run.model, device=device, dtype=run.dtype)
    ask_with(opened.tokenizer, run.data.system_prompt)
    questions = _fitting(run, opened, questions)
    orders = (1, run.seed) if run.stage1_orders else None
    examples = _encode(opened.model, opened.tokenizer, questions.known, questions.validation, orders)
    noise = None
    if run.stages.noisy_stage1:
        noise = _with_layers(opened.model, run.config, run.layers, examples[0], device)
    about: dict[str, Any] = {"model": opened.name, "task": str(run.task), "method": "map", "preset": run.preset.name}
    about |= {"stage1": run.about_stage1(), "seed": run.seed, "seen": questions.seen()} | run.prompt()
    _stage1_folders(run, opened.model, examples, noise, about | {"vmoer": __version__}, running)


def _whole(folder: Path) -> bool:
    """Whether a state of stage 1 is there. A damaged one is named, and counts as missing."""
    if not manifest.complete(folder):
        return False
    try:
        read_folder(folder)
    except InputError as error:
        warnings.warn(f"{error}; stage 1 is trained again", TrainingWarning, stacklevel=2)
        return False
    return True


def _stage1_folders(
    run: Request,
    model: Any,
    examples: tuple[Examples, Examples],
    noise: Config | None,
    about: dict[str, Any],
    running: Running,
) -> None:
    """Train stage 1 and write RUN/map and RUN/map-early, each a run folder with the model's own routing."""
    plan = run.stages.stage1
    states: list[dict[str, torch.Tensor]] = [{}, {}]
    if plan.epochs:
        settings = as_json({"model": about["model"], **about["stage1"]})
        how: dict[str, Any] = {"noise": noise, "adapter": run.stages.adapter, "settings": settings, "running": running}
        model, outcome = stage1(model, *examples, plan, folder=run.out, rank=run.stages.rank, seed=run.seed, **how)
        states = [outcome.last, outcome.best]
        about = about | {"stage1": about["stage1"] | outcome.summary()}
    for name, state in zip(("map", "map-early"), states, strict=True):
        if state:
            checkpoint.restore(state, {n: p for n, p in model.named_parameters() if p.requires_grad}, model)
        with drawn.kept_apart(model, run.out / name, running.workers) as more:
            attach(model, Deterministic())
            _save(model, run.out / name, about | {"stage1": about["stage1"] | more, "state": name}, running.workers)
            detach(model)
    if running.workers.main:
        (run.out / "stage1.safetensors").unlink(missing_ok=True)


def _check_stage1(run: Request, wanted: dict[str, Any]) -> None:
    place = run.source / run.stages.map_state
    if not manifest.complete(place):
        raise InputError(f"{run.source} holds no finished stage 1: {place / manifest.NAME} is missing")
    found = read_run(place)
    refuse_other_settings(run.source, {name: {**found, **found["stage1"]}.get(name) for name in wanted}, wanted)


# -- stage 2 -----------------------------------------------------------------------------------------------------------


def _second_stage(run: Request, questions: _Questions, running: Running) -> None:
    """Stage 2 on what stage 1 left: always from the files, the first time and after a kill alike."""
    workers, stages, settings = running.workers, run.stages, run.settings()
    opened = open_model(run.source / stages.map_state, device=workers.device, dtype=run.dtype)
    ask_with(opened.tokenizer, run.data.system_prompt)
    detach(opened.model)
    questions = _fitting(run, opened, questions)
    if hasattr(opened.model, "merge_adapter"):
        opened.model.merge_adapter()  # frozen from here on: one addition now, not one in every pass
    orders = (2, run.seed) if run.stage2_data == "permuted" else None
    fresh, valid = _encode(opened.model, opened.tokenizer, questions.unseen, questions.validation, orders)
    config = _with_layers(opened.model, run.config, run.layers, fresh, workers.device)
    how: dict[str, Any] = {"objective": stages.objective, "passes": stages.passes, "plan": run.plan, "seed": run.seed}
    how |= {"settings": settings, "running": running}
    folder, tried = run.out, None
    if stages.search or (config.search and config.search.always and isinstance(run.method, str)):
        config, folder, tried = search_stage2(opened.model, fresh, valid, config, folder=run.out / "search", **how)
    outcome = stage2(opened.model, fresh, valid, config, folder=folder, **how)
    about: dict[str, Any] = {"model": opened.name, "task": str(run.task), "method": config.key}
    about |= {"preset": run.preset.name, "seed": run.seed}
    about |= {"stage1": opened.run["stage1"] if opened.run else run.about_stage1()}
    about |= {"config": config.to_dict(), "settings": settings, "seen": questions.seen()} | run.prompt()
    about |= {"stage2": run.about_stage2() | (outcome.summary() if outcome else {}) | {"tried": tried}}
    if workers.sharded:
        trained = _whole_copy(run, config, outcome)
    else:
        trained = opened.model
        _fit(trained, opened.tokenizer, questions, workers.device)
        about["reference"] = reference(trained, opened.tokenizer, questions.validation)
    _save(trained, run.out, about | {"vmoer": __version__}, workers)
    if workers.main:
        checkpoint.sweep(run.out)


def _whole_copy(run: Request, config: Config, outcome: StageOutcome | None) -> nn.Module:
    """The trained routers on a copy of the model that is not sharded, which is what can be saved."""
    whole = detach(open_model(run.source / run.stages.map_state, device="cpu", dtype=run.dtype).model)
    attach(whole, config)
    if outcome:
        kept = outcome.last if run.plan.keep == "last" else outcome.best
        checkpoint.restore(kept, {n: p for n, p in whole.named_parameters() if p.requires_grad}, whole)
    return whole


def _fit(model: nn.Module, tokenizer: Any, questions: _Questions, device: torch.device) -> None:
    known, unseen, validation = questions
    seen = known if _needs_fit(model) else [*{question.id: question for question in (*known, *unseen)}.values()]
    fit_novelty(model, _encode(model, tokenizer, seen, validation)[0], device)


def fit_novelty(model: nn.Module, seen: Examples, device: torch.device) -> None:
    """How far a token lies from questions seen before: a signal of every method, and all that some methods route by.

    The signal is read at the prompts' last tokens, so those are counted, of both stages' questions: of stage 1's alone it would
    be half a sign of memory, since their answers are known by heart, which no new question's are. A method that routes by it
    (`needs_fit`) routes every token, and is a posterior given what stage 1 was trained on.
    """
    last: dict[str, Any] = {"tokens": "last", "rank": min(256, next(iter(routers_of(model).values())).gate.hidden_size)}
    fit(model, _batches(seen, device, tokens=16384), **({} if _needs_fit(model) else last))


def _needs_fit(model: nn.Module) -> bool:
    return any(router.needs_fit for router in routers_of(model).values())


def _save(model: nn.Module, folder: Path, run: dict[str, Any], workers: Workers) -> None:
    """Adapter, routers and `run.json`, then the manifest: where that is, the folder is complete."""
    if workers.main:
        store.save(model, folder, run=as_json(run))
    workers.wait()


def _encode(
    model: Any,
    tokenizer: Any,
    train: Sequence[tasks.Question],
    valid: Sequence[tasks.Question],
    orders: tuple[int, int] | None = None,
) -> tuple[Examples, Examples]:
    how = context_length(model), max(len(question.choices) for question in (*train, *valid))
    return encode_questions(tokenizer, train, *how, orders=orders), encode_questions(tokenizer, valid, *how)


def _with_layers(model: Any, config: Config, layers: str | None, examples: Examples, device: torch.device) -> Config:
    """The configuration with its layers chosen on this model."""
    if layers is None:
        return config
    strategy, n = parse_layers(layers)
    chosen = select_layers(model, _batches(examples, device, MEASURED), strategy=strategy, n=n)
    return with_value(config, "layers", tuple(chosen))


def _batches(examples: Examples, device: torch.device, limit: int | None = None, tokens: int = 4096) -> list[Any]:
    lengths = examples.lengths[:limit]
    return [collate(examples, rows, device).inputs for rows in by_length(lengths, tokens)]
