"""The paper's experiments, one file each. `run_study(name, study)` computes a grid's missing cells and writes its rows."""

import sys
from collections.abc import Callable, Sequence

from vmoer.errors import InputError, unknown
from vmoer.evaluation import scores
from vmoer.files import read_json, write_rows
from vmoer.studies import (
    brittleness,
    calibration,
    efficiency,
    factor_rows,
    factors,
    layer_count,
    layer_placement,
    paper,
    stability,
    temperature_sweep,
    topk_bias,
)
from vmoer.studies._grid import Backend, Cell, Outcome, run
from vmoer.studies._made_with import keep_to_one
from vmoer.studies._processes import processes
from vmoer.studies._ray import cluster
from vmoer.studies._variants import Study

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
    "paper": paper.cells,
}


def summary(name: str) -> str:
    """The first line of the module that holds a study."""
    doc = sys.modules[STUDIES[name].__module__].__doc__ or ""
    return doc.strip().splitlines()[0]


def grid(name: str, study: Study) -> list[Cell]:
    if name == "all":
        return [cell for one in STUDIES if one not in ("ood", "factors", "paper") for cell in STUDIES[one](study)]
    if name not in STUDIES:
        raise unknown("study", name, [*STUDIES, "all"])
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
    where = backend_named(backend, workers, ray_address, gpu=study.device != "cpu")
    cells = grid(name, study)
    _keep_to_one(name, study, cells)
    outcome = run(cells, study.out, backend=where, say=say)
    folders = paper.folders(study) if name == paper.STUDY else [study.out]
    rows = [row for one in folders if any(one.glob("*/predictions.parquet")) for row in scores.score(one)]
    for other in sorted(study.out.glob("*.json")):
        if other.stem in STUDIES:
            rows += read_json(other)
    rows = [*stability.over_seeds(rows), *factor_rows.summary(study.out)]
    rows += paper.compare(rows, study.model) if name == paper.STUDY else []
    write_rows(study.out / "metrics.json", rows)
    return outcome


def _keep_to_one(name: str, study: Study, cells: Sequence[Cell]) -> None:
    """Refuse a folder that was made with other settings; the study of the paper has one for each task besides its own."""
    if name != paper.STUDY:
        return keep_to_one(study)
    asked = list(dict.fromkeys(cell.key["task"] for cell in cells if "task" in cell.key))
    keep_to_one(study, asked)
    for task in asked:
        keep_to_one(paper.on(study, task))


def backend_named(name: str, workers: int = 1, ray_address: str | None = None, *, gpu: bool = True) -> Backend:
    """What computes cells: `processes`, so many of this machine, or `ray`, a cluster."""
    check_backend(name, workers, ray_address)
    return cluster(ray_address, gpu=gpu) if name == "ray" else processes(workers)


def check_backend(name: str, workers: int, ray_address: str | None) -> None:
    """Refuse what does not go together."""
    if name not in ("processes", "ray"):
        raise InputError(f"backend={name!r}: choose processes or ray")
    if name == "processes" and ray_address is not None:
        raise InputError("a Ray address is given, but not backend ray")
    if name == "ray" and workers > 1:
        raise InputError("workers are processes of this machine; a Ray cluster has as many as it has")


__all__ = ["STUDIES", "Cell", "Outcome", "Study", "backend_named", "check_backend", "grid", "run_study"]
