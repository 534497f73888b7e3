"""The paper's experiments, one file each. `run_study(name, study)` computes a grid's missing cells and writes its rows."""

import difflib
import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from vmoer import scores
from vmoer.errors import InputError
from vmoer.files import write_rows
from vmoer.studies import (
    _ray,
    brittleness,
    calibration,
    efficiency,
    factors,
    layer_count,
    layer_placement,
    stability,
    temperature_sweep,
    topk_bias,
)
from vmoer.studies._grid import Cell, Outcome, run
from vmoer.studies._variants import Study, share_stage1

STUDIES: dict[str, Callable[[Study], list[Cell]]] = {
    "brittleness": brittleness.cells,
    "temperature-sweep": temperature_sweep.cells,
    "calibration": calibration.cells,
    "ood": calibration.cells,
    "stability": stability.cells,
    "efficiency": efficiency.cells,
    "layer-count": layer_count.cells,
    "layer-placement": layer_placement.cells,
    "topk-bias": topk_bias.cells,
    "factors": factors.cells,
}


def grid(name: str, study: Study) -> list[Cell]:
    if name == "all":
        return [cell for one in STUDIES if one not in ("ood", "factors") for cell in STUDIES[one](study)]
    if name not in STUDIES:
        near = difflib.get_close_matches(name, STUDIES, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise InputError(f"unknown study {name!r}{hint} (known: {', '.join(STUDIES)}, all)")
    return STUDIES[name](study)


def run_study(
    name: str,
    study: Study,
    *,
    workers: int = 1,
    backend: str = "processes",
    ray_address: str | None = None,
    say: Callable[[str], object] = print,
) -> Outcome:
    """Compute what is missing; then metrics from the predictions, and the studies' own rows beside them in `metrics.json`.

    `backend` is `processes`, of which `workers` on this machine, or `ray`: a cluster, which must see the study's folder.
    """
    if backend not in ("processes", "ray"):
        raise InputError(f"backend={backend!r}: choose processes or ray")
    if backend != "ray" and ray_address is not None:
        raise InputError("a Ray address is given, but not backend ray")
    if backend == "ray" and workers > 1:
        raise InputError("workers are processes of this machine; a Ray cluster has as many as it has")
    cells = grid(name, study)
    # what several cells train on is made before they start side by side
    if backend == "ray":
        stage1 = [partial(share_stage1, replace(study, seeds=(seed,))) for seed in study.seeds]
        on_ray = _ray.cluster(ray_address, gpu=study.device != "cpu", first=stage1)
        outcome = run(cells, study.out, backend=on_ray, say=say)
    else:
        if workers > 1:
            share_stage1(study, workers)
        outcome = run(cells, study.out, workers=workers, say=say)
    predicted = any((study.out / child.name / "predictions.parquet").exists() for child in study.out.iterdir())
    rows = scores.score(study.out) if predicted else []
    for other in sorted(study.out.glob("*.json")):
        if other.stem in STUDIES:
            rows += json.loads(other.read_text())
    rows = [*stability.over_seeds(rows), *factors.summary(study.out)]
    write_rows(study.out / "metrics.json", rows)
    return outcome


__all__ = ["STUDIES", "Cell", "Outcome", "Study", "grid", "run_study"]
