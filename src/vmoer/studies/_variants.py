"""What stands in a study's rows: a method as it was trained, by name.

vglr-fc              a method key, with the default preset
vglr-fc@paper        the same with the protocol exactly as printed
map, map-early       stage 1 alone, in its last state and in its best on validation
mean-only            a trained mean without variance          } the controls without which a gain is
fixed-noise          untrained noise of fixed size            } credited to the wrong cause
tuned-noise          the same, its size chosen on validation  }
vglr-fc+full         predictions averaged over answers rather than in the router (+answer, +full)

Of map, of mean-only, of tuned-noise and of the variational methods with the default preset validation questions are answered
too: their rows come a second time with an output temperature (+ts), so that what routing adds to plain temperature scaling can
be seen.
"""

import dataclasses
import json
import math
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from vmoer import tasks
from vmoer.attach import attach, attachment_of
from vmoer.errors import InputError
from vmoer.gates import find
from vmoer.models import Opened, open_model
from vmoer.predict import predict_task
from vmoer.routers import Config, Deterministic, MeanField, method
from vmoer.studies._grid import start_worker
from vmoer.train import PRESETS, STAGE1, Plan, train
from vmoer.training.stages import searched

CONTROLS: dict[str, Config] = {
    "mean-only": MeanField(learn="mean", beta=0.001),
    "fixed-noise": MeanField(learn="nothing", prior_scale=2.0),
    "tuned-noise": MeanField(learn="nothing"),
}
STATES = ("map", "map-early")
TEMPERED = ("map", "mean-only", "tuned-noise", "vglr-mf", "vglr-fc", "vglr-lr", "vtsr")


@dataclass(frozen=True)
class Study:
    """What the studies are run on, and where their files go."""

    model: str
    task: str
    out: Path
    ood: tuple[str, ...] = ()
    methods: tuple[str, ...] = ("map", "vglr-fc", "vtsr")
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

    def questions(self, task: str, split: str) -> list[tasks.Question]:
        return tasks.load(task, split, data_root=self.data_root, limit=self.limit)

    def common(self) -> dict[str, Any]:
        """What every cell's key holds besides its own coordinates."""
        plans = [dataclasses.asdict(plan) for plan in (self.stage1, self.stage2) if plan is not None]
        return {
            "model": self.model,
            "task": self.task,
            "limit": self.limit,
            "plans": json.dumps(plans),
            "data": self.stage2_data,
        }


def parse(label: str) -> tuple[str, str, str]:
    """A label's method, preset and averaging."""
    head, _, averaging = label.partition("+")
    key, _, preset = head.partition("@")
    if key not in (*STATES, *CONTROLS):
        method(key)
    if preset and preset not in PRESETS:
        raise InputError(f"{label}: there is no preset {preset!r}; known are {', '.join(PRESETS)}")
    if averaging not in ("", "answer", "full"):
        raise InputError(f"{label}: averaging is +answer or +full")
    return key, preset or "default", averaging or "router"


def tempered(label: str) -> bool:
    """Whether validation questions are answered too, which an output temperature is fitted on."""
    key, preset, averaging = parse(label)
    return key in TEMPERED and preset == "default" and averaging != "answer"


def prepare(study: Study, label: str, seed: int, *, layers: str | None = None, **changes: Any) -> Opened:
    """The model of a label, trained where it is not yet, opened for evaluation."""
    key, preset, _ = parse(label)
    source = _source(study, seed, preset)
    embedded = study.stage1.epochs == 0
    if not (embedded and key in STATES):
        _train(study, "map", preset=preset, out=source, seed=seed)
    if key in STATES:
        name: str | Path = source if key == "map" else source / key  # the run itself: stage 1's end, with its novelty
        if embedded:
            name = study.model if key == "map" else f"{study.model}-{key}"
        opened = open_model(name, device=study.device, dtype=study.dtype)
        if attachment_of(opened.model) is None:
            attach(opened.model, Deterministic())
        return merged(opened)
    folder = study.out / "runs" / f"{label.partition('+')[0]}{f'-{layers}' if layers else ''}-s{seed}".replace(":", "")
    _train(study, key, preset=preset, out=folder, seed=seed, layers=layers, from_map=source, **changes)
    return merged(open_model(folder, device=study.device, dtype=study.dtype))


def merged(opened: Opened) -> Opened:
    """The adapter added to the weights, as it was when stage 2 was trained: once, not in every pass."""
    if hasattr(opened.model, "merge_adapter"):
        opened.model.merge_adapter()
    return opened


