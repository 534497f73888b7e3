"""What the documents say is what the code does."""

from pathlib import Path

import models_table

ROOT = Path(__file__).parent.parent


def test_models_table_is_current() -> None:
    assert (ROOT / "docs" / "models.md").read_text() == models_table.table()
