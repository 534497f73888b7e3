"""The tests of REGISTERED.md, or of LARGER.md, from OUT/results alone; verdicts.py prints them.

Every answer goes through the calibrator that cross-validation chooses on the validation answers of its own label, seed and task.
A difference is paired by question and by seed. A draw takes a task's questions by their ids, the same ones for every home that
asks them: models of different homes err on the same questions. It takes seeds for all sets alike, since a seed is one base model
and one cut of the data on all tasks.
"""

import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from audit import adjusted
from comparisons import BASE, Comparison, of_results

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
    """NLL on validation of the letters' shares there, a mean over seeds."""


class Line(NamedTuple):
    """A registered test: whether it holds (None: not run, or no test), what it says, and what was found."""

    holds: bool | None
    claim: str
    found: str


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


def read(of: Comparison, results: Path, wanted: Sequence[str]) -> dict[str, Home]:
    """By home, in their order; labels that are not wanted are left out."""
    found = {group.source_task: group for group in predictions.load(results)}
    return {home: home_of(found[home], wanted) for home in of.homes if home in found}


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
        if key.method == BASE:
            shares = np.bincount(valid.answers) / len(valid.answers)
            constants.append(-np.log(shares[valid.answers]).mean())
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
    seeds, found, ids = seeds_of(homes) if seeds is None else seeds, [], asked(homes)
    for name, home in homes.items():
        for task, cells in home.sets.items():
            if (task != name) == shifts:
                found.append(difference_on([cells[label] for label in pair], seeds, task, what, ids[task]))
    return Estimate(float(np.mean([e.value for e in found])), np.mean([e.draws for e in found], axis=0))


def asked(homes: Mapping[str, Home]) -> dict[str, list[str]]:
    """The questions of each task that any home asks, by the baseline's answers: what a draw chooses among."""
    found: dict[str, set[str]] = {}
    for home in homes.values():
        for task, cells in home.sets.items():
            found.setdefault(task, set()).update(*{scored.ids for scored in cells.get(BASE, {}).values()})
    return {task: sorted(ids) for task, ids in found.items()}


def difference_on(
    pair: Sequence[Mapping[int, Scored]], seeds: Sequence[int], task: str, what: str, ids: Sequence[str]
) -> Estimate:
    """On one set of a task's questions; `ids` are all of the task that are asked anywhere."""
    by_seed, place = [], {one: i for i, one in enumerate(ids)}
    counts = estimates.multiplicities((len(ids),), DRAWS, zlib.crc32(task.encode()))
    for seed in seeds:
        ours, theirs = (cells[seed] for cells in pair)
        if ours.ids != theirs.ids or not place.keys() >= {*ours.ids}:
            raise InputError(f"{task}: labels have not answered the same questions")
        change = np.zeros((len(ids), 2))  # and a one beside: what a draw takes of a set that lacks some varies in size
        at = [place[one] for one in ours.ids]
        change[at, 0], change[at, 1] = getattr(ours, what) - getattr(theirs, what), 1
        drawn = counts @ change
        by_seed.append(Estimate(float(change[at, 0].mean()), drawn[:, 0] / drawn[:, 1]))
    return estimates.over_seeds(by_seed, 0)  # 0 for every set: the same seeds are drawn on all


def kept_apart(homes: Mapping[str, Home]) -> list[str]:
    """Homes on whose validation the baseline is no better than a constant."""
    own = {name: [*home.chosen.get(BASE, {}).values()] for name, home in homes.items()}
    return [name for name, losses in own.items() if losses and np.mean(losses) >= homes[name].constant]


def missing(of: Comparison, homes: Mapping[str, Home]) -> list[str]:
    """What stands between these answers and a verdict: homes, sets and seeds that the baseline lacks, and seeds too many."""
    out = [f"home {name} is missing" for name in of.homes if name not in homes]
    for name, home in homes.items():
        sets = of.sets(name)
        for seed in of.seeds:
            lacking = [task for task in sets if seed not in home.sets.get(task, {}).get(BASE, {})]
            if lacking:
                where = "all sets" if len(lacking) == len(sets) else ", ".join(lacking)
                out.append(f"home {name}, seed {seed}: no {BASE} on {where}")
    return [*out, *(f"seed {seed} is none of the study's" for seed in seeds_of(homes) if seed not in of.seeds)]


