"""From rows of `metrics.json` to tables: calibration, verdicts, OoD detection, selective prediction."""

import hashlib
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from vmoer.evaluation.scores import BASELINES, Row
from vmoer.report.tables import Entry, Table, number

_CALIBRATION = {
    "accuracy": "ACC",
    "nll": "NLL",
    "brier": "Brier",
    "ece": "ECE",
    "mce": "MCE",
    "debiased_ece": "dECE",
    "smooth_ece": "smECE",
}
_SELECTIVE = {"accuracy": "ACC", "aurc": "AURC", "augrc": "AUGRC"}
_DETECTION = {"auroc": "AUROC", "auprc": "AUPRC", "fpr95": "FPR95", "auroc_matched": "AUROC matched"}
VERDICTS = {"nll": "NLL", "brier": "Brier", "debiased_ece": "dECE", "accuracy": "ACC"}
_HIGHER = ("accuracy", "auroc", "auprc", "auroc_matched")


class Setting(NamedTuple):
    """What a table is about: one model, one task it was fine-tuned on, one task it answers."""

    model: str | None
    source: str
    task: str
    alone: bool = False  # the only model in the report: its name need not be said each time

    @property
    def shifted(self) -> bool:
        return self.task != self.source

    def __str__(self) -> str:
        task = f"{self.source} → {self.task}" if self.shifted else self.task
        return f"{task}, {self.model}" if self.model and not self.alone else task

    @property
    def slug(self) -> str:
        """A file name's part; of the model only its last name."""
        model = [self.model.rstrip("/").rsplit("/", 1)[-1]] if self.model and not self.alone else []
        text = "-".join([*model, self.source, *([self.task] if self.shifted else [])])
        plain = "".join(c if c.isalnum() or c in "-_." else "_" for c in text)
        if plain == text:
            return text
        return f"{plain}-{hashlib.sha256(text.encode()).hexdigest()[:6]}"  # "a b" is not "a_b"


class Scores:
    """The test rows of one setting, one value per (method, metric, signal): over seeds where there are several."""

    def __init__(self, setting: Setting, rows: Iterable[Row]) -> None:
        self.setting = setting
        self.rows: dict[tuple[str, str, str | None], Row] = {}
        self.seeds: set[int] = set()
        for row in rows:
            if row["metric"] != "temperature":
                key = row["method"], row["metric"], row["signal"]
                self.seeds |= {row["seed"]} - {None}
                if key not in self.rows or row["seed"] is None:
                    self.rows[key] = row

    @property
    def methods(self) -> list[str]:
        """The baselines first, then the others by name."""
        found = {method for method, *_ in self.rows}
        return [*(name for name in BASELINES if name in found), *sorted(found - set(BASELINES))]

    def get(self, method: str, metric: str, signal: str | None = None) -> Row | None:
        return self.rows.get((method, metric, signal))

    def value(self, method: str, metric: str, signal: str | None = None) -> float | None:
        row = self.get(method, metric, signal)
        return None if row is None else row["value"]

    def entry(self, method: str, metric: str, signal: str | None = None) -> Entry:
        row = self.get(method, metric, signal)
        return Entry("-") if row is None else number(row["value"], row["low"], row["high"])

    def size(self) -> str:
        """ "500 questions" or "500 questions, 3 seeds"."""
        questions = next((row["value"] for (_, metric, _), row in self.rows.items() if metric == "questions"), None)
        parts = [] if questions is None else [f"{questions:.0f} questions"]
        return ", ".join([*parts, f"{len(self.seeds)} seeds"] if len(self.seeds) > 1 else parts)

    def intervals(self) -> str:
        over = "questions and seeds" if len(self.seeds) > 1 else "questions"
        return f"{self.size()}. In brackets: 95% bootstrap intervals over {over}."


def settings(rows: Sequence[Row]) -> list[Scores]:
    """The rows of each setting; the source tasks before the shifts."""
    groups: dict[Setting, list[Row]] = {}
    alone = len({row["model"] for row in rows}) == 1
    for row in rows:
        setting = Setting(row["model"], row.get("source") or row["task"], row["task"], alone)
        groups.setdefault(setting, []).append(row)
    order = sorted(groups, key=lambda s: (s.model or "", s.source, s.shifted, s.task))
    return [Scores(setting, groups[setting]) for setting in order]


def _overlaps(row: Row, best: Row) -> bool:
    known = [row["low"], row["high"], best["low"], best["high"]]
    return None not in known and row["low"] <= best["high"] and best["low"] <= row["high"]


