"""What stands in a study's rows: a method as it was trained, by name.

vglr-fc              a method key, with the default preset
vglr-fc@paper        the same with the paper's protocol
map, map-early       stage 1 alone, in its last state and in its best on validation
mean-only            a trained mean without variance          } the controls without which a gain is
fixed-noise          untrained noise of fixed size            } credited to the wrong cause
tuned-noise          the same, its size chosen on validation  }
vglr-fc+full         predictions averaged over answers rather than in the router (+answer, +full), or over orders of
map+orders4          the options (+orders, +orders+routing); with a number over so many passes, else over the study's

Methods and controls that say so (`tempered`) answer validation questions too under the default preset: their rows come a second
time with an output temperature (+ts), so that what routing adds to plain temperature scaling can be seen.
"""

import dataclasses
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch
from filelock import FileLock

from vmoer import metrics, tasks
from vmoer.errors import InputError
from vmoer.evaluation import predictions
from vmoer.evaluation.answers import predict_task
from vmoer.evaluation.scores import Row
from vmoer.gates import find
from vmoer.inference.averaging import Averaging
from vmoer.live.attach import attach, attachment_of
from vmoer.models import Opened, open_model, skeleton
from vmoer.routers import Config, Deterministic, controls, method
from vmoer.saved import manifest
from vmoer.saved.store import read_run
from vmoer.studies._grid import Cell
from vmoer.tasks.batches import padded
from vmoer.tasks.prompt import encode
from vmoer.training.presets import preset_layers, preset_named
from vmoer.training.run import PRESETS, STAGE1, Data, Plan, Running, Stages, Workers, train

STATES = ("map", "map-early")
AVERAGED = tuple(kind for kind in get_args(Averaging) if kind != "router")
DIGITS = "0123456789"


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

    def questions(self, task: str, split: str) -> list[tasks.Question]:
        paper = PRESETS[self.preset].paper_splits
        return tasks.load(task, split, data_root=self.data_root, limit=self.limit, paper_splits=paper)

    def label(self, key: str) -> str:
        """A method, state or control under the study's preset."""
        return with_preset(key, self.preset)

    def data(self, stage2: str | None) -> Data:
        """What its runs are trained on, `stage2` being stage 2's part."""
        return Data(root=self.data_root, limit=self.limit, stage2=stage2)

    def common(self) -> dict[str, Any]:
        """What every cell's key holds besides its own coordinates."""
        plans = [plan.described() for plan in (self.stage1, self.stage2) if plan is not None]
        return {
            "model": self.model,
            "task": self.task,
            "limit": self.limit,
            "plans": json.dumps(plans),
            "data": self.stage2_data,
        } | ({} if self.preset == "default" else {"preset": self.preset})


def with_preset(label: str, preset: str) -> str:
    """The label under a preset, unless it names one itself."""
    head, plus, averaging = label.partition("+")
    return label if preset == "default" or "@" in head else f"{head}@{preset}{plus}{averaging}"


def parse(label: str) -> tuple[str, str, str]:
    """A label's method, preset and averaging."""
    head, _, averaging = label.partition("+")
    key, _, preset = head.partition("@")
    if key not in (*STATES, *controls()):
        method(key)
    preset_named(preset or "default")
    averaging = averaging.rstrip(DIGITS)
    if averaging not in AVERAGED and "+" in label:
        raise InputError(f"{label}: averaging is {', '.join(f'+{kind}' for kind in AVERAGED)}")
    return key, preset or "default", averaging or "router"


def passes_of(study: Study, label: str) -> int:
    """How many passes a label's answers take at most."""
    number = label[len(label.rstrip(DIGITS)) :] if "+" in label else ""
    return 1 if parse(label)[2] == "router" else int(number or study.passes)


def tempered(label: str) -> bool:
    """Whether validation questions are answered too, which an output temperature is fitted on."""
    key, preset, averaging = parse(label)
    if preset != "default" or averaging == "answer" or key == "map-early":
        return False
    return controls()[key].tempered if key in controls() else method(key).tempered


