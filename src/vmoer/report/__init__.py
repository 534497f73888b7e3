"""`report(DIR)`: metrics and predictions to tables in four formats and one self-contained page."""

import json
import re
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from vmoer import predictions, scores
from vmoer.errors import InputError
from vmoer.files import write_text
from vmoer.metrics import auroc
from vmoer.predictions import Cell, Predictions
from vmoer.report import figures, overhead, page, studies, summaries
from vmoer.report.figures import Figure
from vmoer.report.page import Section
from vmoer.report.tables import Entry, Table, to_csv, to_latex, to_markdown, to_terminal
from vmoer.scores import Row

__all__ = ["Entry", "Figure", "Section", "Table", "read", "report", "sections", "tables", "to_csv", "to_latex"]
__all__ += ["to_markdown", "to_terminal"]

tables = summaries.tables

_HOW = (
    "Metrics are computed from the saved predictions alone, by vmoer.scores: no model is needed to check a number.",
    "Intervals are 95% bootstrap intervals over questions, and over seeds where there are several (seeds are resampled "
    "first, then questions, the same for all seeds). Differences between methods are paired: the same draws of questions "
    "for both. Intervals of ECE, MCE, dECE, smECE, AURC and AUGRC are shifted by the bootstrap's own bias.",
    "ECE, MCE: 15 equal-width bins. dECE: equal-mass bins, debiased, near 0 (or below) for a calibrated model. smECE: "
    "smooth ECE. Noise floor: the ECE of a perfectly calibrated model with the same confidences.",
    "+ts: with one output temperature, fitted on the validation questions of the source task.",
    "Length-matched values compare only pairs of equally long prompts, and need 200 of them.",
    "Figures show the lowest seed.",
)


def read(directory: Path) -> list[Row]:
    """The rows of `DIR/metrics.json`, which is computed first where it does not exist."""
    path = Path(directory) / "metrics.json"
    if not path.exists():
        scores.write(directory)
    needed = {"model", "task", "split", "method", "seed", "signal", "metric", "value", "low", "high"}
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))
        whole = isinstance(rows, list) and all(needed <= row.keys() for row in rows)
    except (OSError, ValueError, AttributeError) as error:
        raise InputError(f"{path}: not a list of metrics rows ({error})") from error
    if not whole or not rows:
        raise InputError(f"{path}: must be a list of rows with {', '.join(sorted(needed))}")
    return list(rows)


def _first_seed(group: Predictions, task: str) -> dict[str, Cell]:
    """The test predictions of each method at its lowest seed, baselines first."""
    found: dict[str, Cell] = {}
    for key, cell in sorted(group.cells.items()):
        if key.task == task and group.scores(key):
            found.setdefault(key.method, cell)
    return {name: found[name] for name in sorted(found, key=lambda name: (name not in scores.BASELINES, name))}


def _figures(group: Predictions, task: str, slug: str) -> Iterator[Figure]:
    cells = _first_seed(group, task)
    for method, cell in cells.items():
        yield figures.reliability(f"reliability-{slug}-{_slug(method)}", method, cell, f"on {task}")
    # dozens of curves cannot be told apart: then those whose answers are averaged lie in the tables alone
    drawn = {name: c for name, c in cells.items() if len(cells) <= 12 or "+" not in name or name in scores.BASELINES}
    if drawn:
        yield figures.risk_coverage(f"risk-{slug}", drawn, f"by confidence, on {task}")


