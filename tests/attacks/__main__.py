"""`make attack`: the long run. Writes results/attacks/README.md, a table of what became of every attack.

    python tests/attacks [--parts folders,kills,...] [--cases 10000] [--passes 1000] [--moments 50] [--seed 0]

A part that is left out keeps the rows it has in results/attacks/outcomes.json. Several of these may run side by side, each with
parts of its own.
"""

import argparse
import fcntl
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch

from attacks import commands, folders, kills, threads
from attacks.targets import BAD, GOOD, Outcomes, Target, make_run
from vmoer.files import write_json, write_text

ROOT = Path(__file__).parents[2]
Rows = list[dict[str, Any]]


def mutated(given: argparse.Namespace) -> Rows:
    """Every bit of the JSON files flipped, and `cases` more folders with one file changed. The last row is the peak of memory."""
    table: dict[str, Outcomes] = {}

    def said(row: str, outcome: str, message: str) -> None:
        if outcome in BAD:
            print(f"{row}: {outcome}: {message}", file=sys.stderr, flush=True)

    with tempfile.TemporaryDirectory() as place:
        target = Target(make_run(Path(place) / "run"), Path(place) / "copy")
        folders.run(target, folders.flips(target), table, said)
        # eight files are torn, five rewritten, two get other tensors; a few stay as they were
        share = given.cases // 14 + 1
        for kind in (folders.torn, folders.rewritten, folders.retensored):
            folders.run(target, islice(kind(target, share, given.seed), None), table, said)
    table["all"] = sum(table.values(), Outcomes())
    rows = [{"attack": name, "cases": found.total(), **dict(found)} for name, found in table.items()]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    return [*rows, {"attack": f"peak memory {peak:.2f} GB", "changed": int(peak > 1)}]


