"""What the labels of methods mean, and which of them a figure shows: by a fixed order, never by a result."""

import re
from collections.abc import Iterable

from vmoer.evaluation.scores import BASELINES

MOST = 8  # labels in one figure
METHODS = {
    "map": "the model after stage 1, with its own router",
    "mean-only": "control: a trained shift of the router's logits, without variance",
    "vglr-fc": "variational router: Gaussian logits, experts correlated",
    "vglr-mf": "variational router: Gaussian logits, experts independent",
    "vglr-lr": "variational router: Gaussian logits, correlated by a few factors",
    "vtsr": "variational router: experts sampled at a temperature learned for each token",
    "laplace": "closed-form posterior over the router's weights",
    "swag": "Gaussian over the router's weights, from the path of their training",
    "mcdr": "dropout on the router's input",
    "lora-dropout": "on all questions: dropout in the adapter, in training and in every pass",
    "blob": "on all questions: a Gaussian over the adapter, learned in stage 1 (BLoB)",
    "laplace-lora": "on all questions: a Laplace posterior over the adapter, after stage 1",
    "temp-scale": "experts sampled at one temperature for all tokens",
    "tuned-noise": "control: untrained noise on the logits, its size chosen on validation",
    "fixed-noise": "control: untrained noise on the logits, of a fixed size",
    "map-early": "stage 1 in its best state on validation",
}
PARTS = {
    "@paper": "trained by the paper's protocol",
    "+answer": "answers averaged over copies of the last token",
    "+full": "answers averaged over whole passes",
    "+orders": "answers averaged over orders of the options",
    "+routing": "each order with a routing sample of its own",
    "+ts": "with one output temperature, fitted on the validation questions of the source task",
    "+cal": "through the run's own calibrator (vmoer calibrate)",
}


def split(label: str) -> list[str]:
    """ "vglr-fc@paper+full4+ts" as ["vglr-fc", "@paper", "+full", "+ts"]: how many passes there were is left out."""
    return re.findall(r"^[^@+]+|@[^@+]+|\+[a-z]+", label)


def ordered(labels: Iterable[str]) -> list[str]:
    """Labels in a fixed order: plain ones, then averaged ones, then presets; of twins the one with a temperature first."""
    known, keys = set(labels), list(METHODS)

    def rank(label: str) -> tuple[bool, bool, bool, int, str]:
        key, *parts = split(label) or [label]
        averaged = any(part not in ("@paper", "+ts") for part in parts)
        place = keys.index(key) if key in keys else len(keys)
        return "@" in label, averaged, f"{label}+ts" in known, place, label

    return sorted(known, key=rank)


def shown(labels: Iterable[str], baseline: str) -> list[str]:
    """The labels that a figure shows beside a baseline."""
    return [label for label in ordered(labels) if label != baseline][:MOST]


def legend(labels: Iterable[str]) -> list[tuple[str, str]]:
    """What each part of these labels means, where it is known."""
    parts = {part for label in labels for part in split(label)}
    return [(part, words) for part, words in (METHODS | PARTS).items() if part in parts]


def baseline(labels: Iterable[str]) -> str | None:
    """The calibrated base where there is one, else the plain one."""
    return next((name for name in reversed(BASELINES) if name in set(labels)), None)
