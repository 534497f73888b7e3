"""A study's models: trained by label where they are not there yet, opened, and asked."""

import dataclasses
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from filelock import FileLock

from vmoer import metrics, tasks
from vmoer.errors import InputError
from vmoer.evaluation import predictions
from vmoer.evaluation.answers import predict_task
from vmoer.evaluation.scores import Row
from vmoer.gates import find
from vmoer.live.attach import attach, attachment_of
from vmoer.models import Opened, open_model, skeleton
from vmoer.routers import Config, Deterministic, controls
from vmoer.saved import manifest
from vmoer.saved.store import read_run
from vmoer.studies._adapters import adapter_of, answering, open_posterior, over_adapter
from vmoer.studies._grid import Cell
from vmoer.studies._labels import (
    OTHER,
    STATES,
    config_of,
    member_of,
    parse,
    passes_of,
    stage1_label,
    tempered,
    with_preset,
)
from vmoer.tasks.batches import padded
from vmoer.tasks.prompt import encode
from vmoer.training.layers import preset_layers
from vmoer.training.run import PRESETS, STAGE1, Data, Plan, Running, Stages, Workers, train


@dataclass(frozen=True)
class Study:
    """What the studies are run on, and where their files go."""

    model: str
    task: str
    out: Path
    ood: tuple[str, ...] = ()
    methods: tuple[str, ...] = ("map", "vglr-fc", "vtsr")
    preset: str = "default"
    """Of the labels that a study names itself, and of the test questions: `paper` takes as many as it prints."""
    table: str = "all"
    """Which of the paper's tables its study makes."""
    seeds: tuple[int, ...] = (0,)
    averaging: tuple[str, ...] = ("router",)
    passes: int = 8
    limit: int | None = None
    data_root: str | None = None
    stage1: Plan = STAGE1
    stage2: Plan | None = None
    stage2_data: str | None = None
    search: bool = False
    transfer_from: Path | None = None
    device: str | None = None
    dtype: str | None = None
    skip_nonfinite: bool = False
    recompute: bool = False
    """Less memory in stage 1, with the same result (training.plan.Running)."""
    vary_data: bool = False
    """Whether each seed has a split into train and validation of its own (tasks.load, recut)."""
    system_prompt: str | None = None
    """What labels of the printed protocol are asked with, in place of our own."""

    def questions(self, task: str, split: str, seed: int = 0) -> list[tasks.Question]:
        """The seed decides the split where `vary_data` says so; test is the same for all."""
        how: dict[str, Any] = {"data_root": self.data_root, "limit": self.limit}
        if self.vary_data and split != "test":
            return tasks.load(task, split, seed=seed, recut=True, **how)
        how["paper_splits"] = PRESETS[self.preset].paper_splits
        return tasks.shift(task, **how) if split == "test" and task in self.ood else tasks.load(task, split, **how)

    def label(self, key: str) -> str:
        """A method, state or control under the study's preset."""
        return with_preset(key, self.preset)

    def data(self, stage2: str | None, seed: int = 0) -> Data:
        """What its runs are trained on, `stage2` being stage 2's part."""
        cut: dict[str, Any] = {"seed": seed, "recut": True} if self.vary_data else {}
        return Data(root=self.data_root, limit=self.limit, stage2=stage2, **cut)

    def common(self) -> dict[str, Any]:
        """What every cell's key holds besides its own coordinates."""
        plans = [plan.described() for plan in (self.stage1, self.stage2) if plan is not None]
        return {
            "model": self.model,
            "task": self.task,
            "limit": self.limit,
            "plans": json.dumps(plans),
            "data": self.stage2_data,
        } | self._rarely()

    def _rarely(self) -> dict[str, Any]:
        """What is in a key only where it is set: cells from before have no such entry."""
        found = {"preset": self.preset, "vary_data": self.vary_data, "system_prompt": self.system_prompt}
        usual = {"preset": "default", "vary_data": False, "system_prompt": None}
        return {name: value for name, value in found.items() if value != usual[name]}


