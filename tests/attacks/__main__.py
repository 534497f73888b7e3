"""`make attack`: the long run. Writes results/attacks/README.md, a table of what became of every attack."""

import argparse
import platform
import resource
import sys
import tempfile
import time
from itertools import islice
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch

from attacks import folders
from attacks.targets import BAD, GOOD, Outcomes, Target, make_run

ROOT = Path(__file__).parents[2]


def main() -> int:
    asked = argparse.ArgumentParser(description=__doc__)
    asked.add_argument("--cases", type=int, default=10_000, help="mutated run folders, at least")
    asked.add_argument("--seed", type=int, default=0)
    asked.add_argument("--out", type=Path, default=ROOT / "results" / "attacks")
    given = asked.parse_args()
    torch.set_num_threads(1)
    table: dict[str, Outcomes] = {}
    wrong: list[str] = []

    def said(row: str, outcome: str, message: str) -> None:
        if outcome in BAD:
            wrong.append(f"{row}: {outcome}: {message}")
            print(wrong[-1], file=sys.stderr, flush=True)

    started = time.monotonic()
    with tempfile.TemporaryDirectory() as place:
        target = Target(make_run(Path(place) / "run"), Path(place) / "copy")
        folders.run(target, folders.flips(target), table, said)
        left = max(0, given.cases - sum(table.values(), Outcomes()).total())
        share = (
            left // 10 + 1
        )  # six files are torn, three rewritten, two get other tensors; a few are left as they were
        for kind in (folders.torn, folders.rewritten, folders.retensored):
            folders.run(target, islice(kind(target, share, given.seed), None), table, said)
    seconds = time.monotonic() - started
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    lines = [
        "# Attacks",
        "",
        f"`make attack` (`python tests/attacks --cases {given.cases} --seed {given.seed}`): run folders of a tiny model with",
        "one file changed, loaded onto one base model. What the columns mean: [docs/security.md](../../docs/security.md).",
        f"Python {platform.python_version()}, torch {torch.__version__}; peak memory of the process {peak:.2f} GB.",
        "",
        folders.written(table, (*GOOD, *BAD)),
    ]
    given.out.mkdir(parents=True, exist_ok=True)
    (given.out / "README.md").write_text("\n".join(lines))
    print("\n".join(lines))
    print(f"{seconds:.0f} s", file=sys.stderr)
    return int(bool(wrong) or peak > 1)


if __name__ == "__main__":
    sys.exit(main())
