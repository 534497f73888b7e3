"""Rows of the study `factors`, from the predictions of its levels: scores, and their differences to MAP and to the default."""

import re
from pathlib import Path
from typing import Any

from vmoer import metrics
from vmoer.evaluation import predictions
from vmoer.evaluation.scores import Row
from vmoer.files import read_json, unsealed
from vmoer.metrics import estimates
from vmoer.metrics.resampling import percentiles
from vmoer.studies._grid import row
from vmoer.studies.factors import DEFAULT, FACTORS, METRICS, SCORE, STOP, STUDY


def summary(out: Path, draws: int = 500) -> list[Row]:
    """Every level's scores and their differences to MAP: over seeds, a pure function of the files in OUT/factors."""
    found: dict[tuple[str, str], dict[int, dict[str, estimates.Estimate]]] = {}
    about: dict[str, dict[str, Any]] = {}
    common: dict[str, Any] = {}
    for path in sorted((out / STUDY).glob("*/level.json")):
        level = unsealed(read_json(path), path)
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
                known = estimates.calibration(cell.log_probs, cell.answers, draws, 0)
                tempered = metrics.cross_tempered(cell.log_probs, cell.answers)
                known["tempered_nll"] = estimates.calibration(tempered, cell.answers, draws, 0)["nll"]
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


def _row(metric: str, name: str, by_seed: dict[int, estimates.Estimate], keys: dict[str, Any]) -> Row:
    value, drawn = estimates.over_seeds(list(by_seed.values()), 0)
    # resampling repeats questions, which biases all but means upwards
    shift = float(drawn.mean()) - value if metric == "debiased_ece" else 0.0
    low, high = percentiles(value, drawn - shift, 0.95)[1:]
    return row(STUDY, name, value, **keys) | {"low": low, "high": high}


def _order(level: dict[str, Any], averaging: str) -> tuple[Any, ...]:
    numbers = [float(x) for x in re.findall(r"\d+(?:\.\d+)?(?:e-?\d+)?", level["level"])]
    kind = re.sub(r"[\d.e-]+", "", level["level"])
    return FACTORS.index(level["factor"]), kind, numbers, level["level"], ("router", "answer", "full").index(averaging)