def config_of(label: str, **changes: Any) -> Config:
    """The configuration a label is trained with, before validation or another study chooses any of it."""
    key, preset, _ = parse(label)
    if key in controls():
        return dataclasses.replace(controls()[key].config, **changes)
    return PRESETS[preset].config("map" if key in STATES else key, **changes)


def searches(study: Study, label: str) -> bool:
    """Whether the study asks for a search over a label's setting."""
    control = controls().get(parse(label)[0])
    if control is not None and control.search is not None:
        return control.search
    return study.search and study.transfer_from is None and config_of(label).search is not None


def prepare(study: Study, label: str, seed: int, *, layers: str | None = None) -> Opened:
    """The model of a label, trained where it is not yet, opened for evaluation."""
    key, preset, _ = parse(label)
    source = _source(study, seed, preset)
    embedded = study.stage1.epochs == 0
    if not (embedded and key in STATES):
        _first_stage(study, seed, preset)
    if key in STATES:
        name: str | Path = source if key == "map" else source / key  # the run itself: stage 1's end, with its novelty
        if embedded:
            name = study.model if key == "map" else f"{study.model}-{key}"
        opened = open_model(name, device=study.device, dtype=study.dtype)
        if attachment_of(opened.model) is None:
            attach(opened.model, Deterministic())
        return merged(opened)
    trained = label.partition("+")[0]
    folder = study.out / "runs" / f"{trained}{f'-{layers}' if layers else ''}-s{seed}".replace(":", "")
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
    key, preset, _ = parse(label)
    if study.stage1.epochs == 0 and key in STATES:
        return ()  # these are embedded
    return (stage1_cell(_source(study, seed, preset), seed, partial(_first_stage, study, seed, preset)),)


def stage1_cell(run: Path, seed: int, work: Callable[[], list[Row]]) -> Cell:
    return Cell(
        "stage 1", {"method": run.name.removesuffix(f"-s{seed}"), "seed": seed}, work, leaves=(run / manifest.NAME,)
    )


def _source(study: Study, seed: int, preset: str) -> Path:
    """The paper's protocol trains stage 1 on everything, ours holds a share back."""
    return study.out / "runs" / f"map{'@paper' if preset == 'paper' else ''}-s{seed}"


def _first_stage(study: Study, seed: int, preset: str) -> list[Row]:
    train_label(study, f"map@{preset}", out=_source(study, seed, preset), seed=seed)
    return []


def running(study: Study) -> Running | None:
    """How the study trains, where not as `train` does by itself."""
    if not study.skip_nonfinite:
        return None
    return Running(workers=Workers.launched(), checkpoint_seconds=20.0, skip_nonfinite=True)


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
    paper = preset == "paper"
    chosen: str | Config = config_of(label) if key in controls() else key
    if key == "map":
        layers = "all"
    elif paper and layers is None:
        layers, _ = preset_layers(PRESETS[preset], study.model)
    if study.transfer_from is not None and isinstance(chosen, str):
        chosen = _transferred(study.transfer_from, out.name, config_of(label))
    stage2, data = (None, None) if paper else (study.stage2, study.stage2_data)
    stages = Stages(stage1=study.stage1, stage2=stage2, search=searches(study, label), from_map=from_map)
    how: dict[str, Any] = {"data": study.data(data), "seed": seed, "dtype": study.dtype, "running": running(study)}
    with alone(out):
        train(study.model, study.task, chosen, out=out, preset=preset, layers=layers, stages=stages, **how)


def _transferred(source: Path, run: str, config: Config) -> Config:
    """The method with what was searched on another model, untuned on this one."""
    folder = source / "runs" / run
    if not manifest.complete(folder):
        raise InputError(f"nothing to transfer: {folder / manifest.NAME} is missing")
    if config.search is None:
        return config
    name = config.search.name
    return dataclasses.replace(config, **{name: read_run(folder)["config"][name]})


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
        questions = [question for task, split in wanted for question in study.questions(task, split)]
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
        passes=passes_of(study, label),
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
