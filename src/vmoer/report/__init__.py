"""`report(DIR)`: metrics and predictions to tables in four formats and one self-contained page."""

import re
from collections.abc import Iterable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from vmoer.errors import InputError
from vmoer.evaluation import predictions, scores, temperatures
from vmoer.evaluation.predictions import Answered, Predictions
from vmoer.evaluation.scores import BASELINES, Row
from vmoer.files import read_rows, stored, write_text
from vmoer.report import figures, labels, overhead, page, studies, summaries
from vmoer.report.figures import Figure
from vmoer.report.page import Section
from vmoer.report.summaries import Scores
from vmoer.report.tables import Entry, Table, to_csv, to_latex, to_markdown, to_terminal
from vmoer.report.verdict import verdict

__all__ = ["Entry", "Figure", "Report", "Section", "Table", "read", "report", "sections", "to_csv", "to_latex"]
__all__ += ["to_markdown", "to_terminal"]

_HOW = (
    "Metrics are computed from the saved predictions alone, by vmoer.evaluation.scores: no model is needed to check a number.",
    "Intervals are 95% bootstrap intervals over questions, and over seeds where there are several (seeds are resampled "
    "first, then questions, the same for all seeds). Differences between methods are paired: the same draws of questions "
    "for both. Intervals of ECE, MCE, dECE, smECE, AURC and AUGRC are shifted by the bootstrap's own bias.",
    "ECE, MCE: 15 equal-width bins. dECE: equal-mass bins, debiased, near 0 (or below) for a calibrated model. smECE: "
    "smooth ECE. Noise floor: the ECE of a perfectly calibrated model with the same confidences.",
    "Length-matched values compare only pairs of equally long prompts, and need 200 of them.",
    "Figures of answers are drawn from the lowest seed; every number beside them is that of the tables, over all seeds.",
)
SERIES = 4  # tasks, or shifts, in one figure


def read(directory: Path) -> list[Row]:
    """The rows of `DIR/metrics.json` (or `metrics.json.gz`), which is computed first where it does not exist."""
    path = stored(Path(directory) / "metrics.json")
    if not path.exists():
        scores.write(directory)
    needed = {"model", "task", "split", "method", "seed", "signal", "metric", "value", "low", "high"}
    try:
        rows = read_rows(path)
        whole = isinstance(rows, list) and all(needed <= row.keys() for row in rows)
    except (OSError, ValueError, AttributeError) as error:
        raise InputError(f"{path}: not a list of metrics rows ({error})") from error
    if not whole or not rows:
        raise InputError(f"{path}: must be a list of rows with {', '.join(sorted(needed))}")
    for row in rows:
        if any(not isinstance(row[name], int | float | None) for name in ("value", "low", "high")):
            raise InputError(f"{path}: a value is no number in the row {row}")
        if wrong := _no_text(row):
            raise InputError(f"{path}: {wrong} is no text in the row {row}")
    return list(rows)


def _no_text(row: Row) -> str | None:
    """The first name of a row that must be a text and is none. Rows of some studies are of the model alone, without a method."""
    required = {"metric"} | ({"method"} if row.get("study") not in studies.OF_THE_MODEL else set())
    for name in ("study", "model", "task", "split", "method", "signal", "metric"):
        if not isinstance(row.get(name), str) and (name in required or row.get(name) is not None):
            return name
    return None


class Setting(NamedTuple):
    """A source task: its scores, those of its shifts, and its predictions where they are kept."""

    scores: Scores
    shifts: list[Scores]
    group: Predictions | None

    def cells(self, task: str, labels: Iterable[str]) -> dict[str, Answered]:
        """The test predictions of these labels at their lowest seed."""
        found: dict[str, Answered] = {}
        for key, cell in sorted(self.group.cells.items()) if self.group else []:
            if key.task == task and self.group and self.group.scores(key):
                found.setdefault(key.method, cell)
        return {label: found[label] for label in labels if label in found}

    def carriers(self) -> dict[str, str]:
        """Signals, and of each the first label in the fixed order that has it: no choice by a result."""
        having: dict[str, set[str]] = {}
        for shift in self.shifts:
            for method, metric, signal in shift.rows:
                if metric == "auroc" and signal:
                    having.setdefault(signal, set()).add(method)
        return {signal: labels.ordered(methods)[0] for signal, methods in sorted(having.items())}


