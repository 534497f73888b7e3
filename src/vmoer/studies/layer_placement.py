"""Ablation B: which layers, the most susceptible against the first, the middle and the last, ten of each (or a third)."""

from functools import partial

from vmoer.live.brittleness import parse_layers
from vmoer.studies._ablation import METHODS, measure
from vmoer.studies._grid import Cell
from vmoer.studies._variants import Study, first_stage, moe_layers
from vmoer.training.layers import preset_layers
from vmoer.training.presets import PAPER

STUDY = "layer-placement"
STRATEGIES = ("first", "middle", "last", "susceptible")


def cells(study: Study) -> list[Cell]:
    n = _number(study)
    return [
        Cell(
            STUDY,
            {"method": method, "layers": f"{strategy}:{n}", "seed": seed, "ood": study.ood[-1:], **study.common()},
            partial(measure, STUDY, study, method, f"{strategy}:{n}", seed),
            first_stage(study, method, seed),
        )
        for method in map(study.label, METHODS)
        for strategy in STRATEGIES
        for seed in study.seeds
    ]


def _number(study: Study) -> int:
    if study.preset == PAPER.name:
        return parse_layers(preset_layers(PAPER, study.model)[0])[1]
    available = moe_layers(study.model)
    return 10 if available >= 30 else max(1, available // 3)
