"""Sections for the studies beside calibration: tables and figures from their rows, the paper's value beside ours.

Every builder takes the rows of one study and returns what there is to show; rows of one model and task are assumed.
"""

from collections.abc import Sequence

import numpy as np

from vmoer.report import factors, robustness
from vmoer.report.figures import canvas, style
from vmoer.report.page import Section
from vmoer.report.robustness import brittleness_curve, brittleness_layers
from vmoer.report.rows import Row, mean, only, papers_value, spread, values
from vmoer.report.tables import Entry, Table, number

__all__ = ["BUILDERS", "brittleness_curve", "brittleness_layers", "sections"]

# -- efficiency --------------------------------------------------------------------------------------------------------

_MEAN_FIELD = (
    "Mean-field: the paper prints 0.0069 G; its own formula gives 0.0062 G (D H + 2 H N + S N for each of ten layers), which is "
    "what the counter finds."
)


def _efficiency(rows: list[Row]) -> Section:
    body = []
    rows = [row for row in rows if row["metric"] != "time_ratio"]  # what was timed has a section of its own
    for method in values(rows, "method"):
        own = {row["metric"]: row["value"] for row in only(rows, method=method)}
        theirs = {metric: papers_value("efficiency", method, metric) for metric in ("parameters", "macs")}
        body.append(
            [
                Entry(method),
                number(own["parameters"] / 1e6, digits=1),
                Entry("-") if theirs["parameters"] is None else number(theirs["parameters"] / 1e6, digits=1),
                number(own["parameters_percent_of_paper"], digits=2),
                number(own["macs"] / 1e9, digits=4),
                Entry("-") if theirs["macs"] is None else number(theirs["macs"] / 1e9, digits=4),
                number(own["flops"] / 1e9, digits=4),
                number(own["macs_percent_of_paper"], digits=2),
                number(own["macs_percent"], digits=2),
            ]
        )
    columns = [
        "method",
        "params M",
        "paper",
        "% of 800M",
        "G MACs",
        "paper",
        "GFLOPs",
        "% of 0.897 G",
        "% of own count",
    ]
    notes = [
        "Granite-3B geometry on the meta device: ten layers, D 1536, N 40, S 35, H = D / 4; per token, frozen logits left out.",
        "What the paper calls GFLOPs are multiply-accumulates; ours are under both names.",
        _MEAN_FIELD,
        "Full covariance is 1.07% in the paper's own table, so not under one percent.",
    ]
    table = Table("efficiency", "Parameters and arithmetic", columns, body, notes)
    with canvas("efficiency-bars", (3.4, 2.6)) as drawn:
        axes, methods = drawn.axes[0], values(rows, "method")
        shares = [mean(only(rows, method=method, metric="macs_percent_of_paper")) or 0.0 for method in methods]
        axes.barh(methods[::-1], shares[::-1], color=style(0)["color"], alpha=0.8)
        axes.axvline(1, linewidth=0.8, color=style(1)["color"])
        axes.set(xlabel="added MACs, % of 0.897 G")
        listed = ", ".join(f"{name} {share:.2f}" for name, share in zip(methods, shares, strict=True))
        figure = drawn.figure("Added arithmetic; the line is one percent", f"Added MACs in percent: {listed}.")
    return Section(
        "efficiency", "Efficiency", ["Counted from the modules themselves, not from formulas."], [table], [figure]
    )


# -- ablations ---------------------------------------------------------------------------------------------------------