def _ood_figures(group: Predictions, slug: str) -> Iterator[Figure]:
    """ROC curves per shift and histograms per signal, each signal from the method that uses it best."""
    source = _first_seed(group, group.source_task)
    shifts = {task: cells for task in group.ood_tasks if (cells := _first_seed(group, task))}
    areas: dict[str, dict[str, float]] = {}
    for method, cell in source.items():
        for signal, own in figures.signals(cell).items():
            others = [figures.signals(cells[method]) for cells in shifts.values() if method in cells]
            found = [auroc(own, other[signal]) for other in others if signal in other]
            if found:
                areas.setdefault(signal, {})[method] = sum(found) / len(found)
    chosen = {signal: max(by_method, key=lambda name: by_method[name]) for signal, by_method in areas.items()}
    for task, cells in shifts.items():
        curves = {
            signal if signal == "prompt length" else f"{signal} ({method})": (
                figures.signals(source[method])[signal],
                figures.signals(cells[method])[signal],
            )
            for signal, method in chosen.items()
            if method in cells and signal in figures.signals(cells[method])
        }
        if curves:
            yield figures.roc(f"roc-{slug}-{_slug(task)}", curves, f"{group.source_task} → {task}")
    for signal, method in chosen.items():
        everywhere = {group.source_task: source, **shifts}
        values = {
            task: figures.signals(cells[method])[signal]
            for task, cells in everywhere.items()
            if method in cells and signal in figures.signals(cells[method])
        }
        about = "all methods alike" if signal == "prompt length" else method
        yield figures.histogram(f"histogram-{slug}-{_slug(signal)}", signal, values, about)


def _slug(text: str) -> str:
    return re.sub(r"[^\w.-]", "_", text)


def sections(rows: list[Row], predictions: list[Predictions]) -> list[Section]:
    """Calibration on the source task, OoD detection, then how the methods do on the shifted tasks themselves."""
    made: list[Section] = []
    grouped = {(group.model, group.source_task): group for group in predictions}
    for found in summaries.settings(rows):
        setting, group = found.setting, grouped.get((found.setting.model, found.setting.source))
        drawn = list(_figures(group, setting.task, setting.slug)) if group and not setting.shifted else []
        parts = [summaries.verdict_table(found), summaries.calibration_table(found), summaries.selective_table(found)]
        parts = [summaries.detection_table(found), *parts] if setting.shifted else parts
        parts = [table for table in parts if table.rows]
        if not parts:  # rows of another study
            continue
        if setting.shifted:
            text = (
                "How well each signal tells this task from the source task, and how the methods answer its questions."
            )
            made.append(Section(f"shift-{setting.slug}", f"Shift: {setting}", [text], parts))
            continue
        text = "Proper scores (NLL, Brier) are what to judge by; ECE only together with its noise floor."
        made.append(Section(f"calibration-{setting.slug}", f"Calibration: {setting}", [text], parts, drawn))
        if group and (signals := list(_ood_figures(group, setting.slug))):
            text = (
                "Each signal is drawn for the method that gives it the highest mean AUROC over the shifts, so these curves "
                "flatter it; the tables have all methods. Prompt length is the null signal."
            )
            made.append(Section(f"signals-{setting.slug}", f"OoD signals: {setting}", [text], [], signals))
    return made


def report(directory: Path) -> Path:
    """Write `DIR/report/`: index.html, tables.md, and each table as CSV and LaTeX; returns the page's path."""
    if absent := [name for name in ("jinja2", "matplotlib") if find_spec(name) is None]:
        raise InputError(f"the report needs {' and '.join(absent)}: pip install 'vmoer[report]'")
    directory = Path(directory)
    rows = read(directory)
    # Committed results may come without their predictions: then the page has tables and no figures.
    has_predictions = any(directory.glob("predictions.parquet")) or any(directory.glob("*/predictions.parquet"))
    answers = predictions.load(directory) if has_predictions else []
    answered = [row for row in rows if row.get("study") not in studies.BUILDERS]
    made = [*sections(answered, answers), *studies.sections(rows), *overhead.sections(directory, rows)]
    parquets = [str(path.relative_to(directory)) for path in predictions.files(directory)] if has_predictions else []
    sources = [
        *_HOW,
        f"Numbers: metrics.json ({len(rows)} rows)" + (f", from {', '.join(parquets)}." if parquets else "."),
    ]
    models = sorted({row["model"] for row in answered or rows if row["model"]})
    title = "Uncertainty report" + (f": {', '.join(models)}" if models else "")
    out, found = directory / "report", [table for section in made for table in section.tables]
    for table in found:
        write_text(out / f"{table.name}.csv", to_csv(table))
        write_text(out / f"{table.name}.tex", to_latex(table))
    write_text(out / "tables.md", "\n".join(to_markdown(table) for table in found))
    index = out / "index.html"
    write_text(index, page.render(title, page.headlines(answered), made, sources))
    return index
