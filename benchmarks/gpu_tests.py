"""The kernels' tests on this machine's GPU, several files at a time, and a table of what passed.

    python benchmarks/gpu_tests.py --out results/kernels        kernels.md and kernels.json; exit code 1 where a test fails

The same tests run in Triton's interpreter, without a GPU, as part of `make test`.
"""

import argparse
import os
import platform
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from vmoer.files import write_json, write_text

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "tests" / "kernels"


def run(file: Path, scratch: Path) -> list[dict[str, Any]]:
    """A row a test: its name, outcome and seconds."""
    report = scratch / f"{file.stem}.xml"
    command = [sys.executable, "-m", "pytest", str(file), "-m", "gpu", "-q", "-p", "no:cacheprovider"]
    path = os.pathsep.join(filter(None, [str(ROOT / "src"), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [*command, f"--junitxml={report}"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    if not report.exists():
        return [{"file": file.stem, "test": "", "outcome": "error", "seconds": 0.0, "why": done.stderr[-500:]}]
    rows = []
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        bad = next((child for child in case if child.tag in ("failure", "error", "skipped")), None)
        why = None if bad is None else (bad.get("message") or "").splitlines()[:1]
        row = {"file": file.stem, "test": case.get("name"), "outcome": "passed" if bad is None else bad.tag}
        rows.append(row | {"seconds": float(case.get("time") or 0), "why": why[0][:200] if why else None})
    return rows


def machine() -> dict[str, Any]:
    import triton

    versions = {"python": platform.python_version(), "torch": torch.__version__, "triton": triton.__version__}
    return {"device": torch.cuda.get_device_name(), "versions": versions}


def table(where: dict[str, Any], rows: list[dict[str, Any]]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in where["versions"].items())
    lines = [
        f"# Kernel tests on {where['device']} ({versions})",
        "",
        "`python benchmarks/gpu_tests.py`: `pytest -m gpu`",
        "",
    ]
    outcomes = ("passed", "failure", "error", "skipped")
    lines += ["| file | tests | " + " | ".join(outcomes) + " | seconds |", "|---" * (len(outcomes) + 3) + "|"]
    for file in [*dict.fromkeys(row["file"] for row in rows), None]:
        own = [row for row in rows if file in (row["file"], None)]
        counts = [str(sum(row["outcome"] == outcome for row in own)) for outcome in outcomes]
        seconds = sum(row["seconds"] for row in own)
        lines.append(f"| {file or 'all'} | {len(own)} | " + " | ".join(counts) + f" | {seconds:.0f} |")
    bad = [row for row in rows if row["outcome"] in ("failure", "error")]
    lines += ["", *(f"- {row['outcome']}: {row['file']} {row['test']}: {row['why']}" for row in bad[:20])]
    return "\n".join(lines).rstrip() + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("out/kernels"))
    parser.add_argument("--processes", type=int, default=4)
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("no GPU here", file=sys.stderr)
        return 2
    files = sorted(FOLDER.glob("test_kernel_*.py"), key=lambda path: path.stat().st_size, reverse=True)
    with tempfile.TemporaryDirectory() as scratch, ThreadPoolExecutor(arguments.processes) as pool:
        rows = [row for found in pool.map(lambda file: run(file, Path(scratch)), files) for row in found]
    where = machine()
    write_json(arguments.out / "kernels.json", {"machine": where, "tests": rows})
    write_text(arguments.out / "kernels.md", text := table(where, rows))
    print(text)
    return 1 if not rows or any(row["outcome"] in ("failure", "error") for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
