"""Names of methods in studies. Oracles: what the docs say each name means, written out."""

from pathlib import Path

import pytest

from vmoer.errors import InputError
from vmoer.report.labels import split
from vmoer.studies import Study, calibration
from vmoer.studies._variants import parse, passes_of

STUDY = Study("demo", "demo", Path("out"), methods=("map", "vglr-mf", "map+orders4"), averaging=("router", "orders"))


@pytest.mark.parametrize(
    ("label", "parts", "passes"),
    [
        ("map", ("map", "default", "router"), 1),
        ("map+orders", ("map", "default", "orders"), 8),
        ("map+orders4", ("map", "default", "orders"), 4),
        ("vglr-fc@paper+full", ("vglr-fc", "paper", "full"), 8),
        ("mcdr+orders+routing16", ("mcdr", "default", "orders+routing"), 16),
    ],
)
def test_a_label_says_method_preset_averaging_and_passes(label: str, parts: tuple[str, ...], passes: int) -> None:
    assert parse(label) == parts
    assert passes_of(STUDY, label) == passes


@pytest.mark.parametrize("label", ["map+order", "map+routing", "map+4", "mip+orders", "map@papers+orders"])
def test_other_labels_are_refused(label: str) -> None:
    with pytest.raises(InputError, match=r"averaging is|choose|did you mean"):
        parse(label)


def test_orders_are_for_every_method_and_routing_for_those_that_draw() -> None:
    assert calibration.labels(STUDY) == ["map", "map+orders", "vglr-mf", "vglr-mf+orders", "map+orders4"]
    both = Study("demo", "demo", Path("out"), methods=("map", "vglr-mf"), averaging=("full", "orders+routing"))
    assert calibration.labels(both) == ["map", "vglr-mf", "vglr-mf+full", "vglr-mf+orders+routing"]


def test_the_legend_knows_the_parts_of_a_label() -> None:
    assert split("vglr-mf@paper+orders+routing8+ts") == ["vglr-mf", "@paper", "+orders", "+routing", "+ts"]
