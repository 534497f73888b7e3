"""`vmoer ask MODEL "question"`: an answer with its uncertain tokens marked, or none where it is too uncertain.

A token is marked by the probability it was chosen with, or by a signal of the routers; in colour on a terminal, elsewhere by
brackets. `--abstain-above` takes a number, held against the answer's score, or a file of `vmoer threshold`, held against the
signal that the file names. A file chosen on letters is meant for questions with options (`--choice`); held against a free
answer, it is read at that answer's first token, where a letter would have been, and a note says that it promises nothing there.
Options' probabilities are those at the file's output temperature; signals are the model's own, which the threshold is on.
"""

import json
import math
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from vmoer.commands._shared import Device, Dtype, Json, check_device, quiet
from vmoer.commands.threshold import LETTERS, TEXT, read_threshold, shown
from vmoer.errors import InputError

if TYPE_CHECKING:
    from vmoer.generation import Answer
    from vmoer.models import Opened

UNSURE, DOUBTFUL = "yellow", "bold underline red"
LIKELY, EVEN = 0.9, 0.5  # probabilities from which a token is not marked, and below which it is marked twice


class Limit(NamedTuple):
    """Above what to abstain; `file` is what `vmoer threshold` wrote, None where a number was given."""

    value: float
    file: dict[str, Any] | None


class Reading(NamedTuple):
    """An answer as it is printed: its pieces with their marks (0 to 2), what the marks mean, and what it is judged by."""

    pieces: list[tuple[str, int]]
    legend: list[str]
    judged: dict[str, float]
    score: str
    shown: list[str]
    record: dict[str, Any]


def ask(
    model: Annotated[str, typer.Argument(help="A hub id, a local folder, a run folder, or demo.")],
    question: Annotated[str, typer.Argument(help="What to ask.")],
    router: Annotated[str | None, typer.Option(help="A run of `vmoer train`, or a folder of `vmoer.save`.")] = None,
    choice: Annotated[list[str] | None, typer.Option(help="An option to choose from; give it for each.")] = None,
    abstain_above: Annotated[
        str | None, typer.Option(help="A number, or a file of `vmoer threshold`: say nothing where it is exceeded.")
    ] = None,
    score: Annotated[str | None, typer.Option(help="The score of the answer; by default sequence_nll.")] = None,
    mark: Annotated[str, typer.Option(help="What tokens are marked by: probability, or a signal.")] = "probability",
    max_new_tokens: Annotated[int, typer.Option(help="The longest answer.")] = 128,
    passes: Annotated[int | None, typer.Option(help="Routing samples to average over; needed by some scores.")] = None,
    seed: Annotated[int, typer.Option(help="Of methods that draw fresh noise.")] = 0,
    device: Device = None,
    dtype: Dtype = None,
    as_json: Json = False,
) -> None:
    """Ask a question: the answer with its uncertain tokens marked, and a score; or nothing where that is too high."""
    limit = parse_limit(abstain_above)
    if limit and limit.file and limit.file["form"] == TEXT and choice:
        raise InputError(f"{abstain_above} was chosen on free answers: leave --choice out")
    if choice and len(choice) < 2:
        raise InputError("one --choice is no question: give it for each option")
    quiet()
    check_device(device, dtype)
    opened = _open(model, router, device, dtype)
    if choice:
        reading = _of_letter(opened, question, choice, limit, score, passes, seed)
    else:
        reading = _of_text(opened, question, limit, score, mark, max_new_tokens, passes, seed)
    name, value = _judged(reading, limit, opened)
    abstained = limit is not None and not value <= limit.value
    if as_json:
        said = {"question": question, "abstained": abstained} | ({} if abstained else reading.record)
        said |= {"signal": name, "value": value, "threshold": None if limit is None else limit.value}
        print(json.dumps(said, indent=2))
    elif limit is not None and abstained:
        print(f"I do not answer: {name} is {value:.4g}, above {shown(limit.value)}{_why(limit)}")
    else:
        show(reading)


def parse_limit(text: str | None) -> Limit | None:
    if text is None:
        return None
    try:
        value = float(text)
    except ValueError:
        file = read_threshold(Path(text))
        return Limit(float(file["threshold"]), file)
    if math.isnan(value):
        raise InputError("--abstain-above nan: give a number, or a threshold file")
    return Limit(value, None)


def _why(limit: Limit) -> str:
    if limit.file is None or "risk" not in limit.file:
        return ""
    return f" (for a risk of {limit.file['risk']:g} with confidence {limit.file['confidence']:g})"


