"""Ablation B: which layers, the most susceptible against the first, the middle and the last, ten of each (or a third)."""

from functools import partial

from vmoer.studies._ablation import measure
from vmoer.studies._grid import Cell
from vmoer.studies._variants import Study, moe_layers

STUDY = "layer-placement"
STRATEGIES = ("first", "middle", "last", "susceptible")
METHODS = ("mcdr", "vglr-fc", "vtsr")


def cells(study: Study) -> list[Cell]:
    available = moe_layers(study.model)
    n = 10 if available >= 30 else max(1, available // 3)
    return [
        Cell(
            STUDY,
            {"method": method, "layers": f"{strategy}:{n}", "seed": seed, "ood": study.ood[-1:], **study.common()},
            partial(measure, STUDY, study, method, f"{strategy}:{n}", seed),
        )
        for method in METHODS
        for strategy in STRATEGIES
        for seed in study.seeds
    ]
