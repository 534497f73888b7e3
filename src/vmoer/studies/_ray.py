"""Cells on a Ray cluster: `vmoer study ... --backend ray`.

Each cell is one task. A task leaves files, so the folder must be on storage that every machine sees, under the same path; a task
whose machine does not see it fails with that reason. A cell that says how much GPU memory it takes gets that part of a GPU, so
that several share one. Ray decides where and when; `_grid.run` decides what is ready, and what is tried once more.
"""

import math
import os
import signal
import socket
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vmoer.errors import InputError, RunError, first_line
from vmoer.studies._grid import Backend, Cell, Pool, Result, attempt
from vmoer.studies._processes import gpu_gb, start_worker

LOOPBACK = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
"""Ray's switch for machines of which no cluster is made: where it is 0, Ray listens on the loopback interface alone."""


def cluster(address: str | None, *, gpu: bool = True, cpus: int | None = None) -> Backend:
    """A backend that hands cells to a Ray cluster.

    `address` is that of a cluster, `auto` (or None) for the one that RAY_ADDRESS names or that runs on this machine, or `local`
    for one that is started here, on `cpus` cores, and ends with the study. Where the cluster has GPUs each cell gets one, or the
    part that it asks for, unless `gpu` says that it needs none: a task that asks for none sees none.
    """

    @contextmanager
    def opened(out: Path) -> Iterator[Pool]:
        with _connected(address, cpus) as ray, _marked(out) as here:
            pool = _Cluster(ray, here, gpu)
            try:
                yield pool
            finally:
                pool.close()

    return opened


class _Cluster:
    def __init__(self, ray: Any, here: "Here", gpu: bool) -> None:
        self.ray, self.here = ray, here
        self.gpu = gpu and ray.cluster_resources().get("GPU", 0) > 0
        self.running: dict[Any, Cell] = {}
        self.gb: float | None = None

    def room(self, cell: Cell) -> bool:
        return True  # Ray keeps what does not fit yet

    def memory(self) -> float:
        """Of one of the cluster's GPUs."""
        if self.gb is None:
            asked = self.ray.remote(num_cpus=0, num_gpus=1)(gpu_gb)
            self.gb = self.ray.get(asked.remote()) if self.gpu else math.inf
        return self.gb

    def start(self, cell: Cell, latest: float) -> None:
        share = min(1.0, cell.gb / self.memory()) if cell.gb else 1.0
        task = self.ray.remote(num_cpus=1, num_gpus=_part(share) if self.gpu else 0, max_retries=0)
        self.running[task(Here.compute).remote(self.here, cell, share, latest)] = cell

    def wait(self) -> list[tuple[Cell, Result]]:
        (done, *_), _ = self.ray.wait(list(self.running), num_returns=1)
        cell = self.running.pop(done)
        try:
            return [(cell, self.ray.get(done))]
        except self.ray.exceptions.RayTaskError as error:
            raise error.cause from None
        except self.ray.exceptions.RayError as error:  # what a cell raises comes as a reason; this is a process lost
            return [(cell, Result(first_line(error), died=True))]

    def close(self) -> None:
        """End what still runs, which is nothing unless the study is stopped."""
        for running in self.running:
            self.ray.cancel(running, force=True)


def _part(share: float) -> float:
    """Ray counts GPUs in ten-thousandths, and takes no more than one by parts."""
    return min(1.0, math.ceil(share * 1e4) / 1e4)


@dataclass(frozen=True)
class Here:
    """What a task must know of the process that asked for it: its folders, and its own settings of the environment."""

    out: Path
    """As the caller wrote it: what runs store of it must not depend on the backend."""
    marker: str
    cwd: str
    environment: dict[str, str]

    def compute(self, cell: Cell, share: float = 1.0, latest: float = math.inf) -> Result:
        try:
            self._enter()
        except RunError as error:
            return Result(str(error))
        return attempt(cell, self.out, share, latest)

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
    ends = signal.getsignal(signal.SIGTERM)
    if address == "local":
        _start_local(ray, cpus)
    else:
        asked = address or os.environ.get("RAY_ADDRESS") or "auto"
        if asked != "auto":
            _reach(asked)
        try:
            ray.init(asked, logging_level="ERROR", log_to_driver=False)
        except (ConnectionError, ValueError, RuntimeError) as error:
            raise InputError(_nothing_at(asked)) from error
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, ends)  # Ray sets a handler of its own
    try:
        yield ray
    finally:
        ray.shutdown()


def _start_local(ray: Any, cpus: int | None) -> None:
    """A cluster of this machine, which nothing outside it can reach."""
    constants, before = ray._private.ray_constants, os.environ.get(LOOPBACK)
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # read by Ray's processes as they start; this one may have read it before
    os.environ[LOOPBACK], enabled, constants.ENABLE_RAY_CLUSTER = "0", constants.ENABLE_RAY_CLUSTER, False
    # what goes to and fro are names and reasons: a store of gigabytes would be for nothing
    small = {"num_cpus": cpus, "include_dashboard": False, "object_store_memory": 100 * 2**20}
    try:
        for last in (False, True):  # on a busy machine its parts may wait for each other too long
            try:
                ray.init("local", **small, logging_level="ERROR", log_to_driver=False)
                return
            except (RuntimeError, OSError, TimeoutError) as error:
                ray.shutdown()
                if last:
                    raise RunError(f"a local Ray cluster did not start: {first_line(error)}") from None
    finally:
        constants.ENABLE_RAY_CLUSTER = enabled
        os.environ.pop(LOOPBACK)
        os.environ.update({} if before is None else {LOOPBACK: before})


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
