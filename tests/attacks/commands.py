"""What each command does when another has its folder, when it is told to stop, and when there is no room.

    python tests/attacks/commands.py PART FOLDER

The parts are

    two     a command is stopped in its middle with its folder locked; the same command, in another PID namespace, must say why
            not; then the first goes on, and must leave what it leaves alone
    stop    Ctrl-C and SIGTERM at moments of its work: 130 or 143, within five seconds, and started again it ends as if nothing
            had been
    room    on a disk that is full at several sizes, and on one that cannot be written: one line; with room, the same bytes
    workers a study with four processes, and on a local Ray: Ctrl-C and SIGTERM end it within five seconds, no process of it is
            left, and the same command ends as if nothing had been; so does a study of which a worker is killed: its cell is
            tried once more
    reads   two writers with one process number, and readers: no file is ever seen torn

Every command is a fork of this process, in which everything is imported. Namespaces and mounts need the rights of root; without
them a part says what it left out. A line of JSON is printed for each attempt.
"""

import argparse
import ctypes
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[1] / "studies"))

import psutil
import torch
from toy_cells import seconds_to_end
from train_workers import world

from attacks.kills import content
from vmoer.cli import COMMANDS, command, main
from vmoer.files import read_json, write_json

NEW_FILES, NEW_PIDS = 0x00020000, 0x20000000  # CLONE_NEWNS, CLONE_NEWPID
Report = Iterator[dict[str, Any]]


def lines(place: Path) -> dict[str, list[str]]:
    """What is typed, by command; OUT is the folder that it writes."""
    model, data = place / "world" / "model", ["--data-root", str(place / "world" / "data")]
    task, cpu = ["--task", "sciq", *data], ["--device", "cpu"]
    plans = ["--stage1-epochs", "1", "--stage2-epochs", "1", "--rank", "2", "--method", "vglr-mf", "--layers", "0,1"]
    grid = ["--task", "demo", "--methods", "map,temp-scale", "--limit", "40", *cpu]
    return {
        "train": ["train", str(model), *task, *plans, "--out", "OUT"],
        "eval": ["eval", str(model), *task, *cpu, "--batch-tokens", "60", "--out", "OUT"],
        "study": ["study", "calibration", "--model", "demo", *grid, "--out", "OUT"],
        "calibrate": ["calibrate", str(model), *task, *cpu, "--batch-tokens", "60", "--out", "OUT"],
        "sensitivity": ["sensitivity", str(model), *task, *cpu, "--out", "OUT"],
        "threshold": ["threshold", "OUT", "--risk", "0.995", "--confidence", "0.5"],
        "report": ["report", "OUT"],
        "merge": ["merge", str(place / "whole-train" / "out"), "--out", "OUT"],
        "demo": ["demo", "--out", "OUT"],
    }


WITHOUT_A_FOLDER = {
    "ask": ["ask", "demo", "Which of them is a fruit?", "--max-new-tokens", "256"],
    "info": ["info", "demo"],
    "bench": ["bench", "--quick"],
}
PROGRESS = ("note: ", "stage 1, ", "stage 2, ", "small-granite")
NEEDS_ANSWERS = ("threshold", "report")


class Place:
    """Where commands run: the small world, and folders that are as each command wants to find them."""

    def __init__(self, folder: Path, only: str = "") -> None:
        self.folder = folder
        world.save(folder / "world", n=40, validation=24, test=8)
        self.lines = lines(folder)
        self.took = {"demo": 10.0, "bench": 10.0}  # they would take minutes, and are never run to their end
        self.only = only.split(",") if only else [*self.lines, *WITHOUT_A_FOLDER, "1", "4", "ray"]
        self.names = [name for name in self.lines if name in self.only]

    def fresh(self, name: str, out: Path) -> Path:
        out.mkdir(parents=True, exist_ok=True)
        if name in NEEDS_ANSWERS:
            shutil.copytree(self.whole("eval"), out, dirs_exist_ok=True)
        if name == "merge":
            self.whole("train")
        return out

    def whole(self, name: str) -> Path:
        """The folder of the command alone."""
        out = self.folder / f"whole-{name}" / "out"
        if not out.exists():
            self.fresh(name, out)
            began = time.monotonic()
            code, said = ended(self.start(name, out))
            self.took[name] = time.monotonic() - began
            if code:
                raise SystemExit(f"{name} fails alone: {said}")
        return out

    def start(self, name: str, out: Path, spaces: int = 0) -> "Started":
        return Started({**self.lines, **WITHOUT_A_FOLDER}[name], out, spaces)


