"""Sections on what noise does to routing: brittleness of the model's own, stability of the methods'."""

from collections.abc import Sequence

from vmoer.evaluation.scores import Row
from vmoer.report.figures import CURVES, Figure, canvas, style, with_legend
from vmoer.report.page import Section
from vmoer.report.rows import interval, mean, only, papers_value, printed, spread, values
from vmoer.report.tables import Entry, Table

# -- brittleness -------------------------------------------------------------------------------------------------------


def brittleness_curve(rows: Sequence[Row]) -> Figure:
    """Mean Jaccard over layers against gamma."""
    found = only(rows, metric="jaccard")
    gammas = sorted(values(found, "gamma"))
    means = [mean(only(found, gamma=gamma)) for gamma in gammas]
    with canvas("brittleness-curve", (3.4, 2.6)) as drawn:
        axes = drawn.axes[0]
        axes.plot(gammas, means, marker="o", markersize=3.5, **style(0))
        axes.set(xscale="log", ylim=(0, 1.02), xlabel="noise level gamma", ylabel="mean Jaccard")
        listed = ", ".join(f"{gamma:g}: {mean:.2f}" for gamma, mean in zip(gammas, means, strict=True))
        return drawn.figure("Routing under noise, mean over layers", f"Mean Jaccard of expert sets by gamma: {listed}.")


def brittleness_layers(rows: Sequence[Row]) -> Figure:
    """The distribution over tokens at the diagnostic level, a box a layer."""
    quantiles = [row for row in rows if str(row["metric"]).startswith("quantile_")]
    layers = sorted(values(quantiles, "layer"))
    with canvas("brittleness-layers", (max(3.4, 0.22 * len(layers) + 1), 2.6)) as drawn:
        axes = drawn.axes[0]
        medians = []
        for layer in layers:
            q = {row["metric"].removeprefix("quantile_"): row["value"] for row in only(quantiles, layer=layer)}
            axes.vlines(layer, q["0.05"], q["0.95"], color=style(0)["color"], linewidth=1)
            axes.vlines(layer, q["0.25"], q["0.75"], color=style(0)["color"], linewidth=5, alpha=0.6)
            axes.plot([layer], [q["0.5"]], marker="_", markersize=9, color=style(1)["color"])
            medians.append(f"{layer}: {q['0.5']:.2f}")
        axes.set(ylim=(-0.02, 1.02), xlabel="layer", ylabel="Jaccard")
        caption = "Per-layer distribution over tokens at gamma = 0.01: 5-95% line, quartiles, median"
        return drawn.figure(caption, f"Median Jaccard at gamma 0.01 by layer: {', '.join(medians)}.")


def brittleness(rows: list[Row]) -> Section:
    ranks = sorted(only(rows, metric="rank", seed=min(values(rows, "seed"))), key=lambda row: row["value"])
    ranking = ", ".join(str(row["layer"]) for row in ranks)
    found = only(rows, metric="jaccard")
    gammas = sorted(values(found, "gamma"))
    body = []
    for layer in sorted(values(found, "layer")):
        body.append([Entry(str(layer)), *(spread(only(found, layer=layer, gamma=g)) for g in gammas)])
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


def _difference(rows: Sequence[Row]) -> Entry:
    """The paired difference over seeds, or that of the only seed."""
    overall = only(rows, seed=None) or rows
    return interval(overall[0], digits=4, rising=True) if overall else Entry("-")


def stability(rows: list[Row]) -> Section:
    found, differences = only(rows, metric="jaccard"), only(rows, metric="jaccard_minus_map")
    gammas = sorted(values(found, "gamma"))
    columns = ["method", "two identical passes", *(f"{gamma:g}" for gamma in gammas[1:])]
    notes = ["Mean over the attached layers; intervals over prompts. The column of identical passes is the floor."]
    notes += ["map is given once for all methods that are attached to the same layers."]
    title = "Routing stability: Jaccard under noise"
    table = Table("stability", title, [*columns, "paper (Granite), same gammas"], _kept(found, gammas), notes)
    verdicts = [
        [Entry(method), *(_difference(only(differences, method=method, gamma=gamma)) for gamma in gammas)]
        for method in values(differences, "method")
    ]
    note = (
        "Paired over prompts; where there are several seeds, these are resampled first, then prompts, the same for all "
        "seeds. An interval that includes zero is no difference."
    )
    title = "Difference to map at the same layers, fixed points"
    against = Table("stability-against-map", title, columns, verdicts, [note])
    text = "Stability verified as in the brittleness measurement, at the attached layers, with fixed points and with fresh noise."
    return Section("stability", "Routing stability", [text], [table, against], [stability_curves(found, gammas)])


def _kept(found: Sequence[Row], gammas: Sequence[float]) -> list[list[Entry]]:
    """A line for each method, the paper's values last."""
    body, shown = [], []
    for method in values(found, "method"):
        entries = [spread(only(found, method=method, gamma=gamma)) for gamma in gammas]
        if method.startswith("map at "):  # the same numbers wherever the layers are the same
            if entries in shown:
                continue
            shown.append(entries)
        theirs = [papers_value("stability", method.partition("@")[0], "jaccard", gamma=gamma) for gamma in gammas[1:]]
        body.append([Entry(method), *entries, Entry("-" if set(theirs) == {None} else printed(theirs))])
    return body


def stability_curves(found: Sequence[Row], gammas: Sequence[float]) -> Figure:
    """Mean Jaccard against gamma, a line for each method and one for map."""
    # map at the layers of each method is one curve where all are attached to the same layers: the first stands for it
    curves = [name for name in values(found, "method") if not name.startswith("map at ")]
    own = [name for name in values(found, "method") if name.startswith("map at ")]
    if len(curves) > CURVES:
        curves = [name for name in curves if "fresh" not in name]
    with canvas("stability-curves", with_legend(1 + len(curves), 2)) as drawn:
        axes, described = drawn.axes[0], []
        for i, method in enumerate([*own[:1], *curves]):
            means = [mean(only(found, method=method, gamma=gamma)) for gamma in gammas[1:]]
            axes.plot(gammas[1:], means, marker="o", markersize=3, label=method.partition(" at ")[0], **style(i))
            described.append(f"{method.partition(' at ')[0]} {means[-1]:.2f}")
        axes.set(xscale="log", ylim=(None, 1.01), xlabel="noise level gamma", ylabel="mean Jaccard")
        drawn.drawing.legend(loc="outside lower center", ncols=2)
        alt = f"Mean Jaccard of expert sets against gamma, a line a method. At {gammas[-1]:g}: {', '.join(described)}."
        return drawn.figure("Jaccard against noise", alt)
