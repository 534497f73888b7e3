"""Tables 1 and 2 and their full versions: every method, baseline and control, the three kinds of averaging, every shift.

A cell is one label and seed: trained where it is not yet, then predicted on test and the shifted sets. Metrics come from the
predictions alone (`vmoer.scores`): calibration, out-of-distribution detection and selective prediction at once.
"""

from functools import partial

from vmoer.studies._grid import Cell, Row
from vmoer.studies._variants import Study, parse, predict_label

STUDY = "calibration"


def labels(study: Study) -> list[str]:
    """The methods asked for and, for those that draw, each kind of averaging asked for."""
    out = []
    for label in study.methods:
        key, _, averaging = parse(label)
        out.append(label)
        if averaging == "router" and key not in ("map", "map-early", "mean-only"):
            out += [f"{label}+{kind}" for kind in study.averaging if kind != "router"]
    return list(dict.fromkeys(out))


def cells(study: Study) -> list[Cell]:
    common = study.common() | {"ood": ",".join(study.ood), "passes": study.passes}
    # those that train before those that average the answers of a run: side by side, nobody waits for a run in the making
    return [
        Cell(STUDY, {"method": label, "seed": seed, **common}, partial(work, study, label, seed))
        for averaged in (False, True)
        for seed in study.seeds
        for label in labels(study)
        if ("+" in label) == averaged
    ]


def work(study: Study, label: str, seed: int) -> list[Row]:
    predict_label(study, label, seed, study.out / f"{label}-s{seed}")
    return []