def _open(model: str, router: str | None, device: str | None, dtype: str | None) -> "Opened":
    from vmoer.attach import attachment_of
    from vmoer.models import open_model
    from vmoer.store import load

    opened = open_model(model, device=device, dtype=dtype)
    if router is None:
        return opened
    if attachment_of(opened.model) is not None:
        raise InputError(f"{model} is a run with routers of its own: leave --router out, or name its base model")
    return opened._replace(model=load(opened.model, router).eval())


def _judged(reading: Reading, limit: Limit | None, opened: "Opened") -> tuple[str, float]:
    """The value that decides, with its name."""
    if limit is None or limit.file is None:
        return reading.score, reading.judged[reading.score]
    name = limit.file["signal"]
    if name not in reading.judged:
        raise InputError(f"this answer has no {name}, which the threshold is on: it has {', '.join(reading.judged)}")
    from vmoer.attach import attachment_of

    attachment = attachment_of(opened.model)
    method = "map" if attachment is None else attachment.config.key
    if limit.file.get("method") not in (None, method):
        warnings.warn(f"the threshold was chosen for {limit.file['method']}, and this is {method}", stacklevel=1)
    return name, reading.judged[name]


# -- a free answer -----------------------------------------------------------------------------------------------------


def _of_text(
    opened: "Opened",
    question: str,
    limit: Limit | None,
    score: str | None,
    mark: str,
    max_new_tokens: int,
    passes: int | None,
    seed: int,
) -> Reading:
    from vmoer.generation import SCORE, Answer, generate

    file = limit.file if limit and limit.file else {}
    own = file.get("form") == TEXT
    if passes is None:
        passes = int(file.get("passes") or 0) if own else 0
    prompt: Any = [{"role": "user", "content": question}]
    more: dict[str, Any] = {}
    if not getattr(opened.tokenizer, "chat_template", None):
        prompt, more = f"Question: {question}\nAnswer:", {"stop_strings": ["\n"]}
    found = generate(
        *(opened.model, opened.tokenizer, prompt),
        max_new_tokens=max_new_tokens,
        passes=passes,
        score=score or SCORE,
        seed=seed,
        **more,
    )
    assert isinstance(found, Answer)
    if score is None:
        score = file["signal"] if own and file["signal"] in found.scores else SCORE
    judged = dict(found.scores)
    if file.get("form") == LETTERS:
        judged = {name: values[0] for name, values in found.signals.items()}
        judged["least_confidence"] = -math.expm1(found.log_probs[0])
        warnings.warn(
            f"the threshold was chosen on the letters of {file.get('task')}: for a free answer, read at its first token, it "
            "promises nothing",
            stacklevel=1,
        )
        judged[score] = found.scores[score]
    marks, legend = _marks(found, mark)
    tokens = [
        {"text": piece, "log_prob": log_prob, **{name: values[n] for name, values in found.signals.items()}}
        for n, (piece, log_prob) in enumerate(zip(found.pieces, found.log_probs, strict=True))
    ]
    record = {"text": found.text.strip(), "tokens": tokens, "score": found.scores[score], "scores": found.scores}
    shown = [f"{score} {found.scores[score]:.4g}: {_meaning(score)}; {len(found.tokens)} tokens"]
    return Reading(list(zip(found.pieces, marks, strict=True)), legend, judged, score, shown, record)


def _meaning(score: str) -> str:
    known = {
        "sequence_nll": "minus the log-probability of the whole answer",
        "nll": "minus the mean log-probability of a token",
        "max_nll": "minus the log-probability of the least likely token",
        "marginal_sequence_nll": "minus the log-probability of the whole answer, averaged over routing",
        "marginal_nll": "minus the mean log-probability of a token, averaged over routing",
    }
    kind, _, signal = score.partition("_")
    return known.get(score) or f"{'the largest' if kind == 'max' else 'the mean'} {signal} of a token"


def _marks(answer: "Answer", mark: str) -> tuple[list[int], list[str]]:
    """0, 1 or 2 for each token, and what 1 and 2 mean."""
    if mark == "probability":
        chances = [math.exp(log_prob) for log_prob in answer.log_probs]
        marks = [0 if p >= LIKELY else 1 if p >= EVEN else 2 for p in chances]
        return marks, [f"probability below {LIKELY:g}", f"below {EVEN:g}"]
    if mark not in answer.signals:
        raise InputError(f"mark={mark!r}: choose one of probability, {', '.join(answer.signals)}")
    values = answer.signals[mark]
    ranked = (
        sorted((value for value, piece in zip(values, answer.pieces, strict=True) if piece), reverse=True) or values
    )
    third, tenth = (ranked[math.ceil(len(ranked) / parts) - 1] for parts in (3, 10))
    marks = [2 if value >= tenth else 1 if value >= third else 0 for value in values]
    return marks, [f"{mark} from {third:.4g}, the answer's highest third", f"from {tenth:.4g}, its highest tenth"]