@cache
def moe_layers(model: str) -> int:
    """How many layers of a model have experts."""
    return len(find(open_model(model, device="cpu").model))


def paper_layers(model: str) -> str:
    """Ten layers, as printed; of a model with fewer the same share, ten in thirty-two."""
    available = moe_layers(model)
    return f"susceptible:{10 if available >= 10 else math.ceil(available * 10 / 32)}"


def share_stage1(study: Study, workers: int = 1) -> None:
    """Stage 1 of every seed and preset that the study's methods start from, in as many processes as are given."""
    presets = sorted({parse(label)[1] for label in study.methods})
    wanted = [(seed, preset) for seed in study.seeds for preset in presets]
    missing = [pair for pair in wanted if not (_source(study, *pair) / "run.json").exists()]
    if workers > 1 and len(missing) > 1:
        how: dict[str, Any] = {"mp_context": get_context("spawn"), "initializer": start_worker}
        with ProcessPoolExecutor(min(workers, len(missing)), **how) as pool:
            list(pool.map(_first_stage, [study] * len(missing), *zip(*missing, strict=True)))
    else:
        for pair in missing:
            _first_stage(study, *pair)


def _source(study: Study, seed: int, preset: str) -> Path:
    """The paper's protocol trains stage 1 on everything, ours holds a share back."""
    return study.out / "runs" / f"map{'@paper' if preset == 'paper' else ''}-s{seed}"


def _first_stage(study: Study, seed: int, preset: str) -> None:
    _train(study, "map", preset=preset, out=_source(study, seed, preset), seed=seed)


def alone(folder: Path) -> Any:
    """A lock on a folder of files: cells side by side may want the same run, which one of them makes and the others wait for."""
    from filelock import FileLock  # torch brings it

    folder.parent.mkdir(parents=True, exist_ok=True)
    return FileLock(folder.parent / f".{folder.name}.lock")


def _train(study: Study, key: str, *, preset: str, out: Path, seed: int, **changes: Any) -> None:
    if (out / "run.json").exists():
        return
    with alone(out):
        _train_alone(study, key, preset=preset, out=out, seed=seed, **changes)


def _train_alone(study: Study, key: str, *, preset: str, out: Path, seed: int, **changes: Any) -> None:
    chosen: str | Config = CONTROLS.get(key, key)
    if key == "map":
        changes["layers"] = "all"
    elif preset == "paper" and changes.get("layers") is None:
        changes["layers"] = paper_layers(study.model)
    if study.transfer_from is not None and isinstance(chosen, str):
        chosen = _transferred(study.transfer_from, out.name, PRESETS[preset].config(key))
    paper = preset == "paper"
    free = study.search and study.transfer_from is None and key != "fixed-noise"
    config = PRESETS[preset].config(chosen) if isinstance(chosen, str) else chosen
    train(
        study.model,
        study.task,
        chosen,
        out=out,
        preset=preset,
        stage1_plan=study.stage1,
        stage2_plan=None if paper else study.stage2,
        stage2_data=None if paper else study.stage2_data,
        search=key == "tuned-noise" or (free and searched(config) is not None),
        data_root=study.data_root,
        limit=study.limit,
        seed=seed,
        dtype=study.dtype,
        **{k: v for k, v in changes.items() if v is not None},
    )


def _transferred(source: Path, run: str, config: Config) -> Config:
    """The method with what was searched on another model, untuned on this one."""
    path = source / "runs" / run / "run.json"
    if not path.exists():
        raise InputError(f"nothing to transfer: {path} is missing")
    found = json.loads(path.read_text())["config"]
    kept = {name: found[name] for name in ("beta", "temperature") if name in found}
    return dataclasses.replace(config, **kept)


def predict_label(
    study: Study, label: str, seed: int, folder: Path, questions: Sequence[tasks.Question] | None = None
) -> None:
    """Predictions of a label on its task and on the shifted sets, unless they are there already."""
    if (folder / "meta.json").exists():
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
        passes=study.passes,
    )


def batches(
    study: Study, opened: Opened, questions: Sequence[tasks.Question], size: int = 32
) -> list[dict[str, torch.Tensor]]:
    """Prompts as padded batches, for what needs activations rather than answers."""
    from vmoer.predict import collate
    from vmoer.tasks.prompt import encode

    prompts = encode(opened.tokenizer, list(questions), 2**31)
    return [collate(prompts[i : i + size], opened.model) for i in range(0, len(prompts), size)]
