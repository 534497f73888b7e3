"""The tests of REGISTERED.md from OUT/results alone; verdicts.py prints them.

Every answer goes through the calibrator that cross-validation chooses on the validation answers of its own label, seed and task.
A difference is paired by question and by seed. Its draws take questions anew on every set by itself, and seeds for all sets
alike, since a seed is one base model and one cut of the data on all tasks.
"""

import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from audit import adjusted
from equal import HOMES, labels

from vmoer import metrics
from vmoer.errors import InputError
from vmoer.evaluation import predictions
from vmoer.evaluation.predictions import Answered, Key
from vmoer.files import read_json
from vmoer.metrics import estimates
from vmoer.metrics.calibrators import choose
from vmoer.metrics.estimates import Estimate
from vmoer.metrics.resampling import percentiles

DRAWS = 2000
LEVEL = 0.05
SLACK = 0.005
"""Of accuracy, below which a label counts as less accurate."""
BASE = "map-all"
ROUTED = ("vglr-mf@permuted", "vglr-fc@permuted")
CONTRASTS = [
    *((f"{key}+orders+routing", f"{BASE}+orders") for key in (*ROUTED, "mcdr@permuted")),
    *((f"{key}+orders", f"{BASE}+orders") for key in (*ROUTED, "mean-only@permuted")),
    *((f"{key}+orders+routing", f"{key}+orders") for key in ROUTED),
    *((f"{key}+full", key) for key in (*ROUTED, "mcdr@permuted")),
]
"""What routing adds: to orders at equal passes, by a stage 2, by samples."""
Floats = npt.NDArray[np.float64]


class Scored(NamedTuple):
    """The calibrated answers of one label and seed to one set."""

    ids: tuple[str, ...]
    nll: Floats
    correct: Floats


class Home(NamedTuple):
    """A task that models were trained on: by set, label and seed."""

    sets: dict[str, dict[str, dict[int, Scored]]]
    chosen: dict[str, dict[int, float]]
    """Cross-validated NLL of the calibrated validation answers."""
    constant: float
    """NLL on the home's test of the letters' shares on validation, a mean over seeds."""


class Line(NamedTuple):
    """A registered test: whether it holds (None: not run, or no test), what it says, and what was found."""

    holds: bool | None
    claim: str
    found: str


def present(results: Path) -> bool:
    """Whether these are results of the registered study."""
    return (results / HOMES[0]).is_dir() and any(BASE in p.read_text() for p in results.glob("*/files.json"))


# -- reading -----------------------------------------------------------------------------------------------------------


Metas = Mapping[tuple[str, str, int], Mapping[str, Any]]
"""What each label's predictions say of themselves, by home, label and seed."""


def metas(results: Path) -> Metas:
    found = {}
    for path in sorted(results.glob("*/files.json")):
        for name, meta in read_json(path).items():
            if re.fullmatch(r"[^/]+/meta\.json", name):
                found[path.parent.name, meta["method"], meta["seed"]] = meta
    return found


def bases(said: Metas) -> dict[int, int]:
    """Seeds that were run on several base models, and on how many: their labels are not paired with each other."""
    found: dict[tuple[int, str], set[str]] = {}
    for (_, _, seed), meta in said.items():
        layers = str(meta["config"]["layers"])  # the fingerprint is that of these
        found.setdefault((seed, layers), set()).add(meta["fingerprint"]["base"])
    return {seed: len(own) for (seed, _), own in found.items() if len(own) > 1}


def read(results: Path, wanted: Sequence[str]) -> dict[str, Home]:
    """By home, in their order; labels that are not wanted are left out."""
    found = {group.source_task: group for group in predictions.load(results)}
    return {home: home_of(found[home], wanted) for home in HOMES if home in found}