def _ablation(rows: list[Row], name: str, title: str, text: str) -> Section:
    body = []
    for method in values(rows, "method"):
        for layers in values(only(rows, method=method), "layers"):
            own = only(rows, method=method, layers=layers)
            strategy = layers.partition(":")[0]
            printed = "susceptible" if strategy == "susceptible" else f"{strategy}-10"
            theirs = [
                papers_value("layer-placement", method, m, layers=printed)
                for m in ("jaccard_minus_map", "ece", "auroc")
            ]
            shown = " / ".join("-" if value is None else f"{value:.3f}" for value in theirs)
            signals = [s for s in values(own, "signal") if s != "novelty"]
            signal = signals[0] if signals else None
            body.append(
                [
                    Entry(method),
                    Entry(layers),
                    spread(only(own, metric="jaccard_minus_map")),
                    spread(only(own, metric="ece")),
                    spread(only(own, metric="debiased_ece")),
                    spread(only(own, metric="nll")),
                    spread(only(own, metric="auroc", signal=signal)),
                    spread(only(own, metric="auroc", signal="novelty")),
                ]
            )
            if name == "layer-placement":
                body[-1].append(Entry(shown))
    columns = [
        "method",
        "layers",
        "Jaccard - map at 0.005",
        "ECE",
        "dECE",
        "NLL",
        "AUROC (own signal)",
        "AUROC (novelty)",
    ]
    columns += ["paper: dJS / ECE / AUROC"] * (name == "layer-placement")
    floor = mean(only(rows, metric="ece_floor"))
    notes = [
        "Ranges are the lowest and highest seed.",
        f"ECE of a calibrated model with these confidences: about {floor:.3f}.",
    ]
    table = Table(name, title, columns, body, notes, labels=2)
    figures = []
    if name == "layer-count":
        with canvas("layer-count", (3.4, 2.8)) as drawn:
            axes, said = drawn.axes[0], []
            for i, method in enumerate(values(rows, "method")):
                own = only(rows, method=method, metric="ece")
                counts = sorted({int(row["layers"].partition(":")[2]) for row in own})
                at = [[r["value"] for r in own if r["layers"] == f"susceptible:{n}"] for n in counts]
                axes.plot(counts, [np.mean(v) for v in at], marker="o", markersize=3, label=method, **style(i))
                axes.fill_between(
                    counts, [min(v) for v in at], [max(v) for v in at], color=style(i)["color"], alpha=0.15
                )
                said.append(f"{method}: " + ", ".join(f"{n} {np.mean(v):.3f}" for n, v in zip(counts, at, strict=True)))
            axes.set(xlabel="layers attached", ylabel="ECE")
            axes.legend()
            figures.append(
                drawn.figure(
                    "ECE by number of layers, range over seeds", f"ECE by number of layers. {'; '.join(said)}."
                )
            )
    return Section(name, title, [text], [table], figures)


def _layer_count(rows: list[Row]) -> Section:
    text = "The L most susceptible layers; the paper finds L = 10 of 32 best."
    return _ablation(rows, "layer-count", "How many layers", text)


def _layer_placement(rows: list[Row]) -> Section:
    text = "The same number of layers at the first, middle, last and most susceptible places."
    return _ablation(rows, "layer-placement", "Which layers", text)


# -- temperature sweep -------------------------------------------------------------------------------------------------


def _temperature_sweep(rows: list[Row]) -> Section:
    sampled = [row for row in rows if row.get("layer") is not None]
    line = {metric: mean(only(rows, method="map", metric=metric)) for metric in ("accuracy", "ece", "ece_floor")}
    temperatures = sorted(values(sampled, "temperature"))
    first = min(values(sampled, "layer"))
    body = []
    for t in temperatures:
        at = only(sampled, temperature=t)
        later = [row for row in at if row["layer"] != first]
        body.append(
            [
                Entry(f"{t:g}"),
                *(number(mean(only(group, metric=m))) for group in (at, later) for m in ("accuracy", "ece")),
            ]
        )
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


BUILDERS = {
    "brittleness": robustness.brittleness,
    "temperature-sweep": _temperature_sweep,
    "stability": robustness.stability,
    "layer-count": _layer_count,
    "layer-placement": _layer_placement,
    "topk-bias": _topk_bias,
    "efficiency": _efficiency,
    "factors": factors.section,
}


def sections(rows: Sequence[Row]) -> list[Section]:
    """A section for every study that has rows, in the order of the paper."""
    made = []
    for study, build in BUILDERS.items():
        own = [row for row in rows if row.get("study") == study]
        if own:
            made.append(build(own))
    return made
