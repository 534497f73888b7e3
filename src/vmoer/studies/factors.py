"""What makes it calibrate: one factor at a time around the default preset, and the paper's protocol as a corner.

A level is one change to how vglr-fc is trained under the default preset (or another method in its place). It is compared with
the MAP model of the same seed and the same stage-1 questions, on validation, so that test plays no part in choosing defaults.
Validation is cut in two by the questions' wording (training.data.halves): stopping, Temp-Scale and output temperature see the
first half alone, and every number here is from the second. Each level is read under all three kinds of averaging, which so are
a factor themselves, crossed with all others.

    OUT/factors/<level>-s<seed>/<averaging>/predictions.parquet     and level.json, written last

`summary` makes the rows from these files alone: scores, and their paired differences to MAP, and of NLL to the default averaged
in the router, with intervals over questions and seeds. A level that is to replace the default must beat it beyond its interval.
"""

import dataclasses
import json
import re
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from vmoer import metrics, predictions, tasks
from vmoer.attach import attached, routers_of
from vmoer.files import write_json
from vmoer.metrics import batched
from vmoer.metrics.resampling import percentiles
from vmoer.models import Opened, open_model
from vmoer.predict import predict_task
from vmoer.routers import Config
from vmoer.studies._grid import Cell, Row, row
from vmoer.studies._variants import CONTROLS, Study, alone, batches, merged, moe_layers, paper_layers, parse
from vmoer.tasks._base import subsample
from vmoer.train import PRESETS, train
from vmoer.training.data import halves

STUDY = "factors"
STOP, SCORE = "validation/stop", "validation/score"
METRICS = ("nll", "brier", "debiased_ece", "accuracy", "tempered_nll")
METHOD = "vglr-fc"
MEASURED = 200  # questions that the spread of the logits is measured on
BATCH_TOKENS = 16384


@dataclass(frozen=True)
class Level:
    """`config` changes the method's settings, `train` the arguments of `vmoer.train`."""

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
        return ("router",) if parse(self.label)[0] in ("map", "mean-only") else ("router", "answer", "full")


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
    return Cell(STUDY, key, partial(work, study, level, seed))


def work(study: Study, level: Level, seed: int) -> list[Row]:
    folder = study.out / STUDY / f"{level.slug}-s{seed}"
    if not (folder / "level.json").exists():
        opened, found = prepare_level(study, level, seed)
        questions = scored(study, with_stop=level.label.startswith("map"))
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
        write_json(folder / "level.json", described | {"slug": level.slug, "reference": reference} | found)
    described = json.loads((folder / "level.json").read_text())
    keys = {"model": study.model, "task": study.task, "split": "validation", "method": level.label, "seed": seed}
    keys |= {"factor": level.factor, "level": level.name}
    measured = ("prior_scale", "logit_spread")
    return [row(STUDY, name, described[name], **keys) for name in measured if name in described]


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
        asked = half if study.limit is None else subsample(half, study.limit, 0)
        out += [dataclasses.replace(q, split=split) for q in asked if with_stop or split == SCORE]
    return out


def prepare_level(study: Study, level: Level, seed: int) -> tuple[Opened, dict[str, float]]:
    """The level's model, trained where it is not yet, opened for evaluation; and what was measured on the way."""
    source = _source(study, level, seed)
    found: dict[str, float] = {}
    if level.label.startswith("map"):
        opened = open_model(source / "map", device=study.device, dtype=study.dtype)
    else:
        run, found = _trained(study, DEFAULT if level.samples else level, seed, source)
        opened = open_model(run, device=study.device, dtype=study.dtype)
    if level.samples:
        for router in routers_of(opened.model).values():
            router.config = dataclasses.replace(router.config, samples=level.samples)
            router.add_points(next(router.parameters()).device)
    return merged(opened), found


def _source(study: Study, level: Level, seed: int) -> Path:
    """Stage 1 for this level's questions, made where it is not yet; shared with the other studies where it is the same."""
    name, data = _stage1(study, level)
    shown = {"default": "map", "paper": "map@paper"}.get(name, f"map-{data}").replace(":", "")
    out = study.out / "runs" / f"{shown}-s{seed}"
    with alone(out):
        if not (out / "run.json").exists():
            train(study.model, study.task, "map", out=out, layers="all", **_shared(study, level, seed))
    return out


def _shared(study: Study, level: Level, seed: int) -> dict[str, Any]:
    where = {"data_root": study.data_root, "limit": study.limit, "seed": seed, "dtype": study.dtype}
    preset = PRESETS[parse(level.label)[1]]
    plan = preset.stage2 if preset.name == "paper" else study.stage2 or preset.stage2
    plans = {"stage1_plan": study.stage1, "stage2_plan": plan}
    return {"preset": preset.name, "stage2_data": _stage1(study, level)[1], **plans, **where}


