"""Some of the mutated run folders; `make attack` makes ten thousand. Oracles: the logits before, and the model itself."""

from itertools import islice

import pytest
import torch

from attacks import folders
from attacks.targets import BAD, Outcomes, Target, make_run


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    torch.set_num_threads(1)  # as in the tests: this comes before them
    place = tmp_path_factory.mktemp("attacked")
    return Target(make_run(place / "run"), place / "copy")


@pytest.mark.parametrize(
    ("cases", "expected"),
    [
        ("flips", "refused"),
        ("torn", "refused"),
        ("rewritten", None),
        ("retensored", None),
    ],
)
def test_no_mutation_is_taken_in_silence(target: Target, cases: str, expected: str | None) -> None:
    table: dict[str, Outcomes] = {}
    wrong: list[str] = []

    def said(row: str, outcome: str, message: str) -> None:
        alike = outcome == "identical" and message.startswith("threshold.json")  # a space more in what is not listed
        if outcome in BAD or (expected and outcome != expected and not alike):
            wrong.append(f"{row}: {outcome}: {message}")

    made = folders.flips(target, 53) if cases == "flips" else getattr(folders, cases)(target, 40)
    folders.run(target, islice(made, 600), table, said)
    assert not wrong
    assert sum(table.values(), Outcomes()).total() > 50
    assert target.load()[0] == "identical"
