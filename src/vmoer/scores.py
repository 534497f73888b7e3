"""Predictions to metrics: `metrics.json` is a pure function of `predictions.parquet`, its `meta.json` and a seed.

A bootstrap draw is a vector of multiplicities: how often each question was drawn. All methods and seeds on a task see
the same draws, so one value per (method, seed, metric, draw) is enough for everything that follows:

    an interval              the quantiles of the draws
    over seeds, nested       draw d is the mean over resampled seeds of their d-th draws
    a paired difference      the d-th draw of one method minus the d-th draw of the other

Values come from `vmoer.metrics`; draws from a batched form of the same metrics, which the tests hold equal to them.
"""

import json
import math
from collections.abc import Iterator, Mapping
from functools import lru_cache
from itertools import pairwise, product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from scipy.fft import dct, idct

from vmoer import metrics as m
from vmoer.errors import InputError
from vmoer.files import write_bytes
from vmoer.metrics.calibration import BINS
from vmoer.metrics.ood import MIN_PAIRS
from vmoer.metrics.resampling import percentiles

SIGNALS = (
    *("gate_entropy", "logit_variance", "temperature", "mc_logit_variance"),
    *("novelty", "mutual_information", "predictive_entropy"),
)
BASELINES = ("map", "map+ts")
_MEANS = ("accuracy", "nll", "brier")  # averages over questions: resampling leaves them unbiased
_COMPARED = (*_MEANS, "debiased_ece")
_CHUNK = 50  # draws at a time: what they need stays in the processor's cache

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Row = dict[str, Any]


class Key(NamedTuple):
    """Which predictions: one method and seed on one split of one task."""

    task: str
    split: str
    method: str
    seed: int


class Cell(NamedTuple):
    """The predictions of one `Key`, ordered by question id; a signal is there if it has a value for every question."""

    ids: tuple[str, ...]
    log_probs: Floats
    answers: Ints
    prompt_tokens: Ints
    signals: dict[str, Floats]


class Predictions(NamedTuple):
    """All predictions of one model fine-tuned on one task."""

    study: str | None
    model: str | None
    source_task: str
    ood_tasks: tuple[str, ...]
    cells: dict[Key, Cell]
    split: str = "test"
    """Which split of the source task is scored; of the shifted tasks it is test."""

    def split_of(self, task: str) -> str:
        return self.split if task == self.source_task else "test"

    def scores(self, key: Key) -> bool:
        return key.split == self.split_of(key.task)


def files(directory: Path) -> list[Path]:
    """`DIR/predictions.parquet`, or else all `DIR/*/predictions.parquet`."""
    directory = Path(directory)
    single = directory / "predictions.parquet"
    found = [single] if single.exists() else sorted(directory.glob("*/predictions.parquet"))
    if not found:
        raise InputError(f"{directory}: no predictions.parquet there, nor in its subdirectories")
    return found


