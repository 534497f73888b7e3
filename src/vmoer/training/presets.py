"""Settings that go together: the paper's protocol (docs/paper.md says where it deviates), and our own defaults."""

import dataclasses
from dataclasses import dataclass
from typing import Any

from vmoer.errors import InputError, unknown
from vmoer.routers import Config, method
from vmoer.training.plan import Plan

STAGE1 = Plan(epochs=3)
STAGE2 = Plan(epochs=10, patience=3)


@dataclass(frozen=True, kw_only=True)
class Preset:
    """`layers` as the command line writes them. What the preset changes in a method stands in the method (`Config.presets`),
    under the first of the names `method` that it knows, or else the preset's own."""

    name: str
    layers: str
    stage2_data: str
    stage1: Plan = STAGE1
    stage2: Plan = STAGE2
    stage1_orders: bool = False
    paper_splits: bool = False
    method: tuple[str, ...] = ()

    def config(self, key: str, **changes: Any) -> Config:
        """The method's configuration under this preset; `changes` win."""
        kind = method(key)
        known = {f.name for f in dataclasses.fields(kind)}
        unknown = sorted(set(changes) - known)
        if unknown:
            raise InputError(f"{key} has no setting {unknown[0]!r}; it has {', '.join(sorted(known))}")
        known_as = next((name for name in self.method or (self.name,) if name in kind.presets), "")
        return kind(**{**kind.presets.get(known_as, {}), **changes})


PAPER = Preset(name="paper", layers="susceptible:10", stage2_data="train", paper_splits=True)
# Stage 2 learns from questions that the MAP model has not memorised. Heads that start at zero have a few hundred steps on a
# fifth of the data, in which a learning rate of 1e-4 moves them too little.
DEFAULT = Preset(name="default", layers="all", stage2_data="held-out:0.2", stage2=dataclasses.replace(STAGE2, lr=1e-3))
# Both stages learn from all questions. In stage 2 their options stand in new orders every epoch, so that what the MAP model knows
# by heart, the letter, does not answer them.
PERMUTED = dataclasses.replace(DEFAULT, name="permuted", stage2_data="permuted", method=("default",))
BOTH = dataclasses.replace(PERMUTED, name="permuted-both", stage1_orders=True)


def _printed(name: str, **changes: Any) -> Preset:
    """The printed protocol without what we add to it: no epoch 0 among the candidates, and no patience."""
    return dataclasses.replace(PAPER, name=name, stage2=Plan(epochs=10, **changes), method=("paper",))


PRINTED = (
    _printed("printed", keep="last"),
    _printed("printed-best", keep="trained"),
    _printed("printed-fast", keep="last", lr=1e-3),
    _printed("printed-fast-best", keep="trained", lr=1e-3),
    # the mean head as the printed listing leaves it
    dataclasses.replace(_printed("printed-listing", keep="last"), method=("listing", "paper")),
)
PRESETS = {preset.name: preset for preset in (PAPER, DEFAULT, PERMUTED, BOTH, *PRINTED)}


def preset_named(preset: Preset | str) -> Preset:
    if isinstance(preset, Preset):
        return preset
    if preset not in PRESETS:
        raise unknown("preset", preset, PRESETS)
    return PRESETS[preset]
