"""Ablation A: how many layers, L in {1, 2, 4, 8, 10, 12, 15} of the most susceptible, with its spread over seeds."""

from collections.abc import Sequence
from functools import partial

from vmoer.studies._ablation import METHODS, measure
from vmoer.studies._grid import Cell
from vmoer.studies._variants import Study, first_stage, moe_layers

STUDY = "layer-count"
COUNTS = (1, 2, 4, 8, 10, 12, 15)


def cells(study: Study, methods: Sequence[str] = METHODS) -> list[Cell]:
    available = moe_layers(study.model)
    counts = [n for n in COUNTS if n <= available]
    return [
        Cell(
            STUDY,
            {"method": method, "layers": n, "seed": seed, "ood": study.ood[-1:], **study.common()},
            partial(measure, STUDY, study, method, f"susceptible:{n}", seed, everywhere=n == available),
            first_stage(study, method, seed),
        )
        for method in map(study.label, methods)
        for n in counts
        for seed in study.seeds
    ]
