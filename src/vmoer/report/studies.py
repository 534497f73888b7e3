"""Sections for the studies beside calibration: tables and figures from their rows, the paper's value beside ours.

Every builder takes the rows of one study and returns what there is to show; rows of one model and task are assumed.
"""

import json
from collections.abc import Iterable, Sequence
from functools import cache
from importlib.resources import files
from typing import Any

import numpy as np

from vmoer.report.figures import Figure, canvas, style
from vmoer.report.page import Section
from vmoer.report.tables import Entry, Table, number

Row = dict[str, Any]


@cache
def paper() -> list[Row]:
    """The paper's tables as data, each value with the number of its table."""
    return list(json.loads((files("vmoer.report") / "paper.json").read_text())["rows"])


def papers_value(study: str, method: str, metric: str, model: str = "granite", **keys: Any) -> float | None:
    """What the paper prints for Granite, or None."""
    wanted = {"study": study, "method": method, "metric": metric, "model": model, **keys}
    return next((row["value"] for row in paper() if all(row.get(k) == v for k, v in wanted.items())), None)


def _only(rows: Iterable[Row], **keys: Any) -> list[Row]:
    return [row for row in rows if all(row.get(k) == v for k, v in keys.items())]


def _values(rows: Iterable[Row], key: str) -> list[Any]:
    return list(dict.fromkeys(row[key] for row in rows if row.get(key) is not None))


def _mean(rows: Sequence[Row]) -> float | None:
    return float(np.mean([row["value"] for row in rows])) if rows else None


def _spread(rows: Sequence[Row], digits: int = 3) -> Entry:
    """Mean over seeds with the lowest and highest; for one seed the interval of the row itself, where it has one."""
    if not rows:
        return Entry("-")
    values = [row["value"] for row in rows]
    if len(rows) == 1:
        return number(values[0], rows[0].get("low"), rows[0].get("high"), digits)
    return number(float(np.mean(values)), min(values), max(values), digits)


# -- brittleness -------------------------------------------------------------------------------------------------------


def brittleness_curve(rows: Sequence[Row]) -> Figure:
    """Mean Jaccard over layers against gamma."""
    found = _only(rows, metric="jaccard")
    gammas = sorted(_values(found, "gamma"))
    means = [_mean(_only(found, gamma=gamma)) for gamma in gammas]
    with canvas("brittleness-curve", (3.4, 2.6)) as drawn:
        axes = drawn.axes[0]
        axes.plot(gammas, means, marker="o", markersize=3.5, **style(0))
        axes.set(xscale="log", ylim=(0, 1.02), xlabel="noise level gamma", ylabel="mean Jaccard")
        listed = ", ".join(f"{gamma:g}: {mean:.2f}" for gamma, mean in zip(gammas, means, strict=True))
        return drawn.figure("Routing under noise, mean over layers", f"Mean Jaccard of expert sets by gamma: {listed}.")


def brittleness_layers(rows: Sequence[Row]) -> Figure:
    """The distribution over tokens at the diagnostic level, a box a layer."""
    quantiles = [row for row in rows if str(row["metric"]).startswith("quantile_")]
    layers = sorted(_values(quantiles, "layer"))
    with canvas("brittleness-layers", (max(3.4, 0.22 * len(layers) + 1), 2.6)) as drawn:
        axes = drawn.axes[0]
        medians = []
        for layer in layers:
            q = {row["metric"].removeprefix("quantile_"): row["value"] for row in _only(quantiles, layer=layer)}
            axes.vlines(layer, q["0.05"], q["0.95"], color=style(0)["color"], linewidth=1)
            axes.vlines(layer, q["0.25"], q["0.75"], color=style(0)["color"], linewidth=5, alpha=0.6)
            axes.plot([layer], [q["0.5"]], marker="_", markersize=9, color=style(1)["color"])
            medians.append(f"{layer}: {q['0.5']:.2f}")
        axes.set(ylim=(-0.02, 1.02), xlabel="layer", ylabel="Jaccard")
        caption = "Per-layer distribution over tokens at gamma = 0.01: 5-95% line, quartiles, median"
        return drawn.figure(caption, f"Median Jaccard at gamma 0.01 by layer: {', '.join(medians)}.")


