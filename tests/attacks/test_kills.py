"""kill -9 at every step that a command takes on disk: the next start ends with the bytes of an undisturbed run.

The process is forked with everything imported, and killed inside the n-th `fsync` or `replace`, before or after it.
"""

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tiny_letters import TOKENIZER, tiny_model

import vmoer
from vmoer.evaluation import calibrators, scores
from vmoer.evaluation.answers import predict_task
from vmoer.files import locked
from vmoer.models import Opened
from vmoer.saved import calibrator as files
from vmoer.saved import manifest
from vmoer.studies import _grid
from vmoer.tasks import Question

ASKED = [Question(f"q{i}", f"Number {i}?", ("1", "2"), i % 2, "t", "validation") for i in range(60)]
QUESTIONS = [Question(f"q{i}", f"Number {i}?", ("1", "2"), i % 2, "t", "test") for i in range(8)]


def evaluate(out: Path) -> None:
    with locked(out):
        predict_task(tiny_model(), TOKENIZER, QUESTIONS, folder=out, batch_tokens=120, routing=True)
        scores.write(out, draws=20)


def study(out: Path) -> None:
    def work(n: int) -> list[dict[str, Any]]:
        return [_grid.row("toy", "value", n / 7, method=str(n))]

    with locked(out):
        cells = [_grid.Cell("toy", {"n": n}, lambda n=n: work(n)) for n in range(3)]
        _grid.run(cells, out, say=lambda line: None)


def calibrate(out: Path) -> None:
    """In place, on a run that has a calibrator already: its one file and the manifest are replaced."""
    run = {"model": "tiny", "task": "t", "method": "vglr-mf", "seed": 0}
    with locked(out):
        if not manifest.complete(out):
            model = vmoer.attach(tiny_model(), vmoer.MeanField(layers=[1], samples=4))
            vmoer.save(model, out, run=run)
        files.renew(out)
        model = vmoer.load(tiny_model(), out)
        for kind in ("temperature", "vector"):
            opened = Opened(model, TOKENIZER, "tiny", run)
            calibrators.calibrate(out, opened, ASKED, folder=out, kind=kind, batch_tokens=1000)


def killed(work: Callable[[Path], None], out: Path, at: int, after: bool) -> bool:
    """Whether the work was killed at that step; False where it ended before."""
    child = os.fork()
    if child == 0:
        seen = 0

        def dying(real: Callable[..., Any]) -> Callable[..., Any]:
            def call(*args: Any, **more: Any) -> Any:
                nonlocal seen
                seen += 1
                if seen == at and not after:
                    os.kill(os.getpid(), signal.SIGKILL)
                found = real(*args, **more)
                if seen == at:
                    os.kill(os.getpid(), signal.SIGKILL)
                return found

            return call

        os.fsync, os.replace = dying(os.fsync), dying(os.replace)
        try:
            work(out)
        finally:
            os._exit(0)
    return os.WIFSIGNALED(os.waitpid(child, 0)[1])


def content(folder: Path) -> dict[str, bytes]:
    files = {str(path.relative_to(folder)): path for path in sorted(folder.rglob("*")) if path.is_file()}
    # how long a cell took stands in its file, and is in no table
    return {name: path.read_bytes() if "cells" not in name else b"" for name, path in files.items()}


@pytest.mark.parametrize("work", [evaluate, study, calibrate])
def test_killed_at_every_step_it_ends_with_the_same_bytes(work: Callable[[Path], None], tmp_path: Path) -> None:
    work(tmp_path / "whole")
    expected, moments = content(tmp_path / "whole"), 0
    for after in (False, True):
        for at in range(1, 40):
            out = tmp_path / f"{at}-{after}"
            if not killed(work, out, at, after):
                break
            moments += 1
            work(out)
            assert content(out) == expected
    assert moments >= 12