def best_within_noise(scores: Scores, metric: str) -> tuple[set[str], bool]:
    """The best method and all that cannot be told from it, and whether that rests on paired intervals throughout.

    A method cannot be told from the best one where the paired interval of their difference includes zero. Without such
    a row, it is where their two intervals overlap: a weaker test, which calls too many methods equal.
    """
    found = {
        method: row for method in scores.methods if (row := scores.get(method, metric)) and row["value"] is not None
    }
    if not found:
        return set(), True
    sign = -1 if metric in _HIGHER else 1
    best = min(found, key=lambda method: (sign * found[method]["value"], method))
    equal, paired = {best}, True
    for method in found.keys() - {best}:
        difference = scores.get(method, f"{metric}_minus_best")
        if difference is None or difference["low"] is None:
            paired = False
            within = _overlaps(found[method], found[best])
        else:
            within = difference["low"] <= 0 <= difference["high"]
        equal |= {method} if within else set()
    return equal, paired


def _compared(scores: Scores, metrics: dict[str, str]) -> tuple[list[list[Entry]], list[str]]:
    """Rows of methods by metrics with the best within noise marked, and the notes that this needs."""
    equal = {metric: best_within_noise(scores, metric) for metric in metrics}
    rows = [
        [Entry(method), *(scores.entry(method, key)._replace(best=method in equal[key][0]) for key in metrics)]
        for method in scores.methods
        if any(scores.get(method, key) for key in metrics)
    ]
    notes = [f"{scores.intervals()} Best within noise (bold or *): the paired interval against the best includes zero."]
    if loose := [label for metric, label in metrics.items() if not equal[metric][1]]:
        notes.append(
            f"No paired differences for {', '.join(loose)}: best within noise there means overlapping intervals."
        )
    return rows, notes


def floor_notes(scores: Scores) -> list[str]:
    """Sentences on differences of ECE that are smaller than its noise floor."""
    found = {name: v for name in scores.methods if (v := scores.value(name, "ece")) is not None}
    floors = {name: v for name in found if (v := scores.value(name, "ece_floor")) is not None}
    if not floors:
        return []
    notes, best = [], min(found, key=lambda name: (found[name], name))
    close = {name: v - found[best] for name, v in found.items() if name != best}
    if best in floors and (below := [name for name, gap in close.items() if gap < floors[best]]):
        notes.append(
            f"Noise floor: a perfectly calibrated model with the confidences of {best} would show an ECE of about "
            f"{floors[best]:.3f} on this many questions. The differences between {best} ({found[best]:.3f}) and "
            f"{', '.join(f'{name} ({found[name]:.3f})' for name in below)} are smaller than that and mean nothing."
        )
    p_values = {name: scores.value(name, "ece_p") for name in found}
    if calibrated := [name for name, p in p_values.items() if p is not None and p > 0.05]:
        notes.append(f"By ECE alone, not to be told from perfectly calibrated (p > 0.05): {', '.join(calibrated)}.")
    return notes


def calibration_table(scores: Scores) -> Table:
    """Methods by accuracy, proper scores and calibration errors; the noise floor of ECE beside it."""
    rows, notes = _compared(scores, _CALIBRATION)
    columns, after = ["Method", *_CALIBRATION.values()], 2 + list(_CALIBRATION).index("ece")
    columns.insert(after, "ECE floor")
    for row in rows:
        row.insert(after, number(scores.value(row[0].text, "ece_floor")))
    name, title = f"calibration-{scores.setting.slug}", f"Calibration: {scores.setting}"
    return Table(name, title, columns, rows, [*notes, *untrained_notes(scores), *floor_notes(scores)])


def untrained_notes(scores: Scores) -> list[str]:
    """A sentence on methods whose routers are, with one seed or more, as they began: validation kept the untrained state."""
    untrained = [method for method in scores.methods if scores.value(method, "moved") == 0]
    if not untrained:
        return []
    return [f"Untrained routers, since validation kept epoch 0 of at least one seed: {', '.join(untrained)}."]


def selective_table(scores: Scores) -> Table:
    """Methods by the risk of answering only the most confident questions; lower is better."""
    rows, notes = _compared(scores, _SELECTIVE)
    notes.append("AURC, AUGRC: areas under the (generalised) risk-coverage curve by confidence; lower is better.")
    name, title = f"selective-{scores.setting.slug}", f"Selective prediction: {scores.setting}"
    return Table(name, title, ["Method", *_SELECTIVE.values()], rows, notes)