def _brittleness(rows: list[Row]) -> Section:
    ranks = sorted(_only(rows, metric="rank", seed=min(_values(rows, "seed"))), key=lambda row: row["value"])
    ranking = ", ".join(str(row["layer"]) for row in ranks)
    found = _only(rows, metric="jaccard")
    gammas = sorted(_values(found, "gamma"))
    body = []
    for layer in sorted(_values(found, "layer")):
        body.append([Entry(str(layer)), *(_spread(_only(found, layer=layer, gamma=g)) for g in gammas)])
    relative = {row["gamma"]: row.get("relative") for row in found}
    notes = [f"Most brittle first at gamma 0.01: layers {ranking}."]
    if all(relative.get(g) for g in gammas):
        notes.append("Relative noise gamma sqrt(D): " + ", ".join(f"{g:g} is {relative[g]:.3g}" for g in gammas) + ".")
    table = Table(
        "brittleness", "Jaccard of expert sets by layer and gamma", ["layer", *(f"{g:g}" for g in gammas)], body, notes
    )
    text = "Noise on the residual stream entering one layer at a time, before its input norm; what its router selects then."
    return Section("brittleness", "Brittleness", [text], [table], [brittleness_curve(rows), brittleness_layers(rows)])


# -- stability ---------------------------------------------------------------------------------------------------------


def _stability(rows: list[Row]) -> Section:
    found = _only(rows, metric="jaccard")
    gammas = sorted(_values(found, "gamma"))
    body = []
    for method in _values(found, "method"):
        entries = [_spread(_only(found, method=method, gamma=gamma)) for gamma in gammas]
        printed = [papers_value("stability", method.partition("@")[0], "jaccard", gamma=gamma) for gamma in gammas[1:]]
        theirs = " / ".join("-" if value is None else f"{value:.3f}" for value in printed)
        body.append([Entry(method), *entries, Entry(theirs if any(v is not None for v in printed) else "-")])
    columns = [
        "method",
        "two identical passes",
        *(f"{gamma:g}" for gamma in gammas[1:]),
        "paper (Granite), same gammas",
    ]
    notes = ["Mean over the attached layers; intervals over prompts. The column of identical passes is the floor."]
    table = Table("stability", "Routing stability: Jaccard under noise", columns, body, notes)
    verdicts = []
    for method in _values(_only(rows, metric="jaccard_minus_map"), "method"):
        line = [Entry(method)]
        for gamma in gammas:
            for row in _only(rows, metric="jaccard_minus_map", method=method, gamma=gamma)[:1]:
                tone = "better" if row["low"] > 0 else "worse" if row["high"] < 0 else ""
                entry = number(row["value"], row["low"], row["high"])
                line.append(entry._replace(tone=tone))
        verdicts.append(line)
    against = Table(
        "stability-against-map",
        "Difference to map at the same layers, fixed points",
        ["method", "two identical passes", *(f"{gamma:g}" for gamma in gammas[1:])],
        verdicts,
        ["Paired over prompts, lowest seed. An interval that includes zero is no difference."],
    )
    with canvas("stability-curves", (3.4, 3.4)) as drawn:
        axes = drawn.axes[0]
        for i, method in enumerate(_values(found, "method")):
            means = [_mean(_only(found, method=method, gamma=gamma)) for gamma in gammas[1:]]
            axes.plot(gammas[1:], means, marker="o", markersize=3, label=method, **style(i))
        axes.set(xscale="log", ylim=(None, 1.01), xlabel="noise level gamma", ylabel="mean Jaccard")
        drawn.drawing.legend(loc="outside lower center")
        figure = drawn.figure("Jaccard against noise", "Mean Jaccard of expert sets against gamma, a line a method.")
    text = "Stability verified as in the brittleness measurement, at the attached layers, with fixed points and with fresh noise."
    return Section("stability", "Routing stability", [text], [table, against], [figure])


# -- efficiency --------------------------------------------------------------------------------------------------------

_MEAN_FIELD = (
    "Mean-field: the paper prints 0.0069 G; its own formula gives 0.0062 G (D H + 2 H N + S N for each of ten layers), which is "
    "what the counter finds."
)


