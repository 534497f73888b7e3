"""What the documents say is what the code does."""

import re
import runpy
from pathlib import Path
from typing import Any

import models_table
import pytest

ROOT = Path(__file__).parent.parent


def test_models_table_is_current() -> None:
    assert (ROOT / "docs" / "models.md").read_text() == models_table.table()


def test_the_readme_example_runs_as_printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its ten lines, in a folder of their own; the run they save opens on a fresh copy of the model."""
    import vmoer
    from vmoer.models import open_model

    monkeypatch.chdir(tmp_path)
    (block,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    names: dict[str, Any] = {}
    exec(compile(block, "README.md", "exec"), names)
    assert names["rec"].signals["novelty"].shape == (2, 4, 10)
    assert names["log_probs"].shape[0] == 4
    vmoer.load(open_model("demo").model, tmp_path / "run")


def test_the_readme_tree_is_the_tree() -> None:
    """Every module and package of src/vmoer stands in the README's tree, and nothing else."""
    text = (ROOT / "README.md").read_text()
    block = text[text.index("src/vmoer/\n") : text.index("\ntests/ ")]
    listed = {line.split()[0].rstrip("/") for line in block.splitlines()[1:] if line.strip()}
    package = ROOT / "src" / "vmoer"
    there = {p.name for p in package.iterdir() if p.suffix == ".py" or (p.is_dir() and (p / "__init__.py").exists())}
    assert listed == there


def test_every_command_of_the_readme_exists() -> None:
    from vmoer.cli import app

    names = {command.name or command.callback.__name__ for command in app.registered_commands if command.callback}
    text = (ROOT / "README.md").read_text()
    assert set(re.findall(r"^vmoer ([a-z-]+)", text, re.M)) == names


def test_the_quickstart_runs(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(ROOT / "examples" / "quickstart.py"))
    assert "saved, detached and loaded again" in capsys.readouterr().out