def told(script: str, *words: object) -> Rows:
    """The lines that a script of this folder prints, in a process of its own."""
    command = [sys.executable, "-W", "ignore", script, *map(str, words)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        found = []
        for line in process.stdout:
            found.append(json.loads(line))
            if found[-1].get("outcome") in ("raw", "different", "hang", "orphans", "not killed"):
                print(line, end="", file=sys.stderr, flush=True)
    if process.returncode:
        raise SystemExit(f"{Path(script).name} {words[0]} ended with {process.returncode}")
    return found or sys.exit(f"{Path(script).name} {words[0]} made no attempt")


def killed(given: argparse.Namespace) -> Rows:
    rows = []
    for work in kills.WORKS:
        with tempfile.TemporaryDirectory() as place:
            events = given.moments * 4 // 5
            more = ("--events", events, "--times", given.moments - events, "--seed", given.seed)
            found = Counter(one["outcome"] for one in told(kills.__file__, work, place, *more))
        rows.append({"command": work, "moments": found.total(), **found})
    return rows


def of_commands(part: str) -> Callable[[argparse.Namespace], Rows]:
    def run(given: argparse.Namespace) -> Rows:
        with tempfile.TemporaryDirectory() as place:
            found = told(commands.__file__, part, place)
        counts: dict[str, Counter[str]] = {}
        slowest: dict[str, float] = {}
        for one in found:
            command, seconds = one["command"], round(one.get("seconds", 0.0), 1)
            counts.setdefault(command, Counter())[one["outcome"]] += one.get("cases", 1)
            slowest[command] = max(seconds, slowest.get(command, 0.0))
        return [
            {"command": command, "attempts": count.total(), **count, "seconds": slowest[command]}
            for command, count in counts.items()
        ]

    return run


def in_threads(given: argparse.Namespace) -> Rows:
    return told(threads.__file__, "threads", "--passes", given.passes)


def in_tasks(given: argparse.Namespace) -> Rows:
    return told(threads.__file__, "tasks")


def cost(given: argparse.Namespace) -> Rows:
    found = told(threads.__file__, "cost", "--passes", given.passes * 9)
    for row in found:
        row["over 1%"] = int(row["high"] > 1.01)
        row |= {name: round(row[name], 4) for name in ("ratio", "low", "high", "milliseconds")}
    return found


PARTS: dict[str, tuple[str, Callable[[argparse.Namespace], Rows], tuple[str, ...]]] = {
    "folders": (
        "Run folders with one file changed, loaded onto one base model.",
        mutated,
        ("attack", "cases", *GOOD, *BAD),
    ),
    "threads": (
        "One attached model, 16 threads: passes that answer wrong, and passes whose record holds another's.",
        in_threads,
        ("method", "passes", "right", "wrong", "mixed"),
    ),
    "tasks": (
        "One attached model, 200 asyncio tasks of one thread, records open while others run.",
        in_tasks,
        ("method", "passes", "right", "wrong", "mixed"),
    ),
    "cost": (
        "One thread: milliseconds of the processor for a recorded pass of a tiny model with all state in plain attributes, and\n"
        "the ratio of ours to it, with a 95% interval, all of which must lie below 1.01. On a larger model the same\n"
        "microseconds are a smaller part.",
        cost,
        ("method", "milliseconds", "ratio", "low", "high", "over 1%"),
    ),
    "kills": (
        "kill -9 at moments spread over all steps on disk, and at random times; then the same command again.",
        killed,
        ("command", "moments", "identical", "different", "raw", "not killed"),
    ),
    "two": (
        "The same command twice on one folder, in one PID namespace and in two.",
        of_commands("two"),
        ("command", "attempts", "refused", "different", "raw", "left out"),
    ),
    "reads": (
        "Two writers of one file, each with process number 1, and a reader.",
        of_commands("reads"),
        ("command", "attempts", "whole", "different"),
    ),
    "stop": (
        "Ctrl-C and SIGTERM, as the work begins and later; then the same command again. *late*: it was done before the signal\n"
        "came. *seconds*: the longest from a signal to the end.",
        of_commands("stop"),
        ("command", "attempts", "stopped", "late", "orphans", "different", "hang", "raw", "seconds"),
    ),
    "workers": (
        "Studies with 1 and 4 processes and on a local Ray: Ctrl-C and SIGTERM, then the same command again; and one worker\n"
        "killed. *seconds*: the longest from a signal to the end.",
        of_commands("workers"),
        ("command", "attempts", "stopped", "tried again", "orphans", "different", "hang", "raw", "seconds"),
    ),
    "room": (
        "A full disk, at four sizes, and one that cannot be written; then the same command with room.",
        of_commands("room"),
        ("command", "attempts", "refused", "enough", "different", "raw", "left out"),
    ),
}
FINE = {*GOOD, "right", "identical", "stopped", "late", "tried again", "whole", "enough", "left out"}
COUNTED = {"cases", "passes", "moments", "attempts", "seconds", "milliseconds", "ratio", "low", "high"}


def wrong(row: dict[str, Any]) -> int:
    """All that is neither fine nor a count: an outcome that no column is for is wrong too."""
    return sum(value for name, value in row.items() if name not in FINE | COUNTED and not isinstance(value, str))


HEAD = """\
# Attacks

`make attack`, or one part by the command above its table. What is promised, and what the outcomes mean:
[docs/security.md](../../docs/security.md). The command fails where a bad outcome is not 0. The same as data:
[outcomes.json](outcomes.json).
"""


def written(found: dict[str, Any]) -> str:
    """The page."""
    lines = [HEAD.rstrip()]
    for part, (title, _, columns) in PARTS.items():
        if part in found:
            lines += ["", f"## {part}", "", title, found[part]["made"], "", f"| {' | '.join(columns)} |"]
            lines.append(f"|:---|{'---:|' * (len(columns) - 1)}")
            lines += [f"| {' | '.join(str(row.get(name, 0)) for name in columns)} |" for row in found[part]["rows"]]
    return "\n".join(lines) + "\n"


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Inside the block nobody else is in one for this folder; they wait."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def keep(out: Path, part: str, made: str, rows: Rows) -> None:
    """Put the rows of a part beside those of the others."""
    data = out / "outcomes.json"
    with alone(out):
        found = json.loads(data.read_text()) if data.exists() else {}
        found[part] = {"made": made, "rows": rows}
        write_json(data, {name: found[name] for name in PARTS if name in found})
        write_text(out / "README.md", written(found))


def main() -> int:
    asked = argparse.ArgumentParser(description=__doc__)
    asked.add_argument("--parts", default=",".join(PARTS), help="separated by commas")
    asked.add_argument("--cases", type=int, default=10_000, help="mutated run folders, besides every bit flipped")
    asked.add_argument("--passes", type=int, default=1000, help="of each thread")
    asked.add_argument("--moments", type=int, default=50, help="at which each of four commands is killed")
    asked.add_argument("--seed", type=int, default=0)
    asked.add_argument("--out", type=Path, default=ROOT / "results" / "attacks")
    given = asked.parse_args()
    torch.set_num_threads(1)
    given.out.mkdir(parents=True, exist_ok=True)
    bad = 0
    for part in given.parts.split(","):
        began = time.monotonic()
        try:
            rows = PARTS[part][1](given)
        except SystemExit as stop:  # the other parts go on
            print(f"{part}: {stop}", flush=True)
            bad += 1
            continue
        options = f"--cases {given.cases} --passes {given.passes} --moments {given.moments} --seed {given.seed}"
        seconds = f"{time.monotonic() - began:.0f} s, Python {platform.python_version()}, torch {torch.__version__}"
        made = f"`python tests/attacks --parts {part} {options}`: {seconds}."
        keep(given.out, part, made, rows)
        amiss = sum(map(wrong, rows))
        print(f"{part}: {amiss} amiss, {made}", flush=True)
        bad += amiss
    return int(bool(bad))


if __name__ == "__main__":
    sys.exit(main())
