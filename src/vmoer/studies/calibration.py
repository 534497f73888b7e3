"""Tables 1 and 2 and their full versions: every method, baseline and control, the three kinds of averaging, every shift.

A cell is one label and seed: trained where it is not yet, then predicted on test and the shifted sets. Metrics come from the
predictions alone (`vmoer.evaluation.scores`): calibration, out-of-distribution detection and selective prediction at once.
"""

from functools import partial
from pathlib import Path

from vmoer.evaluation.scores import Row
from vmoer.studies._grid import Cell
from vmoer.studies._labels import config_of, parse
from vmoer.studies._made_with import check_shifts
from vmoer.studies._variants import Study, first_stage, predict_label

STUDY = "calibration"


def labels(study: Study) -> list[str]:
    """The methods asked for and each kind of averaging asked for; those over routing alone for methods that draw."""
    out = []
    for label in study.methods:
        out.append(label)
        if parse(label)[2] == "router":
            kinds = [kind for kind in study.averaging if kind == "orders" or config_of(label).draws]
            out += [f"{label}+{kind}" for kind in kinds if kind != "router"]
    return list(dict.fromkeys(out))


def cells(study: Study) -> list[Cell]:
    for seed in study.seeds:
        for label in labels(study):
            check_shifts(study, folder_of(study, label, seed))
    common = study.common() | {"ood": ",".join(study.ood), "passes": study.passes}
    # those that train before those that average the answers of a run: side by side, nobody waits for a run in the making
    return [
        Cell(
            STUDY,
            {"method": label, "seed": seed, **common},
            partial(work, study, label, seed),
            first_stage(study, label, seed),
            answers=(folder_of(study, label, seed),),
        )
        for averaged in (False, True)
        for seed in study.seeds
        for label in labels(study)
        if ("+" in label) == averaged
    ]


def folder_of(study: Study, label: str, seed: int) -> Path:
    return study.out / f"{label}-s{seed}"


def work(study: Study, label: str, seed: int) -> list[Row]:
    predict_label(study, label, seed, folder_of(study, label, seed))
    return []
