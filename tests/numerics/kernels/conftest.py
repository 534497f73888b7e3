"""The kernels' tests run on a GPU where there is one, and everywhere in Triton's interpreter.

The interpreter must be switched on before Triton is imported, and would stay on for the whole process, so the interpreted run
is a process of its own (`test_kernels_interpreted.py`). Without a GPU the other files are collected in that process only.
"""

from pathlib import Path

import pytest
import torch
from kernel_cases import EVERYWHERE, HERE, INTERPRETED


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    fused = collection_path.name.startswith("test_") and collection_path.name not in EVERYWHERE
    return True if fused and not INTERPRETED and not torch.cuda.is_available() else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # numpy warns of lanes that are masked out later; compilers warn of settings
    quiet = pytest.mark.filterwarnings("ignore::RuntimeWarning" if INTERPRETED else "ignore")
    for item in items:
        if HERE in item.path.parents and item.path.name not in EVERYWHERE:
            item.add_marker(quiet)
            if not INTERPRETED:
                item.add_marker(pytest.mark.gpu)


@pytest.fixture(autouse=True)
def poisoned(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """Fresh memory is full of NaN, so an element that a kernel leaves unwritten shows."""
    if request.path.name in EVERYWHERE and not INTERPRETED:
        return
    empty = torch.empty

    def poison(*args: object, **kwargs: object) -> torch.Tensor:
        out: torch.Tensor = empty(*args, **kwargs)  # type: ignore[call-overload]
        return out.fill_(float("nan") if out.is_floating_point() else -(10**6))

    monkeypatch.setattr(torch, "empty", poison)