class Started:
    """A command in a process group of its own, perhaps in namespaces of its own. It writes stderr to a file.

    Its folder has the same name in every attempt, relative to where it runs: some files keep that name.
    """

    def __init__(self, words: list[str], out: Path, spaces: int = 0) -> None:
        self.command = words[0]
        self.said = out.parent.parent / f"said-{time.monotonic_ns()}"
        self.pid = os.fork()
        if self.pid:
            return
        os.setpgid(0, 0)
        if spaces:
            unshare(spaces)
            child = os.fork()  # its number is 1 there
            if child:
                for number in (signal.SIGINT, signal.SIGTERM):
                    signal.signal(number, signal.SIG_IGN)
                code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
                os._exit(code if code >= 0 else 100)
        with self.said.open("wb") as file:
            os.dup2(file.fileno(), 2)
        with open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), 1)
        os.chdir(out.parent)
        sys.argv[1:] = [out.name if word == "OUT" else word for word in words]
        try:
            main()
        except SystemExit as stop:
            os._exit(stop.code if isinstance(stop.code, int) else 1)
        except BaseException as error:
            print(f"raw {type(error).__name__}: {error}", file=sys.stderr, flush=True)
            os._exit(99)
        os._exit(0)

    def running(self) -> bool:
        return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None


def ended(started: Started) -> tuple[int, str]:
    """The exit code of a command and what it said, but for notes and the lines with which training goes on."""
    code = os.waitstatus_to_exitcode(os.waitpid(started.pid, 0)[1])
    said = "\n".join(line for line in started.said.read_text().splitlines() if not line.startswith(PROGRESS))
    return code, said


def unshare(spaces: int) -> None:
    if ctypes.CDLL(None, use_errno=True).unshare(spaces):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def allowed(spaces: int) -> bool:
    """Whether this process may make such namespaces."""
    child = os.fork()
    if not child:
        try:
            unshare(spaces)
        except (OSError, AttributeError):
            os._exit(1)
        os._exit(0)
    return os.waitpid(child, 0)[1] == 0


def locked_by(started: Started, out: Path) -> bool:
    """Wait until the command has its folder: the kernel lists the lock. `report` has it on a folder below, `merge` beside."""
    while started.running():
        for path in (out / ".lock", out / "report" / ".lock", out.with_name(f".{out.name}.merge") / ".lock"):
            with suppress(FileNotFoundError):
                if f":{path.stat().st_ino} " in Path("/proc/locks").read_text():
                    return True
        time.sleep(0.0005)
    return False


def same(out: Path, name: str, place: Place) -> list[str]:
    """Files that are not those of the command alone. TensorBoard's have times in them; so have a study's cells."""
    expected, found = content(place.whole(name)), content(out)
    odd = {file for file in expected.keys() | found.keys() if expected.get(file) != found.get(file)}
    return sorted(file for file in odd if "tensorboard" not in file)


# -- the parts ---------------------------------------------------------------------------------------------------------


