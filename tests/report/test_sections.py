"""Sections of the studies from rows written by hand: what stands in their tables and figures."""

from vmoer.report import studies

KEYS = {"model": "demo", "task": "demo", "split": None, "signal": None, "low": None, "high": None}


def ablated(study, method, layers, seed, **values):
    about = KEYS | {"study": study, "method": method, "layers": layers, "seed": seed}
    signal = {"auroc": "logit_variance", "novelty": "novelty"}
    return [
        about | {"metric": "auroc" if name in signal else name, "value": value, "signal": signal.get(name)}
        for name, value in values.items()
    ]


def line(section, *labels):
    table = section.tables[0]
    (found,) = [row for row in table.rows if tuple(entry.text for entry in row[: len(labels)]) == labels]
    return dict(zip(table.columns, found, strict=True))


def test_layer_count_has_a_line_a_count_and_a_curve_with_its_spread():
    rows = []
    for seed, shift in ((0, 0.0), (1, 0.02)):
        for n, ece in ((1, 0.14), (8, 0.10)):
            values = {
                "jaccard_minus_map": -0.001,
                "ece": ece + shift,
                "debiased_ece": ece,
                "nll": 0.9,
                "ece_floor": 0.02,
            }
            rows += ablated(
                "layer-count", "vglr-fc", f"susceptible:{n}", seed, **values, accuracy=0.7, auroc=0.6, novelty=0.99
            )
    (section,) = studies.sections(rows)
    assert section.id == "layer-count"
    found = line(section, "vglr-fc", "susceptible:8")
    assert (found["ECE"].text, found["ECE"].detail) == ("0.110", "[0.100, 0.120]")
    assert found["AUROC (own signal)"].text == "0.600"
    assert found["AUROC (novelty)"].text == "0.990"
    (figure,) = section.figures
    assert "vglr-fc: 1 0.150, 8 0.110" in figure.alt


def test_layer_placement_stands_beside_the_papers_values():
    """The paper's ablation B for vglr-fc: the last ten layers 0.156 / 0.104 / 0.792, susceptible ones 0.216 / 0.015 / 0.834."""
    rows = []
    for layers in ("last:2", "susceptible:2"):
        rows += ablated("layer-placement", "vglr-fc", layers, 0, jaccard_minus_map=0.0, ece=0.1, ece_floor=0.02)
    (section,) = studies.sections(rows)
    assert line(section, "vglr-fc", "last:2")["paper: dJS / ECE / AUROC"].text == "0.156 / 0.104 / 0.792"
    assert line(section, "vglr-fc", "susceptible:2")["paper: dJS / ECE / AUROC"].text == "0.216 / 0.015 / 0.834"


def stability(method, gamma, seed, value, low=None, high=None, metric="jaccard"):
    about = KEYS | {"study": "stability", "method": method, "seed": seed, "gamma": gamma, "metric": metric}
    return about | {"value": value, "low": low, "high": high}


def test_stability_is_judged_over_all_seeds():
    """The row over seeds decides where there is one, not a single seed's."""
    rows = [stability(name, g, s, 1 - g) for name in ("a", "map at the layers of a") for g in (0, 0.01) for s in (0, 1)]
    for seed, shift in ((0, -0.003), (1, 0.001), (None, -0.001)):
        rows += [stability("a", g, seed, shift, shift - 0.002, shift + 0.002, "jaccard_minus_map") for g in (0, 0.01)]
    (section,) = studies.sections(rows)
    entry = section.tables[1].rows[0][2]
    assert (entry.text, entry.detail, entry.tone) == ("-0.0010", "[-0.0030, 0.0010]", "")
    (figure,) = section.figures
    assert "At 0.01: map 0.99, a 0.99." in figure.alt
