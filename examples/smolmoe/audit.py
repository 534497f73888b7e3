"""What the results of this study do not show: the numbers of docs/audit.md that the stored predictions give.

    python examples/smolmoe/audit.py results/smolmoe
    python examples/smolmoe/audit.py results/smolmoe --data-root DATA

Markdown, four tables: whether the routers of the printed protocol moved; MAP trained on as many questions as the routers; simple
baselines on all tasks, and what a constant answer scores; every tempered label with p-values for looking at all of them. With the
questions at hand a fifth: whether a list of words finds the shifts that novelty finds.
"""

import argparse
import re
import sys
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow.parquet as pq
from pooled import Cells, difference, read
from scipy.optimize import minimize
from scipy.special import log_softmax
from scipy.stats import norm
from table import interval, short

from vmoer import metrics, tasks
from vmoer.errors import InputError
from vmoer.evaluation import predictions, temperatures
from vmoer.evaluation.predictions import Answered, Key
from vmoer.metrics.estimates import Estimate
from vmoer.metrics.resampling import percentiles
from vmoer.tasks import Question

SOURCE = "openbookqa"
EQUAL = ("map", "vglr-mf", "vglr-fc+answer")
RIDGE = 1e-4  # on the letters' biases: a letter that validation hardly has keeps its place
Floats = npt.NDArray[np.float64]
Sets = dict[tuple[str, str], Cells]


