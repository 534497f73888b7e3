"""Did it help? One sentence, from rows of `metrics.json` alone."""

from collections.abc import Sequence
from typing import NamedTuple

from vmoer.evaluation.scores import Row
from vmoer.live import html
from vmoer.report import summaries
from vmoer.report.summaries import Scores

BASES = {"map+ts": "the plain model with a temperature", "map": "the plain model"}
"""What a method is held against, the most demanding first, and what a sentence calls it."""
_WORDS = {"better": "better", "worse": "worse", "within noise": "no difference beyond noise"}


class Compared(NamedTuple):
    """The NLL of a method minus that of the base, on the same questions, and what its interval says."""

    method: str
    difference: str
    value: float
    word: str


class Verdict(str):
    """The sentence. In a notebook a table of what it counts stands below it, sorted by name: the best of many is no finding."""

    compared: Sequence[tuple[str, Compared]] = ()
    """Where, and what was compared there."""

    def _repr_html_(self) -> str:
        rows = sorted((where, one.method, one.difference, _WORDS[one.word]) for where, one in self.compared)
        return html.table(("task", "method", "NLL less the base's", "that is"), rows, self)


def verdict(rows: Sequence[Row]) -> Verdict | None:
    """ "Against the plain model with a temperature: NLL -0.012 [-0.020, -0.004] over 500 questions: better."

    The interval is that of the rows: 95%, by a bootstrap over questions that takes the same ones for both. Each method has
    the same help as the base: its own output temperature where both have one. Several methods, models or tasks are counted,
    and none is named: the best of many on test is no finding. Shifted tasks are left out. A plain model alone is compared
    with itself, with and without a temperature.

    Args:
        rows: Of `metrics.json`.

    Returns:
        The sentence, which a notebook shows with its table; None where nothing can be compared.
    """
    settings = [scores for scores in summaries.settings(rows) if not scores.setting.shifted]
    for base in BASES:
        found = {str(scores.setting): against(scores, base) for scores in settings}
        found = {where: compared for where, compared in found.items() if compared}
        if found:
            sizes = dict.fromkeys(scores.size() for scores in settings if str(scores.setting) in found)
            return _verdict(BASES[base], found, next(iter(sizes)) if len(sizes) == 1 else "")
    return None


def against(scores: Scores, base: str) -> list[Compared]:
    """Each method against a base, those that gain most first; nothing where the base did not answer."""
    compared = []
    for method in _methods(scores, base):
        word, known = (
            summaries.verdict(scores, method, "nll", base),
            scores.entry(method, f"nll_minus_{base.replace('+', '_')}"),
        )
        if word is not None and known.value is not None:
            compared.append(Compared(method, f"{known.text} {known.detail}", known.value, word))
    return sorted(compared, key=lambda one: (one.value, one.method))


def _methods(scores: Scores, base: str) -> list[str]:
    """Every method but the plain model, in the form that has the base's help; the plain model's temperature against none."""
    suffix = base.removeprefix("map")
    plain = [name for name in scores.methods if not name.endswith("+ts") and name != "map"]
    if not plain and base == "map":
        return [name for name in scores.methods if name != base]
    return [name + suffix if name + suffix in scores.methods else name for name in plain]


def _verdict(base: str, found: dict[str, list[Compared]], size: str) -> Verdict:
    compared = [(where, one) for where, ones in found.items() for one in ones]
    said = Verdict(_sentence(base, compared, size, "comparisons" if len(found) > 1 else "methods"))
    said.compared = compared
    return said


def _sentence(base: str, compared: Sequence[tuple[str, Compared]], size: str, what: str) -> str:
    over = f" over {size}" if size else ""
    if len(compared) == 1:
        _, first = compared[0]
        help_ = " a temperature gives" if first.method == "map+ts" else ""
        return f"Against {base}{help_}: NLL {first.difference}{over}: {_WORDS[first.word]}."
    counts = {word: sum(one.word == word for _, one in compared) for word in _WORDS}
    said = [f"{counts['better']} of {len(compared)} {what} better", f"{counts['worse']} worse"]
    said.append(f"{counts['within noise']} without a difference beyond noise")
    return f"Against {base}, by NLL{over}: {', '.join(said)}."