def _columns(path: Path) -> dict[str, Any]:
    """The columns of a parquet file, checked and sorted by key, then id; all-null signals left out."""
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ModuleNotFoundError as error:
        raise InputError("reading predictions needs pyarrow: pip install 'vmoer[eval]'") from error
    wanted = {name: pa.string() for name in ("id", "task", "split", "method")}
    wanted |= {name: pa.int64() for name in ("seed", "answer", "prompt_tokens")} | {"log_probs": pa.list_(pa.float64())}
    try:
        table = pq.read_table(path)
    except (pa.ArrowException, OSError) as error:
        raise InputError(f"{path}: not a readable parquet file ({str(error).splitlines()[0]})") from error
    if missing := [name for name in wanted if name not in table.column_names]:
        raise InputError(f"{path}: missing column {', '.join(missing)}")
    if not table.num_rows:
        raise InputError(f"{path}: no predictions, the file has no rows")
    wanted |= {name: pa.float64() for name in SIGNALS if name in table.column_names}
    cast = {}
    for name, kind in wanted.items():
        try:
            cast[name] = table[name].cast(kind)
        except pa.ArrowException as error:
            raise InputError(f"{path}: column {name} must be {kind}, not {table.schema.field(name).type}") from error
        if name not in SIGNALS and cast[name].null_count:
            raise InputError(f"{path}: column {name} has {cast[name].null_count} missing values")
    table = pa.table(cast).sort_by([(name, "ascending") for name in (*Key._fields, "id")]).combine_chunks()
    log_probs = table["log_probs"].combine_chunks()
    options = np.diff(log_probs.offsets.to_numpy())
    padded = np.full((len(options), max(options.max(), 1)), -np.inf)
    padded[np.arange(padded.shape[1]) < options[:, None]] = log_probs.values.to_numpy(zero_copy_only=False)
    answers = table["answer"].to_numpy()
    try:
        m.nll_per_question(padded, answers)
    except InputError as error:
        raise InputError(f"{path}: {error} (rows counted in the order {', '.join(Key._fields)}, id)") from error
    rest = {name: table[name].to_numpy() for name in wanted if name not in ("log_probs", "answer")}
    return rest | {"log_probs": padded, "answer": answers}


def _cells(path: Path) -> Iterator[tuple[Key, Cell]]:
    columns = _columns(path)
    keys = [Key(*key) for key in zip(*(columns[name].tolist() for name in Key._fields), strict=True)]
    starts = [i for i, key in enumerate(keys) if i == 0 or key != keys[i - 1]]
    for start, end in zip(starts, [*starts[1:], len(keys)], strict=True):
        key, cell = keys[start], {name: column[start:end] for name, column in columns.items()}
        ids = tuple(cell["id"].tolist())
        if len(set(ids)) < len(ids):
            twice = next(a for a, b in pairwise(ids) if a == b)
            raise InputError(f"{path}: question {twice} is there twice for {_name(key)}")
        signals = {}
        for name in SIGNALS:
            lacking = np.isnan(cell[name]).sum() if name in cell else len(ids)
            if lacking == 0:
                signals[name] = cell[name]
            elif lacking < len(ids):
                raise InputError(f"{path}: column {name} lacks {lacking} of {len(ids)} values for {_name(key)}")
        signals.setdefault("predictive_entropy", _entropy(cell["log_probs"]))
        yield key, Cell(ids, cell["log_probs"], cell["answer"], cell["prompt_tokens"], signals)


def _name(key: Key) -> str:
    return f"{key.method} seed {key.seed} on {key.task} {key.split}"


def _entropy(log_probs: Floats) -> Floats:
    finite = np.where(np.isneginf(log_probs), 0.0, log_probs)
    return np.asarray(-(np.exp(log_probs) * finite).sum(1), dtype=np.float64)


