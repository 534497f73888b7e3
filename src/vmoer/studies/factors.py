"""What makes it calibrate: one factor at a time around the default preset, and the paper's protocol as a corner.

A level is one change to how vglr-fc is trained under the default preset (or another method in its place). It is compared with
the MAP model of the same seed and the same stage-1 questions, on validation, so that test plays no part in choosing defaults.
Validation is cut in two by the questions' wording (training.data.halves): stopping, Temp-Scale and output temperature see the
first half alone, and every number here is from the second. Each level is read under all three kinds of averaging, which so are
a factor themselves, crossed with all others.

    OUT/factors/<level>-s<seed>/<averaging>/predictions.parquet     and level.json, written last

`factor_rows.summary` makes the rows from these files alone: scores, and their paired differences to MAP, and of NLL to the
default averaged in the router, with intervals over questions and seeds. A level that is to replace the default must beat it
beyond its interval.
"""

import dataclasses
import re
import warnings
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from vmoer import tasks
from vmoer.errors import InputError
from vmoer.evaluation import predictions
from vmoer.evaluation.answers import predict_task
from vmoer.evaluation.scores import Row
from vmoer.files import read_json, sealed, unsealed, write_json
from vmoer.live.attach import collected, reconfigured
from vmoer.models import Opened, open_model
from vmoer.saved import manifest
from vmoer.studies._grid import Cell, row
from vmoer.studies._labels import config_of, parse
from vmoer.studies._variants import Study, alone, batches, merged, moe_layers, running, stage1_cell
from vmoer.training.data import halves
from vmoer.training.layers import preset_layers
from vmoer.training.run import PRESETS, Plan, Stages, train

STUDY = "factors"
STOP, SCORE = "validation/stop", "validation/score"
METRICS = ("nll", "brier", "debiased_ece", "accuracy", "tempered_nll")
METHOD = "vglr-fc"
MEASURED = 200  # questions that the spread of the logits is measured on
BATCH_TOKENS = 16384


@dataclass(frozen=True)
class Level:
    """`config` changes the method's settings; `train` changes stage2_data, objective, noisy_stage1, layers or lr."""

    factor: str
    name: str
    label: str = METHOD
    """A method or control, with @paper for the paper's preset; `map` is stage 1 alone."""
    config: dict[str, Any] = field(default_factory=dict)
    train: dict[str, Any] = field(default_factory=dict)
    relative: float | None = None
    """The prior's scale as a multiple of the logits' spread."""
    samples: int | None = None
    """Points in the router, and passes for answers, at inference: the default's own run, asked with other numbers."""

    @property
    def slug(self) -> str:
        return re.sub(r"[^\w.@-]+", "-", f"{self.factor}-{self.name}").strip("-")

    @property
    def averaging(self) -> tuple[str, ...]:
        return ("router", "answer", "full") if config_of(self.label).draws else ("router",)


DEFAULT = Level("default", "default")
MAPS = {
    "default": Level("map", "default's stage 1", "map"),
    "train": Level("map", "stage 1 on all questions", "map", train={"stage2_data": "train"}),
    "held-out:0.5": Level("map", "stage 1 on half the questions", "map", train={"stage2_data": "held-out:0.5"}),
    "paper": Level("paper", "map", "map@paper"),
}
"""Stage 1 by what it leaves to stage 2: what each level is compared with."""
FACTORS: tuple[str, ...] = (
    "map",
    "default",
    "stage-2 data",
    "noise in stage 1",
    "objective",
    "posterior",
    "prior scale",
    "untrained noise",
    "beta",
)
FACTORS = (*FACTORS, "layers", "S", "learning rate", "together", "paper")
"""In the order of the table."""


