"""Cells in processes of this machine, which share its GPU.

As many processes run as are asked for, and as many cells as fit the GPU's memory by what each says it takes. A process that
dies costs its own cell and no other. Processes end with the study, and with the process that started them, however that ends.
"""

import math
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from multiprocessing import connection, get_context, parent_process, resource_tracker
from pathlib import Path
from typing import Any

import torch
import transformers

from vmoer.studies._grid import USABLE, Backend, Cell, Pool, Result, attempt, here

SPAWN = get_context("spawn")  # not forked: threads of the libraries do not survive a fork
DIED = "its process was killed (out of memory?)"
SECONDS_TO_END = 2.0


def processes(workers: int) -> Backend:
    """A backend of so many processes; one is this process itself."""

    @contextmanager
    def opened(out: Path) -> Iterator[Pool]:
        pool = _Processes(workers, out)
        try:
            yield pool
        finally:
            pool.close()

    return opened if workers > 1 else here


class _Process:
    """A process of its own that computes one cell at a time."""

    def __init__(self, out: Path) -> None:
        self.cell: Cell | None = None
        self.channel, theirs = SPAWN.Pipe()
        self.process = SPAWN.Process(target=_serve, args=(theirs, out), daemon=True)
        with _interrupts_wait():
            self.process.start()
        theirs.close()  # now the channel ends when the process does

    def start(self, cell: Cell, share: float) -> None:
        self.cell = cell
        with suppress(OSError):  # it died while it was idle, which `result` notices
            self.channel.send((cell, share))

    def result(self) -> Result:
        self.cell = None
        try:
            found: Result = self.channel.recv()
        except (EOFError, OSError):
            self.process.join()
            return Result(DIED, died=True)
        return found


class _Processes:
    def __init__(self, workers: int, out: Path) -> None:
        self.workers, self.out = workers, out
        self.all: list[_Process] = []

    def _busy(self) -> list[_Process]:
        return [one for one in self.all if one.cell is not None]

    def memory(self) -> float:
        return gpu_gb()

    def room(self, cell: Cell) -> bool:
        running = [one.cell.gb for one in self._busy() if one.cell is not None]
        if not running or len(running) == self.workers:
            return not running
        return not cell.gb or sum(running) + cell.gb <= self.memory()

    def start(self, cell: Cell, latest: float) -> None:
        idle = next((one for one in self.all if one.cell is None), None)
        if idle is None:
            idle = _Process(self.out)
            self.all.append(idle)
        idle.start(cell, min(1.0, cell.gb / self.memory()) if cell.gb else 1.0)

    def wait(self) -> list[tuple[Cell, Result]]:
        busy = {one.channel: one for one in self._busy()}
        ended = []
        for ready in connection.wait(list(busy)):
            one = busy[ready]  # type: ignore[index]
            cell, result = one.cell, one.result()
            assert cell is not None
            if result.died:
                self.all.remove(one)
            ended.append((cell, result))
        return ended

    def close(self) -> None:
        for one in self.all:
            one.process.terminate()
        for one in self.all:
            one.process.join(SECONDS_TO_END)
            if one.process.is_alive():
                one.process.kill()
                one.process.join()
            one.channel.close()


@cache
def gpu_gb() -> float:
    """GB of the GPU that cells can share; without a GPU there is nothing to divide."""
    return USABLE * torch.cuda.get_device_properties(0).total_memory / 1e9 if torch.cuda.is_available() else math.inf


@contextmanager
def _interrupts_wait() -> Iterator[None]:
    """A process that starts in here does not hear Ctrl-C, which would end it with a traceback before it can say so itself."""
    if not hasattr(signal, "pthread_sigmask"):  # Windows
        yield
        return
    resource_tracker.ensure_running()  # it would let interrupts through again
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _serve(channel: Any, out: Path) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes; the one that started them ends them
    threading.Thread(target=_end_with_parent, daemon=True).start()
    start_worker()
    while True:
        try:
            cell, share = channel.recv()
        except EOFError:
            return
        channel.send(attempt(cell, out, share))


def _end_with_parent() -> None:
    parent = parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def start_worker() -> None:
    """One thread a process: the processes share the cores between them."""
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
