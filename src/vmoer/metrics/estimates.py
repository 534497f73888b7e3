"""Metrics with their values on bootstrap draws.

A draw says how often each question is taken. All methods and seeds on a task see the same draws, so the values on the
draws are enough for everything that follows:

    an interval              the quantiles of the draws
    over seeds, nested       draw d is the mean over resampled seeds of their d-th draws
    a paired difference      the d-th draw of one method minus the d-th draw of the other
"""

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import NamedTuple, TypeVar

import numpy as np

from vmoer.errors import InputError
from vmoer.metrics import calibration as c
from vmoer.metrics import ood, selective
from vmoer.metrics._inputs import Floats, Ints
from vmoer.metrics.tally import Counts, Tally

MEANS = ("accuracy", "nll", "brier")
"""Averages over questions: resampling leaves them unbiased."""
_CHUNK = 50  # draws at a time: what they need stays in the processor's cache
_Counted = TypeVar("_Counted")


class Estimate(NamedTuple):
    """A metric: its value, and its values on the bootstrap draws."""

    value: float
    draws: Floats

    def __sub__(self, other: "Estimate") -> "Estimate":
        return Estimate(self.value - other.value, self.draws - other.draws)


@lru_cache(maxsize=8)
def multiplicities(sizes: tuple[int, ...], draws: int, seed: int) -> Counts:
    """How often each question is taken, [draws, sum(sizes)]: each of the data sets is resampled on its own.

    The stream for one data set is that of `metrics.bootstrap_metric`. A byte each is enough: no question is ever taken
    256 times in as many draws as there are questions.
    """
    rng, counts = np.random.default_rng(seed), np.empty((draws, sum(sizes)), dtype=np.uint8)
    for row in counts:
        row[:] = np.concatenate([np.bincount(rng.integers(n, size=n), minlength=n) for n in sizes])
    return counts


def calibration(log_probs: Floats, answers: Ints, draws: int, seed: int) -> dict[str, Estimate]:
    """Accuracy, proper scores, calibration errors and selective risks."""
    confidence, correct = c.confidence(log_probs), c.correct_per_question(log_probs, answers)
    scores = [correct, c.nll_per_question(log_probs, answers), c.brier_per_question(log_probs, answers)]
    counts = multiplicities((len(correct),), draws, seed)
    means = (counts.astype(np.float64) @ np.stack(scores, axis=1)).T / len(correct)
    values = {name: float(x.mean()) for name, x in zip(MEANS, scores, strict=True)}
    values |= {f.__name__: f(confidence, correct) for f in (c.ece, c.mce, c.debiased_ece, c.smooth_ece)}
    values |= {f.__name__: f(confidence, 1 - correct) for f in (selective.aurc, selective.augrc)}
    by_confidence = {"ece": c.ece_of, "mce": c.mce_of, "debiased_ece": c.debiased_ece_of, "smooth_ece": c.smooth_ece_of}
    by_confidence |= {"aurc": selective.aurc_of, "augrc": selective.augrc_of}
    order = np.argsort(-confidence, kind="stable")  # once for all chunks: sorting what is sorted takes no time
    confidence, correct = confidence[order], correct[order]
    drawn = _on_chunks(counts, lambda chunk: Tally(confidence, correct, chunk.take(order, axis=1)), by_confidence)
    drawn |= dict(zip(MEANS, means, strict=True))
    return {name: Estimate(value, drawn[name]) for name, value in values.items()}


def detection(
    scores: tuple[Floats, Floats], lengths: tuple[Floats, Floats], draws: int, seed: int
) -> tuple[dict[str, Estimate], str | None]:
    """AUROC, AUPRC and FPR95 of a score, on all prompts and on pairs of equally long ones.

    Args:
        scores: Those of the `in` prompts and those of the `out` prompts; higher means more out-of-distribution.
        lengths: Those of the same prompts.
        draws: The number of bootstrap draws.
        seed: Of the draws, and of the choice among equally long prompts.

    Returns:
        The estimates by name, `_matched` added for the pairs; and the reason where there are too few pairs, else None.
    """
    (scores_in, scores_out), (lengths_in, lengths_out) = scores, lengths
    if np.shape(lengths_in) != np.shape(scores_in) or np.shape(lengths_out) != np.shape(scores_out):
        raise InputError("there must be one length for every score")
    found = _detection(scores_in, scores_out, multiplicities((len(scores_in), len(scores_out)), draws, seed))
    pairs_in, pairs_out = ood.length_match(lengths_in, lengths_out, seed)
    if len(pairs_in) < ood.MIN_PAIRS:
        return found, f"not matchable: {len(pairs_in)} pairs of equally long prompts, {ood.MIN_PAIRS} needed"
    # Matched prompts are drawn as pairs, which keeps the lengths of both sides equal in every draw.
    counts = np.tile(multiplicities((len(pairs_in),), draws, seed), 2)
    matched = _detection(scores_in[pairs_in], scores_out[pairs_out], counts)
    return found | {f"{name}_matched": estimate for name, estimate in matched.items()}, None


def _detection(scores_in: Floats, scores_out: Floats, counts: Counts) -> dict[str, Estimate]:
    metrics = {"auroc": ood.auroc_of, "auprc": ood.auprc_of, "fpr95": ood.fpr95_of}
    once = ood.flagged(scores_in, scores_out)
    drawn = _on_chunks(counts, lambda chunk: ood.flagged(scores_in, scores_out, chunk), metrics)
    return {name: Estimate(float(metric(once)[0]), drawn[name]) for name, metric in metrics.items()}


def _on_chunks(
    counts: Counts, counted: Callable[[Counts], _Counted], metrics: Mapping[str, Callable[[_Counted], Floats]]
) -> dict[str, Floats]:
    """Each metric on all draws, [draws], a chunk of draws counted at a time."""
    parts: dict[str, list[Floats]] = {name: [] for name in metrics}
    for start in range(0, len(counts), _CHUNK):
        chunk = counted(counts[start : start + _CHUNK])
        for name, metric in metrics.items():
            parts[name].append(metric(chunk))
    return {name: np.concatenate(chunks) for name, chunks in parts.items()}


def over_seeds(estimates: list[Estimate], seed: int) -> Estimate:
    """The mean over seeds; on each draw, the mean over resampled seeds."""
    if len(estimates) == 1:
        return estimates[0]
    table = np.stack([estimate.draws for estimate in estimates])
    seeds, draws = table.shape
    picked = np.random.default_rng([seed, 1]).integers(seeds, size=(seeds, draws))
    return Estimate(float(np.mean([e.value for e in estimates])), table[picked, np.arange(draws)].mean(0))