def two(place: Place) -> Report:
    spaces = NEW_PIDS if allowed(NEW_PIDS) else 0
    for apart in [0, spaces] if spaces else [0]:
        how = "two PID namespaces" if apart else "one PID namespace"
        for name in place.names:
            out = place.fresh(name, place.folder / f"two-{name}-{bool(apart)}" / "out")
            first = place.start(name, out, apart)
            if not locked_by(first, out):
                yield {"command": name, "how": how, "outcome": "raw", "said": ended(first)[1]}
                continue
            os.killpg(first.pid, signal.SIGSTOP)
            code, said = ended(place.start(name, out, apart))
            os.killpg(first.pid, signal.SIGCONT)
            refused = code == 1 and "is in use by another vmoer" in said and "\n" not in said
            if name == "demo":
                os.killpg(first.pid, signal.SIGKILL)
                ended(first)
                outcome = "refused" if refused else "raw"
            else:
                worked, odd = ended(first), same(out, name, place)
                outcome = "raw" if worked[0] or not refused else "different" if odd else "refused"
                said = worked[1] or said if outcome == "raw" else " ".join(odd) or said
            yield {"command": name, "how": how, "outcome": outcome, "said": said}
    if not spaces:
        yield {"command": "all", "how": "two PID namespaces", "outcome": "left out", "said": "they need root"}


def stop(place: Place, moments: int) -> Report:
    for name in [*place.names, *(name for name in WITHOUT_A_FOLDER if name in place.only)]:
        for number, moment in product((signal.SIGINT, signal.SIGTERM), range(moments)):
            if name not in ("demo", "bench"):
                place.whole(name)
            wait, outcome = place.took[name] * moment / moments, "late"
            for shorter in range(4 if wait else 1):  # where it was done before, once more, and the signal comes sooner
                if outcome == "late":
                    where = place.folder / f"stop-{name}-{number.name}-{moment}-{shorter}"
                    out = place.fresh(name, where / "out")
                    outcome, said, seconds = told_to_end(place.start(name, out), out, number, wait / 2**shorter)
            if outcome == "stopped" and name == "merge" and out.exists() and not same(out, name, place):
                outcome = "late"  # the folder is whole, and a second merge into it is refused
            if outcome == "stopped" and name in place.lines and name != "demo":
                code, again = ended(place.start(name, out))
                outcome = "raw" if code else "different" if same(out, name, place) else "stopped"
                said = f"{said} {again}".strip()
            how = f"{number.name} at {moment} of {moments}"
            yield {"command": name, "how": how, "outcome": outcome, "said": said, "seconds": seconds}


def told_to_end(started: Started, out: Path, number: signal.Signals, wait: float) -> tuple[str, str, float]:
    """What a signal comes to so long after the command has its folder, what was said, and how long the end took."""
    begun = True
    if started.command in WITHOUT_A_FOLDER:
        time.sleep(0.1)
    else:
        begun = locked_by(started, out)
    time.sleep(wait)
    os.killpg(started.pid, number)
    told = time.monotonic()
    code, said = ended(started)
    seconds = time.monotonic() - told
    outcome = "raw" if not begun or code not in (128 + number, 0) or said.count("\n") else "stopped"
    outcome = "hang" if seconds > seconds_to_end() else "late" if code == 0 else outcome
    return "orphans" if left_of(started) else outcome, said, seconds


def left_of(started: Started) -> bool:
    """Whether a process of its group stays. Python's tracker of resources sees that it is alone, and ends a moment later."""
    deadline = time.monotonic() + seconds_to_end()
    while time.monotonic() < deadline:
        try:
            os.killpg(started.pid, 0)
        except ProcessLookupError:
            return False
        time.sleep(0.05)
    return True


