"""What the labels of methods mean, and which of them a figure shows: by a fixed order, never by a result."""

import re
from collections.abc import Iterable

from vmoer.evaluation.scores import BASELINES
from vmoer.routers import controls, methods

MOST = 8  # labels in one figure
ORDER: tuple[str, ...] = ("map", "mean-only", "vglr-fc", "vglr-mf", "vglr-lr", "vtsr", "laplace", "swag", "mcdr")
ORDER += ("lora-dropout", "blob", "laplace-lora", "temp-scale", "tuned-noise", "fixed-noise", "map-early")
"""Methods that are not named here come after these."""
OTHERS = {
    "lora-dropout": "on all questions: dropout in the adapter, in training and in every pass",
    "blob": "on all questions: a Gaussian over the adapter, learned in stage 1 (BLoB)",
    "laplace-lora": "on all questions: a Laplace posterior over the adapter, after stage 1",
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


def meanings() -> dict[str, str]:
    """What each method, control and adapter is, in the order of figures."""
    found = {key: known.about for key, known in (methods() | controls()).items()} | OTHERS
    return {key: found.pop(key) for key in ORDER if key in found} | found


def split(label: str) -> list[str]:
    """ "vglr-fc@paper+full4+ts" as ["vglr-fc", "@paper", "+full", "+ts"]: how many passes there were is left out."""
    return re.findall(r"^[^@+]+|@[^@+]+|\+[a-z]+", label)


def ordered(labels: Iterable[str]) -> list[str]:
    """Labels in a fixed order: plain ones, then averaged ones, then presets; of twins the one with a temperature first."""
    known, keys = set(labels), list(meanings())

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
    return [(part, words) for part, words in (meanings() | PARTS).items() if part in parts and words]


def baseline(labels: Iterable[str]) -> str | None:
    """The calibrated base where there is one, else the plain one."""
    return next((name for name in reversed(BASELINES) if name in set(labels)), None)
