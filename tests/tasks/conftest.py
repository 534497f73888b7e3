"""Where the real data are."""

import os
from pathlib import Path

import pytest

DATA = Path(os.environ.get("VMOER_DATA") or Path(__file__).parents[3] / "shared" / "data")


@pytest.fixture(scope="session")
def data_root() -> Path:
    if not (DATA / "README.md").is_file():
        pytest.skip(f"the real data are not at {DATA}; set VMOER_DATA")
    return DATA


@pytest.fixture(autouse=True)
def _no_data_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VMOER_DATA", raising=False)