def home_of(group: predictions.Predictions, wanted: Sequence[str], *, calibrate: bool = True) -> Home:
    sets: dict[str, dict[str, dict[int, Scored]]] = {}
    chosen: dict[str, dict[int, float]] = {}
    constants = []
    home = group.source_task
    for key, valid in sorted(group.cells.items()):
        if key[:2] != (home, "validation") or key.method not in wanted:
            continue
        choice = choose(valid.log_probs, valid.answers, valid.ids, "auto" if calibrate else "none")
        chosen.setdefault(key.method, {})[key.seed] = metrics.nll(choice.held_out, valid.answers)
        for task in (home, *group.ood_tasks):
            cell = group.cells.get(Key(task, "test", key.method, key.seed))
            if cell is not None:
                scored = _scored(cell, choice.calibrator.apply(cell.log_probs))
                sets.setdefault(task, {}).setdefault(key.method, {})[key.seed] = scored
        own = group.cells.get(Key(home, "test", key.method, key.seed))
        if key.method == BASE and own is not None:
            shares = np.log(np.bincount(valid.answers, minlength=own.log_probs.shape[1]) + 1.0)
            shares -= np.logaddexp.reduce(shares)
            constants.append(-shares[own.answers].mean())
    return Home(sets, chosen, float(np.mean(constants)) if constants else np.nan)


def _scored(cell: Answered, log_probs: Floats) -> Scored:
    correct = metrics.correct_per_question(log_probs, cell.answers)
    return Scored(cell.ids, metrics.nll_per_question(log_probs, cell.answers), np.asarray(correct, dtype=np.float64))


# -- differences -------------------------------------------------------------------------------------------------------


def seeds_of(homes: Mapping[str, Home], label: str = BASE) -> tuple[int, ...]:
    """The seeds that a label, by default the baseline, has on every home."""
    own = [set(home.chosen.get(label, ())) for home in homes.values()]
    return tuple(sorted(set.intersection(*own))) if own else ()


def complete(homes: Mapping[str, Home], label: str) -> bool:
    """Whether a label has every seed that the baseline has, on every set."""
    seeds = seeds_of(homes)
    return bool(seeds) and all(
        set(seeds) <= set(home.sets[name].get(label, ())) for home in homes.values() for name in home.sets
    )


def difference(
    homes: Mapping[str, Home],
    pair: tuple[str, str],
    *,
    shifts: bool,
    what: str = "nll",
    seeds: Sequence[int] | None = None,
) -> Estimate:
    """A mean over sets, each counted alike: the homes' own, or all that they are shifted to. Seeds: the baseline's, if None."""
    seeds, found = seeds_of(homes) if seeds is None else seeds, []
    for name, home in homes.items():
        for task, cells in home.sets.items():
            if (task != name) == shifts:
                found.append(difference_on([cells[label] for label in pair], seeds, f"{name} {task}", what))
    return Estimate(float(np.mean([e.value for e in found])), np.mean([e.draws for e in found], axis=0))


def difference_on(pair: Sequence[Mapping[int, Scored]], seeds: Sequence[int], name: str, what: str) -> Estimate:
    by_seed = []
    for seed in seeds:
        ours, theirs = (cells[seed] for cells in pair)
        if ours.ids != theirs.ids:
            raise InputError(f"{name}: labels have not answered the same questions")
        change = getattr(ours, what) - getattr(theirs, what)
        counts = estimates.multiplicities((len(change),), DRAWS, zlib.crc32(name.encode()))
        by_seed.append(Estimate(float(change.mean()), counts @ change / len(change)))
    return estimates.over_seeds(by_seed, 0)  # 0 for every set: the same seeds are drawn on all


def kept_apart(homes: Mapping[str, Home]) -> list[str]:
    """Homes on which the baseline is no better than a constant."""
    out = []
    for name, home in homes.items():
        losses = [scored.nll.mean() for scored in home.sets.get(name, {}).get(BASE, {}).values()]
        if losses and np.mean(losses) >= home.constant:
            out.append(name)
    return out


def primary(homes: Mapping[str, Home]) -> dict[str, float]:
    """Validation NLL of every candidate, the least first: single runs of at most eight passes, on all homes and seeds."""
    seeds = seeds_of(homes)
    candidates = [label for label in labels() if "ens" not in label and label != BASE and complete(homes, label)]
    scores = {
        label: float(np.mean([home.chosen[label][seed] for home in homes.values() for seed in seeds]))
        for label in candidates
    }
    return dict(sorted(scores.items(), key=lambda item: item[1]))