def verdict(scores: Scores, method: str, metric: str, baseline: str) -> str | None:
    """ "better", "worse" or "within noise" than a baseline, from the paired interval; None without one."""
    row = scores.get(method, f"{metric}_minus_{baseline.replace('+', '_')}")
    if row is None or row["low"] is None or row["high"] is None:
        return None
    if row["low"] <= 0 <= row["high"]:
        return "within noise"
    return "better" if (row["high"] < 0) != (metric in _HIGHER) else "worse"


def verdict_table(scores: Scores) -> Table:
    """Every method against map, and against map with output temperature scaling."""
    pairs = [(metric, baseline) for baseline in BASELINES for metric in VERDICTS]
    # Output temperature does not change the answers of map, so accuracy against map+ts is that against map.
    pairs = [pair for pair in pairs if pair != ("accuracy", "map+ts")]
    rows = []
    for method in scores.methods:
        row = [Entry(method)]
        for metric, baseline in pairs:
            word = verdict(scores, method, metric, baseline)
            known = scores.entry(method, f"{metric}_minus_{baseline.replace('+', '_')}")
            detail, tone = f"{known.text} {known.detail}", word if word in ("better", "worse") else "even"
            row.append(Entry("-") if word is None else known._replace(text=word, detail=detail, tone=tone))
        rows += [row] if any(entry.tone for entry in row) else []
    notes = [
        f"{scores.size()}. Paired differences to the baseline on the same questions: better or worse where the 95% "
        "interval excludes zero. Lower is better for all but accuracy (ACC).",
    ]
    columns = ["Method", *(f"{VERDICTS[metric]} vs {baseline}" for metric, baseline in pairs)]
    return Table(f"verdicts-{scores.setting.slug}", f"Verdicts: {scores.setting}", columns, rows, notes)


def detection_table(scores: Scores) -> Table:
    """Methods by signals: how well each tells the shifted task from the source task."""
    found = {(method, signal) for method, metric, signal in scores.rows if metric == "auroc" and signal}
    lengths = {scores.value(method, "auroc", signal) for method, signal in found if signal == "prompt_tokens"}
    pairs = [(method, signal) for method in scores.methods for signal in sorted(s for n, s in found if n == method)]
    if len(lengths) == 1:  # the same prompts for all: one row says it
        one = next(pair for pair in pairs if pair[1] == "prompt_tokens")
        pairs = [one, *(pair for pair in pairs if pair[1] != "prompt_tokens")]
    rows = []
    equal = {
        metric: _best_signals(scores, metric, [p for p in pairs if p[1] != "prompt_tokens"]) for metric in _DETECTION
    }
    for method, signal in pairs:
        label = "(any)" if signal == "prompt_tokens" and len(lengths) == 1 else method
        entries = [
            scores.entry(method, metric, signal)._replace(best=(method, signal) in equal[metric])
            for metric in _DETECTION
        ]
        rows.append([Entry(label), Entry(signal), *entries])
    reasons = {row["note"] for row in scores.rows.values() if row["metric"] == "auroc_matched" and row.get("note")}
    notes = [
        f"{scores.intervals()} Bold or *: intervals overlap with the best one's. FPR95: lower is better.",
        "prompt_tokens is the null signal: what prompt length alone gives. A signal is worth something beyond it, and "
        "on prompts of matched length.",
        *(f"AUROC matched: {reason}." for reason in sorted(reasons)),
    ]
    title = f"OoD detection: {scores.setting}"
    return Table(f"ood-{scores.setting.slug}", title, ["Method", "Signal", *_DETECTION.values()], rows, notes, labels=2)


def _best_signals(scores: Scores, metric: str, pairs: Sequence[tuple[str, str]]) -> set[tuple[str, str]]:
    found = {pair: row for pair in pairs if (row := scores.get(pair[0], metric, pair[1])) and row["value"] is not None}
    if not found:
        return set()
    sign = -1 if metric in _HIGHER else 1
    best = found[min(found, key=lambda pair: (sign * found[pair]["value"], pair))]
    return {pair for pair, row in found.items() if row is best or _overlaps(row, best)}


def tables(rows: Sequence[Row]) -> list[Table]:
    """Every table that the rows allow."""
    return [table for scores in settings(rows) for table in parts(scores)]


def parts(scores: Scores) -> list[Table]:
    """Every table that the scores of one setting allow."""
    made = [calibration_table(scores), verdict_table(scores), selective_table(scores)]
    made += [detection_table(scores)] if scores.setting.shifted else []
    return [table for table in made if table.rows]