def room(place: Place) -> Report:
    if not allowed(NEW_FILES):
        yield {"command": "all", "how": "disk full", "outcome": "left out", "said": "mounts need root"}
        return
    for name in place.names:
        if name != "demo":
            size = sum(-(-len(data) // 4096) * 4096 for data in content(place.whole(name)).values())
            for share in (0.0, 0.2, 0.5, 0.8):
                yield in_a_fork(partial(full, place, name, share, size))
            yield in_a_fork(partial(full, place, name, None, 0))


def in_a_fork(work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What the work tells, done in a process with mounts of its own, which go with it."""
    ours, theirs = os.pipe()
    child = os.fork()
    if not child:
        try:
            unshare(NEW_FILES)
            subprocess.run(["mount", "--make-rprivate", "/"], check=True)
            told = work()
        except BaseException as error:
            told = {"command": "?", "how": "?", "outcome": "raw", "said": f"{type(error).__name__}: {error}"}
        os.write(theirs, json.dumps(told).encode())
        os._exit(0)
    os.close(theirs)
    with os.fdopen(ours, "rb") as file:
        told = json.loads(file.read())
    os.waitpid(child, 0)
    return dict(told)


def full(place: Place, name: str, share: float | None, size: int) -> dict[str, Any]:
    """The command on a disk of a share of what it needs, or of one that cannot be written (None); then with room."""
    out = place.folder / f"room-{name}-{share}" / "out"
    disk = out.parent  # `merge` writes beside its folder
    disk.mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "none", str(disk)], check=True)
    place.fresh(name, out)
    found = os.statvfs(disk)
    used = (found.f_blocks - found.f_bfree) * found.f_frsize
    pages = max(1, (used + int((share or 0) * max(0, size - used))) // 4096)  # 0 would be without a limit
    limits = "ro" if share is None else f"size={4 * pages}k"
    subprocess.run(["mount", "-o", f"remount,{limits}", str(disk)], check=True)
    code, said = ended(place.start(name, out))
    how = "read-only" if share is None else f"disk full at {share:.0%}"
    clear = code == 1 and said and "\n" not in said and "VMOER_DEBUG" not in said
    outcome = "refused" if clear else "enough" if code == 0 else "raw"
    subprocess.run(["mount", "-o", "remount,rw,size=64m", str(disk)], check=True)
    code, again = ended(place.start(name, out))
    odd = same(out, name, place)
    outcome = "raw" if code else "different" if odd else outcome
    return {"command": name, "how": how, "outcome": outcome, "said": f"{said} {again} {odd or ''}".strip()}


def workers(place: Place) -> Report:
    labels = "map,vglr-mf,vglr-fc,vglr-lr,mcdr,temp-scale"
    grid = [
        "study",
        "calibration",
        "--model",
        "demo",
        "--task",
        "demo",
        "--methods",
        labels,
        "--limit",
        "60",
        "--out",
        "out",
    ]
    (place.folder / "whole").mkdir()
    expected = finished(grid, place.folder / "whole")
    for how in (["--workers", "1"], ["--workers", "4"], ["--backend", "ray", "--ray-address", "local"]):
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL) if how[1] in place.only else ():
            where = place.folder / f"{how[1]}-{number.name}"
            where.mkdir()
            if number != signal.SIGKILL or how[1] != "1":  # with one process there is no other to kill
                found = stopped_study([*grid, *how], where, number, 1 if how[1] == "ray" else int(how[1]))
                if found["outcome"] in ("stopped", "tried again") and finished([*grid, *how], where) != expected:
                    found["outcome"] = "different"
                yield found


def program(words: list[str], where: Path) -> "subprocess.Popen[str]":
    line = [sys.executable, "-W", "ignore", "-c", "from vmoer.cli import main; main()", *words]
    told: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    return subprocess.Popen(line, cwd=where, text=True, start_new_session=True, **told)


def finished(words: list[str], where: Path) -> bytes | None:
    """The numbers of a study that is run to its end; None where it fails."""
    running = program(words, where)
    running.communicate()
    return None if running.returncode else (where / "out" / "metrics.json").read_bytes()


def stopped_study(words: list[str], where: Path, number: signal.Signals, least: int) -> dict[str, Any]:
    """A study that a signal ends, or one of whose workers is killed."""
    running = program(words, where)
    found = psutil.Process(running.pid)
    while running.poll() is None and not list(where.glob("out/runs/*/*")):
        time.sleep(0.05)
    wanted = max(least if least > 1 else 0, int(number == signal.SIGKILL))
    while running.poll() is None and len(busy(found)) < wanted:
        time.sleep(0.05)
    family = found.children(recursive=True)
    told, kept = time.monotonic(), len(list(where.glob("out/cells/*.json")))
    told_to = {"command": f"study {' '.join(words[-2 - 2 * ('ray' in words) :])}", "how": number.name}
    if number == signal.SIGKILL:
        mine = busy(found)
        if not mine:
            return told_to | {
                "outcome": "raw",
                "said": f"it ended before a worker could be killed: {running.communicate()[0]}",
            }
        mine[-1].kill()
        said = running.communicate()[0]
        good = running.returncode == 0 and "tried once more" in said
        return told_to | {"outcome": "tried again" if good else "raw", "said": said.splitlines()[-1]}
    os.killpg(running.pid, number) if number == signal.SIGINT else running.send_signal(number)
    said = running.communicate()[0]
    seconds = time.monotonic() - told
    time.sleep(1)
    alive = [process for process in family if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]
    outcome = "raw" if running.returncode != 128 + number or "Error" in said else "orphans" if alive else "stopped"
    outcome = "hang" if seconds > seconds_to_end() else outcome
    if len(list(where.glob("out/cells/*.json"))) < kept:
        outcome = "different"
    return told_to | {
        "outcome": outcome,
        "seconds": seconds,
        "said": f"{seconds:.1f} s, code {running.returncode}, {len(family)} more processes: {said[-300:]}",
    }


def busy(found: psutil.Process) -> list[psutil.Process]:
    """The processes that work on cells: they have loaded their libraries, and run."""
    names = ("ray::", "spawn_main")
    mine = []
    for child in found.children(recursive=True):
        with suppress(psutil.Error):
            if any(name in " ".join(child.cmdline()) for name in names) and child.cpu_times().user > 4:
                mine.append(child)
    return mine


def reads(place: Place) -> Report:
    spaces = NEW_PIDS if allowed(NEW_PIDS) else 0
    path, texts = place.folder / "reads" / "file.json", [[letter] * 20_000 for letter in "ab"]
    write_json(path, texts[0])
    writers = []
    for text in texts:
        pid = os.fork()
        if not pid:
            if spaces:
                unshare(spaces)
                child = os.fork()
                if child:
                    os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
            for _ in range(600):
                write_json(path, text)
            os._exit(0)
        writers.append(pid)
    torn = seen = 0
    left = set(writers)
    while left:
        try:
            torn += read_json(path) not in texts
        except Exception:
            torn += 1
        seen += 1
        left -= {pid for pid in left if os.waitpid(pid, os.WNOHANG)[0]}
    over = [other.name for other in path.parent.iterdir() if other != path]
    how = "two PID namespaces" if spaces else "one PID namespace"
    outcome = "different" if torn or over else "whole"
    yield {
        "command": "1200 writes",
        "how": how,
        "outcome": outcome,
        "said": f"{torn} of {seen} reads torn",
        "cases": seen,
    }


PARTS: dict[str, Callable[[Place], Report]] = {
    "two": two,
    "room": room,
    "workers": workers,
    "reads": reads,
}


def run() -> None:
    asked = argparse.ArgumentParser(description=__doc__)
    asked.add_argument("part", choices=[*PARTS, "stop"])
    asked.add_argument("folder", type=Path)
    asked.add_argument("--only", default="", help="commands, separated by commas; of workers, 1, 4 or ray")
    asked.add_argument("--moments", type=int, default=3, help="of the work of each command, at which it is stopped")
    given = asked.parse_args()
    torch.set_num_threads(1)
    for name in COMMANDS:
        command(name)
    place = Place(given.folder, given.only)
    parts = PARTS | {"stop": partial(stop, moments=given.moments)}
    for found in parts[given.part](place):
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    run()
