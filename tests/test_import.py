"""`import vmoer`, in a process of its own. Oracle: `sys.modules`, and the modules that define the public names."""

import subprocess
import sys

import pytest

import vmoer


def loaded(program: str) -> set[str]:
    """The modules in memory after a program."""
    start, end = f"import sys; sys.path[:0] = {sys.path!r}\n", "\nprint(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", start + program + end], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_it_loads_nothing_but_itself() -> None:
    before = loaded("")
    assert {name for name in loaded("import vmoer") - before if name.split(".")[0] == "vmoer"} == {"vmoer"}
    assert not {"torch", "transformers", "numpy"} & loaded("import vmoer; vmoer.__version__")


def test_routing_needs_no_data_set_no_training_and_no_metrics() -> None:
    names = [name for name in vmoer.__all__ if name not in ("VMoERTrainer", "select_layers")]
    found = loaded(f"from vmoer import {', '.join(names)}")
    assert "torch" in found
    assert not {"vmoer.tasks", "vmoer.training", "vmoer.metrics", "vmoer.evaluation", "pyarrow"} & found


def test_every_public_name_is_what_its_module_defines() -> None:
    for name in vmoer.__all__:
        value = getattr(vmoer, name)
        assert value.__name__ == name
        assert value.__module__.startswith("vmoer.")
    assert set(vmoer.__all__) <= set(dir(vmoer))
    assert "__version__" in dir(vmoer)


def test_other_names_are_refused_as_of_any_module() -> None:
    with pytest.raises(AttributeError, match="module 'vmoer' has no attribute 'atach'"):
        vmoer.atach  # noqa: B018
    with pytest.raises(ImportError):
        from vmoer import atach  # type: ignore[attr-defined]  # noqa: F401
