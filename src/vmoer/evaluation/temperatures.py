"""Calibrated answers beside those of the model itself, each under a label of its own.

METHOD+ts    p_T = softmax(log p / T),  T = argmin NLL on validation: one for each method and seed, fitted here
METHOD+cal   through the calibrator of the run that answered (metrics.calibrators), fitted before
"""

from pathlib import Path

from vmoer import metrics as m
from vmoer.errors import InputError
from vmoer.evaluation import predictions
from vmoer.evaluation.predictions import Answered, Floats, Key, Predictions, entropy


def temperatures(group: Predictions) -> dict[tuple[str, int], float]:
    """The temperature of every method and seed that has validation answers, unless validation is what is scored."""
    fitted = {
        (key.method, key.seed): m.fit_temperature(cell.log_probs, cell.answers)
        for key, cell in group.cells.items()
        if key[:2] == (group.source_task, "validation") and not group.scores(key)
    }
    return dict(sorted(fitted.items()))


def load(directory: Path) -> list[Predictions]:
    """The predictions under a directory, and a second time each method that has a temperature, or a run's calibrator."""
    groups = predictions.load(directory)
    for group in groups:
        found = temperatures(group)
        for key, cell in list(group.cells.items()):
            if not group.scores(key):
                continue
            if (key.method, key.seed) in found:
                scaled = m.apply_temperature(cell.log_probs, found[key.method, key.seed])
                group.cells[key._replace(method=f"{key.method}+ts")] = _through(cell, scaled)
            if (mapped := _calibrated(group, key, cell)) is not None:
                group.cells[key._replace(method=f"{key.method}+cal")] = _through(cell, mapped)
    return groups


def _through(cell: Answered, log_probs: Floats) -> Answered:
    """The same answers with other probabilities; of the signals only those that follow from them."""
    return cell._replace(log_probs=log_probs, signals={"predictive_entropy": entropy(log_probs)})


def _calibrated(group: Predictions, key: Key, cell: Answered) -> Floats | None:
    """Through the calibrator of the run; None where it has none, has seen these questions, or does not fit them."""
    stored = group.calibrators.get((key.method, key.seed))
    if stored is None or (key.task == stored.file["task"] and key.split in ("validation", "all")):
        return None
    try:
        return stored.apply(cell.log_probs)
    except InputError:  # another number of options: `vmoer eval` says so
        return None
