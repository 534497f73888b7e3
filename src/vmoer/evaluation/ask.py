"""One question to a model: a free answer, or a choice between options, and whether a threshold lets it pass.

A threshold that is a number is held against the answer's score. One from a file is held against the signal that the file names,
and the answer is made as the file says. A file chosen on letters is meant for questions with options. Held against a free
answer, it is read at that answer's first token, where a letter would have been, and promises nothing there. Options'
probabilities are those at the file's output temperature; signals are the model's own, which the threshold is on.
"""

import math
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from vmoer.errors import InputError
from vmoer.evaluation.answers import answer_questions
from vmoer.evaluation.calibrators import settings
from vmoer.evaluation.predictions import entropy
from vmoer.evaluation.threshold import Threshold
from vmoer.inference.generation import SCORE, Answer, generate
from vmoer.live.attach import attachment_of
from vmoer.live.inputs import context_length
from vmoer.metrics import apply_temperature
from vmoer.models import Opened
from vmoer.saved.calibrator import Stored
from vmoer.tasks import LETTERS, Question
from vmoer.tasks.prompt import encode, freely


class Asked(NamedTuple):
    """An answer, and what it may be judged by."""

    record: dict[str, Any]
    """The answer: `text` and `score`; with options their letters' `probabilities`, else `tokens` with their signals."""
    score: str
    """The name of the score."""
    judged: dict[str, float]
    """Every score or signal that a threshold may be on."""


class Verdict(NamedTuple):
    """The value that decides, by its name, and whether it is too large to answer."""

    signal: str
    value: float
    abstained: bool


def answer_text(
    opened: Opened,
    question: str,
    *,
    threshold: Threshold | None = None,
    score: str | None = None,
    max_new_tokens: int = 128,
    passes: int | None = None,
    seed: int = 0,
) -> Asked:
    """A text, through the chat template where the tokenizer has one, else up to the end of a line."""
    file = threshold.file if threshold else {}
    own = file.get("form") == "text"
    if passes is None:
        passes = int(file.get("passes") or 0) if own else 0
    prompt = freely(opened.tokenizer, question)
    more: dict[str, Any] = {"stop_strings": ["\n"]} if isinstance(prompt, str) else {}
    more |= {"max_new_tokens": max_new_tokens, "passes": passes, "score": score or SCORE, "seed": seed}
    found = generate(opened.model, opened.tokenizer, prompt, **more)
    assert isinstance(found, Answer)
    if score is None:
        score = file["signal"] if own and file["signal"] in found.scores else SCORE
    judged = dict(found.scores)
    if file.get("form") == "letters":
        judged = {name: values[0] for name, values in found.signals.items()}
        judged |= {"least_confidence": -math.expm1(found.log_probs[0]), score: found.scores[score]}
        warnings.warn(
            f"the threshold was chosen on the letters of {file.get('task')}: for a free answer, read at its first token, it "
            "promises nothing",
            stacklevel=1,
        )
    tokens = [
        {"text": piece, "log_prob": log_prob, **{name: values[n] for name, values in found.signals.items()}}
        for n, (piece, log_prob) in enumerate(zip(found.pieces, found.log_probs, strict=True))
    ]
    record = {"text": found.text.strip(), "tokens": tokens, "score": found.scores[score], "scores": found.scores}
    record["ranks"] = ranks(opened.run, "text", {name: values[0] for name, values in found.signals.items()})
    return Asked(record, score, judged)


def ranks(run: Mapping[str, Any] | None, form: str, signals: Mapping[str, float]) -> dict[str, float]:
    """The share of the run's validation questions whose signal is smaller, for each signal that the run has a reference of.

    Args:
        run: what `run.json` says.
        form: `letters` or `text`, as the question was asked.
        signals: where the answer starts.
    """
    known = (run or {}).get("reference")
    levels = known.get(form) if isinstance(known, dict) else None
    found = {}
    for name, value in signals.items() if isinstance(levels, dict) else []:
        quantiles = levels.get(name) if isinstance(levels, dict) else None
        if isinstance(quantiles, list) and quantiles and all(isinstance(q, int | float) for q in quantiles):
            found[name] = sum(q < value for q in quantiles) / len(quantiles)
    return found