def _settings(rows: Sequence[Row], predictions: Sequence[Predictions]) -> list[Setting]:
    """Source tasks, those with shifts first."""
    groups = {(group.model, group.source_task): group for group in predictions}
    found = summaries.settings(rows)
    made = []
    for own in found:
        key = own.setting.model, own.setting.source
        if not own.setting.shifted:
            shifts = [s for s in found if s.setting.shifted and (s.setting.model, s.setting.source) == key]
            made.append(Setting(own, shifts, groups.get(key)))
    return sorted(made, key=lambda one: not one.shifts)


def _told(scores: Scores, label: str) -> str:
    ece, floor = scores.entry(label, "ece"), scores.entry(label, "ece_floor")
    return f"ECE {ece.text} {ece.detail}, noise floor {floor.text}"


def _answer_figures(one: Setting) -> Iterator[Figure]:
    scores, slug, task = one.scores, one.scores.setting.slug, one.scores.setting.task
    base = labels.baseline(scores.methods)
    chosen = [*([base] if base else []), *labels.shown(scores.methods, base or "")]
    cells = one.cells(task, chosen)
    for label, cell in cells.items():
        told = {label: _told(scores, label)}
        yield figures.reliability(f"reliability-{slug}-{_slug(label)}", {label: cell}, told, f"of {label} on {task}")
    if cells:
        areas = {label: scores.entry(label, "aurc").text for label in cells}
        yield figures.risk_coverage(f"risk-{slug}", cells, areas, f"by confidence, on {task}")


def _signal_figures(one: Setting) -> Iterator[Figure]:
    """ROC curves per shift and histograms per signal."""
    source, carriers = one.scores.setting.source, one.carriers()
    cells = {task: one.cells(task, set(carriers.values())) for task in (source, *(s.setting.task for s in one.shifts))}
    values = {
        (task, signal): figures.signals(cell)[signal]
        for task, found in cells.items()
        for signal, label in carriers.items()
        if (cell := found.get(label)) and signal in figures.signals(cell)
    }
    for shift in one.shifts:
        task = shift.setting.task
        curves = {
            f"{signal} ({label}) {shift.entry(label, 'auroc', signal).text}": (
                values[source, signal],
                values[task, signal],
            )
            for signal, label in carriers.items()
            if {(source, signal), (task, signal)} <= values.keys()
        }
        if curves:
            yield figures.roc(f"roc-{shift.setting.slug}", curves, f"{source} → {task}")
    for signal, label in carriers.items():
        if drawn := {task: values[task, signal] for task in cells if (task, signal) in values}:
            yield figures.histogram(f"histogram-{one.scores.setting.slug}-{_slug(signal)}", signal, drawn, label)


def _slug(text: str) -> str:
    return re.sub(r"[^\w.-]", "_", text)


def overview(found: Sequence[Setting]) -> list[Figure]:
    """The first screen: methods against the calibrated base, reliability before and after it, detection of shifts."""
    made, first = [], found[0]
    tasks = {str(one.scores.setting): one.scores for one in found[:SERIES]}
    base = labels.baseline(first.scores.methods)
    metric = f"nll_minus_{(base or '').replace('+', '_')}"
    lines = {
        label: {task: row for task, s in tasks.items() if (row := s.get(label, metric)) and row["value"] is not None}
        for label in labels.shown({label for s in tasks.values() for label in s.methods}, base or "")
    }
    if lines := {label: row for label, row in lines.items() if row}:
        more = len({label for s in tasks.values() for label in s.methods} - {base}) > len(lines)
        which = f"Labels are the first {len(lines)}" if more else "Labels are"
        about = (
            f"Methods against {base} on NLL: left is better, hollow includes zero. {which} in a "
            "fixed order, not the best; nothing is adjusted for their number."
        )
        made.append(figures.forest("overview-methods", lines, about, f"NLL less that of {base}"))
    pair = first.cells(first.scores.setting.task, BASELINES)
    if pair:
        told = {label: _told(first.scores, label) for label in pair}
        made.append(figures.reliability("overview-reliability", pair, told, f"on {first.scores.setting}"))
    shifts = {s.setting.task: s for s in first.shifts[:SERIES]}
    signals = {
        signal: {
            task: row
            for task, s in shifts.items()
            if (row := s.get(label, "auroc", signal)) and row["value"] is not None
        }
        for signal, label in first.carriers().items()
    }
    if signals := {signal: row for signal, row in signals.items() if row}:
        mean = {signal: sum(row["value"] for row in by.values()) / len(by) for signal, by in signals.items()}
        lines = {signal: signals[signal] for signal in sorted(signals, key=lambda signal: -mean[signal])}
        about = (
            f"How well each signal tells other tasks from {first.scores.setting.source}, by mean AUROC. prompt_tokens, the "
            "length of the prompt, is the null: a signal is worth what it has beyond it."
        )
        made.append(figures.forest("overview-detection", lines, about, "AUROC", zero=0.5))
    return made