def primary(of: Comparison, homes: Mapping[str, Home]) -> dict[str, float]:
    """Validation NLL of every candidate, the least first: single runs of at most eight passes, on all homes and seeds."""
    seeds = seeds_of(homes)
    candidates = [label for label in of.labels() if "ens" not in label and label != BASE and complete(homes, label)]
    scores = {
        label: float(np.mean([home.chosen[label][seed] for home in homes.values() for seed in seeds]))
        for label in candidates
    }
    return dict(sorted(scores.items(), key=lambda item: item[1]))


# -- the tests ---------------------------------------------------------------------------------------------------------


def lines(results: Path) -> Iterator[Line]:
    of = of_results(results)
    if of is None:
        raise InputError(f"{results} has no results of a registered comparison")
    for seed, number in bases(metas(results)).items():
        yield Line(None, f"seed {seed} was run on {number} base models", "its labels are not paired with each other")
    homes = read(of, results, of.labels())
    if lacking := missing(of, homes):
        yield Line(None, "no verdict before every home and seed is there", "; ".join(lacking))
        return
    apart = kept_apart(homes)
    for name in apart:
        yield Line(None, f"{name}: reported apart, {BASE} is not better than a constant there", _apart(homes[name]))
    homes = {name: home for name, home in homes.items() if name not in apart}
    if not homes:
        yield Line(None, "no home is left to compare on", "not run")
        return
    yield Line(None, f"homes {', '.join(homes)}; seeds {', '.join(map(str, seeds_of(homes)))}", "what is compared")
    ranked = primary(of, homes)
    if not ranked:
        yield Line(None, "the primary label", "not run")
        return
    label = next(iter(ranked))
    first = ", ".join(f"{name} {value:.4f}" for name, value in list(ranked.items())[:5])
    yield Line(None, f"the primary label, chosen on validation: {label}", first)
    tests = [(one, BASE) for one in of.labels() if one != BASE] + CONTRASTS
    run = [pair for pair in tests if all(complete(homes, one) for one in pair)]
    family = [(pair, shifts) for pair in run for shifts in (False, True)]
    found = [difference(homes, pair, shifts=shifts) for pair, shifts in family]
    alone, _, most = adjusted(found)
    result = {key: (e, a, m) for key, e, a, m in zip(family, found, alone, most, strict=True)}
    yield from _goal(of, homes, label, result)
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
    of: Comparison, homes: Mapping[str, Home], label: str, result: Mapping[tuple[tuple[str, str], bool], Result]
) -> Iterator[Line]:
    """The primary label against MAP on the same questions with its best calibrator."""
    pair = (label, BASE)
    each = {name: difference({name: home}, pair, shifts=False) for name, home in homes.items()}
    below = sum(estimate.value < 0 for estimate in each.values())
    home = _line("", result[pair, False])
    said = "; ".join(f"{name} {shown(estimate)}" for name, estimate in each.items())
    where = "at home, on at least three tasks and all together" if of.homes_needed == 3 else "at home"
    claim = f"goal: {label} below {BASE} {where}"
    yield Line(below >= of.homes_needed and bool(home.holds), claim, f"{home.found}; {said}")
    yield _line(f"goal: {label} below {BASE} on the pooled shifts", result[pair, True])
    accuracy = difference(homes, pair, shifts=False, what="correct")
    _, high = interval(accuracy)
    claim = f"goal: {label} is not less accurate than {BASE} at home"
    yield Line(bool(accuracy.value >= -SLACK and high >= 0), claim, shown(accuracy))


def _apart(home: Home) -> str:
    return f"NLL on validation {np.mean([*home.chosen[BASE].values()]):.3f}, of a constant {home.constant:.3f}"


def interval(estimate: Estimate) -> tuple[float, float]:
    _, low, high = percentiles(*estimate, 0.95)
    return low, high


def shown(estimate: Estimate) -> str:
    low, high = interval(estimate)
    return f"{estimate.value:+.4f} [{low:+.4f}, {high:+.4f}]"
