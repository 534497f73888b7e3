"""Figures as SVG text for the page: reliability, ROC, score histograms, risk-coverage.

Drawn on a transparent ground in `currentColor`, so that a figure takes the page's ink in light and in dark mode; curves
in mid-tones near the Okabe-Ito palette, and dashed beyond eight. Text stays text. The same data give the same bytes.
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
from vmoer.predictions import SIGNALS, Cell

PALETTE = ("#0079c1", "#d55e00", "#009e73", "#cc79a7", "#b58900", "#56a5d8", "#8a63d2", "#7f8c8d")
_DASHES: tuple[Any, ...] = ("-", (0, (5, 2)), (0, (1, 1.5)), (0, (6, 2, 1, 2)))
CURVES = 12  # more than a figure can show
_INK = "#123456"  # stands for currentColor, which matplotlib does not know
_RC = {
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
    """A figure being drawn on `axes`, one above the other."""

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
    """The size of a figure whose legend stands below it: what it takes is not taken from the axes."""
    return 3.4, 2.6 + 0.15 * math.ceil(entries / columns)


def _inline(svg: str, alt: str) -> str:
    """A matplotlib file as an element of a page: no prologue, no metadata, no group ids, named for screen readers."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'<g id="[^"]*"', "<g", svg).replace(_INK, "currentColor")
    svg = re.sub(r"font: ([\d.]+)px [^;\"]*", r"font: \1px sans-serif", svg)
    box = re.search(r'viewBox="[^"]*"', svg)
    assert box is not None
    root = f'<svg {box.group()} role="img" aria-label="{html.escape(alt, quote=True)}">'
    svg = root + svg[svg.index(">") + 1 :]
    return "\n".join(line.rstrip() for line in svg.splitlines() if line.strip()) + "\n"


def reliability(name: str, method: str, cell: Cell, about: str) -> Figure:
    """Accuracy against confidence in 15 bins with the band of a calibrated model, above a histogram of confidence."""
    confidence, correct = m.confidence(cell.log_probs), m.correct_per_question(cell.log_probs, cell.answers)
    bins = m.reliability(confidence, correct)
    filled = bins.size > 0
    with canvas(name, (3.4, 3.4), rows=(3.2, 1)) as drawn:
        top, bottom = drawn.axes
        x = bins.confidence[filled]
        top.plot([0, 1], [0, 1], color=_INK, linewidth=0.6, alpha=0.6)
        top.vlines(x, bins.low[filled], bins.high[filled], color=_INK, alpha=0.22, linewidth=8)
        top.plot(x, bins.accuracy[filled], marker="o", markersize=4, color=PALETTE[1])
        top.set(xlim=(0, 1), ylim=(-0.02, 1.02), ylabel="accuracy")
        edges = np.linspace(0, 1, len(bins.size) + 1)
        bottom.bar(
            edges[:-1], bins.size / bins.size.sum(), width=np.diff(edges), align="edge", color=PALETTE[0], alpha=0.75
        )
        bottom.set(xlabel="confidence", ylabel="share")
        ece, floor = m.ece(confidence, correct), m.noise_floor(confidence, draws=200).mean
        inside = int(((bins.accuracy >= bins.low) & (bins.accuracy <= bins.high))[filled].sum())
        alt = (
            f"Reliability diagram of {method} {about}: mean confidence {confidence.mean():.2f}, accuracy {correct.mean():.2f}, "
            f"ECE {ece:.3f} where a calibrated model would show about {floor:.3f}; {inside} of {int(filled.sum())} bins lie in "
            "the calibrated band."
        )
        return drawn.figure(f"{method}: ECE {ece:.3f}, floor {floor:.3f}", alt)


def roc(name: str, scores: Mapping[str, tuple[npt.ArrayLike, npt.ArrayLike]], about: str) -> Figure:
    """ROC curves: `scores` maps a label to its values on the source task and on the shift."""
    with canvas(name, (3.4, 3.9)) as drawn:
        axes, areas = drawn.axes[0], {}
        axes.plot([0, 1], [0, 1], color=_INK, linewidth=0.6, alpha=0.6)
        for i, (label, (inside, outside)) in enumerate(scores.items()):
            own, shifted = np.sort(np.asarray(inside)), np.sort(np.asarray(outside))
            # One point per distinct score, highest first; ties give the sloping pieces.
            thresholds = np.unique(np.concatenate([own, shifted]))[::-1]
            flagged = [1 - np.searchsorted(side, thresholds, "left") / len(side) for side in (own, shifted)]
            areas[label] = m.auroc(own, shifted)
            curve = {"color": _INK, "linestyle": ":"} if label == "prompt length" else style(i)
            axes.plot(
                *(np.concatenate([[0.0], side]) for side in flagged), label=f"{label} {areas[label]:.2f}", **curve
            )
        axes.set(xlim=(0, 1), ylim=(0, 1.01), xlabel="false positives", ylabel="true positives")
        drawn.drawing.legend(loc="outside lower center")
        listed = ", ".join(f"{label} {area:.2f}" for label, area in areas.items())
        return drawn.figure(f"ROC, {about}", f"ROC curves, {about}. AUROC: {listed}.")


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


def risk_coverage(name: str, cells: Mapping[str, Cell], about: str) -> Figure:
    """Error rate among the most confident questions, against the share answered; of many methods those in one pass."""
    if len(cells) > CURVES:
        cells = {method: cell for method, cell in cells.items() if "+" not in method or method == "map+ts"}
        about += ", one pass"
    with canvas(name, with_legend(len(cells), 2)) as drawn:
        axes, described = drawn.axes[0], []
        for i, (method, cell) in enumerate(cells.items()):
            errors = 1 - m.correct_per_question(cell.log_probs, cell.answers)
            coverage, risk = m.risk_coverage(m.confidence(cell.log_probs), errors)
            # The risk of the first few answers is noise, and 300 points are a smooth curve.
            shown = np.unique(np.linspace(min(9, len(risk) - 1), len(risk) - 1, 300).astype(int))
            axes.plot(coverage[shown], risk[shown], label=method, **style(i))
            described.append(f"{method} {risk[(len(risk) - 1) // 2]:.3f}")
        axes.set(xlim=(0, 1), ylim=(0, None), xlabel="coverage", ylabel="risk")
        drawn.drawing.legend(loc="outside lower center", ncols=2)
        return drawn.figure(
            f"Risk against coverage, {about}",
            f"Risk against coverage, {about}. Risk at half coverage: {', '.join(described)}.",
        )


def signals(cell: Cell) -> dict[str, npt.NDArray[np.float64]]:
    """The signals of a cell in their fixed order, prompt length last."""
    ordered = {name: cell.signals[name] for name in SIGNALS if name in cell.signals}
    return {**ordered, "prompt length": cell.prompt_tokens.astype(np.float64)}
