"""`vmoer threshold DIR --risk R`: the limit on a signal below which answers are wrong at most so often, and what it costs.

Chosen on validation, with a promise (`metrics.selective.promised_threshold`), then held against test. The promise is for a model
that was fixed before it saw these questions: where they also chose its early stopping or its beta, test has the last word.
With letters the file also has the output temperature that makes the validation answers likeliest: `vmoer ask` gives
probabilities at it.
"""

import json
import math
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import typer

from vmoer.commands._shared import DataRoot, Device, Dtype, Json, check_device, quiet, table
from vmoer.errors import InputError
from vmoer.metrics._inputs import Floats

FILE, FORMAT = "threshold.json", 1
LETTERS, TEXT = "letters", "text"
"""What the questions were answered with: a letter (`vmoer eval`), or a text of its own (examples/short_answers.py)."""


class Answered(NamedTuple):
    """The answers of one method on one split."""

    questions: int
    errors: Floats
    signals: dict[str, Floats]


class Found(NamedTuple):
    form: str
    about: dict[str, Any]
    """Whose answers these are, and how they were given: what `ask` needs to give such an answer again."""
    splits: dict[str, Answered]
    """validation, and the split that is scored where there is one"""


def threshold(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A folder of `vmoer eval`, or a run of `vmoer train`.")],
    risk: Annotated[float, typer.Option(help="The largest share of wrong answers among those given.")] = 0.1,
    confidence: Annotated[float, typer.Option(help="How sure that is to be.")] = 0.95,
    signal: Annotated[
        str | None, typer.Option(help="Abstain on large values of this; by default predictive_entropy, or the score.")
    ] = None,
    method: Annotated[str | None, typer.Option(help="Whose answers, where the folder holds several.")] = None,
    seed: Annotated[int | None, typer.Option(help="Of which seed, where there are several.")] = None,
    out: Annotated[Path | None, typer.Option(help="The file to write; by default DIR/threshold.json.")] = None,
    data_root: DataRoot = None,
    device: Device = None,
    dtype: Dtype = None,
    as_json: Json = False,
) -> None:
    """Choose when to abstain: the threshold on validation for a wanted risk, its coverage and risk on test."""
    found = read_answers(folder, method, seed, data_root, device, dtype)
    chosen = choose(found, signal, risk, confidence)
    from vmoer.files import write_json

    path = out or folder / FILE
    write_json(path, chosen)
    if as_json:
        print(json.dumps(chosen, indent=2))
        return
    show(chosen)
    print(f'{path}; next: vmoer ask MODEL --router RUN "question" --abstain-above {path}')


def choose(found: Found, signal: str | None, risk: float, confidence: float) -> dict[str, Any]:
    """What `threshold.json` says."""
    from vmoer.metrics.selective import accepted, promised_threshold

    validation = found.splits["validation"]
    signal = signal or ("predictive_entropy" if found.form == LETTERS else str(found.about["score"]))
    if signal not in validation.signals:
        raise InputError(f"signal={signal!r}: choose one of {', '.join(validation.signals)}")
    try:
        promise = promised_threshold(validation.signals[signal], validation.errors, risk, confidence)
    except InputError as error:
        raise InputError(f"{signal}: {error}") from None
    chosen = {"format": FORMAT, "form": found.form, **found.about, "signal": signal, "threshold": promise.threshold}
    chosen |= {"risk": risk, "confidence": confidence, "promised_risk": promise.risk}
    for split, answered in found.splits.items():
        kept = accepted(answered.signals[signal], answered.errors, promise.threshold, confidence)
        chosen[split] = {"questions": kept.questions, "answered": kept.accepted, "errors": kept.errors}
        chosen[split] |= {"coverage": list(kept.coverage), "risk": list(kept.risk)}
        chosen[split] |= {"risk_of_all": float((answered.errors > 0).mean())}
    return chosen


def show(chosen: dict[str, Any]) -> None:
    def interval(numbers: list[float]) -> str:
        return f"{numbers[0]:.3f} [{numbers[1]:.3f}, {numbers[2]:.3f}]"

    what = f"answer where {chosen['signal']} <= {shown(chosen['threshold'])}"
    header = ("split", "questions", "answered", "coverage", "errors", "risk", "risk of all")
    rows = []
    for split in [name for name in chosen if isinstance(chosen[name], dict)]:
        s = chosen[split]
        cells = (split, s["questions"], s["answered"], interval(s["coverage"]), s["errors"], interval(s["risk"]))
        rows.append((*cells, f"{s['risk_of_all']:.3f}"))
    table(f"{chosen['method']} on {chosen['task']}: {what}", header, rows)
    print(
        f"risk is at most {chosen['promised_risk']:.3f} with confidence {chosen['confidence']:g} (exact, on validation)"
    )


def shown(limit: float) -> str:
    return "any value" if limit >= 1e300 else f"{limit:.4g}"


# -- files -------------------------------------------------------------------------------------------------------------


