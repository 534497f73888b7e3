"""What the registered comparisons run, a table each: homes, shifts, seeds, labels, and what their cells take of a GPU.

`smolmoe` is the study of REGISTERED.md, on SmolLM2 with experts; `larger` that of LARGER.md, on a base ten times as large.
equal.py makes cells of a table. Predictions carry its name, so that what reads them knows which one they are of.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from vmoer.files import read_json
from vmoer.training.run import Plan

PARTS = ("equal", "ensembles", "printed", "adapters")
BASE = "map-all"
LAPLACE = "last-laplace"
"""MAP's own run, its last layer by Laplace's method."""
_ROUTERS = ("", "+full", "+orders", "+orders+routing")


@dataclass(frozen=True)
class Comparison:
    """Labels that have all seen the same questions, on some homes."""

    name: str
    """What predictions call the model, whatever base a seed has."""
    document: str
    homes: tuple[str, ...]
    homes_needed: int
    """On so many the goal's mean difference has to be below zero."""
    seeds: tuple[int, ...]
    """Those that the tests are over."""
    own_seeds: Mapping[str, tuple[int, ...]] = field(hash=False)
    """By part, where it has others."""
    shifted: Mapping[str, int] = field(hash=False)
    """Questions of each set that a model is shifted to."""
    graded: str | None
    """The set of these that is asked by subject: so many questions of each."""
    most: int
    """Questions of a home's own test, at most."""
    stage1: Plan
    stage2: Plan
    batch: Mapping[str, int] = field(hash=False)
    asked: Mapping[str, tuple[str, ...]] = field(hash=False)
    """By what is trained: how it is asked."""
    ensembles: Mapping[str, tuple[str, ...]] = field(hash=False)
    printed_on: tuple[str, ...]
    printed: Mapping[str, tuple[str, ...]] = field(hash=False)
    adapters: tuple[str, ...]
    """What people use in place of routers; each averages over as many samples of its adapter as others take passes."""
    batch_tokens: int
    gb: float
    """GPU memory that a cell takes which answers alone, and that others take at least."""
    gb_fixed: float
    gb_each: tuple[float, float]
    """Of training in stage 1 and in stage 2: so much besides, and so much for each question of a batch."""
    keep_models: int
    """How many opened models a process keeps."""
    seconds: Mapping[str, float] = field(hash=False)
    """A guess at stage 1 of a home, beside as many others as share the GPU."""
    pass_seconds: float
    """Likewise at a pass over all that a label is asked."""
    printed_seconds: float

    @property
    def parts(self) -> tuple[str, ...]:
        return tuple(part for part in PARTS if self.adapters or part != "adapters")

    @property
    def all_seeds(self) -> tuple[int, ...]:
        return tuple(sorted({*self.seeds, *(seed for own in self.own_seeds.values() for seed in own)}))

    def seeds_of(self, part: str) -> tuple[int, ...]:
        return self.own_seeds.get(part, self.seeds)

    @property
    def further(self) -> tuple[str, ...]:
        """Members of the larger ensemble that nothing else asks for."""
        return tuple(head for head in self.ensembles["map-ens5"] if head not in self.asked)

    def labels(self) -> list[str]:
        """Every label of the comparison at equal data, the baseline first."""
        asked = [f"{head}{how}" for head, ways in self.asked.items() if "." not in head for how in ways]
        return [*asked, LAPLACE, *self.ensembles]

    def sets(self, home: str) -> tuple[str, ...]:
        """What models of a home are asked: its own test, and its shifts."""
        return (home, *(name for name in self.shifted if name != home))


_SMOLMOE_HOMES = ("openbookqa", "arc_easy", "arc_challenge", "sciq")
SMOLMOE = Comparison(
    name="smolmoe",
    document="REGISTERED.md",
    homes=_SMOLMOE_HOMES,
    homes_needed=3,
    seeds=(0, 1, 2, 3, 4),
    own_seeds={"printed": (0, 1), "adapters": (2, 3)},
    shifted={**dict.fromkeys((*_SMOLMOE_HOMES, "medmcqa"), 300), "mmlu_law": 150},  # its prompts are four times as long
    graded=None,
    most=1000,
    stage1=Plan(epochs=3, lr=7e-4, batch_size=64),
    stage2=Plan(epochs=3, lr=2e-3, batch_size=64),
    batch={"openbookqa": 64, "arc_easy": 32, "arc_challenge": 16, "sciq": 16},
    asked={
        BASE: ("", "+orders4", "+orders"),
        "map@permuted-both": ("", "+orders"),
        "vglr-mf@permuted": _ROUTERS,
        "vglr-fc@permuted": _ROUTERS,
        "mean-only@permuted": ("", "+orders"),
        "mcdr@permuted": ("", "+full", "+orders+routing"),
        "map-all.1": ("",),
        "map-all.2": ("",),
    },
    ensembles={
        "map-ens3": (BASE, "map-all.1", "map-all.2"),
        "map-ens5": (BASE, "map-all.1", "map-all.2", "map-all.3", "map-all.4"),
    },
    printed_on=("arc_challenge",),
    printed={
        "map@printed": ("",),
        **{
            f"{key}@printed{how}": ("", "+full35")
            for key in ("vglr-mf", "vglr-fc")
            for how in ("", "-best", "-fast", "-fast-best", "-listing")
        },
    },
    adapters=("lora-dropout", "blob", "laplace-lora"),
    batch_tokens=32768,
    # a little more than training with such batches took, by question (peak_gb in results/smolmoe/timing.jsonl)
    gb=12.0,
    gb_fixed=8.0,
    gb_each=(0.35, 0.28),
    keep_models=3,
    # the steps and questions of the first study, on an H200 (results/smolmoe/timing.jsonl)
    seconds={"openbookqa": 110.0, "arc_easy": 100.0, "arc_challenge": 90.0, "sciq": 65.0},
    pass_seconds=8.0,
    printed_seconds=420.0,
)

LARGER = replace(
    SMOLMOE,
    name="larger",
    document="LARGER.md",
    homes=("arc_challenge",),
    homes_needed=1,
    seeds=(0, 1, 2),
    own_seeds={"printed": (3,)},
    shifted={"openbookqa": 300, "mmlu": 16},
    graded="mmlu",
    most=500,
    stage1=Plan(epochs=3, lr=2e-4, batch_size=16),
    stage2=Plan(epochs=3, lr=2e-3, batch_size=16),
    batch={"arc_challenge": 16},
    printed={
        "map@printed": ("",),
        **{f"{key}@printed{how}": ("", "+full35") for key in ("vglr-mf", "vglr-fc") for how in ("", "-best")},
    },
    adapters=(),
    batch_tokens=16384,
    # by the arithmetic of LARGER.md, measured nowhere
    gb=24.0,
    gb_fixed=22.0,
    gb_each=(1.5, 1.0),
    keep_models=0,  # a second copy would not fit beside the other processes
    seconds={"arc_challenge": 90.0},
    pass_seconds=20.0,
    printed_seconds=450.0,
)

COMPARISONS = {one.name: one for one in (SMOLMOE, LARGER)}


def of_results(results: Path) -> Comparison | None:
    """The comparison that a folder of results is of; None of other results."""
    if not any(BASE in path.read_text() for path in results.glob("*/files.json")):
        return None
    names = {read_json(path).get("model") for path in results.glob("*/meta.json")}
    return next((one for name, one in COMPARISONS.items() if name in names), None)