def _trained(study: Study, level: Level, seed: int, source: Path) -> tuple[Path, dict[str, float]]:
    """The level's run folder, and the prior scale where it was set by measurement."""
    key, preset, _ = parse(level.label)
    out = study.out / "runs" / f"{STUDY}-{level.slug}-s{seed}"
    with alone(out):
        found: dict[str, float] = {}
        if level.relative is not None:
            spread = logit_spread(study, source)
            found = {"logit_spread": spread, "prior_scale": level.relative * spread}
        if (out / "run.json").exists():
            return out, found
        scale = {"prior_scale": found["prior_scale"]} if found else {}
        changes = level.config | scale
        config: Config = (
            dataclasses.replace(CONTROLS[key], **changes) if key in CONTROLS else PRESETS[preset].config(key, **changes)
        )
        arguments = _shared(study, level, seed) | {name: v for name, v in level.train.items() if name != "lr"}
        if "lr" in level.train:
            arguments["stage2_plan"] = dataclasses.replace(arguments["stage2_plan"], lr=level.train["lr"])
        everywhere = paper_layers(study.model) if preset == "paper" else PRESETS[preset].layers
        arguments.setdefault("layers", everywhere)
        arguments["from_map"] = None if level.train.get("noisy_stage1") else source
        train(study.model, study.task, config, out=out, half_validation=True, **arguments)
    return out, found


@torch.no_grad()
def logit_spread(study: Study, source: Path) -> float:
    """How far a token's logits lie apart: their standard deviation over the experts, a mean over tokens and layers."""
    opened = open_model(source / "map", device=study.device, dtype=study.dtype)
    model: Any = opened.model
    sums: list[torch.Tensor] = []
    keep_T = torch.ones(0, dtype=torch.bool)

    def look(layer: int, u_TD: torch.Tensor, logits_TN: torch.Tensor, now: Any) -> None:
        sums.append(logits_TN.float().std(-1, correction=0)[keep_T])

    for batch in batches(study, opened, study.questions(study.task, "train")[:MEASURED]):
        keep_T = batch["attention_mask"].reshape(-1).bool()
        attached(model).collector = look
        try:
            model(**batch, use_cache=False)
        finally:
            attached(model).collector = None
    return float(torch.cat(sums).mean())


# -- from the predictions ----------------------------------------------------------------------------------------------


def summary(out: Path, draws: int = 500) -> list[Row]:
    """Every level's scores and their differences to MAP: over seeds, a pure function of the files in OUT/factors."""
    found: dict[tuple[str, str], dict[int, dict[str, batched.Estimate]]] = {}
    about: dict[str, dict[str, Any]] = {}
    common: dict[str, Any] = {}
    for path in sorted((out / STUDY).glob("*/level.json")):
        level = json.loads(path.read_text())
        for file in sorted(path.parent.glob("*/predictions.parquet")):
            (group,) = predictions.load(file.parent)
            common = {"model": group.model, "task": group.source_task, "split": "validation"}
            cells = {key.split: cell for key, cell in group.cells.items()}
            asked = {level["slug"]: cells[SCORE]}
            if STOP in cells:
                temperature = metrics.fit_temperature(cells[STOP].log_probs, cells[STOP].answers)
                scaled = metrics.apply_temperature(cells[SCORE].log_probs, temperature)
                asked[f"{level['slug']}+ts"] = cells[SCORE]._replace(log_probs=scaled)
            for slug, cell in asked.items():
                known = batched.calibration(cell.log_probs, cell.answers, draws, 0)
                tempered = metrics.cross_tempered(cell.log_probs, cell.answers)
                known["tempered_nll"] = batched.calibration(tempered, cell.answers, draws, 0)["nll"]
                found.setdefault((slug, file.parent.name), {})[level["seed"]] = {m: known[m] for m in METRICS}
                tuned = {"level": f"{level['level']} + output temperature", "label": f"{level['label']}+ts"}
                about[slug] = level | (tuned if slug.endswith("+ts") else {})
    rows = []
    for slug, averaging in sorted(found, key=lambda key: _order(about[key[0]], key[1])):
        level, by_seed = about[slug], found[slug, averaging]
        reference = found.get((level["reference"], "router"), {})
        keys = common | {"method": level["label"], "seed": next(iter(by_seed)) if len(by_seed) == 1 else None}
        keys |= {"factor": level["factor"], "level": level["level"], "averaging": averaging, "seeds": len(by_seed)}
        for metric in METRICS:
            own = {seed: known[metric] for seed, known in by_seed.items()}
            rows.append(_row(metric, metric, own, keys))
            theirs = {seed: known[metric] for seed, known in reference.items()}
            paired = {seed: own[seed] - theirs[seed] for seed in own if seed in theirs}
            if paired and slug != level["reference"]:
                rows.append(_row(metric, f"{metric}_minus_map", paired, keys | {"seeds": len(paired)}))
        ours = found.get((DEFAULT.slug, "router"), {})
        paired = {seed: known["nll"] - ours[seed]["nll"] for seed, known in by_seed.items() if seed in ours}
        if paired and (slug, averaging) != (DEFAULT.slug, "router"):
            rows.append(_row("nll", "nll_minus_default", paired, keys | {"seeds": len(paired)}))
    return rows


def _row(metric: str, name: str, by_seed: dict[int, batched.Estimate], keys: dict[str, Any]) -> Row:
    value, drawn = batched.over_seeds(list(by_seed.values()), 0)
    # resampling repeats questions, which biases all but means upwards
    shift = float(drawn.mean()) - value if metric == "debiased_ece" else 0.0
    low, high = percentiles(value, drawn - shift, 0.95)[1:]
    return row(STUDY, name, value, **keys) | {"low": low, "high": high}


def _order(level: dict[str, Any], averaging: str) -> tuple[Any, ...]:
    numbers = [float(x) for x in re.findall(r"\d+(?:\.\d+)?(?:e-?\d+)?", level["level"])]
    kind = re.sub(r"[\d.e-]+", "", level["level"])
    return FACTORS.index(level["factor"]), kind, numbers, level["level"], ("router", "answer", "full").index(averaging)
