"""Calibrating a run or a model: it answers validation questions, and the answers choose a map (metrics.calibrators).

    RUN/calibrator.json    the map, listed in the run's manifest; every command that answers with letters uses it

A model that is no run becomes one: a `map` run, with the model's own routing bit for bit, the calibrator and nothing else.
Answers are kept in `.calibrate/` until the calibrator is written, so a process that was killed goes on from there.
"""

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from vmoer import metrics as m
from vmoer.errors import InputError
from vmoer.evaluation import predictions
from vmoer.evaluation.answers import predict_task
from vmoer.live.attach import attach, attachment_of
from vmoer.metrics.calibrators import Choice, choose
from vmoer.metrics.resampling import Interval
from vmoer.models import Opened
from vmoer.routers import Deterministic
from vmoer.saved import calibrator as files
from vmoer.saved import manifest
from vmoer.saved.calibrator import Stored
from vmoer.saved.store import read_run, save
from vmoer.tasks import Question

SCRATCH = ".calibrate"


class Calibrated(NamedTuple):
    """A calibrator as it was stored, and what it is worth on questions that it was not fitted on."""

    stored: Stored
    before: dict[str, Interval]
    """nll, brier, debiased_ece of the answers as they are."""
    after: dict[str, Interval]
    """The same of each question through a map that was fitted without it."""
    difference: dict[str, Interval]
    """After minus before, paired; of the proper scores."""


def settings(stored: Stored | None, averaging: str | None, passes: int | None) -> tuple[str, int]:
    """Averaging and passes: those asked for, else those that the calibrator was fitted for, else "router"."""
    if stored is None or stored.kind == "none":
        return averaging or "router", 8 if passes is None else passes
    own = averaging in (None, stored.averaging) and stored.averaging != "router"
    default = stored.passes if own else 8
    return averaging or stored.averaging, default if passes is None else passes


def target_of(name: str | Path, out: Path | None) -> Path:
    """The folder that the calibrator goes to: `out`, or the run itself."""
    folder = Path(name)
    run = folder.is_dir() and (folder / "router.json").exists() and not (folder / "config.json").exists()
    if out is None and not run:
        raise InputError(f"{name} is not a folder of a run: give --out, the folder to write")
    if run and out is not None:
        raise InputError(f"{name} is a run, and keeps its calibrator itself: leave --out out")
    if out is None:
        return folder
    if manifest.complete(out) and read_run(out).get("calibrated") != str(name):
        raise InputError(f"{out} holds another run: choose another folder")
    return out


def calibrate(
    name: str | Path,
    opened: Opened,
    questions: Sequence[Question],
    *,
    folder: Path,
    averaging: str = "router",
    passes: int = 8,
    kind: str = "auto",
    batch_tokens: int = 8192,
    progress: Callable[[str, int, int], object] | None = None,
) -> Calibrated:
    """Answer questions, choose a calibrator on the answers, and store it with the run.

    Args:
        name: what was opened, as the user wrote it.
        opened: the model.
        questions: of one task's validation split.
        folder: of `target_of`.
        averaging: how answers are averaged; the calibrator is for such answers alone. So are `passes`.
        kind: none, temperature, vector, isotonic, or auto: the one of least cross-validated NLL.
        batch_tokens: the size of a batch with its padding.
        progress: as `predict_task` calls it.
    """
    if attachment_of(opened.model) is None:
        attach(opened.model, Deterministic())
    said, scratch = opened.run or {}, folder / SCRATCH
    how: dict[str, Any] = {"name": opened.name, "method": said.get("method"), "seed": int(said.get("seed", 0))}
    how |= {"averaging": averaging, "passes": passes, "batch_tokens": batch_tokens}
    predict_task(opened.model, opened.tokenizer, questions, folder=scratch, progress=progress, **how)
    (group,) = predictions.load(scratch)
    ((key, cell),) = group.cells.items()
    choice = choose(cell.log_probs, cell.answers, cell.ids, kind)
    options = [len(question.choices) for question in questions]
    content = files.described(
        choice, options=options, averaging=averaging, passes=passes, task=key.task, method=key.method
    )
    stored = _store(str(name), opened, folder, content)
    shutil.rmtree(scratch)
    return Calibrated(stored, *_worth(choice, cell.log_probs, cell.answers))


def _store(name: str, opened: Opened, folder: Path, content: dict[str, Any]) -> Stored:
    if Path(name).is_dir() and folder.resolve() == Path(name).resolve():
        return files.write(folder, content)
    run = {"task": content["task"], "method": content["method"], "seed": 0}
    run |= (opened.run or {}) | {"model": opened.name, "calibrated": name}
    save(opened.model, folder, run=run, calibrator=content)
    return files.parse(manifest.read_member(folder, files.NAME), folder / files.NAME)


def _worth(
    choice: Choice, log_probs: Any, answers: Any
) -> tuple[dict[str, Interval], dict[str, Interval], dict[str, Interval]]:
    scores = {"nll": m.nll_per_question, "brier": m.brier_per_question}
    found = []
    for answered in (log_probs, choice.held_out):
        own = {name: m.bootstrap(score(answered, answers)) for name, score in scores.items()}
        sure, right = m.confidence(answered), m.correct_per_question(answered, answers)
        found.append(own | {"debiased_ece": m.bootstrap_metric(m.debiased_ece, sure, right)})
    paired = {
        name: m.paired_bootstrap(score(choice.held_out, answers), score(log_probs, answers))
        for name, score in scores.items()
    }
    return found[0], found[1], paired
