"""The limit on a signal below which answers are wrong at most so often, and what that costs: `threshold.json`.

It is chosen on validation, with a promise (`metrics.selective.promised_threshold`), then held against test. The promise is for a
model that was fixed before it saw these questions: where they also chose its early stopping, its beta or its calibrator, test has
the last word. Letters go through the run's calibrator where it has one; where it has none, the file also has the output
temperature that makes the validation answers likeliest.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import numpy.typing as npt

from vmoer import metrics as m
from vmoer.errors import InputError, is_number
from vmoer.evaluation import predictions
from vmoer.evaluation.answers import predict_task
from vmoer.evaluation.calibrators import settings
from vmoer.evaluation.predictions import entropy
from vmoer.files import read_json, sealed, unsealed, write_json
from vmoer.metrics.selective import accepted, promised_threshold
from vmoer.models import open_model
from vmoer.saved import manifest
from vmoer.saved.store import read_run
from vmoer.tasks import load

FILE, FORMAT = "threshold.json", 2
Form = Literal["letters", "text"]
"""What questions were answered with: a letter (`vmoer eval`), or a text of its own (examples/short_answers.py)."""
_COLUMNS = ("id", "task", "split", "method", "seed", "correct")  # of answers.parquet; every other number is a score


class Threshold(NamedTuple):
    """A value above which to abstain. `file` is the content of `threshold.json`; it is empty where a number was given."""

    value: float
    file: dict[str, Any]

    @property
    def form(self) -> Form | None:
        return self.file.get("form")

    def __str__(self) -> str:
        return "any value" if self.value >= 1e300 else f"{self.value:.4g}"


class Graded(NamedTuple):
    """The answers to one split: 1 where an answer is wrong, else 0, and the signals of each."""

    errors: npt.NDArray[np.float64]
    signals: dict[str, npt.NDArray[np.float64]]


class Source(NamedTuple):
    """The answers of one method that a threshold is chosen on."""

    form: Form
    about: dict[str, Any]
    """Whose answers these are, and how they were given: what `ask` needs to give such an answer again."""
    splits: dict[str, Graded]
    """validation, and the split that is scored where there is one"""


def choose(source: Source, signal: str | None, risk: float, confidence: float) -> dict[str, Any]:
    """The content of `threshold.json`. Without a signal it is on `predictive_entropy`, or on the score of a text."""
    validation = source.splits["validation"]
    signal = signal or ("predictive_entropy" if source.form == "letters" else str(source.about["score"]))
    if signal not in validation.signals:
        raise InputError(f"signal={signal!r}: choose one of {', '.join(validation.signals)}")
    try:
        promise = promised_threshold(validation.signals[signal], validation.errors, risk, confidence)
    except InputError as error:
        raise InputError(f"{signal}: {error}") from None
    chosen = {"format": FORMAT, "form": source.form, **source.about, "signal": signal, "threshold": promise.threshold}
    chosen |= {"risk": risk, "confidence": confidence, "promised_risk": promise.risk}
    for split, graded in source.splits.items():
        kept = accepted(graded.signals[signal], graded.errors, promise.threshold, confidence)
        chosen[split] = {"questions": kept.questions, "answered": kept.accepted, "errors": kept.errors}
        chosen[split] |= {"coverage": list(kept.coverage), "risk": list(kept.risk)}
        chosen[split] |= {"risk_of_all": float((graded.errors > 0).mean())}
    return chosen


def write_threshold(path: Path, chosen: dict[str, Any]) -> None:
    """Write the file, with a checksum of its own."""
    write_json(path, sealed(chosen))


def read_threshold(path: Path) -> Threshold:
    """A threshold file (or the one in a folder), checked."""
    path = path / FILE if path.is_dir() else path
    if not path.exists():
        raise InputError(f"{path}: no such file; give a number, or a threshold file of `vmoer threshold`")
    chosen = read_json(path)
    if isinstance(chosen, dict) and chosen.get("format") == FORMAT:
        chosen = unsealed(chosen, path)
    known = isinstance(chosen, dict) and chosen.get("format") == FORMAT and chosen.get("form") in get_args(Form)
    if not known or not isinstance(chosen.get("signal"), str) or "threshold" not in chosen:
        raise InputError(f"{path} is not a threshold file of this version of vmoer: run vmoer threshold again")
    temperature = chosen.get("temperature", 1.0)
    if not is_number(temperature) or temperature <= 0:
        raise InputError(f"{path} has no number for a temperature")
    if not is_number(chosen["threshold"]):
        raise InputError(f"{path} has no number for a threshold")
    return Threshold(float(chosen["threshold"]), chosen)


# -- answers -----------------------------------------------------------------------------------------------------------


def unanswered(folder: Path) -> bool:
    """Whether the folder is a run of `vmoer train` that has answered no questions yet."""
    if not folder.is_dir():
        raise InputError(f"{folder}: no such folder")
    answered = any(any(folder.glob(f"{where}.parquet")) for where in ("answers", "predictions", "*/predictions"))
    return not answered and manifest.complete(folder)


def answer_run(
    run: Path,
    *,
    data_root: Path | None = None,
    device: str | None = None,
    dtype: str | None = None,
    progress: Callable[[str, int, int], object] | None = None,
) -> None:
    """Answer the validation and test questions of a run's own task into RUN/eval."""
    task = read_run(run).get("task")
    if task is None:
        raise InputError(f"{run} does not say which task it was trained on: run vmoer eval, and give its folder")
    questions = [q for split in ("test", "validation") for q in load(task, split, data_root=data_root)]
    opened = open_model(run, device=device, dtype=dtype)
    said = opened.run or {}
    labels: dict[str, Any] = {"name": opened.name, "method": said.get("method"), "seed": said.get("seed", 0)}
    averaging: Any
    averaging, passes = settings(opened.calibrator, None, None)
    labels |= {"averaging": averaging, "passes": passes, "calibrator": opened.calibrator}
    predict_task(opened.model, opened.tokenizer, questions, folder=run / "eval", progress=progress, **labels)


