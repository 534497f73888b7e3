"""Sections for the studies beside calibration: tables and figures from their rows, the paper's value beside ours.

Every builder takes the rows of one study, of one model and task, and returns its section.
"""

from collections.abc import Callable, Sequence

import numpy as np

from vmoer.errors import InputError
from vmoer.evaluation.scores import Row
from vmoer.report import factors, robustness
from vmoer.report import paper as paper_tables
from vmoer.report.figures import Figure, canvas, style
from vmoer.report.page import Section
from vmoer.report.rows import mean, only, papers_value, printed, spread, values
from vmoer.report.tables import Entry, Table, number

# -- efficiency --------------------------------------------------------------------------------------------------------

_MEAN_FIELD = (
    "Mean-field: the paper prints 0.0069 G; its own formula gives 0.0062 G (D H + 2 H N + S N for each of ten layers), which is "
    "what the counter finds."
)


# column, metric, its unit, digits, and whether the paper prints it
_COUNTED = (
    ("params M", "parameters", 1e6, 1, True),
    ("% of 800M", "parameters_percent_of_paper", 1, 2, False),
    ("G MACs", "macs", 1e9, 4, True),
    ("GFLOPs", "flops", 1e9, 4, False),
    ("% of 0.897 G", "macs_percent_of_paper", 1, 2, False),
    ("% of own count", "macs_percent", 1, 2, False),
)


def _efficiency(rows: list[Row]) -> Section:
    rows = [row for row in rows if row["metric"] != "time_ratio"]  # what was timed has a section of its own
    columns, body = ["method"], []
    for column, _, _, _, by_paper in _COUNTED:
        columns += [column, *["paper"] * by_paper]
    for method in values(rows, "method"):
        own = {row["metric"]: row["value"] for row in only(rows, method=method)}
        line = [Entry(method)]
        for _, metric, unit, digits, by_paper in _COUNTED:
            theirs = papers_value("efficiency", method, metric) if by_paper else None
            line.append(number(own[metric] / unit, digits=digits))
            line += [number(None if theirs is None else theirs / unit, digits=digits)] * by_paper
        body.append(line)
    notes = [
        "Granite-3B geometry on the meta device: ten layers, D 1536, N 40, S 35, H = D / 4; per token, frozen logits left out.",
        "What the paper calls GFLOPs are multiply-accumulates; ours are under both names.",
        _MEAN_FIELD,
        "Full covariance is 1.07% in the paper's own table, so not under one percent.",
    ]
    table = Table("efficiency", "Parameters and arithmetic", columns, body, notes)
    text = "Counted from the modules themselves, not from formulas."
    return Section("efficiency", "Efficiency", [text], [table], [_added_arithmetic(rows)])


def _added_arithmetic(rows: list[Row]) -> Figure:
    with canvas("efficiency-bars", (3.4, 2.6)) as drawn:
        axes, methods = drawn.axes[0], values(rows, "method")
        shares = [mean(only(rows, method=method, metric="macs_percent_of_paper")) or 0.0 for method in methods]
        axes.barh(methods[::-1], shares[::-1], color=style(0)["color"], alpha=0.8)
        axes.axvline(1, linewidth=0.8, color=style(1)["color"])
        axes.set(xlabel="added MACs, % of 0.897 G")
        listed = ", ".join(f"{name} {share:.2f}" for name, share in zip(methods, shares, strict=True))
        return drawn.figure("Added arithmetic; the line is one percent", f"Added MACs in percent: {listed}.")


# -- ablations ---------------------------------------------------------------------------------------------------------


def _ablation(rows: list[Row], name: str, title: str, paper: bool) -> Table:
    """A line for each method and choice of layers; `paper` adds what the paper prints of them."""
    body = []
    tried = [
        (method, layers) for method in values(rows, "method") for layers in values(only(rows, method=method), "layers")
    ]
    for method, layers in tried:
        own = only(rows, method=method, layers=layers)
        signal = next((signal for signal in values(own, "signal") if signal != "novelty"), None)
        line = [Entry(method), Entry(layers)]
        line += [spread(only(own, metric=m)) for m in ("jaccard_minus_map", "ece", "debiased_ece", "nll")]
        line += [spread(only(own, metric="auroc", signal=s)) for s in (signal, "novelty")]
        if paper:
            strategy = layers.partition(":")[0]
            chosen = "susceptible" if strategy == "susceptible" else f"{strategy}-10"
            metrics = ("jaccard_minus_map", "ece", "auroc")
            line.append(
                Entry(printed([papers_value(name, method.partition("@")[0], m, layers=chosen) for m in metrics]))
            )
        body.append(line)
    columns = ["method", "layers", "Jaccard - map at 0.005", "ECE", "dECE", "NLL", "AUROC (own signal)"]
    columns += ["AUROC (novelty)", *["paper: dJS / ECE / AUROC"] * paper]
    floor = mean(only(rows, metric="ece_floor"))
    notes = [
        "Ranges are the lowest and highest seed.",
        f"ECE of a calibrated model with these confidences: about {floor:.3f}.",
    ]
    return Table(name, title, columns, body, notes, labels=2)