def sections(found: Sequence[Setting]) -> list[Section]:
    """Of each source task: its scores, the signals of shifts, then how the methods do on the shifted tasks themselves."""
    made: list[Section] = []
    for one in found:
        setting = one.scores.setting
        drawn, signals = list(_answer_figures(one)), list(_signal_figures(one))
        if parts := summaries.parts(one.scores):
            text = "Proper scores (NLL, Brier) are what to judge by; ECE only together with its noise floor."
            made.append(Section(f"calibration-{setting.slug}", f"Calibration: {setting}", [text], parts, drawn))
        if signals:
            text = "Each signal is drawn for one label, the first in the fixed order that has it; the tables have all."
            made.append(Section(f"signals-{setting.slug}", f"OoD signals: {setting}", [text], [], signals))
        for shift in one.shifts:
            if parts := summaries.parts(shift):
                text = "How well each signal tells this task from the source task, and how the methods answer its questions."
                made.append(Section(f"shift-{shift.setting.slug}", f"Shift: {shift.setting}", [text], parts))
    return made


class Report(NamedTuple):
    """What was written: the page, and the tables on it, which are the tables of every study in the folder."""

    page: Path
    tables: list[Table]
    rows: list[Row]


def report(directory: Path) -> Report:
    """Write `DIR/report/`: index.html, tables.md, and each table as CSV and LaTeX."""
    if absent := [name for name in ("jinja2", "matplotlib") if find_spec(name) is None]:
        raise InputError(f"the report needs {' and '.join(absent)}: pip install 'vmoer[report]'")
    directory = Path(directory)
    rows = read(directory)
    # Committed results may come without their predictions: then the page has tables and no figures.
    has_predictions = any(directory.glob("predictions.parquet")) or any(directory.glob("*/predictions.parquet"))
    answers = temperatures.load(directory) if has_predictions else []
    answered = [row for row in rows if row.get("study") not in studies.BUILDERS]
    try:
        found = _settings(answered, answers)
        first = overview(found) if found else []
        made = [*sections(found), *studies.sections(rows), *overhead.sections(directory, rows)]
    except InputError:
        raise
    except (LookupError, TypeError, ValueError, AttributeError) as error:  # rows that some study needs are not there
        path = directory / "metrics.json"
        raise InputError(f"{path} is incomplete or damaged ({type(error).__name__}: {error}): make it again") from error
    parquets = [str(path.relative_to(directory)) for path in predictions.files(directory)] if has_predictions else []
    sources = [
        *_HOW,
        f"Numbers: metrics.json ({len(rows)} rows)" + (f", from {', '.join(parquets)}." if parquets else "."),
    ]
    models = sorted({row["model"] for row in answered or rows if row["model"]})
    title = "Uncertainty report" + (f": {', '.join(models)}" if models else "")
    out, tables = directory / "report", [table for section in made for table in section.tables if table.rows]
    if not tables:
        raise InputError(f"{directory / 'metrics.json'} has no row of a metric that the report shows")
    for table in tables:
        write_text(out / f"{table.name}.csv", to_csv(table))
        write_text(out / f"{table.name}.tex", to_latex(table))
    write_text(out / "tables.md", "\n".join(to_markdown(table) for table in tables))
    index = out / "index.html"
    legend = labels.legend({row["method"] for row in rows if row["method"]})
    write_text(index, page.render(title, verdict(answered), first, made, legend, sources))
    return Report(index, tables, rows)