def read_source(folder: Path, method: str | None = None, seed: int | None = None, calibrated: bool = True) -> Source:
    """The answers in a folder, of the method and seed asked for where there are several.

    They go through the calibrator of the run that answered, where it had one, unless `calibrated` is False.
    """
    if (folder / predictions.TEXTS).exists():
        return _texts(folder, method, seed)
    return _letters(folder, method, seed, calibrated)


def _letters(folder: Path, method: str | None, seed: int | None, calibrated: bool) -> Source:
    cells = [(group, key) for group in predictions.load(folder) for key in group.cells]
    if method is None and (folder / predictions.BASE).is_dir():  # a run's answers, with the plain model's beside them
        method = predictions.read_meta(folder / "meta.json").get("method")
    valid = [(g, key) for g, key in cells if key.split == "validation" and key.task == g.source_task]
    group, key = _only({(key.method, key.seed, key.task, g.model): (g, key) for g, key in valid}, method, seed, folder)
    splits = {"validation": group.cells[key]}
    if group.split != "validation" and key._replace(split=group.split) in group.cells:
        splits[group.split] = group.cells[key._replace(split=group.split)]
    stored = group.calibrators.get((key.method, key.seed)) if calibrated else None
    if stored is not None:
        mapped = {split: (cell, stored.apply(cell.log_probs)) for split, cell in splits.items()}
        splits = {
            split: cell._replace(log_probs=log_probs, signals=cell.signals | {"predictive_entropy": entropy(log_probs)})
            for split, (cell, log_probs) in mapped.items()
        }
    graded = {}
    for split, cell in splits.items():
        signals = cell.signals | {"least_confidence": 1 - m.confidence(cell.log_probs)}
        signals["prompt_tokens"] = cell.prompt_tokens.astype(np.float64)
        graded[split] = Graded(1 - m.correct_per_question(cell.log_probs, cell.answers), signals)
    about: dict[str, Any] = {"model": group.model, "method": key.method, "seed": key.seed, "task": key.task}
    cell = group.cells[key]
    if stored is not None:
        about["calibrator"] = stored.digest
    else:
        about["temperature"] = m.fit_temperature(cell.log_probs, cell.answers)
    meta = _meta(folder)
    return Source("letters", about | {name: meta[name] for name in ("averaging", "passes") if name in meta}, graded)


def _texts(folder: Path, method: str | None, seed: int | None) -> Source:
    """`answers.parquet`: a row a question with `id, task, split, method, seed, correct`, and a column for each score."""
    path = folder / predictions.TEXTS
    columns = predictions.read_parquet(path).to_pydict()
    if missing := [name for name in _COLUMNS if name not in columns]:
        raise InputError(f"{path}: missing column {', '.join(missing)}")
    whose = list(zip(columns["method"], columns["seed"], columns["task"], strict=True))
    valid = {who: who for who, split in zip(whose, columns["split"], strict=True) if split == "validation"}
    wanted = _only(valid, method, seed, folder)
    graded: dict[str, Graded] = {}
    for split in ("validation", "test"):
        rows = [i for i, who in enumerate(whose) if who == wanted and columns["split"][i] == split]
        if rows:
            signals = {n: np.array([v[i] for i in rows]) for n, v in columns.items() if isinstance(v[rows[0]], float)}
            signals = {name: values for name, values in signals.items() if not np.isnan(values).any()}
            graded[split] = Graded(1 - np.array([float(columns["correct"][i]) for i in rows]), signals)
    about = dict(zip(("method", "seed", "task"), wanted, strict=True))
    return Source("text", {"model": None, "score": "sequence_nll"} | _meta(folder) | about, graded)


def _only(found: dict[tuple[Any, ...], Any], method: str | None, seed: int | None, folder: Path) -> Any:
    """The one that was asked for, of what is named by (method, seed, task, ...)."""
    if not found:
        raise InputError(
            f"{folder} has no validation answers, and a threshold is chosen on those (vmoer eval writes them)"
        )
    left = [key for key in found if method in (None, key[0]) and seed in (None, key[1])]
    if len(left) == 1:
        return found[left[0]]
    which = "choose by --method and --seed from" if left else "there is only"
    names = sorted(f"{key[0]} seed {key[1]} on {key[2]}" for key in left or found)
    raise InputError(f"{folder}: {which} {', '.join(names)}")


def _meta(folder: Path) -> dict[str, Any]:
    """How the answers were given, where one file says so for all."""
    paths = [path for path in (folder / "meta.json", *sorted(folder.glob("*/meta.json"))) if path.exists()]
    if len(paths) > 1 and paths[0].parent == folder:  # the plain model's lie beside it
        paths = [path for path in paths if path.parent.name != predictions.BASE]
    meta = predictions.read_meta(paths[0]) if len(paths) == 1 else {}
    return {name: meta[name] for name in ("model", "averaging", "passes", "score") if name in meta}
