"""Table 4 from the modules themselves, against the paper's numbers and its written-out complexities."""

import pytest

from vmoer.studies import efficiency


def found(key: str) -> dict[str, float]:
    return {row["metric"]: row["value"] for row in efficiency.cost(key)}


def formula(key: str, d: int = 1536, n: int = 40, s: int = 35, layers: int = 10) -> int:
    """The paper's complexities written out, in multiply-accumulates."""
    h = d // 4
    each = {
        "vglr-mf": d * h + 2 * h * n + s * n,
        "vglr-fc": d * h + h * n + h * n * (n + 1) // 2 + s * n * (n + 1) // 2,
        "vtsr": d * h + h,
        "mcdr": s * d * n,
        "swag": s * d * n,
    }[key]
    return layers * each


@pytest.mark.parametrize(
    ("key", "millions"), [("mcdr", 20.9), ("swag", 20.9), ("vglr-mf", 6.2), ("vglr-fc", 9.2), ("vtsr", 5.9)]
)
def test_parameters_of_the_paper(key: str, millions: float) -> None:
    assert round(found(key)["parameters"] / 1e6, 1) == millions


@pytest.mark.parametrize(("key", "giga"), [("vglr-fc", 0.0096), ("vtsr", 0.0060)])
def test_macs_of_the_paper_within_three_percent(key: str, giga: float) -> None:
    assert found(key)["macs"] / 1e9 == pytest.approx(giga, rel=0.03)


@pytest.mark.parametrize("key", ["vglr-mf", "vglr-fc", "vtsr", "mcdr", "swag"])
def test_counter_against_the_formula(key: str) -> None:
    """The counter sees a dense product where the formula has a triangle, and no elementwise arithmetic."""
    assert found(key)["macs"] == pytest.approx(formula(key), rel=0.03)


def test_own_denominator_is_near_the_papers() -> None:
    active, macs = efficiency.base_cost()
    assert active == pytest.approx(efficiency.PAPER_PARAMETERS, rel=0.15)
    assert macs == pytest.approx(efficiency.PAPER_MACS, rel=0.05)