def _efficiency(rows: list[Row]) -> Section:
    body = []
    for method in _values(rows, "method"):
        own = {row["metric"]: row["value"] for row in _only(rows, method=method)}
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
        axes, methods = drawn.axes[0], _values(rows, "method")
        shares = [_mean(_only(rows, method=method, metric="macs_percent_of_paper")) or 0.0 for method in methods]
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
    for method in _values(rows, "method"):
        for layers in _values(_only(rows, method=method), "layers"):
            own = _only(rows, method=method, layers=layers)
            strategy = layers.partition(":")[0]
            printed = "susceptible" if strategy == "susceptible" else f"{strategy}-10"
            theirs = [
                papers_value("layer-placement", method, m, layers=printed)
                for m in ("jaccard_minus_map", "ece", "auroc")
            ]
            shown = " / ".join("-" if value is None else f"{value:.3f}" for value in theirs)
            signals = [s for s in _values(own, "signal") if s != "novelty"]
            signal = signals[0] if signals else None
            body.append(
                [
                    Entry(method),
                    Entry(layers),
                    _spread(_only(own, metric="jaccard_minus_map")),
                    _spread(_only(own, metric="ece")),
                    _spread(_only(own, metric="debiased_ece")),
                    _spread(_only(own, metric="nll")),
                    _spread(_only(own, metric="auroc", signal=signal)),
                    _spread(_only(own, metric="auroc", signal="novelty")),
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
    floor = _mean(_only(rows, metric="ece_floor"))
    notes = [
        "Ranges are the lowest and highest seed.",
        f"ECE of a calibrated model with these confidences: about {floor:.3f}.",
    ]
    table = Table(name, title, columns, body, notes, labels=2)
    figures = []
    if name == "layer-count":
        with canvas("layer-count", (3.4, 2.8)) as drawn:
            axes = drawn.axes[0]
            for i, method in enumerate(_values(rows, "method")):
                own = _only(rows, method=method, metric="ece")
                counts = sorted({int(row["layers"].partition(":")[2]) for row in own})
                at = [[r["value"] for r in own if r["layers"] == f"susceptible:{n}"] for n in counts]
                axes.plot(counts, [np.mean(v) for v in at], marker="o", markersize=3, label=method, **style(i))
                axes.fill_between(
                    counts, [min(v) for v in at], [max(v) for v in at], color=style(i)["color"], alpha=0.15
                )
            axes.set(xlabel="layers attached", ylabel="ECE")
            axes.legend()
            figures.append(
                drawn.figure("ECE by number of layers, range over seeds", "ECE against the number of layers.")
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
    line = {metric: _mean(_only(rows, method="map", metric=metric)) for metric in ("accuracy", "ece", "ece_floor")}
    temperatures = sorted(_values(sampled, "temperature"))
    first = min(_values(sampled, "layer"))
    body = []
    for t in temperatures:
        at = _only(sampled, temperature=t)
        later = [row for row in at if row["layer"] != first]
        body.append(
            [
                Entry(f"{t:g}"),
                *(number(_mean(_only(group, metric=m))) for group in (at, later) for m in ("accuracy", "ece")),
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
            for i, layer in enumerate(sorted(_values(sampled, "layer"))):
                values = [_mean(_only(sampled, layer=layer, temperature=t, metric=metric)) for t in temperatures]
                axes.plot(temperatures, values, label=f"layer {layer}", **style(i))
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
        [Entry(method), *(_spread(_only(rows, method=method, metric=metric)) for metric in metrics)]
        for method in _values(rows, "method")
    ]
    table = Table("topk-bias", "Top-K of the average, average of Top-K", ["method", *metrics.values()], body)
    text = "What keeping K experts costs: how often single samples would choose others, and what averaging whole passes changes."
    return Section("topk-bias", "The bias of Top-K", [text], [table])


BUILDERS = {
    "brittleness": _brittleness,
    "temperature-sweep": _temperature_sweep,
    "stability": _stability,
    "layer-count": _layer_count,
    "layer-placement": _layer_placement,
    "topk-bias": _topk_bias,
    "efficiency": _efficiency,
}


def sections(rows: Sequence[Row]) -> list[Section]:
    """A section for every study that has rows, in the order of the paper."""
    made = []
    for study, build in BUILDERS.items():
        own = [row for row in rows if row.get("study") == study]
        if own:
            made.append(build(own))
    return made
