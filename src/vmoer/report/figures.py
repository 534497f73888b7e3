"""Figures as SVG text for the page: reliability, forest plots, ROC, score histograms, risk-coverage.

Figures are transparent and drawn in `currentColor`, so they take the page's ink in light and in dark mode. Curves have
mid-tones near the Okabe-Ito palette, and are dashed beyond eight. Text stays text. The same data give the same bytes.
"""

import html
import io
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from vmoer import metrics as m
from vmoer.evaluation.predictions import Answered
from vmoer.evaluation.scores import Row

PALETTE = ("#0079c1", "#d55e00", "#009e73", "#cc79a7", "#b58900", "#56a5d8", "#8a63d2", "#7f8c8d")
_DASHES: tuple[Any, ...] = ("-", (0, (5, 2)), (0, (1, 1.5)), (0, (6, 2, 1, 2)))
CURVES = 12  # more than a figure can show
_INK = "#123456"  # stands for currentColor, which matplotlib does not know
_RC = {
    "text.parse_math": False,  # a name with dollars in it is a name
    **dict.fromkeys(("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), _INK),
    "svg.fonttype": "none",
    "font.size": 8.5,
    "axes.linewidth": 0.6,
    "lines.linewidth": 1.4,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    "legend.fontsize": 7,
}


class Figure(NamedTuple):
    """An SVG element with a caption; `alt` says in words what it shows."""

    name: str
    caption: str
    alt: str
    svg: str


def style(i: int) -> dict[str, Any]:
    """Colour and dashes of the i-th curve: distinct for 32 of them."""
    return {"color": PALETTE[i % len(PALETTE)], "linestyle": _DASHES[(i // len(PALETTE)) % len(_DASHES)]}


class Canvas(NamedTuple):
    """A figure that is being drawn; its `axes` stand one above the other."""

    name: str
    drawing: Any
    axes: Any

    def figure(self, caption: str, alt: str) -> Figure:
        stream = io.StringIO()
        self.drawing.savefig(stream, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
        return Figure(self.name, caption, alt, _inline(stream.getvalue(), alt))


@contextmanager
def canvas(name: str, size: tuple[float, float], rows: Sequence[float] = (1,)) -> Iterator[Canvas]:
    """A canvas in our style; `rows` are the relative heights of its axes."""
    import matplotlib
    from matplotlib.figure import Figure as Drawing

    # The salt makes ids reproducible, and distinct between the figures of one page.
    with matplotlib.rc_context({**_RC, "svg.hashsalt": name}):
        drawing = Drawing(figsize=size, layout="constrained")
        axes = drawing.subplots(len(rows), 1, squeeze=False, sharex=True, height_ratios=list(rows))[:, 0]
        yield Canvas(name, drawing, axes)


def with_legend(entries: int, columns: int) -> tuple[float, float]:
    """The size of a figure with a legend below it, which takes nothing from the height of the axes."""
    return 3.4, 2.6 + 0.15 * math.ceil(entries / columns)


def _inline(svg: str, alt: str) -> str:
    """A matplotlib file as an element of a page: no prologue, no metadata, no group ids, named for screen readers."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'<g id="[^"]*"', "<g", svg).replace(_INK, "currentColor")
    # a tenth of a point is fine enough; numbers that are read (texts) are no attributes
    svg = re.sub(r' (?:d|x|y|transform)="[^"]*"', lambda found: re.sub(r"(\.\d)\d+", r"\1", found.group()), svg)
    svg = re.sub(r"font: ([\d.]+)px [^;\"]*", r"font: \1px sans-serif", svg)
    svg = re.sub(r"font-family: [^;\"]*", "font-family: sans-serif", svg)
    box = re.search(r'viewBox="[^"]*"', svg)
    assert box is not None
    root = f'<svg {box.group()} role="img" aria-label="{html.escape(alt, quote=True)}">'
    svg = root + svg[svg.index(">") + 1 :]
    return "\n".join(line.strip() for line in svg.splitlines() if line.strip()) + "\n"


def reliability(name: str, cells: Mapping[str, Answered], told: Mapping[str, str], about: str) -> Figure:
    """Accuracy against confidence in 15 bins, above a histogram of confidence; one method has the band of a calibrated model.

    `told` says of each method what the tables say of it: a figure computes no number of its own.
    """
    with canvas(name, (3.4, 3.4), rows=(3.2, 1)) as drawn:
        top, bottom = drawn.axes
        top.plot([0, 1], [0, 1], color=_INK, linewidth=0.6, alpha=0.6)
        for i, (method, cell) in enumerate(cells.items()):
            bins = m.reliability(m.confidence(cell.log_probs), m.correct_per_question(cell.log_probs, cell.answers))
            filled, colour = bins.size > 0, PALETTE[1 - i]
            x, edges = bins.confidence[filled], np.linspace(0, 1, len(bins.size) + 1)
            if len(cells) == 1:
                top.vlines(x, bins.low[filled], bins.high[filled], color=_INK, alpha=0.22, linewidth=8)
            top.plot(x, bins.accuracy[filled], marker="o", markersize=4, color=colour, label=method)
            bottom.stairs(bins.size / bins.size.sum(), edges, fill=True, color=colour, alpha=0.45)
        top.set(xlim=(0, 1), ylim=(-0.02, 1.02), ylabel="accuracy")
        bottom.set(xlabel="confidence", ylabel="share")
        if len(cells) > 1:
            top.legend(loc="upper left")
        numbers = "; ".join(f"{method}: {told[method]}" for method in cells)
        return drawn.figure(f"{numbers}", f"Reliability diagram {about}. {numbers}.")


def forest(name: str, lines: Mapping[str, Mapping[str, Row]], about: str, xlabel: str, zero: float = 0.0) -> Figure:
    """Values with intervals: a line for each label, a colour for each series; hollow where the interval includes `zero`."""
    series = list(dict.fromkeys(one for found in lines.values() for one in found))
    height = 0.16 + 0.085 * len(series)
    legend = math.ceil(len(series) / 3) if len(series) > 1 else 0
    with canvas(name, (3.4, 0.6 + height * len(lines) + 0.17 * legend)) as drawn:
        axes = drawn.axes[0]
        axes.axvline(zero, linewidth=0.8, alpha=0.6, color=_INK)
        for i, one in enumerate(series):
            rows = {place: found[one] for place, found in enumerate(lines.values()) if one in found}
            at = [place + (i - (len(series) - 1) / 2) * 0.8 / len(series) for place in rows]
            bounds = [
                (row["value"] if row[end] is None else row[end]) for end in ("low", "high") for row in rows.values()
            ]
            colour = style(i)["color"]
            axes.hlines(at, bounds[: len(at)], bounds[len(at) :], color=colour, linewidth=1.2)
            sure = [row["low"] is not None and not row["low"] <= zero <= row["high"] for row in rows.values()]
            faces = [colour if certain else "none" for certain in sure]
            axes.scatter([row["value"] for row in rows.values()], at, s=12, c=faces, edgecolors=colour, zorder=3)
            axes.plot([], [], marker="o", markersize=3.5, color=colour, label=one)
        axes.set(yticks=range(len(lines)), yticklabels=list(lines), ylim=(len(lines) - 0.45, -0.55), xlabel=xlabel)
        axes.tick_params(axis="y", length=0)
        if legend:
            drawn.drawing.legend(loc="outside lower center", ncols=3)
        said = "; ".join(
            f"{label}: " + ", ".join(f"{one} {row['value']:.3f}" for one, row in found.items())
            for label, found in lines.items()
        )
        return drawn.figure(about, f"{about} {said}.")


def roc(name: str, scores: Mapping[str, tuple[npt.ArrayLike, npt.ArrayLike]], about: str) -> Figure:
    """ROC curves: `scores` maps a label to its values on the source task and on the shift."""
    with canvas(name, (3.4, 2.7 + 0.13 * len(scores))) as drawn:
        axes = drawn.axes[0]
        axes.plot([0, 1], [0, 1], color=_INK, linewidth=0.6, alpha=0.6)
        for i, (label, (inside, outside)) in enumerate(scores.items()):
            own, shifted = np.sort(np.asarray(inside)), np.sort(np.asarray(outside))
            # One point per distinct score, highest first; ties give the sloping pieces. 200 points are a smooth curve.
            thresholds = np.unique(np.concatenate([own, shifted]))[::-1]
            thresholds = thresholds[np.unique(np.linspace(0, len(thresholds) - 1, 200).astype(int))]
            flagged = [1 - np.searchsorted(side, thresholds, "left") / len(side) for side in (own, shifted)]
            curve = {"color": _INK, "linestyle": ":"} if label.startswith("prompt_tokens") else style(i)
            axes.plot(*(np.concatenate([[0.0], side]) for side in flagged), label=label, **curve)
        axes.set(xlim=(0, 1), ylim=(0, 1.01), xlabel="false positives", ylabel="true positives")
        drawn.drawing.legend(loc="outside lower center")
        return drawn.figure(f"ROC, {about}", f"ROC curves, {about}, with AUROC: {', '.join(scores)}.")


def histogram(name: str, signal: str, values: Mapping[str, npt.ArrayLike], about: str) -> Figure:
    """The distribution of one signal on the source task and on each shift."""
    with canvas(name, (3.4, 2.6)) as drawn:
        axes, arrays = drawn.axes[0], {task: np.asarray(array, dtype=np.float64) for task, array in values.items()}
        everything = np.concatenate(list(arrays.values()))
        # A few extreme scores would squeeze all others into one bar: they are counted in the outermost bars.
        low, high = np.quantile(everything, [0.005, 0.995])
        edges = np.linspace(low, high if high > low else low + 1, 31)
        for i, (task, array) in enumerate(arrays.items()):
            weights = np.full(len(array), 1 / len(array))
            clipped = np.clip(array, edges[0], edges[-1])
            axes.hist(clipped, edges, weights=weights, histtype="step", linewidth=1.4, label=task, **style(i))
        axes.set(xlabel=signal, ylabel="share")
        axes.legend()
        medians = ", ".join(f"{task} {np.median(array):.3g}" for task, array in arrays.items())
        return drawn.figure(f"{signal} ({about})", f"Histogram of {signal}, {about}. Medians: {medians}.")


def risk_coverage(name: str, cells: Mapping[str, Answered], told: Mapping[str, str], about: str) -> Figure:
    """Error rate among the most confident questions, against the share answered; `told` as in `reliability`."""
    with canvas(name, with_legend(len(cells), 2)) as drawn:
        axes = drawn.axes[0]
        for i, (method, cell) in enumerate(cells.items()):
            errors = 1 - m.correct_per_question(cell.log_probs, cell.answers)
            coverage, risk = m.risk_coverage(m.confidence(cell.log_probs), errors)
            # The risk of the first few answers is noise, and 100 points are a smooth curve.
            points = np.unique(np.linspace(min(9, len(risk) - 1), len(risk) - 1, 100).astype(int))
            axes.plot(coverage[points], risk[points], label=method, **style(i))
        axes.set(xlim=(0, 1), ylim=(0, None), xlabel="coverage", ylabel="risk")
        drawn.drawing.legend(loc="outside lower center", ncols=2)
        numbers = ", ".join(f"{method} {told[method]}" for method in cells)
        return drawn.figure(f"Risk against coverage, {about}", f"Risk against coverage, {about}. AURC: {numbers}.")


def signals(cell: Answered) -> dict[str, npt.NDArray[np.float64]]:
    """The signals of some answers, and the length of their prompts."""
    return {**cell.signals, "prompt_tokens": cell.prompt_tokens.astype(np.float64)}