def _by_count(rows: list[Row]) -> Figure:
    with canvas("layer-count", (3.4, 2.8)) as drawn:
        axes, said = drawn.axes[0], []
        for i, method in enumerate(values(rows, "method")):
            own = only(rows, method=method, metric="ece")
            counts = sorted({int(row["layers"].partition(":")[2]) for row in own})
            at = [[row["value"] for row in only(own, layers=f"susceptible:{n}")] for n in counts]
            axes.plot(counts, [np.mean(v) for v in at], marker="o", markersize=3, label=method, **style(i))
            axes.fill_between(counts, [min(v) for v in at], [max(v) for v in at], color=style(i)["color"], alpha=0.15)
            said.append(f"{method}: " + ", ".join(f"{n} {np.mean(v):.3f}" for n, v in zip(counts, at, strict=True)))
        axes.set(xlabel="layers attached", ylabel="ECE")
        axes.legend()
        caption = "ECE by number of layers, range over seeds"
        return drawn.figure(caption, f"ECE by number of layers. {'; '.join(said)}.")


def _layer_count(rows: list[Row]) -> Section:
    name, title = "layer-count", "How many layers"
    text = "The L most susceptible layers; the paper finds L = 10 of 32 best."
    return Section(name, title, [text], [_ablation(rows, name, title, paper=False)], [_by_count(rows)])


def _layer_placement(rows: list[Row]) -> Section:
    name, title = "layer-placement", "Which layers"
    text = "The same number of layers at the first, middle, last and most susceptible places."
    return Section(name, title, [text], [_ablation(rows, name, title, paper=True)])


# -- temperature sweep -------------------------------------------------------------------------------------------------


def _temperature_sweep(rows: list[Row]) -> Section:
    sampled = [row for row in rows if row.get("layer") is not None]
    line = {metric: mean(only(rows, method="map", metric=metric)) for metric in ("accuracy", "ece", "ece_floor")}
    temperatures = sorted(values(sampled, "temperature"))
    first = min(values(sampled, "layer"))
    body = []
    for t in temperatures:
        at = only(sampled, temperature=t)
        groups = (at, [row for row in at if row["layer"] != first])
        body.append([Entry(f"{t:g}"), *(number(mean(only(g, metric=m))) for g in groups for m in ("accuracy", "ece"))])
    columns = ["T", "accuracy, all layers", "ECE, all layers", f"accuracy, without {first}", f"ECE, without {first}"]
    notes = [
        f"Deterministic: accuracy {line['accuracy']:.3f}, ECE {line['ece']:.3f}; a calibrated model would show about "
        f"{line['ece_floor']:.3f}."
    ]
    table = Table("temperature-sweep", "Sampling experts at one layer", columns, body, notes)
    figures = []
    for metric in ("accuracy", "ece"):
        with canvas(f"temperature-{metric}", (3.4, 2.8)) as drawn:
            axes = drawn.axes[0]
            for i, layer in enumerate(sorted(values(sampled, "layer"))):
                found = [mean(only(sampled, layer=layer, temperature=t, metric=metric)) for t in temperatures]
                axes.plot(temperatures, found, label=f"layer {layer}", **style(i))
            axes.axhline(line[metric], linewidth=0.8, linestyle=":", color=style(7)["color"])
            axes.set(xlabel="temperature", ylabel=metric)
            drawn.drawing.legend(loc="outside lower center", ncols=4)
            caption = f"{metric} by temperature, one layer at a time; dotted: deterministic"
            figures.append(drawn.figure(caption, f"{metric} against temperature, a line for each layer."))
    text = "On the base model, without fine-tuning: one layer's experts sampled from softmax(l / T), the others as they are."
    return Section("temperature-sweep", "Temperature sweep", [text], [table], figures)


def _topk_bias(rows: list[Row]) -> Section:
    metrics = {
        "samples_with_another_set": "samples whose Top-K differs",
        "experts_in_the_union": "experts in the union",
        "experts_selected": "experts selected",
        "confidence_router": "confidence, router",
        "confidence_full": "confidence, full passes",
        "answer_total_variation": "total variation of the answer",
        "answers_changed": "answers changed",
    }
    body = [
        [Entry(method), *(spread(only(rows, method=method, metric=metric)) for metric in metrics)]
        for method in values(rows, "method")
    ]
    table = Table("topk-bias", "Top-K of the average, average of Top-K", ["method", *metrics.values()], body)
    text = "What keeping K experts costs: how often single samples would choose others, and what averaging whole passes changes."
    return Section("topk-bias", "The bias of Top-K", [text], [table])


# what makes a study's section, and the metric without which there is nothing to show
BUILDERS: dict[str, tuple[Callable[[list[Row]], Section], str | None]] = {
    "brittleness": (robustness.brittleness, "jaccard"),
    "temperature-sweep": (_temperature_sweep, "accuracy"),
    "stability": (robustness.stability, "jaccard"),
    "layer-count": (_layer_count, "ece"),
    "layer-placement": (_layer_placement, "ece"),
    "topk-bias": (_topk_bias, "answers_changed"),
    "efficiency": (_efficiency, "macs"),
    "factors": (factors.section, "nll"),
    "paper": (paper_tables.section, None),  # any of its tables will do
}
OF_THE_MODEL = ("brittleness", "paper")
"""Studies that have rows without a method."""


def sections(rows: Sequence[Row]) -> list[Section]:
    """A section for every study that has rows, in the order of the paper; of the paper's tables one for each model."""
    made = []
    for study, (build, needed) in BUILDERS.items():
        own = [row for row in rows if row.get("study") == study]
        if own and needed and not only(own, metric=needed):
            raise InputError(f"metrics.json is incomplete: the study {study} has no row of {needed}")
        models = values(own, "model") if study == "paper" else []
        if len(models) > 1:
            made += [paper_tables.one_of(build(only(own, model=model)), model) for model in models]
        elif own:
            made.append(build(own))
    return made