def searches(study: Study, label: str) -> bool:
    """Whether the study asks for a search over a label's setting."""
    control = controls().get(parse(label)[0])
    if control is not None and control.search is not None:
        return control.search
    return study.search and study.transfer_from is None and config_of(label).search is not None


def prepare(study: Study, label: str, seed: int, *, layers: str | None = None) -> Opened:
    """The model of a label, trained where it is not yet, opened for evaluation."""
    key, _, _ = parse(label)
    source = _source(study, label, seed)
    embedded = study.stage1.epochs == 0
    if embedded and over_adapter(label):
        raise InputError(f"{label} needs a stage 1 to train an adapter in, and this study's has no epochs")
    if not (embedded and key in STATES):
        _first_stage(study, label, seed)
    if over_adapter(label):
        known = partial(study.questions, study.task, "train", seed)
        return open_posterior(label, source, known, seed=seed, device=study.device, dtype=study.dtype)
    if key in STATES:
        name: str | Path = source if key == "map" else source / key  # the run itself: stage 1's end, with its novelty
        if embedded:
            name = study.model if key == "map" else f"{study.model}-{key}"
        opened = open_model(name, device=study.device, dtype=study.dtype)
        if attachment_of(opened.model) is None:
            attach(opened.model, Deterministic())
        return merged(opened)
    trained = label.partition("+")[0]
    folder = study.out / "runs" / _run_name(trained, seed, layers)
    train_label(study, trained, out=folder, seed=seed, layers=layers, from_map=source)
    return merged(open_model(folder, device=study.device, dtype=study.dtype))


def merged(opened: Opened) -> Opened:
    """The adapter added to the weights, as it was when stage 2 was trained: once, not in every pass."""
    if hasattr(opened.model, "merge_adapter"):
        opened.model.merge_adapter()
    return opened


@cache
def moe_layers(model: str) -> int:
    """How many layers of a model have experts."""
    return len(find(skeleton(model)))


def first_stage(study: Study, label: str, seed: int) -> tuple[Cell, ...]:
    """Stage 1 that a label is trained from, as the cell that its own cell needs."""
    _check_setting(study, label, seed)
    if study.stage1.epochs == 0 and parse(label)[0] in STATES:
        return ()  # these are embedded
    return (stage1_cell(_source(study, label, seed), seed, partial(_first_stage, study, label, seed)),)


def stage1_cell(run: Path, seed: int, work: Callable[[], list[Row]]) -> Cell:
    return Cell(
        "stage 1", {"method": run.name.removesuffix(f"-s{seed}"), "seed": seed}, work, leaves=(run / manifest.NAME,)
    )


def _run_name(label: str, seed: int, layers: str | None = None) -> str:
    """The folder of a label's run, of the preset's layers or of others."""
    return f"{label.partition('+')[0]}{f'-{layers}' if layers else ''}-s{seed}".replace(":", "")


def _source(study: Study, label: str, seed: int) -> Path:
    """The run of stage 1 that a label starts from."""
    return study.out / "runs" / f"{stage1_label(label)}-s{seed}"


def _first_stage(study: Study, label: str, seed: int) -> list[Row]:
    train_label(study, stage1_label(label), out=_source(study, label, seed), seed=seed)
    return []


def running(study: Study) -> Running | None:
    """How the study trains, where not as `train` does by itself."""
    if not (study.skip_nonfinite or study.recompute):
        return None
    how: dict[str, Any] = {"skip_nonfinite": study.skip_nonfinite, "recompute": study.recompute}
    return Running(workers=Workers.launched(), checkpoint_seconds=20.0, **how)


