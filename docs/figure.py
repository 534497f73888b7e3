"""The README's figure: `python docs/figure.py --data-root DATA` draws docs/assets/confidence.svg from results/smolmoe.

Left: two answers of one model that are about equally sure, one to a question like those that it was tuned on and one to a
question that is not; below, how novel all questions of both sets are. The two are chosen by a rule and not by hand: the medical
question of median novelty, and of the school questions within .01 of its confidence the one of median novelty. Right:
reliability of the plain model, before and after an output temperature. Seed 0 throughout; DATA holds the questions' words.
"""

import argparse
import textwrap
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path
from typing import NamedTuple

import numpy as np

from vmoer import metrics, tasks
from vmoer.evaluation.predictions import Answered, Floats, Key, Predictions
from vmoer.evaluation.temperatures import load

ROOT = Path(__file__).parent.parent
TARGET = ROOT / "docs" / "assets" / "confidence.svg"
HOME, SHIFT, METHOD, SEED, NEAR = "openbookqa", "medmcqa", "vglr-fc+answer", 0, 0.01
UNFAMILIAR = 0.9
"""The share of validation questions that are less novel, from which a question is called unfamiliar; as `vmoer ask` has it."""
NAMES = {HOME: "school science, as in training", SHIFT: "medicine, never trained on"}
BEFORE, AFTER, INK, SOFT = "#d55e00", "#0079c1", "#1c1e21", "#5c6370"
COLOUR = {HOME: "#00775a", SHIFT: "#b3261e"}


class Shown(NamedTuple):
    """A question of the figure."""

    task: str
    id: str
    letter: int
    """The option that the model took."""
    confidence: float
    novelty: float
    beyond: float
    """The share of validation questions that are less novel."""


def cell(group: Predictions, task: str, split: str, method: str) -> Answered:
    return group.cells[Key(task, split, method, SEED)]


def openbook(results: Path) -> Predictions:
    return next(group for group in load(results) if group.source_task == HOME)


def chosen(group: Predictions) -> list[Shown]:
    """The two questions, by the rule."""
    known = cell(group, HOME, "validation", METHOD).signals["novelty"]
    sure = {task: metrics.confidence(cell(group, task, "test", f"{METHOD}+ts").log_probs) for task in NAMES}
    novel = {task: cell(group, task, "test", METHOD).signals["novelty"] for task in NAMES}
    far = _median(novel[SHIFT], np.arange(len(novel[SHIFT])))
    near = _median(novel[HOME], np.flatnonzero(abs(sure[HOME] - sure[SHIFT][far]) <= NEAR))
    found = []
    for task, i in ((HOME, near), (SHIFT, far)):
        one, value = cell(group, task, "test", METHOD), novel[task][i]
        beyond = float((known < value).mean())
        found.append(
            Shown(task, one.ids[i], int(one.log_probs[i].argmax()), float(sure[task][i]), float(value), beyond)
        )
    return found


