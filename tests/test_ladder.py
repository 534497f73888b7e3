"""The ladder: a module imports only rungs above its own. The contract is `[tool.importlinter]` in pyproject.toml."""

import ast
import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SRC = ROOT / "src" / "vmoer"
EXTRAS = {
    "datasets", "gguf", "huggingface_hub", "jinja2", "lm_eval", "matplotlib", "peft", "pyarrow", "ray", "rich",
    "torch.utils.tensorboard", "triton", "typer",
}  # fmt: skip
KERNELS = {f"vmoer.numerics.kernels.{path.stem}" for path in (SRC / "numerics" / "kernels").glob("[a-z]*.py")}
LATE = {  # the only modules of ours that another one may import late
    "numerics/kernels/__init__.py": KERNELS,  # they need Triton
    "__init__.py": {"vmoer"},  # public names are imported when they are used; type checkers are told where they are
}  # and a command imports what brings torch when its options are read: a mistake is said at once (tests/test_mistakes.py)
COMMANDS = {"vmoer", "torch", "transformers"}
needs_linter = pytest.mark.skipif(importlib.util.find_spec("importlinter") is None, reason="needs import-linter")


def lint(root: Path) -> subprocess.CompletedProcess[str]:
    """`lint-imports` on the sources below `root`, whatever is installed."""
    path = os.pathsep.join(filter(None, [str(root / "src"), os.environ.get("PYTHONPATH")]))
    code = "from importlinter.cli import lint_imports_command; lint_imports_command()"
    environment = {**os.environ, "PYTHONPATH": path, "COLUMNS": "200"}
    command = [sys.executable, "-c", code, "--no-cache", "--config", str(root / "pyproject.toml")]
    return subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True)


@needs_linter
def test_the_ladder_is_kept() -> None:
    done = lint(ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "The ladder KEPT" in done.stdout


@needs_linter
@pytest.mark.parametrize(
    ("lower", "line", "higher"),
    [
        ("vmoer.numerics.noise", "import vmoer.training.loop", "vmoer.training.loop"),
        ("vmoer.saved.card", "def later():\n    from vmoer.saved.store import save", "vmoer.saved.store"),
        ("vmoer.bench.measure", "from vmoer import harness", "vmoer.harness"),
    ],
)
def test_an_import_against_the_order_is_named(tmp_path: Path, lower: str, line: str, higher: str) -> None:
    """A line at the end of a module, at the top level or inside a function: both modules are named."""
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    shutil.copytree(SRC, tmp_path / "src" / "vmoer", ignore=shutil.ignore_patterns("*.safetensors", "__pycache__"))
    with (tmp_path / "src" / f"{lower.replace('.', '/')}.py").open("a") as file:
        file.write(f"\n\n{line}\n")
    done = lint(tmp_path)
    assert done.returncode != 0
    assert "BROKEN" in done.stdout
    assert any(lower in row and higher in row for row in done.stdout.splitlines()), done.stdout


def late_imports(path: Path) -> Iterator[tuple[int, str]]:
    """Line and module of every import inside a function, and inside `if TYPE_CHECKING`."""
    for node in ast.walk(ast.parse(path.read_text())):
        checked = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        if not checked and not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        for inner in ast.walk(node):
            if isinstance(inner, ast.Import):
                yield from ((inner.lineno, alias.name) for alias in inner.names)
            elif isinstance(inner, ast.ImportFrom):
                package = str(inner.module)
                modules = {f"{package}.{alias.name}" for alias in inner.names}
                ours = package.startswith("vmoer") and all(_is_module(module) for module in modules)
                yield from ((inner.lineno, module) for module in (sorted(modules) if ours else [package]))


def imports_by_name(path: Path) -> list[int]:
    """Lines that import a module whose name is a string, which no contract sees."""
    calls = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
    named = ("import_module", "importlib.import_module", "__import__")
    return [node.lineno for node in calls if ast.unparse(node.func) in named]


def _is_module(name: str) -> bool:
    path = SRC.parent / name.replace(".", "/")
    return path.with_suffix(".py").exists() or path.is_dir()


@pytest.mark.parametrize("path", sorted(SRC.rglob("*.py")), ids=lambda path: str(path.relative_to(SRC)))
def test_functions_import_optional_extras_alone(path: Path) -> None:
    allowed = EXTRAS | LATE.get(str(path.relative_to(SRC)), set())
    allowed |= COMMANDS if path.parent.name == "commands" else set()
    late = [
        (line, name) for line, name in late_imports(path) if not any(f"{name}.".startswith(f"{a}.") for a in allowed)
    ]
    assert not late


@pytest.mark.parametrize("path", sorted(SRC.rglob("*.py")), ids=lambda path: str(path.relative_to(SRC)))
def test_modules_are_imported_by_name_at_the_top_alone(path: Path) -> None:
    """The package finds its public names that way, and the command line its commands."""
    assert path.relative_to(SRC).as_posix() in ("__init__.py", "cli.py") or not imports_by_name(path)


def test_the_walk_sees_imports_by_name(tmp_path: Path) -> None:
    (tmp_path / "module.py").write_text(
        "import importlib\nimportlib.import_module('vmoer.tasks')\n__import__('json')\n"
    )
    assert imports_by_name(tmp_path / "module.py") == [2, 3]


def test_the_walk_sees_late_imports(tmp_path: Path) -> None:
    """The check above can fail: a function's own import, a nested one, and one behind TYPE_CHECKING are all seen."""
    source = """
import json
from typing import TYPE_CHECKING
if TYPE_CHECKING:
    from vmoer.live.context import Call
def outer():
    import numpy as np
    def inner():
        from vmoer import tasks
"""
    (tmp_path / "module.py").write_text(source)
    assert {name for _, name in late_imports(tmp_path / "module.py")} == {"vmoer.live.context", "numpy", "vmoer.tasks"}


def test_importing_vmoer_loads_no_data_set_no_training_no_metrics() -> None:
    code = "import sys, vmoer; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    heavy = ("vmoer.tasks", "vmoer.training", "vmoer.metrics", "vmoer.evaluation", "scipy", "pyarrow")
    assert not [name for name in done.stdout.split() if f"{name}.".startswith(tuple(f"{h}." for h in heavy))]
    assert "vmoer" in done.stdout.split()


def test_using_every_public_name_but_the_trainer_loads_none_of_them_either() -> None:
    code = "import sys, vmoer; [getattr(vmoer, n) for n in vmoer.__all__ if n != 'VMoERTrainer']; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    heavy = ("vmoer.tasks", "vmoer.training", "vmoer.metrics", "vmoer.evaluation")  # transformers brings scipy
    assert not [name for name in done.stdout.split() if f"{name}.".startswith(tuple(f"{h}." for h in heavy))]
    assert "vmoer.routers" in done.stdout.split()