def table(heads: list[str], rows: list[list[str]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in [heads, ["---"] * len(heads), *rows])


def traces(cells: dict[Key, Answered], factors: Path) -> str:
    """Of routers trained on stage 1's questions: the trace of the covariance over questions, and N s0^2, where it starts.

    On test; of the level "stage-2 data: train" of the factors on their half of validation.
    """
    rows = []
    for key, cell in sorted(cells.items()):
        if key.task == SOURCE and key.split == "test" and key.method in ("vglr-fc@paper", "vglr-mf@paper"):
            theirs = cells[key._replace(method="map@paper")]
            losses = [short(metrics.nll(c.log_probs, c.answers)) for c in (cell, theirs)]
            rows.append([key.method, str(key.seed), "8", *_spread(cell.signals["logit_variance"]), *losses])
    stored = pq.read_table(factors, columns=["folder", "seed", "logit_variance"]).to_pylist()
    for seed in (0, 1):
        folder = f"factors/stage-2-data-train-s{seed}/router"
        trace = np.array([row["logit_variance"] for row in stored if row["folder"] == folder])
        rows.append(["vglr-fc, stage-2 data: train", str(seed), "2", *_spread(trace), "", ""])
    return table(["run", "seed", "start", "mean", "spread", "NLL", "NLL of its MAP"], rows)


def _spread(trace: Floats) -> list[str]:
    return [f"{trace.mean():.4f}", f"{trace.std():.4f}"]


def equal_data(cells: dict[Key, Answered]) -> str:
    """Temperatures are fitted on one half of the test questions and read on the other: map@paper has no stored validation."""
    own: Cells = {}
    for key, cell in cells.items():
        if key.task == SOURCE and key.split == "test" and key.method in (*EQUAL, "map@paper"):
            tempered = cell._replace(log_probs=metrics.cross_tempered(cell.log_probs, cell.answers))
            own.setdefault(key.method, {})[key.seed] = tempered
    rows = []
    for label in ("map@paper", *EQUAL):
        losses = [metrics.nll(cell.log_probs, cell.answers) for _, cell in sorted(own[label].items())]
        to = difference(label, "map@paper", own, 0, SOURCE)
        rows.append([label, ", ".join(map(short, losses)), short(float(np.mean(losses))), shown(to)])
    return table(["NLL with a temperature", "by seed", "mean", "less map@paper"], rows)


def fit_letters(log_probs: Floats, answers: npt.NDArray[np.int64]) -> Floats:
    """Vector scaling: the inverse temperature, and a bias for each letter, by least NLL."""

    def loss(at: Floats) -> float:
        return metrics.nll(scaled(log_probs, at), answers) + RIDGE * float(at[1:] @ at[1:])

    start = np.append(1 / metrics.fit_temperature(log_probs, answers), np.zeros(log_probs.shape[1]))
    return np.asarray(minimize(loss, start, method="BFGS").x)


def scaled(log_probs: Floats, at: Floats) -> Floats:
    # options at -inf stay there, whatever the optimiser tries
    logits = np.where(np.isneginf(log_probs), -np.inf, at[0] * np.where(np.isneginf(log_probs), 0, log_probs) + at[1:])
    return np.asarray(log_softmax(logits, axis=1))


def averaged(cells: list[Answered]) -> Floats:
    return np.asarray(np.logaddexp.reduce([cell.log_probs for cell in cells], axis=0) - np.log(len(cells)))


def add_baselines(group: predictions.Predictions, cells: Cells) -> float:
    """Two labels that anybody can have from MAP models alone, and the NLL of answering with validation's letter frequencies."""
    task, seeds = group.source_task, sorted(cells["map"])
    valid = [group.cells[Key(task, "validation", "map", seed)] for seed in seeds]
    test = [cells["map"][seed] for seed in seeds]
    for seed, known, asked in zip(seeds, valid, test, strict=True):
        letters = scaled(asked.log_probs, fit_letters(known.log_probs, known.answers))
        cells.setdefault("map, vector scaling", {})[seed] = asked._replace(log_probs=letters)
    temperature = metrics.fit_temperature(averaged(valid), valid[0].answers)
    several = test[0]._replace(log_probs=metrics.apply_temperature(averaged(test), temperature))
    cells[f"{len(seeds)} MAP models averaged, +ts"] = dict.fromkeys(seeds, several)
    return metrics.nll(constant(valid[0], test[0]), test[0].answers)


def constant(known: Answered, asked: Answered) -> Floats:
    shares = np.bincount(known.answers, minlength=asked.log_probs.shape[1]) + 1.0
    return np.asarray(log_softmax(np.where(np.isneginf(asked.log_probs), -np.inf, np.log(shares)), axis=1))


def pooled(label: str, other: str, sets: Sets) -> list[Estimate]:
    """Each task, then all of them, each counted alike."""
    found = [difference(label, other, cells, number, task) for number, ((task, _), cells) in enumerate(sets.items())]
    return [*found, Estimate(float(np.mean([e.value for e in found])), np.mean([e.draws for e in found], 0))]


def shown(estimate: Estimate) -> str:
    return interval(dict(zip(("value", "low", "high"), percentiles(*estimate, 0.95), strict=True)))


def baselines(sets: Sets, constants: dict[str, float]) -> str:
    added = ["map, vector scaling", *sorted(label for cells in sets.values() for label in cells if "averaged" in label)]
    tasks = [task for task, _ in sets]
    rows = [[label, *map(shown, pooled(label, "map+ts", sets))] for label in dict.fromkeys(added)]
    tempered = [
        short(float(np.mean([metrics.nll(c.log_probs, c.answers) for c in cells["map+ts"].values()])))
        for cells in sets.values()
    ]
    rows += [["NLL of map+ts", *tempered, ""], ["NLL of a constant", *(short(constants[task]) for task in tasks), ""]]
    return table(["NLL - map+ts", *tasks, "all"], rows)


def adjusted(estimates: list[Estimate]) -> tuple[Floats, Floats, Floats]:
    """p-values of differences from zero, two-sided: each by itself, by Holm's steps, and by the largest of all (max-T)."""
    spread = np.array([e.draws.std() for e in estimates])
    spread[spread == 0] = np.inf  # the same answers: no difference, and none can be found
    score = np.abs([e.value for e in estimates]) / spread
    alone = 2 * norm.sf(score)
    order = np.argsort(alone)
    holm = np.empty_like(alone)
    holm[order] = np.minimum(1, np.maximum.accumulate(alone[order] * np.arange(len(alone), 0, -1)))
    centred = np.abs([(e.draws - e.draws.mean()) / s for e, s in zip(estimates, spread, strict=True)])
    largest = (1 + (centred.max(0) >= score[:, None]).sum(1)) / (1 + centred.shape[1])
    return alone, holm, largest


def multiplicity(sets: Sets) -> str:
    labels = sorted(set.intersection(*(set(cells) for cells in sets.values())) - {"map+ts"})
    labels = [label for label in labels if label.endswith("+ts") and "averaged" not in label]
    found = [pooled(label, "map+ts", sets)[-1] for label in labels]
    rows = [
        [label, shown(estimate), *(f"{p:.3f}" for p in values)]
        for label, estimate, *values in zip(labels, found, *adjusted(found), strict=True)
    ]
    rows.sort(key=lambda row: float(row[1].split()[0]))
    return table(["NLL - map+ts, all tasks", "difference", "p", "Holm", "max-T"], rows)


def words(question: Question) -> list[str]:
    return re.findall(r"[a-z0-9']+", " ".join([question.question, *question.choices]).lower())


def unseen(task: str, known: set[str], root: Path) -> dict[str, float]:
    """Of every test question the share of its words that no training question has."""
    asked = tasks.load(task, "test", data_root=root)
    return {q.id: float(np.mean([word not in known for word in words(q)])) for q in asked}


def shifts(group: predictions.Predictions, root: Path, label: str = "vglr-fc+answer") -> str:
    """AUROC of novelty, a mean over seeds, and of unseen words: on all prompts and on those of equal length."""
    known = {word for question in tasks.load(SOURCE, "train", data_root=root) for word in words(question)}
    home, rows = unseen(SOURCE, known, root), []
    for task in group.ood_tasks:
        away, found = unseen(task, known, root), []
        for seed in sorted(key.seed for key in group.cells if key[:3] == (task, "test", label)):
            a, b = (group.cells[Key(name, "test", label, seed)] for name in (SOURCE, task))
            shares = [np.array([share[i] for i in cell.ids]) for share, cell in ((home, a), (away, b))]
            lengths = a.prompt_tokens.astype(float), b.prompt_tokens.astype(float)
            for one, other in ((a.signals["novelty"], b.signals["novelty"]), shares):
                rated, _ = metrics.detection((one, other), lengths, draws=1, seed=0)
                found.append([rated[name].value if name in rated else np.nan for name in ("auroc", "auroc_matched")])
        area = np.reshape(found, (-1, 2, 2)).mean(0)  # seeds; novelty, words; all, matched
        rows.append([task, *("-" if np.isnan(value) else short(float(value)) for value in area.T.ravel())])
    heads = ["AUROC", "novelty", "unseen words", "novelty, equal length", "unseen words, equal length"]
    return table(heads, rows)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path)
    parser.add_argument("--data-root", type=Path)
    given = parser.parse_args(arguments)
    try:
        sets, groups = read(given.results, False), {g.source_task: g for g in temperatures.load(given.results)}
        constants = {task: add_baselines(groups[task], cells) for (task, _), cells in sets.items()}
        own, factors = groups[SOURCE].cells, given.results / SOURCE / "factors.parquet"
        parts = [traces(own, factors), equal_data(own), baselines(sets, constants), multiplicity(sets)]
        parts += [shifts(groups[SOURCE], given.data_root)] if given.data_root else []
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print("\n\n".join(parts))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