# -- the tests ---------------------------------------------------------------------------------------------------------


def lines(results: Path) -> Iterator[Line]:
    for seed, number in bases(metas(results)).items():
        yield Line(None, f"seed {seed} was run on {number} base models", "its labels are not paired with each other")
    homes = read(results, labels())
    apart = kept_apart(homes)
    for name in apart:
        yield Line(
            None, f"{name}: reported apart, {BASE} is not better than a constant there", _apart(homes[name], name)
        )
    homes = {name: home for name, home in homes.items() if name not in apart}
    if not seeds_of(homes):
        yield Line(None, "no home has the baseline", "not run")
        return
    yield Line(None, f"homes {', '.join(homes)}; seeds {', '.join(map(str, seeds_of(homes)))}", "what is compared")
    ranked = primary(homes)
    if not ranked:
        yield Line(None, "the primary label", "not run")
        return
    label = next(iter(ranked))
    first = ", ".join(f"{name} {value:.4f}" for name, value in list(ranked.items())[:5])
    yield Line(None, f"the primary label, chosen on validation: {label}", first)
    tests = [(one, BASE) for one in labels() if one != BASE] + CONTRASTS
    run = [pair for pair in tests if all(complete(homes, one) for one in pair)]
    family = [(pair, shifts) for pair in run for shifts in (False, True)]
    found = [difference(homes, pair, shifts=shifts) for pair, shifts in family]
    alone, _, most = adjusted(found)
    result = {key: (e, a, m) for key, e, a, m in zip(family, found, alone, most, strict=True)}
    yield from _goal(homes, label, result)
    for pair in tests:
        for shifts in (False, True):
            claim = f"{pair[0]} below {pair[1]}, {'shifts pooled' if shifts else 'home'}"
            yield _line(claim, result[pair, shifts]) if (pair, shifts) in result else Line(None, claim, "not run")


Result = tuple[Estimate, float, float]


def _line(claim: str, result: Result) -> Line:
    estimate, alone, most = result
    return Line(
        bool(estimate.value < 0 and most < LEVEL), claim, f"{shown(estimate)}, p {alone:.4f}, adjusted {most:.4f}"
    )


def _goal(
    homes: Mapping[str, Home], label: str, result: Mapping[tuple[tuple[str, str], bool], Result]
) -> Iterator[Line]:
    """The primary label against MAP on the same questions with its best calibrator."""
    pair = (label, BASE)
    each = {name: difference({name: home}, pair, shifts=False) for name, home in homes.items()}
    below = sum(estimate.value < 0 for estimate in each.values())
    home = _line("", result[pair, False])
    said = "; ".join(f"{name} {shown(estimate)}" for name, estimate in each.items())
    claim = f"goal: {label} below {BASE} at home, on at least three tasks and all together"
    yield Line(below >= 3 and bool(home.holds), claim, f"{home.found}; {said}")
    yield _line(f"goal: {label} below {BASE} on the pooled shifts", result[pair, True])
    accuracy = difference(homes, pair, shifts=False, what="correct")
    _, high = interval(accuracy)
    claim = f"goal: {label} is not less accurate than {BASE} at home"
    yield Line(bool(accuracy.value >= -SLACK and high >= 0), claim, shown(accuracy))


def _apart(home: Home, name: str) -> str:
    losses = [scored.nll.mean() for scored in home.sets[name][BASE].values()]
    return f"NLL {np.mean(losses):.3f}, of a constant {home.constant:.3f}"


def interval(estimate: Estimate) -> tuple[float, float]:
    _, low, high = percentiles(*estimate, 0.95)
    return low, high


def shown(estimate: Estimate) -> str:
    low, high = interval(estimate)
    return f"{estimate.value:+.4f} [{low:+.4f}, {high:+.4f}]"