def load(directory: Path) -> list[Predictions]:
    """The predictions under a directory, one entry per model and source task, with `map+ts` added where it can be."""
    groups: dict[tuple[str | None, str], Predictions] = {}
    for path in files(directory):
        own = path.parent / "meta.json"
        meta_path = own if own.exists() else Path(directory) / "meta.json"
        try:
            meta = json.loads(meta_path.read_text())
            source = meta["source_task"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise InputError(f"{meta_path}: must be a JSON object with source_task beside {path.name}") from error
        fresh = Predictions(meta.get("study"), meta.get("model"), source, (), {}, meta.get("split") or "test")
        group = groups.setdefault((fresh.model, source), fresh)
        for key, cell in _cells(path):
            if key in group.cells:
                raise InputError(f"{path}: {_name(key)} is already in another file of {directory}")
            group.cells[key] = cell
        listed = meta.get("ood_tasks") or {key.task for key in group.cells}
        shifts = tuple(sorted({*group.ood_tasks, *listed} - {source}))
        groups[fresh.model, source] = group._replace(ood_tasks=shifts)
    for group in groups.values():
        for seed, temperature in temperatures(group).items():
            for key, cell in list(group.cells.items()):
                if (key.method, key.seed) == ("map", seed) and group.scores(key):
                    scaled = m.apply_temperature(cell.log_probs, temperature)
                    signals = {"predictive_entropy": _entropy(scaled)}  # the others are those of map itself
                    group.cells[key._replace(method="map+ts")] = cell._replace(log_probs=scaled, signals=signals)
    return [groups[key] for key in sorted(groups, key=str)]


def temperatures(group: Predictions) -> dict[int, float]:
    """The output temperature of `map` for every seed that has validation predictions on the source task."""
    fitted = {
        key.seed: m.fit_temperature(cell.log_probs, cell.answers)
        for key, cell in group.cells.items()
        if key[:3] == (group.source_task, "validation", "map")
    }
    return dict(sorted(fitted.items()))


class Estimate(NamedTuple):
    """A metric: its value, and its values on the bootstrap draws."""

    value: float
    draws: Floats

    def __sub__(self, other: "Estimate") -> "Estimate":
        return Estimate(self.value - other.value, self.draws - other.draws)


@lru_cache(maxsize=8)
def multiplicities(sizes: tuple[int, ...], draws: int, seed: int) -> npt.NDArray[np.uint8]:
    """How often each question was drawn, [draws, sum(sizes)]: each of the data sets resampled on its own.

    The stream is that of `metrics.bootstrap_metric` (one data set) and of `metrics.detection` (two). A byte each is
    enough: no question is ever drawn 256 times in as many draws as there are questions.
    """
    rng, counts = np.random.default_rng(seed), np.empty((draws, sum(sizes)), dtype=np.uint8)
    for row in counts:
        row[:] = np.concatenate([np.bincount(rng.integers(n, size=n), minlength=n) for n in sizes])
    return counts


def _smooth_ece(gap: Floats) -> Floats:
    """`metrics.smooth_ece` of residuals summed over a grid on [0, 1], [draws, cells]: bisection, then one secant step."""
    spectrum, frequency = dct(gap, norm="ortho", axis=1), np.pi * np.arange(gap.shape[1])

    def excess(width: Floats) -> Floats:
        damped = spectrum * np.exp(-((width[:, None] * frequency) ** 2) / 2)
        return np.asarray(np.abs(idct(damped, norm="ortho", axis=1)).sum(1) - width)

    low, high = np.zeros(len(gap)), np.ones(len(gap))
    at_low, at_high = excess(low), excess(high)
    for _ in range(8):
        middle = (low + high) / 2
        at_middle = excess(middle)
        above = at_middle > 0
        low, at_low = np.where(above, middle, low), np.where(above, at_middle, at_low)
        high, at_high = np.where(above, high, middle), np.where(above, at_high, at_middle)
    return np.asarray(low + (high - low) * at_low / np.maximum(at_low - at_high, 1e-12), dtype=np.float64)


def calibration(cell: Cell, draws: int, seed: int) -> dict[str, Estimate]:
    """Accuracy, proper scores, calibration errors and selective risks of one cell."""
    confidence, correct = m.confidence(cell.log_probs), m.correct_per_question(cell.log_probs, cell.answers)
    nll, brier = (f(cell.log_probs, cell.answers) for f in (m.nll_per_question, m.brier_per_question))
    values = {"accuracy": correct.mean(), "nll": nll.mean(), "brier": brier.mean()}
    values |= {f.__name__: f(confidence, correct) for f in (m.ece, m.mce, m.debiased_ece, m.smooth_ece)}
    values |= {f.__name__: f(confidence, 1 - correct) for f in (m.aurc, m.augrc)}
    means, counts = np.stack([correct, nll, brier], axis=1), multiplicities((len(correct),), draws, seed)
    chunks = [_on_draws(confidence, correct, counts[i : i + _CHUNK]) for i in range(0, draws, _CHUNK)]
    drawn = {name: np.concatenate([chunk[name] for chunk in chunks]) for name in chunks[0]}
    drawn |= dict(zip(_MEANS, (counts.astype(np.float64) @ means).T / len(correct), strict=True))
    return {name: Estimate(float(value), drawn[name]) for name, value in values.items()}


def _on_draws(confidence: Floats, correct: Floats, counts: npt.NDArray[np.uint8]) -> dict[str, Floats]:
    """Every metric that depends on confidence, on each draw. Arrays [draws, distinct confidences], falling."""
    n, draws, order = len(confidence), len(counts), np.argsort(-confidence, kind="stable")
    first = np.flatnonzero(np.diff(confidence[order], prepend=2))
    level, count = confidence[order][first], counts.take(order, axis=1).astype(np.float64)
    size, hits, squares = count, count * correct[order], count * ((correct - confidence) ** 2)[order]
    if len(first) < n:
        size, hits, squares = (np.add.reduceat(array, first, axis=1) for array in (size, hits, squares))
    gap = hits - size * level

    def grouped(index: Ints, *sums: Floats) -> list[Floats]:
        start = np.flatnonzero(np.diff(index, prepend=-1))
        return [np.add.reduceat(array, start, axis=1) for array in sums]

    bin_gap, bin_size = grouped(np.searchsorted(np.arange(1, BINS) / BINS, level), gap, size)
    # A grid of 128 is fine enough for the spread of smooth ECE, whose bandwidth is rarely below 0.01.
    cell = np.minimum((level * 128).astype(np.int64), 127)
    grid = np.zeros((draws, 128))
    grid[:, np.unique(cell)[::-1]] = grouped(cell, gap)[0] / n

    # Equal-mass bins, as in metrics.debiased_ece: the rank of a draw's first question of each confidence says which.
    seen = size.astype(np.int32).cumsum(1, dtype=np.int32)
    bins = max(1, min(BINS, n // 2))
    mass = np.minimum((n - seen).astype(np.int64) * bins // n, bins - 1) + bins * np.arange(draws)[:, None]
    total, own, number = (
        np.bincount(mass.ravel(), array.ravel(), bins * draws).reshape(draws, bins) for array in (gap, squares, size)
    )
    squared = ((total**2 - own) / np.maximum(number - 1, 1) * (number > 1)).sum(1) / n

    # Risks at k = before + 1 .. before + size rise linearly in the errors of a tie, so their sums are in closed form.
    steps = np.diff(np.concatenate([[0.0], np.cumsum(1 / np.arange(1, n + 1))])[seen], prepend=0)
    errors, before = size - hits, seen - size
    wrong_before, rate = errors.cumsum(1) - errors, errors / np.maximum(size, 1)
    return {
        "ece": np.abs(bin_gap).sum(1) / n,
        "mce": (np.abs(bin_gap) / np.maximum(bin_size, 1)).max(1),
        "debiased_ece": np.sign(squared) * np.sqrt(np.abs(squared)),
        "smooth_ece": _smooth_ece(grid),
        "aurc": ((wrong_before - before * rate) * steps + errors).sum(1) / n,
        "augrc": ((size * wrong_before + errors * (size + 1) / 2).sum(1) - errors.sum(1) / 2) / n**2,
    }


def _detection_on_draws(scores_in: Floats, scores_out: Floats, counts: npt.NDArray[np.uint8]) -> dict[str, Floats]:
    """AUROC, AUPRC and FPR95 on each draw. Arrays [draws, prompts], by falling score; see `metrics.ood`."""
    n_in, n_out = len(scores_in), len(scores_out)
    order_in, order_out = np.argsort(-scores_in, kind="stable"), np.argsort(-scores_out, kind="stable")
    own, shifted = -scores_in[order_in], -scores_out[order_out]
    # How many scores of the other side, or of the same one, a threshold at each score flags.
    out_above, out_from = (np.searchsorted(shifted, own, side) for side in ("left", "right"))
    in_flagged, out_flagged = np.searchsorted(own, shifted, "right"), np.searchsorted(shifted, shifted, "right")
    parts: dict[str, list[Floats]] = {"auroc": [], "auprc": [], "fpr95": []}
    for start in range(0, len(counts), _CHUNK):
        chunk = counts[start : start + _CHUNK].astype(np.int32)
        count_in, count_out = chunk[:, :n_in].take(order_in, axis=1), chunk[:, n_in:].take(order_out, axis=1)
        up_to_in, up_to_out = (
            np.pad(count.cumsum(1, dtype=np.int32), ((0, 0), (1, 0))) for count in (count_in, count_out)
        )
        beaten = (up_to_out.take(out_above, axis=1) + up_to_out.take(out_from, axis=1)).astype(np.float64)
        true, false = up_to_out.take(out_flagged, axis=1), up_to_in.take(in_flagged, axis=1)
        enough = (20 * true >= 19 * n_out).argmax(1)
        parts["auroc"].append((count_in * beaten).sum(1) / (2 * n_in * n_out))
        parts["auprc"].append((count_out * true / np.maximum(true + false, 1)).sum(1) / n_out)
        parts["fpr95"].append(false[np.arange(len(chunk)), enough] / n_in)
    return {name: np.concatenate(chunks) for name, chunks in parts.items()}


def detection(
    scores: tuple[Floats, Floats], lengths: tuple[Floats, Floats], draws: int, seed: int
) -> tuple[dict[str, Estimate], str | None]:
    """AUROC, AUPRC and FPR95, `_matched` too where there are enough equally long prompts, else the reason."""

    def estimates(own: Floats, shifted: Floats, counts: npt.NDArray[np.uint8], suffix: str) -> dict[str, Estimate]:
        drawn = _detection_on_draws(own, shifted, counts)
        return {f.__name__ + suffix: Estimate(f(own, shifted), drawn[f.__name__]) for f in (m.auroc, m.auprc, m.fpr95)}

    (scores_in, scores_out), sizes = scores, (len(scores[0]), len(scores[1]))
    found = estimates(scores_in, scores_out, multiplicities(sizes, draws, seed), "")
    pairs_in, pairs_out = m.length_match(*lengths, seed)
    if len(pairs_in) < MIN_PAIRS:
        return found, f"not matchable: {len(pairs_in)} pairs of equally long prompts, {MIN_PAIRS} needed"
    # Matched prompts are drawn as pairs, which keeps the lengths of both sides equal in every draw.
    counts = np.tile(multiplicities((len(pairs_in),), draws, seed), 2)
    return found | estimates(scores_in[pairs_in], scores_out[pairs_out], counts, "_matched"), None


def over_seeds(estimates: list[Estimate], seed: int) -> Estimate:
    """The mean over seeds; on each draw, the mean over resampled seeds."""
    if len(estimates) == 1:
        return estimates[0]
    table = np.stack([estimate.draws for estimate in estimates])
    seeds, draws = table.shape
    picked = np.random.default_rng([seed, 1]).integers(seeds, size=(seeds, draws))
    return Estimate(float(np.mean([e.value for e in estimates])), table[picked, np.arange(draws)].mean(0))


def _paired(method: Mapping[int, Estimate], other: Mapping[int, Estimate]) -> dict[int, Estimate]:
    """Differences seed by seed; a baseline of one seed is compared with every seed."""
    if len(other) == 1:
        (only,) = other.values()
        return {seed: estimate - only for seed, estimate in method.items()}
    return {seed: estimate - other[seed] for seed, estimate in method.items() if seed in other}


class _Scorer:
    """The rows of one model and source task."""

    def __init__(self, group: Predictions, draws: int, seed: int) -> None:
        self.group, self.draws, self.seed = group, draws, seed
        self.rows: list[Row] = []

    def add(self, task: str, method: str, seed: int | None, metric: str, value: Any, **more: Any) -> None:
        """One row; `value` an Estimate or a number; low, high, signal, split and note come through `more`."""
        low, high = more.pop("low", None), more.pop("high", None)
        if isinstance(value, Estimate):
            # Resampling repeats questions, which biases all but means upwards: shift it out (metrics.bootstrap_metric).
            mean = metric.removesuffix("_matched").split("_minus_")[0] in (*_MEANS, "auroc", "auprc", "fpr95")
            shift = 0.0 if mean else value.draws.mean() - value.value
            value, low, high = percentiles(value.value, value.draws - shift, 0.95)
        source = self.group.source_task
        row = {
            "study": self.group.study,
            "model": self.group.model,
            "task": task,
            "split": self.group.split_of(task),
            "method": method,
        }
        row |= {"seed": seed, "signal": None, "metric": metric, "value": value, "low": low, "high": high} | more
        self.rows.append(row if task == source else row | {"source": source})

    def add_seeds(self, task: str, method: str, metric: str, by_seed: Mapping[int, Estimate], **more: Any) -> None:
        """A row per seed, and where there are several one over seeds."""
        for seed, estimate in by_seed.items():
            self.add(task, method, seed, metric, estimate, **more)
        if len(by_seed) > 1:
            self.add(task, method, None, metric, over_seeds(list(by_seed.values()), self.seed), **more)

    def cells(self, task: str) -> dict[str, dict[int, Cell]]:
        """Test cells of a task by method and seed. All must answer the same questions, or nothing could be paired."""
        found: dict[str, dict[int, Cell]] = {}
        first: tuple[Key, Cell] | None = None
        for key, cell in sorted(self.group.cells.items()):
            if key.task == task and self.group.scores(key):
                first = first or (key, cell)
                if cell.ids != first[1].ids:
                    raise InputError(f"{_name(key)} and {_name(first[0])} answer different questions")
                found.setdefault(key.method, {})[key.seed] = cell
        return found

    def calibration(self, task: str) -> None:
        estimates: dict[str, dict[str, dict[int, Estimate]]] = {}
        for method, cells in self.cells(task).items():
            for seed, cell in cells.items():
                for metric, estimate in calibration(cell, self.draws, self.seed).items():
                    estimates.setdefault(metric, {}).setdefault(method, {})[seed] = estimate
            self.floors(task, method, cells)
        for metric, methods in estimates.items():
            for method, by_seed in methods.items():
                self.add_seeds(task, method, metric, by_seed)
                for baseline in BASELINES:
                    if metric in _COMPARED and method != baseline and baseline in methods:
                        difference = f"{metric}_minus_{baseline.replace('+', '_')}"
                        self.add_seeds(task, method, difference, _paired(by_seed, methods[baseline]))
            self.against_best(task, metric, methods)

    def against_best(self, task: str, metric: str, methods: Mapping[str, Mapping[int, Estimate]]) -> None:
        """How far each method is from the best one: what "best within noise" in the tables rests on."""
        overall = {method: float(np.mean([e.value for e in by_seed.values()])) for method, by_seed in methods.items()}
        best = min(overall, key=lambda method: (-overall[method] if metric == "accuracy" else overall[method], method))
        for method, by_seed in methods.items():
            if method != best and (paired := _paired(by_seed, methods[best])):
                seed = None if len(by_seed) > 1 else next(iter(by_seed))
                difference = over_seeds(list(paired.values()), self.seed)
                self.add(task, method, seed, f"{metric}_minus_best", difference, note=f"best: {best}")

    def floors(self, task: str, method: str, cells: Mapping[int, Cell]) -> None:
        floors = {}
        for seed, cell in cells.items():
            correct = m.correct_per_question(cell.log_probs, cell.answers)
            floors[seed] = floor = m.noise_floor(
                m.confidence(cell.log_probs), correct, draws=self.draws, seed=self.seed
            )
            self.add(task, method, seed, "questions", len(correct))
            self.add(task, method, seed, "ece_floor", floor.mean, high=floor.high)
            self.add(task, method, seed, "ece_p", floor.p_value)
        if len(floors) > 1:
            mean, high = (float(np.mean([floor[i] for floor in floors.values()])) for i in (0, 1))
            self.add(task, method, None, "questions", len(correct))
            self.add(task, method, None, "ece_floor", mean, high=high)
            # Twice the mean of p-values is a p-value whatever their dependence (Rüschendorf 1982).
            p_value = min(1.0, 2 * float(np.mean([floor.p_value or 0.0 for floor in floors.values()])))
            self.add(task, method, None, "ece_p", p_value)

    def detection(self, shift: str) -> None:
        known: dict[tuple[bytes, ...], tuple[dict[str, Estimate], str | None]] = {}
        inside, outside = self.cells(self.group.source_task), self.cells(shift)
        for method in sorted(inside.keys() & outside.keys()):
            estimates: dict[tuple[str, str], dict[int, Estimate]] = {}
            unmatched: dict[str, dict[int | None, str]] = {}
            for seed in sorted(inside[method].keys() & outside[method].keys()):
                cells = inside[method][seed], outside[method][seed]
                lengths = [cell.prompt_tokens.astype(np.float64) for cell in cells]
                scored = {name: [cell.signals[name] for cell in cells if name in cell.signals] for name in SIGNALS}
                for signal, scores in (scored | {"prompt_tokens": lengths}).items():
                    if len(scores) < 2:
                        continue
                    # Prompt lengths, and the signals of methods that route alike, are the same arrays again and again.
                    content = tuple(array.tobytes() for array in (*scores, *lengths))
                    if content not in known:
                        known[content] = detection(
                            (scores[0], scores[1]), (lengths[0], lengths[1]), self.draws, self.seed
                        )
                    found, reason = known[content]
                    for metric, estimate in found.items():
                        estimates.setdefault((signal, metric), {})[seed] = estimate
                    if reason:
                        unmatched.setdefault(signal, {})[seed] = reason
            for (signal, metric), by_seed in estimates.items():
                self.add_seeds(shift, method, metric, by_seed, signal=signal)
            for signal, reasons in unmatched.items():
                if len(reasons) > 1:
                    reasons[None] = next(iter(reasons.values()))
                for (which, reason), metric in product(reasons.items(), ("auroc", "auprc", "fpr95")):
                    self.add(shift, method, which, f"{metric}_matched", None, signal=signal, note=reason)

    def score(self) -> list[Row]:
        source = self.group.source_task
        for seed, temperature in temperatures(self.group).items():
            self.add(source, "map+ts", seed, "temperature", temperature, split="validation")
        for task in sorted({key.task for key in self.group.cells if self.group.scores(key)}):
            self.calibration(task)
            if task != source and task in self.group.ood_tasks:
                self.detection(task)
        return self.rows


def score(directory: Path, draws: int = 500, seed: int = 0) -> list[Row]:
    """Every metric of the predictions in a directory, one row each, sorted; intervals from `draws` bootstrap draws."""
    rows = [row for group in load(directory) for row in _Scorer(group, draws, seed).score()]
    keys = ("study", "model", "task", "source", "split", "method", "signal", "metric", "seed")
    for row in rows:
        for name in ("value", "low", "high"):
            number = row[name]
            # Ten digits: the last ones depend on the machine's summation order, and the file should not.
            row[name] = None if number is None or not math.isfinite(number) else float(f"{number:.10g}")
    return sorted(rows, key=lambda row: [(row.get(key) is not None, row.get(key) or 0) for key in keys])


def write_text(path: Path, text: str) -> None:
    write_bytes(path, text.encode())


def write(directory: Path, draws: int = 500, seed: int = 0) -> Path:
    """Score a directory into its `metrics.json`, one row per line; the same predictions give the same bytes."""
    rows = score(directory, draws, seed)
    path = Path(directory) / "metrics.json"
    write_text(path, "[\n" + ",\n".join(json.dumps(row, allow_nan=False) for row in rows) + "\n]\n")
    return path
