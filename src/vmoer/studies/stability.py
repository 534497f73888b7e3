"""Table 3: how much of a router's choice survives noise on the layer's input, averaged over the attached layers.

Beside each value stands the floor: the agreement of two identical passes, 1 for fixed points and less for fresh noise.
`map` is measured at the layers the method is attached to, so that both are asked the same question. Differences to it come
for each seed, with intervals over prompts, and over seeds: seeds are resampled first, then prompts, the same for all seeds.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from vmoer.evaluation.scores import Row
from vmoer.live.attach import attach, attached, detach, reconfigured
from vmoer.live.brittleness import brittleness
from vmoer.metrics import bootstrap, estimates, paired_bootstrap
from vmoer.metrics.resampling import percentiles
from vmoer.routers import Deterministic
from vmoer.studies._grid import Cell, row
from vmoer.studies._labels import STATES, parse
from vmoer.studies._variants import Study, batches, first_stage, prepare

STUDY = "stability"
GAMMAS = (0.001, 0.002, 0.005, 0.01)
QUESTIONS = 200
BY_PROMPT = "by_prompt"


def cells(study: Study) -> list[Cell]:
    chosen = [label for label in study.methods if parse(label)[0] not in STATES]
    return [
        Cell(
            STUDY,
            {"method": label, "seed": seed, "prompts": QUESTIONS, **study.common()},
            partial(work, study, label, seed),
            first_stage(study, label, seed),
        )
        for seed in study.seeds
        for label in dict.fromkeys(label.partition("+")[0] for label in chosen)
    ]


def work(study: Study, label: str, seed: int) -> list[Row]:
    opened = prepare(study, label, seed)
    model: Any = opened.model
    inputs = batches(study, opened, study.questions(study.task, "test")[:QUESTIONS])
    layers = attached(model).layers
    rows = []
    both: list[dict[str, Any]] = [{"sampling": "fixed"}, {"sampling": "mc"}]  # on the same trained routers
    for changes in both if hasattr(attached(model).config, "sampling") else [{}]:
        with reconfigured(model, **changes), torch.random.fork_rng([]):
            torch.manual_seed(seed)  # fresh noise, but the same in every run of this cell
            result = brittleness(model, inputs, gammas=(0.0, *GAMMAS), layers=layers, seed=seed)
        values_GT = result.jaccard_LGT.mean(0)
        fresh = changes.get("sampling") == "mc"
        if not fresh:
            method_GT, tokens = values_GT, result.rows_T
        rows += _rows(study, f"{label} (fresh noise)" if fresh else label, seed, values_GT, result.rows_T)
    detach(model)
    attach(model, Deterministic(layers=layers))
    own = brittleness(model, inputs, gammas=(0.0, *GAMMAS), layers=layers, seed=seed)
    own_GT = own.jaccard_LGT.mean(0)
    rows += _rows(study, f"map at the layers of {label}", seed, own_GT, own.rows_T)
    for g, gamma in enumerate((0.0, *GAMMAS)):
        ours, theirs = _by_row(method_GT[g], tokens), _by_row(own_GT[g], own.rows_T)
        pair = paired_bootstrap(ours, theirs, seed=seed)
        keys = {"model": study.model, "task": study.task, "method": label, "seed": seed, "gamma": gamma}
        more = {"low": pair.low, "high": pair.high, BY_PROMPT: [round(float(x), 7) for x in ours - theirs]}
        rows.append(row(STUDY, "jaccard_minus_map", pair.value, **keys) | more)
    return rows


def over_seeds(rows: Sequence[Row], draws: int = 2000) -> list[Row]:
    """The rows without each prompt's difference, and what follows from these: the differences over seeds."""
    found: dict[tuple[Any, ...], list[Row]] = {}
    for one in rows:
        if BY_PROMPT in one:
            found.setdefault(tuple(one[name] for name in ("model", "task", "method", "gamma")), []).append(one)
    out = [{name: value for name, value in one.items() if name != BY_PROMPT} for one in rows]
    for same in found.values():
        if len(same) > 1:
            count = estimates.multiplicities((len(same[0][BY_PROMPT]),), draws, 0) / len(same[0][BY_PROMPT])
            drawn = [estimates.Estimate(one["value"], count @ np.asarray(one[BY_PROMPT])) for one in same]
            overall = estimates.over_seeds(drawn, 0)
            value, low, high = percentiles(overall.value, overall.draws, 0.95)
            kept = {name: item for name, item in same[0].items() if name != BY_PROMPT}
            out.append(kept | {"seed": None, "value": value, "low": low, "high": high})
    return out


def _by_row(values_T: Any, rows_T: Any) -> Any:
    """Means over each prompt's tokens: tokens of one prompt share their noise through attention."""
    values, rows = np.asarray(values_T, dtype=float), np.asarray(rows_T)
    return np.bincount(rows, weights=values) / np.bincount(rows)


def _rows(study: Study, name: str, seed: int, values_GT: Any, rows_T: Any) -> list[Row]:
    out = []
    for g, gamma in enumerate((0.0, *GAMMAS)):
        interval = bootstrap(_by_row(values_GT[g], rows_T), seed=seed)
        keys = {"model": study.model, "task": study.task, "method": name, "seed": seed, "gamma": gamma}
        out.append(row(STUDY, "jaccard", interval.value, **keys) | {"low": interval.low, "high": interval.high})
    return out
