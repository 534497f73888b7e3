"""Cells on a Ray cluster: `vmoer study ... --backend ray`.

Cells are independent, so each is one task. What a task leaves is its cell's file, so the folder must be on storage that every
machine sees, under the same path; a task whose machine does not see it fails with that reason. A worker that dies takes its
task with it, and Ray gives the task to another; a cell whose file is there by then is not computed again.
"""

import os
import socket
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vmoer.errors import InputError, RunError
from vmoer.studies._grid import Backend, Cell, compute, start_worker

RETRIES = 3
"""How often a cell whose worker died is begun again: a cell that kills its worker would do so for ever."""


def cluster(
    address: str | None, *, gpu: bool = True, first: Sequence[Callable[[], object]] = (), cpus: int | None = None
) -> Backend:
    """A backend that hands cells to a Ray cluster; `first` is done there before any of them, such as what they share.

    `address` is that of a cluster, `auto` (or None) for the one that RAY_ADDRESS names or that runs on this machine, or `local`
    for one that is started here, on `cpus` cores, and ends with the study. Where the cluster has GPUs each cell gets one, unless
    `gpu` says that it needs none: a task that asks for none sees none.
    """

    def computed(todo: Sequence[Cell], out: Path) -> Iterator[tuple[Cell, str]]:
        if not todo:
            return
        with _connected(address, cpus) as ray, _marked(out) as here:
            gpus = 1 if gpu and ray.cluster_resources().get("GPU", 0) else 0
            task = ray.remote(num_cpus=1, num_gpus=gpus, max_retries=RETRIES)
            for begun in [task(Here.prepare).remote(here, work) for work in first]:
                _result(ray, begun)
            waiting = {task(Here.compute).remote(here, cell): cell for cell in todo}
            while waiting:
                (done, *_), _ = ray.wait(list(waiting), num_returns=1)
                try:
                    reason = _result(ray, done)
                except Exception as error:  # the task's own errors come as reasons; this is a worker lost for good
                    reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
                yield waiting.pop(done), reason

    return computed


@dataclass(frozen=True)
class Here:
    """What a task must know of the process that asked for it: its folders, and its own settings of the environment."""

    out: Path
    """As the caller wrote it: what runs store of it must not depend on the backend."""
    marker: str
    cwd: str
    environment: dict[str, str]

    def prepare(self, work: Callable[[], object]) -> None:
        self._enter()
        work()

    def compute(self, cell: Cell) -> str:
        try:
            self._enter()
        except RunError as error:
            return str(error)
        # the worker before may have died after its file was there
        return "" if cell.path(self.out).exists() else compute(cell, self.out)

    def _enter(self) -> None:
        with suppress(OSError):  # relative names in the study (its folder, a model's, a data root) are relative to this
            os.chdir(self.cwd)
        if not (self.out / self.marker).exists():
            host, folder = socket.gethostname(), Path(self.cwd) / self.out
            raise RunError(f"{host} does not see {folder}: give --out a folder on storage that every machine shares")
        os.environ.update(self.environment)
        start_worker()


@contextmanager
def _marked(out: Path) -> Iterator[Here]:
    """A file with a name of its own in the folder, by which a machine knows that it sees the same one."""
    out.mkdir(parents=True, exist_ok=True)
    marker = out / f".ray-{uuid.uuid4().hex}"
    marker.touch()
    settings = {name: value for name, value in os.environ.items() if name.startswith("VMOER_")}
    try:
        yield Here(out, marker.name, os.getcwd(), settings)
    finally:
        marker.unlink(missing_ok=True)


@contextmanager
def _connected(address: str | None, cpus: int | None) -> Iterator[Any]:
    try:
        import ray
    except ImportError:
        raise InputError("--backend ray needs Ray: pip install 'vmoer[ray]'") from None
    if ray.is_initialized():  # the caller's own cluster, and theirs to leave
        yield ray
        return
    quiet: dict[str, Any] = {"logging_level": "ERROR", "log_to_driver": False}
    if address == "local":
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        # what goes to and fro are names and reasons: a store of gigabytes would be for nothing
        small = {"num_cpus": cpus, "include_dashboard": False, "object_store_memory": 100 * 2**20}
        for last in (False, True):  # on a busy machine its parts may wait for each other too long
            try:
                ray.init("local", **small, **quiet)
                break
            except (RuntimeError, OSError, TimeoutError) as error:
                ray.shutdown()
                if last:
                    why = str(error).strip().splitlines()[0]
                    raise RunError(f"a local Ray cluster did not start: {why}") from None
    else:
        asked = address or os.environ.get("RAY_ADDRESS") or "auto"
        if asked != "auto":
            _reach(asked)
        try:
            ray.init(asked, **quiet)
        except (ConnectionError, ValueError, RuntimeError) as error:
            raise InputError(_nothing_at(asked)) from error
    try:
        yield ray
    finally:
        ray.shutdown()


def _reach(address: str) -> None:
    """Ask whether anything listens there: Ray itself tries for minutes, and then ends the process."""
    host, _, port = address.rpartition("://")[2].rpartition(":")
    if not host or not port.isdigit():
        raise InputError(f"ray address {address!r}: give host:port, ray://host:port, auto or local")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=5).close()
    except (OSError, OverflowError):
        raise InputError(_nothing_at(address)) from None


def _nothing_at(address: str) -> str:
    where = "running (RAY_ADDRESS is not set either)" if address == "auto" else f"at {address}"
    return f"there is no Ray cluster {where}: start one with `ray start --head`, or give --ray-address local"


def _result(ray: Any, reference: Any) -> Any:
    """What a task returned; what it raised, as it was raised."""
    try:
        return ray.get(reference)
    except ray.exceptions.RayTaskError as error:
        raise error.cause from None