def levels(study: Study, available: int) -> list[Level]:
    """The design, the most telling first. `available` is the number of layers that have experts."""
    third = 10 if available >= 30 else max(1, available // 3)
    out = [MAPS["default"], DEFAULT, MAPS["train"]]
    out += [Level("stage-2 data", "train", train={"stage2_data": "train"})]
    out += [Level("objective", "predictive", train={"objective": "predictive"})]
    families = ("vglr-mf", "vglr-lr", "vtsr", "mean-only", "fixed-noise", "laplace")
    out += [Level("posterior", key, key) for key in families]
    out += [Level("prior scale", f"{r:g} x spread", relative=r) for r in (0.25, 1.0, 2.0, 4.0)]
    noise = (0.05, 0.1, 0.2, 0.4)
    out += [Level("untrained noise", f"{r:g} x spread", "fixed-noise", relative=r) for r in noise]
    out += [Level("beta", f"{beta:g}", config={"beta": beta}) for beta in (0.0001, 0.01, 0.1)]
    if study.stage1.epochs:
        out += [MAPS["held-out:0.5"], Level("stage-2 data", "held-out:0.5", train={"stage2_data": "held-out:0.5"})]
        noisy: dict[str, Any] = {"noisy_stage1": True}
        out += [Level("noise in stage 1", "at the prior", train=noisy)]
        out += [Level("noise in stage 1", "sd 2", config={"prior_scale": 2.0}, train=noisy)]
        out += [Level("noise in stage 1", "sd 2, no stage 2", "fixed-noise", train=noisy)]
    places = [f"{place}:{third}" for place in ("susceptible", "first", "middle", "last")]
    counts = [f"susceptible:{n}" for n in (1, 2 * third) if n < available]
    counts += [f"last:{2 * third}"] * (2 * third < available)
    out += [Level("layers", chosen, train={"layers": chosen}) for chosen in dict.fromkeys([*places, *counts])]
    out += [Level("S", str(n), samples=n) for n in (2, 8, 32, 128)]
    out += [Level("S", "fresh noise", config={"sampling": "mc"})]
    out += [Level("learning rate", f"{lr:g}", train={"lr": lr}) for lr in (1e-4, 3e-3)]
    together: dict[str, Any] = {"objective": "predictive"}
    out += [Level("together", "predictive, 1 x spread", train=together, relative=1.0)]
    out += [Level("together", "predictive, mean-field", "vglr-mf", train=together)]
    if study.stage1.epochs:
        both = together | {"noisy_stage1": True}
        out += [Level("together", "predictive, noise in stage 1", train=both)]
    return [*out, MAPS["paper"], Level("paper", METHOD, f"{METHOD}@paper")]


def cells(study: Study) -> list[Cell]:
    return [cell(study, level, seed) for level in levels(study, moe_layers(study.model)) for seed in study.seeds]


def cell(study: Study, level: Level, seed: int) -> Cell:
    key = {"method": f"{level.factor}: {level.name}", "seed": seed, "passes": study.passes, **study.common()}
    needs = [stage1_cell(_source(study, level, seed), seed, partial(_first_stage, study, level, seed))]
    if level.samples:
        needs.append(cell(study, DEFAULT, seed))  # whose run it asks
    return Cell(STUDY, key, partial(work, study, level, seed), tuple(needs))


def work(study: Study, level: Level, seed: int) -> list[Row]:
    folder = study.out / STUDY / f"{level.slug}-s{seed}"
    described = _level(folder)
    if described is None or not all(predictions.whole(folder / averaging) for averaging in level.averaging):
        opened, found = prepare_level(study, level, seed)
        questions = scored(study, with_stop=level.label.startswith("map"))
        changes = {"samples": level.samples} if level.samples else {}
        with reconfigured(opened.model, **changes):
            for averaging in level.averaging:
                how: dict[str, Any] = {"averaging": averaging, "passes": level.samples or study.passes}
                predict_task(
                    opened.model,
                    opened.tokenizer,
                    questions,
                    folder=folder / averaging,
                    name=study.model,
                    method=level.label,
                    seed=seed,
                    batch_tokens=BATCH_TOKENS,
                    **how,
                )
        described = {"factor": level.factor, "level": level.name, "label": level.label, "seed": seed}
        reference = MAPS["default" if level.label.startswith("map") else _stage1(study, level)[0]].slug
        described = sealed(described | {"slug": level.slug, "reference": reference} | found)
        write_json(folder / "level.json", described)
    keys = {"model": study.model, "task": study.task, "split": "validation", "method": level.label, "seed": seed}
    keys |= {"factor": level.factor, "level": level.name}
    measured = ("prior_scale", "logit_spread")
    return [row(STUDY, name, described[name], **keys) for name in measured if name in described]


def _level(folder: Path) -> dict[str, Any] | None:
    """What `level.json` says; None where there is none. A damaged one is named, and counts as missing."""
    path = folder / "level.json"
    try:
        return unsealed(read_json(path), path) if path.exists() else None
    except InputError as error:
        warnings.warn(f"{error}; the level is computed again", stacklevel=2)
        return None


# -- training ----------------------------------------------------------------------------------------------------------


def _stage1(study: Study, level: Level) -> tuple[str, str]:
    """Which of MAPS a level starts from, and what its stage 2 is trained on."""
    preset = PRESETS[parse(level.label)[1]]
    if preset.name == "paper":
        return "paper", preset.stage2_data
    default = study.stage2_data or preset.stage2_data
    data = level.train.get("stage2_data", default)
    return ("default" if data == default else data), data


def scored(study: Study, with_stop: bool) -> list[tasks.Question]:
    """The second half of validation; for MAP the first too, where its output temperature is fitted."""
    whole = tasks.load(study.task, "validation", data_root=study.data_root)
    out = []
    for split, half in zip((STOP, SCORE), halves(whole, 0), strict=True):
        asked = half if study.limit is None else tasks.subsample(half, study.limit, 0)
        out += [dataclasses.replace(q, split=split) for q in asked if with_stop or split == SCORE]
    return out


def prepare_level(study: Study, level: Level, seed: int) -> tuple[Opened, dict[str, float]]:
    """The level's model, trained where it is not yet, opened for evaluation; and what was measured on the way."""
    source = _source(study, level, seed)
    _first_stage(study, level, seed)
    found: dict[str, float] = {}
    if level.label.startswith("map"):
        opened = open_model(source / "map", device=study.device, dtype=study.dtype)
    else:
        run, found = _trained(study, DEFAULT if level.samples else level, seed, source)
        opened = open_model(run, device=study.device, dtype=study.dtype)
    return merged(opened), found


def _source(study: Study, level: Level, seed: int) -> Path:
    """The run of stage 1 on this level's questions; shared with the other studies where it is the same."""
    name, data = _stage1(study, level)
    shown = {"default": "map", "paper": "map@paper"}.get(name, f"map-{data}").replace(":", "")
    return study.out / "runs" / f"{shown}-s{seed}"


def _first_stage(study: Study, level: Level, seed: int) -> list[Row]:
    out = _source(study, level, seed)
    with alone(out):
        if not manifest.complete(out):
            preset, stages = PRESETS[parse(level.label)[1]], Stages(stage1=study.stage1, stage2=_plan(study, level))
            how: dict[str, Any] = {"data": study.data(_stage1(study, level)[1]), "running": running(study)}
            how |= {"seed": seed, "dtype": study.dtype}
            train(study.model, study.task, "map", out=out, layers="all", preset=preset, stages=stages, **how)
    return []


def _plan(study: Study, level: Level) -> Plan:
    """Of stage 2."""
    preset = PRESETS[parse(level.label)[1]]
    plan = preset.stage2 if preset.name == "paper" else study.stage2 or preset.stage2
    return dataclasses.replace(plan, lr=level.train.get("lr", plan.lr))


def _trained(study: Study, level: Level, seed: int, source: Path) -> tuple[Path, dict[str, float]]:
    """The level's run folder, and the prior scale where it was set by measurement."""
    preset, changes = PRESETS[parse(level.label)[1]], level.train
    out = study.out / "runs" / f"{STUDY}-{level.slug}-s{seed}"
    with alone(out):
        found: dict[str, float] = {}
        if level.relative is not None:
            spread = logit_spread(study, source)
            found = {"logit_spread": spread, "prior_scale": level.relative * spread}
        if manifest.complete(out):
            return out, found
        scale = {"prior_scale": found["prior_scale"]} if found else {}
        config = config_of(level.label, **(level.config | scale))
        noisy = changes.get("noisy_stage1", False)
        train(
            study.model,
            study.task,
            config,
            out=out,
            preset=preset,
            layers=changes.get("layers") or preset_layers(preset, study.model)[0],
            stages=Stages(
                stage1=study.stage1,
                stage2=_plan(study, level),
                objective=changes.get("objective", "elbo"),
                noisy_stage1=noisy,
                from_map=None if noisy else source,
            ),
            data=dataclasses.replace(study.data(_stage1(study, level)[1]), half_validation=True),
            seed=seed,
            dtype=study.dtype,
            running=running(study),
        )
    return out, found


@torch.no_grad()
def logit_spread(study: Study, source: Path) -> float:
    """How far a token's logits lie apart: their standard deviation over the experts, a mean over tokens and layers."""
    opened = open_model(source / "map", device=study.device, dtype=study.dtype)
    model: Any = opened.model
    sums: list[torch.Tensor] = []
    keep_T = torch.ones(0, dtype=torch.bool)

    def look(layer: int, u_TD: torch.Tensor, logits_TN: torch.Tensor) -> None:
        sums.append(logits_TN.float().std(-1, correction=0)[keep_T])

    for batch in batches(study, opened, study.questions(study.task, "train")[:MEASURED]):
        keep_T = batch["attention_mask"].reshape(-1).bool()
        with collected(model, look):
            model(**batch, use_cache=False)
    return float(torch.cat(sums).mean())
