"""The HTML page: headline, sections, sources. A new study adds a `Section` to the list; the template does the rest."""

from collections.abc import Sequence
from typing import NamedTuple

from vmoer.report.figures import Figure
from vmoer.report.summaries import VERDICTS, Scores, settings, verdict
from vmoer.report.tables import Table
from vmoer.scores import Row

MOST = 6  # methods that a sentence of the headline names


class Section(NamedTuple):
    """A part of the page; `id` is its anchor."""

    id: str
    title: str
    text: Sequence[str] = ()
    tables: Sequence[Table] = ()
    figures: Sequence[Figure] = ()


def _named(scores: Scores, methods: Sequence[str], baseline: str) -> str:
    """ "vglr-fc (NLL -0.108 [-0.150, -0.061])" for each of the methods, the largest differences first."""
    known = {name: scores.entry(name, f"nll_minus_{baseline.replace('+', '_')}") for name in methods}
    ordered = sorted(known, key=lambda name: -abs(known[name].value or 0.0))
    return _listed([f"{name} (NLL {known[name].text} {known[name].detail})" for name in ordered])


def _listed(names: Sequence[str]) -> str:
    """As many as a sentence holds; the table of verdicts has them all."""
    more = len(names) - MOST
    return ", ".join(names[:MOST]) + (f" and {more} more" if more > 0 else "")


def _against(scores: Scores, baseline: str) -> list[str]:
    """Who is better or worse than a baseline on all three of NLL, Brier and debiased ECE; all others are named too."""
    words = {
        method: [verdict(scores, method, metric, baseline) for metric in VERDICTS if metric != "accuracy"]
        for method in scores.methods
        if method != baseline and verdict(scores, method, "nll", baseline)
    }
    if not words:
        return []
    better = [method for method, found in words.items() if set(found) == {"better"}]
    worse = [method for method, found in words.items() if set(found) == {"worse"}]
    even = [method for method, found in words.items() if set(found) == {"within noise"}]
    mixed = [method for method in words if method not in (*better, *worse, *even)]
    claim = f"better than {baseline} on NLL, Brier and debiased ECE alike"
    sentences = [
        f"{claim[0].upper()}{claim[1:]}: {_named(scores, better, baseline)}." if better else f"No method is {claim}."
    ]
    if costly := [method for method in better if verdict(scores, method, "accuracy", baseline) == "worse"]:
        sentences.append(f"That costs accuracy with {', '.join(costly)}.")
    if worse:
        sentences.append(f"Worse on all three: {_named(scores, worse, baseline)}.")
    if even:
        sentences.append(f"Within noise of {baseline} on all three: {_listed(even)}.")
    if mixed:
        sentences.append(f"Mixed (see the verdicts): {_listed(mixed)}.")
    return sentences


def _calibration_headline(scores: Scores) -> list[str]:
    sentences = []
    ece, floor = scores.value("map", "ece"), scores.value("map", "ece_floor")
    if ece is not None and floor is not None:
        sentences.append(
            f"On {scores.setting} ({scores.size()}) map has accuracy {scores.entry('map', 'accuracy').text}, NLL "
            f"{scores.entry('map', 'nll').text} and ECE {ece:.3f}, where a perfectly calibrated model would show {floor:.3f}."
        )
    against = [" ".join(found) for baseline in ("map", "map+ts") if (found := _against(scores, baseline))]
    if "map+ts" not in scores.methods and against:
        against.append("There is no map+ts to compare with: it needs validation predictions of map.")
    return [*sentences, *against]


def _detection_headline(scores: Scores) -> list[str]:
    found = {
        (row["value"], method, signal)
        for (method, metric, signal), row in scores.rows.items()
        if metric == "auroc" and signal and signal != "prompt_tokens" and row["value"] is not None
    }
    if not found:
        return []
    _, method, signal = max(found, key=lambda one: (one[0], -len(one[1]), one))  # of equals the plainest
    area, matched = scores.entry(method, "auroc", signal), scores.entry(method, "auroc_matched", signal)
    sentence = f"{scores.setting}: the highest AUROC is {area.text} {area.detail}, by {signal} of {method} ("
    if matched.value is None:
        sentence += "too few equally long prompts to match by length)"
    else:
        sentence += f"{matched.text} {matched.detail} on prompts of matched length)"
    lengths = [v for name in scores.methods if (v := scores.value(name, "auroc", "prompt_tokens")) is not None]
    if not lengths:
        return [f"{sentence}."]
    sentence += f"; prompt length alone gives {max(lengths):.3f}."
    # Only a matched value could tell such a signal from length itself.
    alike = matched.value is None and area.low is not None and max(lengths) >= area.low
    return [sentence + " Prompt length alone does about as well, so this says little." * alike]


def headlines(rows: Sequence[Row]) -> list[str]:
    """What the numbers say, each sentence computed from intervals."""
    found = []
    for scores in settings(rows):
        found += _detection_headline(scores) if scores.setting.shifted else _calibration_headline(scores)
    return found


def render(title: str, headline: Sequence[str], sections: Sequence[Section], sources: Sequence[str]) -> str:
    """The page as one HTML text without a reference to anything outside it."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("vmoer.report", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    template = environment.get_template("page.html.j2")
    return template.render(title=title, headline=headline, sections=sections, sources=sources)
