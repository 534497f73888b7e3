"""Appendix B.1: mean Jaccard against the noise level, the per-layer distribution at gamma = 0.01, and the ranking."""

from functools import partial

from vmoer.layers import DIAGNOSTIC, brittleness
from vmoer.studies._grid import Cell, Row, row
from vmoer.studies._variants import Study, batches, prepare

STUDY = "brittleness"
QUESTIONS = 200


def cells(study: Study) -> list[Cell]:
    return [Cell(STUDY, {"seed": seed, **study.common()}, partial(work, study, seed)) for seed in study.seeds]


def work(study: Study, seed: int) -> list[Row]:
    opened = prepare(study, "map", seed)
    result = brittleness(
        opened.model, batches(study, opened, study.questions(study.task, "test")[:QUESTIONS]), seed=seed
    )
    rows = result.to_rows(model=study.model, task=study.task, split="test", method="map")
    keys = {"model": study.model, "task": study.task, "split": "test", "method": "map", "seed": seed}
    for rank, layer in enumerate(result.ranking()):
        rows.append(row(STUDY, "rank", rank, **keys, layer=layer, gamma=DIAGNOSTIC))
    rows += result.quantile_rows(rows[0])
    return rows