def alone(folder: Path) -> Any:
    """A lock on a folder. Where several cells want the same run, one makes it and the others wait."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    return FileLock(folder.parent / f".{folder.name}.lock")


def train_label(
    study: Study,
    label: str,
    *,
    out: Path,
    seed: int,
    layers: str | None = None,
    from_map: Path | None = None,
) -> None:
    """Train a label into a folder, unless it is there. Of several that want it at once one trains, and the others wait."""
    if manifest.complete(out):
        return
    key, preset, _ = parse(label)
    own = PRESETS[preset]
    if key == "map":
        layers = "all"
    elif own.paper_splits and layers is None:
        layers, _ = preset_layers(own, study.model)
    printed = preset.startswith("printed") and study.stage1.epochs > 0
    stages = Stages(
        stage1=own.stage1 if printed else study.stage1,
        stage2=None if own.paper_splits else study.stage2,
        search=searches(study, label),
        from_map=from_map,
        adapter=adapter_of(label),
    )
    data = study.data(study.stage2_data if preset == "default" else None, seed)
    if own.paper_splits:
        data = dataclasses.replace(data, seed=0, recut=False, system_prompt=study.system_prompt if printed else None)
    how: dict[str, Any] = {"data": data, "seed": seed + OTHER * member_of(label), "dtype": study.dtype}
    with alone(out):
        train(
            *(study.model, study.task, _chosen(study, label, seed)),
            out=out,
            preset=preset,
            layers=layers,
            stages=stages,
            running=running(study),
            **how,
        )


def _chosen(study: Study, label: str, seed: int) -> str | Config:
    """What a label is trained with: a control's own configuration, one with what was searched on another model, or a key."""
    key, config = parse(label)[0], config_of(label)
    if key in controls():
        return config
    if study.transfer_from is None or config.search is None:
        return key
    folder = (
        study.transfer_from / "runs" / _run_name(label, seed)
    )  # of whichever layers: a setting is chosen for a task
    if not manifest.complete(folder):
        raise InputError(f"nothing to transfer: {folder / manifest.NAME} is missing")
    return dataclasses.replace(config, **{config.search.name: read_run(folder)["config"][config.search.name]})


def _check_setting(study: Study, label: str, seed: int) -> None:
    """Refuse, before anything is trained, settings that cannot be transferred, and finished runs with other ones.

    A finished run is taken as it is: asked for a search, or for another study's settings, it would pass for one that has them.
    """
    chosen, folder = _chosen(study, label, seed), study.out / "runs" / _run_name(label, seed)
    config = config_of(label) if isinstance(chosen, str) else chosen
    if config.search is None or not manifest.complete(folder):
        return
    run, name = read_run(folder), config.search.name
    value, searched = run["config"][name], bool(run["stage2"].get("search"))
    always = config.search.always and isinstance(chosen, str)
    if searched != searches(study, label) or not (searched or always or value == getattr(config, name)):
        how = ", searched" if searched else ""
        raise InputError(f"{folder} was trained with {name} = {value}{how}: give other settings another --out")


def predict_label(
    study: Study, label: str, seed: int, folder: Path, questions: Sequence[tasks.Question] | None = None
) -> None:
    """Predictions of a label on its task and on the shifted sets, unless they are there already."""
    if predictions.whole(folder):
        return
    opened = prepare(study, label, seed)
    if questions is None:
        wanted = [(study.task, "test"), *((shifted, "test") for shifted in study.ood)]
        wanted += [(study.task, "validation")] * tempered(label)
        questions = [question for task, split in wanted for question in study.questions(task, split, seed)]
    averaging: Any = parse(label)[2]
    predict_task(
        opened.model,
        opened.tokenizer,
        questions,
        folder=folder,
        name=study.model,
        method=label,
        seed=seed,
        averaging=averaging,
        passes=passes_of(label, study.passes),
        run=opened.run,
        **answering(label),
    )


def read_answers(path: Path) -> tuple[Any, Any, Any]:
    """The table of predictions, its log-probabilities as one array, and the right answers."""
    import pyarrow.parquet as pq

    table = pq.read_table(path)
    return table, metrics.pad(table["log_probs"].to_pylist()), np.asarray(table["answer"].to_pylist())


def batches(
    study: Study, opened: Opened, questions: Sequence[tasks.Question], size: int = 32
) -> list[dict[str, torch.Tensor]]:
    """Prompts as padded batches, for what needs activations rather than answers."""
    prompts = encode(opened.tokenizer, list(questions), 2**31)
    device = next(opened.model.parameters()).device
    return [padded(prompts[i : i + size], device) for i in range(0, len(prompts), size)]
