"""`vmoer ask MODEL "question"`: an answer with its uncertain tokens marked, or none where it is too uncertain.

A token is marked by the probability it was chosen with, or by a signal of the routers; in colour on a terminal, elsewhere by
brackets. `--abstain-above` takes a number or a file of `vmoer threshold`.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer
from rich.console import Console
from rich.text import Text

from vmoer.commands._shared import Device, Dtype, Json, NoCalibrator, check_device, quiet
from vmoer.errors import InputError
from vmoer.saved.fetch import check_path, locate
from vmoer.tasks import LETTERS

if TYPE_CHECKING:
    from vmoer.evaluation.ask import Asked
    from vmoer.evaluation.threshold import Threshold
    from vmoer.models import Opened

STYLES = ("", "yellow", "bold underline red")  # of marks 0, 1 and 2
UNFAMILIAR = 0.9  # the share of validation questions that are less novel, from which a question is called unfamiliar
LIKELY, EVEN = 0.9, 0.5  # probabilities from which a token is not marked, and below which it is marked twice


class Shown(NamedTuple):
    """An answer as it is printed: its pieces with their marks (0 to 2), what marks 1 and 2 mean, and the lines below."""

    pieces: list[tuple[str, int]]
    legend: list[str]
    lines: list[str]


def ask(
    model: Annotated[str, typer.Argument(help="A hub id, a local folder, a run folder, or demo.")],
    question: Annotated[str, typer.Argument(help="What to ask.")],
    router: Annotated[str | None, typer.Option(help="A run of `vmoer train`, or a folder of `vmoer.save`.")] = None,
    choice: Annotated[list[str] | None, typer.Option(help="An option to choose from; repeat it for each.")] = None,
    abstain_above: Annotated[
        str | None, typer.Option(help="A number, or a file of `vmoer threshold`: no answer where it is exceeded.")
    ] = None,
    score: Annotated[str | None, typer.Option(help="The score of the answer; by default sequence_nll.")] = None,
    mark: Annotated[str, typer.Option(help="What tokens are marked by: probability, or a signal.")] = "probability",
    max_new_tokens: Annotated[int, typer.Option(help="The longest answer.")] = 128,
    averaging: Annotated[
        str | None, typer.Option(help="With --choice: router, answer, full, orders or orders+routing.")
    ] = None,
    passes: Annotated[int | None, typer.Option(help="Passes to average over; needed by some scores.")] = None,
    seed: Annotated[int, typer.Option(help="The seed of methods that draw fresh noise.")] = 0,
    device: Device = None,
    dtype: Dtype = None,
    no_calibrator: NoCalibrator = False,
    as_json: Json = False,
) -> None:
    """Ask a question: the answer with its uncertain tokens marked, and a score; or nothing where that is too high."""
    check_path(model)
    if choice and len(choice) < 2:
        raise InputError("one --choice is not enough: give one for each option")
    if averaging and not choice:
        raise InputError(
            f"--averaging {averaging} is for questions with options: give each by --choice, or leave it out"
        )
    check_device(device)
    threshold = _threshold(abstain_above)
    if threshold and threshold.form == "text" and choice:
        raise InputError(f"{abstain_above} was chosen on free answers: leave --choice out")
    from vmoer.evaluation.ask import answer_choice, answer_text, judge

    quiet()
    opened = _open(model, router, device, dtype)
    if no_calibrator:
        opened = opened._replace(calibrator=None)
    how: dict[str, Any] = {"threshold": threshold, "score": score, "passes": passes, "seed": seed}
    if choice:
        asked = answer_choice(opened, question, choice, averaging=averaging, **how)
    else:
        asked = answer_text(opened, question, max_new_tokens=max_new_tokens, **how)
    shown = shown_choice(asked, choice, threshold) if choice else _text(asked, mark)
    signal, value, abstained = judge(asked, threshold, opened.model)
    if as_json:
        said = {"question": question, "abstained": abstained} | ({} if abstained else asked.record)
        said |= {"signal": signal, "value": value, "threshold": None if threshold is None else threshold.value}
        print(json.dumps(said, indent=2))
    elif threshold is not None and abstained:
        rank = asked.record["ranks"].get(signal)
        more = "" if rank is None else f", more than {rank:.0%} of validation questions have"
        print(f"I do not answer: {signal} is {value:.4g}{more}, above {threshold}{_why(threshold)}")
    else:
        show(shown)


def _threshold(text: str | None) -> Threshold | None:
    if text is None:
        return None
    path = Path(text)
    try:
        value = float(text)
    except ValueError:
        if not path.exists():
            raise InputError(f"{path}: no such file; give a number, or a threshold file of `vmoer threshold`") from None
        value = None
    if value is not None and math.isnan(value):
        raise InputError("--abstain-above nan: give a number, or a threshold file")
    from vmoer.evaluation.threshold import Threshold, read_threshold

    if value is None:
        return read_threshold(path)
    return Threshold(value, {})


def _open(model: str, router: str | None, device: str | None, dtype: str | None) -> Opened:
    from vmoer.live.attach import attachment_of
    from vmoer.models import open_model
    from vmoer.saved.calibrator import of
    from vmoer.saved.store import put_on, read_folder

    opened = open_model(model, device=device, dtype=dtype)
    if router is None:
        return opened
    if attachment_of(opened.model) is not None:
        raise InputError(f"{model} is a run with routers of its own: leave --router out, or name its base model")
    saved = read_folder(locate(router))
    return opened._replace(model=put_on(opened.model, saved, router).eval(), calibrator=of(saved))


# -- printing ----------------------------------------------------------------------------------------------------------


def _why(threshold: Threshold) -> str:
    if "risk" not in threshold.file:
        return ""
    return f" (for a risk of {threshold.file['risk']:g} with confidence {threshold.file['confidence']:g})"


def _text(asked: Asked, mark: str) -> Shown:
    tokens = asked.record["tokens"]
    marks, legend = _marks(tokens, mark)
    line = f"{asked.score} {asked.record['score']:.4g}: {_meaning(asked.score)}; {len(tokens)} tokens"
    pieces = [(token["text"], m) for token, m in zip(tokens, marks, strict=True)]
    return Shown(pieces, legend, [*_familiar(asked.record["ranks"]), line])


def _familiar(ranks: dict[str, float]) -> list[str]:
    """How far a question lies from those of training, in words; nothing where the run has no reference."""
    rank = ranks.get("novelty")
    if rank is None:
        return []
    if rank >= UNFAMILIAR:
        return [f"unfamiliar: further from the training questions than {rank:.0%} of validation questions"]
    return [f"familiar: {1 - rank:.0%} of validation questions are further from the training questions"]


def shown_choice(asked: Asked, options: list[str], threshold: Threshold | None) -> Shown:
    said = asked.record
    lines = [f"{LETTERS[i]}. {options[i]}: {p:.3f}" for i, p in enumerate(said["probabilities"])]
    if asked.score != "predictive_entropy":
        lines.append(f"{asked.score} {said['score']:.4g}")
    sure = f"confidence {max(said['probabilities']):.0%}"
    if said["calibrator"] is not None:
        by = "calibrated by {kind}, fitted on {questions} validation questions of {task}".format(**said["calibrator"])
        lines.append(f"{sure}, {by}")
    elif said["temperature"] is not None and threshold is not None:
        at = f"probabilities at temperature {said['temperature']:.3g}, fitted on validation questions of"
        lines.append(f"{sure}: {at} {threshold.file.get('task')}")
    else:
        lines.append(f"{sure}, as the model has it (vmoer calibrate fits a calibrator)")
    lines += _familiar(said["ranks"])
    marks, legend = _by_probability([max(said["probabilities"])])
    return Shown([(f"{said['letter']}. {said['text']}", marks[0])], legend, lines)


def _marks(tokens: list[dict[str, Any]], mark: str) -> tuple[list[int], list[str]]:
    """0, 1 or 2 for each token, and what 1 and 2 mean."""
    if mark == "probability":
        return _by_probability([math.exp(token["log_prob"]) for token in tokens])
    signals = [name for name in tokens[0] if name not in ("text", "log_prob")]
    if mark not in signals:
        raise InputError(f"mark={mark!r}: choose one of probability, {', '.join(signals)}")
    values = [token[mark] for token in tokens]
    ranked = sorted((token[mark] for token in tokens if token["text"]), reverse=True) or values
    third, tenth = (ranked[math.ceil(len(ranked) / parts) - 1] for parts in (3, 10))
    marks = [2 if value >= tenth else 1 if value >= third else 0 for value in values]
    return marks, [f"{mark} from {third:.4g}, the answer's highest third", f"from {tenth:.4g}, its highest tenth"]


def _by_probability(chances: list[float]) -> tuple[list[int], list[str]]:
    marks = [0 if p >= LIKELY else 1 if p >= EVEN else 2 for p in chances]
    return marks, [f"probability below {LIKELY:g}", f"below {EVEN:g}"]


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


def show(shown: Shown) -> None:
    """In colour on a terminal that has any; elsewhere [so]? and [so]??."""
    console = Console(highlight=False)
    colour = console.is_terminal and console.color_system is not None and not console.no_color
    *before, last = shown.lines
    answer, legend = Text(), Text("".join(f"{line}\n" for line in before))
    for piece, mark in _merged(shown.pieces):
        answer.append(piece if colour or not mark else _bracketed(piece, mark), STYLES[mark])
    if any(mark for _, mark in shown.pieces):
        for mark, meaning in enumerate(shown.legend, 1):
            legend.append(("■ " if colour else f"[...]{'?' * mark} ") + meaning, STYLES[mark])
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
