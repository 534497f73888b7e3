"""A model, its run and a server for the tests of serving. They run vLLM's build for CPUs, in an environment of its own."""

import importlib.util
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
if importlib.util.find_spec("vllm") is None:
    collect_ignore = ["test_engine.py", "test_api.py", "test_load.py", "test_page.py", "test_restart.py"]


@pytest.fixture(scope="session")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("serving")


@pytest.fixture(scope="session")
def granite(work: Path) -> tuple[Path, Path]:
    """A tiny model and a run for it, with a calibrator."""
    import served

    base = served.build("granite", work / "granite")
    return base, served.train(base, "vglr-fc", work / "granite-vglr-fc", calibrator=served.CALIBRATOR)


class Server:
    """`vmoer serve` in a process of its own, and where it answers; without a run plain `vllm serve`."""

    def __init__(self, base: Path, run: Path | None, log: Path, port: int, *options: str) -> None:
        import served

        self.url, self.log = f"http://127.0.0.1:{port}", log
        command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(base)]
        if run is not None:
            command = [sys.executable, "-c", "from vmoer.cli import main; main()", "serve", str(base)]
            command += ["--router", str(run)]
        command += ["--host", "127.0.0.1", "--port", str(port), "--served-model-name", "tiny", *options]
        command += ["--enforce-eager", "--dtype", "float32", "--max-model-len", "256", "--max-num-seqs", "64"]
        with log.open("w") as out:
            self.process = subprocess.Popen(
                command, env=served.environment(), stdout=out, stderr=out, start_new_session=True
            )

    def ready(self, seconds: float = 400) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if self.process.poll() is not None:
                raise RuntimeError(f"the server ended: {self.log.read_text()[-3000:]}")
            try:
                with urllib.request.urlopen(f"{self.url}/health", timeout=5):
                    return
            except OSError:
                time.sleep(0.5)
        raise RuntimeError(f"the server did not start: {self.log.read_text()[-3000:]}")

    def get(self, path: str) -> str:
        with urllib.request.urlopen(self.url + path, timeout=30) as answer:
            return answer.read().decode()

    def engine(self) -> Any:
        """The process in which the model runs."""
        import psutil

        below = psutil.Process(self.process.pid).children(recursive=True)
        return next(process for process in below if "EngineCore" in process.name() + " ".join(process.cmdline()))

    def stop(self) -> None:
        for number, patience in ((signal.SIGINT, 20), (signal.SIGKILL, 20)):
            try:
                os.killpg(self.process.pid, number)
                self.process.wait(patience)
                return
            except ProcessLookupError:
                return
            except subprocess.TimeoutExpired:
                continue


def free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture(scope="session")
def server(granite: tuple[Path, Path], work: Path) -> Iterator[Server]:
    import served

    started = Server(*granite, work / "server.log", free_port(), "--threshold", str(served.threshold(work, *granite)))
    try:
        started.ready()
        yield started
    finally:
        started.stop()
