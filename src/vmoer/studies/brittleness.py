"""Appendix B.1: mean Jaccard against the noise level, the per-layer distribution at gamma = 0.01, and the ranking."""

from functools import partial

from vmoer.evaluation.brittleness import mean_rows, quantile_rows
from vmoer.evaluation.scores import Row
from vmoer.live.brittleness import DIAGNOSTIC, brittleness
from vmoer.studies._grid import Cell, row
from vmoer.studies._variants import Study, batches, first_stage, prepare

STUDY = "brittleness"
QUESTIONS = 200


def cells(study: Study) -> list[Cell]:
    return [
        Cell(
            STUDY,
            {"seed": seed, **study.common()},
            partial(work, study, seed),
            first_stage(study, study.label("map"), seed),
        )
        for seed in study.seeds
    ]


def work(study: Study, seed: int) -> list[Row]:
    opened = prepare(study, study.label("map"), seed)
    result = brittleness(
        opened.model, batches(study, opened, study.questions(study.task, "test")[:QUESTIONS]), seed=seed
    )
    rows = mean_rows(result, model=study.model, task=study.task, split="test", method="map")
    keys = {"model": study.model, "task": study.task, "split": "test", "method": "map", "seed": seed}
    for rank, layer in enumerate(result.ranking()):
        rows.append(row(STUDY, "rank", rank, **keys, layer=layer, gamma=DIAGNOSTIC))
    rows += quantile_rows(result, rows[0])
    return rows