# -- a choice between options ------------------------------------------------------------------------------------------


def _of_letter(
    opened: "Opened",
    question: str,
    choices: list[str],
    limit: Limit | None,
    score: str | None,
    passes: int | None,
    seed: int,
) -> Reading:
    """As `vmoer eval` answers: by the letters' probabilities where the prompt ends."""
    import numpy as np

    from vmoer.generation import ready
    from vmoer.metrics import apply_temperature
    from vmoer.predict import _context, _seeded, answer, collate
    from vmoer.predictions import SIGNALS
    from vmoer.tasks import LETTERS as ALPHABET
    from vmoer.tasks import Question
    from vmoer.tasks.prompt import encode, letter_ids

    file = limit.file if limit and limit.file else {}
    averaging: Any = file.get("averaging") or ("full" if passes else "router")
    passes = passes or int(file.get("passes") or 8)
    model, n = opened.model, len(choices)
    if n > len(ALPHABET):
        raise InputError(f"{n} options, and at most {len(ALPHABET)} can be asked for")
    asked = Question("asked", question, tuple(choices), 0, "ask", "ask")
    (prompt,) = encode(opened.tokenizer, [asked], _context(model))
    with ready(model), _seeded(str(seed), model):
        found = answer(model, collate([prompt], model), letter_ids(opened.tokenizer, n), [n], averaging, passes)
    chances = [math.exp(value) for value in found["log_probs"][0]]
    judged = {name: found[name][0] for name in SIGNALS if found[name][0] is not None}
    judged |= {"least_confidence": 1 - max(chances), "prompt_tokens": float(len(prompt))}
    score = score or "predictive_entropy"
    if score not in judged:
        raise InputError(f"score={score!r}: choose one of {', '.join(judged)}")
    temperature = file.get("temperature")
    if temperature is not None:
        chances = np.exp(apply_temperature([found["log_probs"][0]], temperature)[0]).tolist()
    best = max(range(n), key=lambda i: chances[i])
    text, p = f"{ALPHABET[best]}. {choices[best]}", chances[best]
    shown = [f"{ALPHABET[i]}. {choices[i]}: {chances[i]:.3f}" for i in range(n)] + [f"{score} {judged[score]:.4g}"]
    if temperature is not None:
        shown.append(
            f"probabilities at temperature {temperature:.3g}, fitted on validation questions of {file.get('task')}"
        )
    record: dict[str, Any] = {"text": choices[best], "letter": ALPHABET[best], "probabilities": chances}
    record |= {"temperature": temperature, "signals": judged}
    mark = 0 if p >= LIKELY else 1 if p >= EVEN else 2
    legend = [f"probability below {LIKELY:g}", f"below {EVEN:g}"]
    return Reading([(text, mark)], legend, judged, score, shown, record | {"score": judged[score]})


# -- printing ----------------------------------------------------------------------------------------------------------


def show(reading: Reading) -> None:
    """In colour on a terminal that has any; elsewhere [so]? and [so]??."""
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False)
    colour = console.is_terminal and console.color_system is not None and not console.no_color
    styles = ("", UNSURE, DOUBTFUL)
    *before, last = reading.shown
    answer, legend = Text(), Text("".join(f"{line}\n" for line in before))
    for piece, mark in _merged(reading.pieces):
        answer.append(piece if colour or not mark else _bracketed(piece, mark), styles[mark])
    if any(mark for _, mark in reading.pieces):
        for mark, meaning in enumerate(reading.legend, 1):
            legend.append(("■ " if colour else f"[...]{'?' * mark} ") + meaning, styles[mark])
            legend.append("  " if mark == 1 else "\n")
    legend.append(last)
    if colour:
        console.print(answer)
        console.print()
        console.print(legend)
    else:
        print(f"{answer}\n\n{legend}")


def _merged(pieces: list[tuple[str, int]]) -> list[tuple[str, int]]:
    """Neighbours with the same mark as one, without the space around the whole."""
    merged: list[tuple[str, int]] = []
    for piece, mark in pieces:
        if merged and (merged[-1][1] == mark or not piece):
            merged[-1] = (merged[-1][0] + piece, merged[-1][1])
        elif piece:
            merged.append((piece, mark))
    if merged:
        merged[0] = (merged[0][0].lstrip(), merged[0][1])
        merged[-1] = (merged[-1][0].rstrip(), merged[-1][1])
    return merged


def _bracketed(piece: str, mark: int) -> str:
    """Brackets around the words, not around the space before them."""
    words = piece.strip()
    if not words:
        return piece
    before, after = piece[: piece.index(words)], piece[piece.index(words) + len(words) :]
    return f"{before}[{words}]{'?' * mark}{after}"