def _median(values: Floats, among: "np.ndarray[tuple[int], np.dtype[np.int64]]") -> int:
    return int(among[np.argsort(values[among], kind="stable")[len(among) // 2]])


# -- drawing -----------------------------------------------------------------------------------------------------------


def text(x: float, y: float, words: str, size: float = 14, **more: str) -> str:
    attributes = "".join(f' {name.replace("_", "-")}="{value}"' for name, value in more.items())
    return f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size:g}"{attributes}>{escape(words)}</text>'


def card(one: Shown, question: str, answer: str, y: float) -> Iterator[str]:
    """A question, its answer with the confidence, and how unfamiliar it is."""
    unfamiliar = one.beyond >= UNFAMILIAR
    yield f'<rect x="16" y="{y}" width="556" height="124" rx="8" fill="#fff" stroke="#d9d9d4"/>'
    yield text(32, y + 24, f"{one.task}: {NAMES[one.task]}", 12, fill=SOFT)
    lines = textwrap.wrap(question, 62)
    yield text(32, y + 46, lines[0] + (" ..." if len(lines) > 1 else ""), 15.5)
    lines = textwrap.wrap(answer, 60)
    yield text(32, y + 68, "\u2192 " + lines[0] + (" ..." if len(lines) > 1 else ""), 15.5, font_weight="600")
    yield f'<rect x="140" y="{y + 83}" width="260" height="10" rx="5" fill="#eceae4"/>'
    yield f'<rect x="140" y="{y + 83}" width="{260 * one.confidence:.1f}" height="10" rx="5" fill="{AFTER}"/>'
    yield text(32, y + 93, "confidence", 13, fill=SOFT) + text(412, y + 93, f"{one.confidence:.0%}", 13)
    yield f'<rect x="140" y="{y + 103}" width="260" height="10" rx="5" fill="#eceae4"/>'
    bar = f'height="10" rx="5" fill="{COLOUR[one.task]}"'
    yield f'<rect x="140" y="{y + 103}" width="{260 * one.beyond:.1f}" {bar}/>'
    yield text(32, y + 113, "novelty", 13, fill=SOFT)
    word, weight = ("unfamiliar", "700") if unfamiliar else ("familiar", "400")
    yield text(
        412,
        y + 113,
        f"{word}: rank {one.beyond:.0%}",
        13,
        fill=COLOUR[one.task] if unfamiliar else INK,
        font_weight=weight,
    )


def strip(group: Predictions, shown: Sequence[Shown], y: float) -> Iterator[str]:
    """How novel the questions of both sets are, against the validation questions of the first."""
    known = cell(group, HOME, "validation", METHOD).signals["novelty"]
    values = {task: cell(group, task, "test", METHOD).signals["novelty"] for task in NAMES}
    low, high, limit = 0.04, 0.16, float(np.quantile(known, UNFAMILIAR))
    left, width, height = 32.0, 524.0, 52.0

    def at(value: float) -> float:
        return left + width * (min(max(value, low), high) - low) / (high - low)

    edges = np.linspace(low, high, 49)
    shares = {task: np.histogram(np.clip(v, low, high), edges)[0] / len(v) for task, v in values.items()}
    top = max(share.max() for share in shares.values())
    for task, share in shares.items():
        points = [f"{at(edges[0]):.1f},{y + height:.1f}"]
        for i, part in enumerate(share):
            level = f"{y + height * (1 - part / top):.1f}"
            points += [f"{at(edges[i]):.1f},{level}", f"{at(edges[i + 1]):.1f},{level}"]
        points.append(f"{at(edges[-1]):.1f},{y + height:.1f}")
        yield f'<polygon points="{" ".join(points)}" fill="{COLOUR[task]}" fill-opacity=".22" stroke="{COLOUR[task]}"/>'
    yield f'<path d="M{left} {y + height}h{width}" stroke="{SOFT}"/>'
    yield f'<path d="M{at(limit):.1f} {y - 6}v{height + 6}" stroke="{INK}" stroke-dasharray="4 3"/>'
    beyond = {task: float((v > limit).mean()) for task, v in values.items()}
    yield text(at(limit), y - 26, f"unfamiliar, beyond {UNFAMILIAR:.0%} of validation questions:", 12.5)
    counted = f"{beyond[HOME]:.0%} of the school questions, {beyond[SHIFT]:.0%} of the medical ones"
    yield text(at(limit), y - 10, counted, 12.5)
    for one in shown:
        yield f'<circle cx="{at(one.novelty):.1f}" cy="{y + height}" r="5" fill="{COLOUR[one.task]}" stroke="#fff"/>'
    yield text(left, y + height + 18, "novelty of all test questions \u2192 (dots: the two above)", 12, fill=SOFT)


def reliability(group: Predictions) -> Iterator[str]:
    """Accuracy against confidence of the plain model, before and after a temperature."""
    left, top, size = 660.0, 58.0, 296.0
    yield f'<rect x="{left}" y="{top}" width="{size}" height="{size}" fill="#fff" stroke="#d9d9d4"/>'
    yield f'<path d="M{left} {top + size}L{left + size} {top}" stroke="{SOFT}" stroke-dasharray="4 3"/>'
    for tick in (0.0, 0.5, 1.0):
        yield text(left + size * tick, top + size + 18, f"{tick:g}", 12, fill=SOFT, text_anchor="middle")
        yield text(left - 8, top + size * (1 - tick) + 4, f"{tick:g}", 12, fill=SOFT, text_anchor="end")
    for method, colour in (("map", BEFORE), ("map+ts", AFTER)):
        one = cell(group, HOME, "test", method)
        bins = metrics.reliability(
            metrics.confidence(one.log_probs), metrics.correct_per_question(one.log_probs, one.answers)
        )
        filled = bins.size >= 10  # fewer questions say nothing
        points = [
            (left + size * float(x), top + size * (1 - float(y)))
            for x, y in zip(bins.confidence[filled], bins.accuracy[filled], strict=True)
        ]
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        yield f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"/>'
        yield from (f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{colour}"/>' for x, y in points)
    for y, (method, colour, words) in enumerate(
        (("map", BEFORE, "as fine-tuned"), ("map+ts", AFTER, "with an output temperature"))
    ):
        one = cell(group, HOME, "test", method)
        nll = metrics.nll(one.log_probs, one.answers)
        yield f'<circle cx="{left + 4}" cy="{top + size + 40 + 20 * y}" r="5" fill="{colour}"/>'
        yield text(left + 16, top + size + 45 + 20 * y, f"{words}: NLL {nll:.2f}", 13.5)
    yield text(left + size * 0.75, top + size + 18, "confidence \u2192", 12, fill=SOFT, text_anchor="middle")
    yield text(left, top - 10, "\u2191 accuracy, school science", 12, fill=SOFT)


def svg(results: Path, data_root: str | None = None) -> str:
    """The figure, from predictions and the questions' words."""
    group = openbook(results)
    shown = chosen(group)
    parts = [text(16, 30, "Equally sure, and one of them has left familiar ground", 17, font_weight="700")]
    for one, y in zip(shown, (44, 178), strict=True):
        (question,) = (q for q in tasks.load(one.task, "test", data_root=data_root) if q.id == one.id)
        parts += card(one, question.question, question.choices[one.letter], y)
    parts += strip(group, shown, 348)
    parts += [text(660, 30, "Before and after calibration", 17, font_weight="700"), *reliability(group)]
    alt = (
        f"Two answers with confidence {shown[0].confidence:.0%} and {shown[1].confidence:.0%}; novelty ranks the first at "
        f"{shown[0].beyond:.0%} and the second at {shown[1].beyond:.0%} of validation questions. Beside it, accuracy against "
        "confidence before and after an output temperature."
    )
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 988 430" role="img" aria-label="{escape(alt, quote=True)}"'
    head += f' font-family="system-ui, -apple-system, Segoe UI, Helvetica, Arial, sans-serif" fill="{INK}">'
    return "\n".join([head, '<rect width="988" height="430" rx="10" fill="#f7f6f2"/>', *parts, "</svg>"]) + "\n"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data-root")
    TARGET.write_text(svg(ROOT / "results" / "smolmoe", parser.parse_args().data_root))