def read_threshold(path: Path) -> dict[str, Any]:
    """A file that this command wrote (or the folder it lies in), checked."""
    path = path / FILE if path.is_dir() else path
    try:
        chosen = json.loads(path.read_text())
        known = isinstance(chosen, dict) and chosen.get("format") == FORMAT and chosen.get("form") in (LETTERS, TEXT)
    except OSError:
        raise InputError(f"{path}: no such file; give a number, or a threshold file of `vmoer threshold`") from None
    except ValueError as error:
        raise InputError(f"{path} is not valid JSON: {error}") from None
    if not known or not isinstance(chosen.get("signal"), str) or not isinstance(chosen.get("threshold"), int | float):
        raise InputError(f"{path} is not a threshold file of this version of vmoer")
    if not isinstance(chosen.get("temperature", 1.0), int | float):
        raise InputError(f"{path} has no number for a temperature")
    if math.isnan(chosen["threshold"]):
        raise InputError(f"{path} has no number for a threshold")
    return chosen


def read_answers(
    folder: Path,
    method: str | None,
    seed: int | None,
    data_root: Path | None = None,
    device: str | None = None,
    dtype: str | None = None,
) -> Found:
    if not folder.is_dir():
        raise InputError(f"{folder}: no such folder")
    if (folder / "answers.parquet").exists():
        return _texts(folder, method, seed)
    evaluated = (folder / "predictions.parquet").exists() or any(folder.glob("*/predictions.parquet"))
    if not evaluated and (folder / "run.json").exists():
        _evaluate(folder, data_root, device, dtype)
    return _letters(folder, method, seed)


def _letters(folder: Path, method: str | None, seed: int | None) -> Found:
    from vmoer import metrics as m
    from vmoer import predictions

    cells = [(group, key) for group in predictions.load(folder) for key in group.cells]
    valid = [(g, key) for g, key in cells if key.split == "validation" and key.task == g.source_task]
    group, key = _only({(key.method, key.seed, key.task, g.model): (g, key) for g, key in valid}, method, seed, folder)
    splits = {"validation": group.cells[key]}
    if group.split != "validation" and key._replace(split=group.split) in group.cells:
        splits[group.split] = group.cells[key._replace(split=group.split)]
    found = {}
    for split, cell in splits.items():
        signals = cell.signals | {"least_confidence": 1 - m.confidence(cell.log_probs)}
        signals["prompt_tokens"] = cell.prompt_tokens.astype(np.float64)
        found[split] = Answered(len(cell.ids), 1 - m.correct_per_question(cell.log_probs, cell.answers), signals)
    about: dict[str, Any] = {"model": group.model, "method": key.method, "seed": key.seed, "task": key.task}
    cell = group.cells[key]
    about["temperature"] = m.fit_temperature(cell.log_probs, cell.answers)
    meta = _meta(folder)
    return Found(LETTERS, about | {name: meta[name] for name in ("averaging", "passes") if name in meta}, found)


def _texts(folder: Path, method: str | None, seed: int | None) -> Found:
    """`answers.parquet`: a row a question with `id, task, split, method, seed, correct`, and a column for each score."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    path, keys = folder / "answers.parquet", ("id", "task", "split", "method", "seed", "correct")
    try:
        columns = pq.read_table(path).to_pydict()
    except (pa.ArrowException, OSError) as error:
        raise InputError(f"{path}: not a readable parquet file ({str(error).splitlines()[0]})") from None
    if missing := [name for name in keys if name not in columns]:
        raise InputError(f"{path}: missing column {', '.join(missing)}")
    whose = list(zip(columns["method"], columns["seed"], columns["task"], strict=True))
    valid = {who: who for who, split in zip(whose, columns["split"], strict=True) if split == "validation"}
    wanted = _only(valid, method, seed, folder)
    found: dict[str, Answered] = {}
    for split in ("validation", "test"):
        rows = [i for i, who in enumerate(whose) if who == wanted and columns["split"][i] == split]
        if rows:
            signals = {n: np.array([v[i] for i in rows]) for n, v in columns.items() if isinstance(v[rows[0]], float)}
            signals = {name: values for name, values in signals.items() if not np.isnan(values).any()}
            errors = 1 - np.array([float(columns["correct"][i]) for i in rows])
            found[split] = Answered(len(rows), errors, signals)
    about = dict(zip(("method", "seed", "task"), wanted, strict=True))
    return Found(TEXT, {"model": None, "score": "sequence_nll"} | _meta(folder) | about, found)


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
    try:
        meta = json.loads(paths[0].read_text()) if len(paths) == 1 else {}
    except ValueError as error:
        raise InputError(f"{paths[0]} is not valid JSON: {error}") from None
    return {name: meta[name] for name in ("model", "averaging", "passes", "score") if name in meta}


def _evaluate(run: Path, data_root: Path | None, device: str | None, dtype: str | None) -> None:
    """A run that was not evaluated yet: its task's validation and test questions are answered into RUN/eval."""
    from vmoer.models import open_model, read_run
    from vmoer.predict import predict_task
    from vmoer.tasks import load

    quiet()
    check_device(device, dtype)
    task = read_run(run).get("task")
    if task is None:
        raise InputError(f"{run} does not say which task it was trained on: run vmoer eval, and give its folder")
    questions = [q for split in ("test", "validation") for q in load(task, split, data_root=data_root)]
    opened = open_model(run, device=device, dtype=dtype)
    said = opened.run or {}
    labels: dict[str, Any] = {"name": opened.name, "method": said.get("method"), "seed": said.get("seed", 0)}
    predict_task(opened.model, opened.tokenizer, questions, folder=run / "eval", progress=True, **labels)
