"""kill -9 at every step that a command takes on disk, and at moments between: the next start ends with the same bytes.

    python tests/attacks/kills.py WORK FOLDER [--events N] [--times N] [--seed S]

Everything is imported first; each attempt is a fork of that. It is killed in the n-th call of one of `EVENTS`, before or after
that has done its work, or after a random part of the time that all takes. The oracle is the folder of an attempt that nobody
killed, byte for byte: that a file is torn, missing or left over shows there. A line of JSON is printed for each moment.
"""

import argparse
import json
import os
import random
import shutil
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from tiny_letters import TOKENIZER, tiny_model
from train_workers import world

import vmoer
from vmoer.commands._shared import quiet
from vmoer.evaluation import calibrators, scores
from vmoer.evaluation.answers import predict_task
from vmoer.files import locked
from vmoer.models import Opened
from vmoer.saved import calibrator as files
from vmoer.saved import manifest
from vmoer.studies import _grid
from vmoer.tasks import Question
from vmoer.training.run import Data, Plan, Running, Stages
from vmoer.training.run import train as run_train

EVENTS = ("fsync", "replace", "unlink", "mkdir", "rmdir")
QUESTIONS = [Question(f"q{i}", f"Number {i}?", ("1", "2"), i % 2, "t", "test") for i in range(8)]
ASKED = [replace(QUESTIONS[i % 8], id=f"v{i}", question=f"Number {i}?", split="validation") for i in range(60)]


def train(out: Path) -> None:
    """Both stages on a model folder and a data folder beside the run."""
    place = out.parent / "world"
    plan = Plan(epochs=1, lr=1e-3, batch_size=8)
    with locked(out):
        run_train(
            str(place / "model"),
            "sciq",
            vmoer.MeanField(layers=[0, 1], beta=0.01),
            out=out,
            stages=Stages(stage1=plan, stage2=plan, rank=2),
            data=Data(root=place / "data"),
            running=Running(checkpoint_every=2, log_every=2),
        )


def evaluate(out: Path) -> None:
    with locked(out):
        predict_task(tiny_model(), TOKENIZER, QUESTIONS, folder=out, batch_tokens=120, routing=True)
        scores.write(out, draws=20)


def study(out: Path) -> None:
    def work(n: int) -> list[dict[str, Any]]:
        return [_grid.row("toy", "value", n / 7, method=str(n))]

    with locked(out):
        cells = [_grid.Cell("toy", {"n": n}, partial(work, n)) for n in range(3)]
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


WORKS: dict[str, Callable[[Path], None]] = {
    "train": train,
    "eval": evaluate,
    "study": study,
    "calibrate": calibrate,
}


def attempt(work: Callable[[Path], None], out: Path, at: int = 0, after: bool = False, seconds: float = 0.0) -> int:
    """How a fork that does the work ended: 0, 1 where it raised, -9 where it was killed at step `at` or after so many seconds.

    With `at` = -1 it is not killed, and leaves the number of steps in a file beside the folder.
    """
    child = os.fork()
    if child:
        if seconds:
            time.sleep(seconds)
            os.kill(child, signal.SIGKILL)
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    try:
        steps = _arm(at, after) if at else []
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            work(out)
        if at == -1:
            out.with_name(f"{out.name}.steps").write_text(str(len(steps)))
        os._exit(0)
    except BaseException as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        os._exit(1)


def _arm(at: int, after: bool) -> list[str]:
    """From here on this process is killed in the `at`-th call of `EVENTS`; gives a list that every call is put on."""
    seen: list[str] = []

    def dying(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **more: Any) -> Any:
            seen.append(name)
            if len(seen) == at and not after:
                os.kill(os.getpid(), signal.SIGKILL)
            own = len(seen)
            try:
                return real(*args, **more)
            finally:
                if own == at:
                    os.kill(os.getpid(), signal.SIGKILL)

        return call

    for name in EVENTS:
        setattr(os, name, dying(name, getattr(os, name)))
    return seen


def content(folder: Path) -> dict[str, bytes]:
    """What every file below a folder holds, and which folders there are; of a cell its rows: how long it took is beside them."""
    found = {str(path.relative_to(folder)): path for path in sorted(folder.rglob("*"))}
    return {name: _of(path) if path.is_file() else b"" for name, path in found.items()}


def _of(path: Path) -> bytes:
    data = path.read_bytes()
    if path.parent.name != "cells":
        return data
    try:
        return json.dumps(json.loads(data)["rows"]).encode()
    except (ValueError, KeyError, TypeError):
        return data


def moments(work: str, folder: Path, events: int, times: int, seed: int) -> Iterator[dict[str, Any]]:
    """At most so many steps on disk, evenly spread over all there are, and random times: `events + times` moments in all."""
    if work == "train":
        world.save(folder / "world", n=40, validation=8, test=8)
    started = time.monotonic()
    if attempt(WORKS[work], folder / "whole"):
        raise SystemExit("the work fails when nobody kills it")
    whole, expected = time.monotonic() - started, content(folder / "whole")
    attempt(WORKS[work], folder / "count", at=-1)
    last = int((folder / "count.steps").read_text())
    rng = random.Random(f"{seed} {work}")
    steps = [(at, after, 0.0) for at in range(1, last + 1) for after in (False, True)]
    if len(steps) > events:
        steps = [steps[round(i * (len(steps) - 1) / max(1, events - 1))] for i in range(events)]
    times += events - len(steps)
    for number, how in enumerate([*steps, *((0, False, rng.uniform(0.02, 0.95) * whole) for _ in range(times))]):
        out = folder / str(number)
        while (ended := attempt(WORKS[work], out, *how)) != -signal.SIGKILL and how[2]:
            how = (0, False, how[2] / 2)  # it had ended before
            shutil.rmtree(out)
        again, found = attempt(WORKS[work], out), content(out)
        odd = sorted(name for name in expected.keys() | found.keys() if expected.get(name) != found.get(name))
        outcome = "not killed" if ended != -signal.SIGKILL else "raw" if again else "different" if odd else "identical"
        yield {"work": work, "moment": how, "outcome": outcome, "odd": odd}
        shutil.rmtree(out)


def main() -> None:
    asked = argparse.ArgumentParser(description=__doc__)
    asked.add_argument("work", choices=list(WORKS))
    asked.add_argument("folder", type=Path)
    asked.add_argument("--events", type=int, default=30)
    asked.add_argument("--times", type=int, default=0)
    asked.add_argument("--seed", type=int, default=0)
    given = asked.parse_args()
    torch.set_num_threads(1)
    quiet()
    for found in moments(given.work, given.folder, given.events, given.times, given.seed):
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