def answer_choice(
    opened: Opened,
    question: str,
    options: Sequence[str],
    *,
    threshold: Threshold | None = None,
    score: str | None = None,
    averaging: str | None = None,
    passes: int | None = None,
    seed: int = 0,
) -> Asked:
    """One of the options, as `vmoer eval` answers: by the letters' probabilities where the prompt ends."""
    if len(options) > len(LETTERS):
        raise InputError(f"{len(options)} options, and at most {len(LETTERS)} can be asked for")
    file, model, n = threshold.file if threshold else {}, opened.model, len(options)
    stored = opened.calibrator if opened.calibrator and opened.calibrator.kind != "none" else None
    how = averaging or file.get("averaging") or ("full" if passes else None)
    given = passes or (file.get("passes") if how == file.get("averaging") else None)
    kind: Any
    kind, passes = settings(stored, how, given)
    if stored is not None:
        _check_fits(stored, kind, passes, n, file)
    whole = Question("asked", question, tuple(options), 0, "ask", "ask")
    (found,) = answer_questions(model, opened.tokenizer, [whole], averaging=kind, passes=passes, seed=seed)
    (prompt,) = encode(opened.tokenizer, [whole], context_length(model))
    judged = dict(found.signals)
    chances = [math.exp(value) for value in found.log_probs]
    if stored is not None:
        mapped = stored.apply([found.log_probs])
        calibrated, own = np.exp(mapped[0]).tolist(), {"predictive_entropy": float(entropy(mapped)[0])}
        if not file or "calibrator" in file:  # a threshold that was chosen on raw answers is held against raw ones
            chances, judged = calibrated, judged | own
    judged |= {"least_confidence": 1 - max(chances), "prompt_tokens": float(len(prompt))}
    score = score or "predictive_entropy"
    if score not in judged:
        raise InputError(f"score={score!r}: choose one of {', '.join(judged)}")
    temperature = None if stored else file.get("temperature")
    if stored is not None:
        chances = calibrated
    if temperature is not None:
        chances = np.exp(apply_temperature([found.log_probs], temperature)[0]).tolist()
    best = max(range(n), key=lambda i: chances[i])
    record: dict[str, Any] = {"text": options[best], "letter": LETTERS[best], "probabilities": chances}
    about = ("kind", "task", "questions", "averaging", "passes")
    record |= {"calibrator": None if stored is None else {name: stored.file[name] for name in about}}
    record |= {"temperature": temperature, "signals": judged, "score": judged[score]}
    record["ranks"] = ranks(opened.run, "letters", judged)
    return Asked(record, score, judged)


def _check_fits(stored: Stored, averaging: str, passes: int, options: int, file: dict[str, Any]) -> None:
    """Refuse a calibrator that is not for such an answer, or not the one that the threshold was chosen with."""
    try:
        stored.check_averaging(averaging, passes)
        stored.check_options([options])
    except InputError as error:
        raise InputError(f"{error}: give --no-calibrator, or run vmoer calibrate on such questions") from None
    if file.get("calibrator") not in (None, stored.digest):
        raise InputError("the threshold was chosen with another calibrator than the run has: run vmoer threshold again")


def judge(asked: Asked, threshold: Threshold | None, model: Any) -> Verdict:
    """Hold an answer against a threshold; without one it is never too uncertain."""
    if threshold is None or not threshold.file:
        name = asked.score
    else:
        name = threshold.file["signal"]
        if name not in asked.judged:
            raise InputError(f"this answer has no {name}, which the threshold is on: it has {', '.join(asked.judged)}")
        attachment = attachment_of(model)
        method = "map" if attachment is None else attachment.config.key
        if threshold.file.get("method") not in (None, method):
            chosen = threshold.file["method"]
            warnings.warn(f"the threshold was chosen for {chosen}, and this is {method}", stacklevel=1)
    value = asked.judged[name]
    return Verdict(name, value, threshold is not None and not value <= threshold.value)
