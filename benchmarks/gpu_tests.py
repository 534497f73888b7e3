"""The kernels' tests on this machine's GPU, and a table of what passed.

    python benchmarks/gpu_tests.py --out results/kernels        kernels.md and kernels.json; exit code 1 where a test fails
    python benchmarks/gpu_tests.py --out DIR --files few        of test_kernel_few.py alone; DIR keeps the rows of the others

The same tests run in Triton's interpreter, without a GPU, as part of `make test`.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from vmoer.files import write_json, write_text
from vmoer.report.tables import grid

ROOT = Path(__file__).parent.parent
OUTCOMES = ("passed", "failure", "error", "skipped")


def run(report: Path, names: list[str]) -> list[dict[str, Any]]:
    """A row a test: its file, name, outcome and seconds. What pytest says is in the report."""
    folder = "tests/numerics/kernels"
    files = [f"{folder}/test_kernel_{name}.py" for name in names] or [folder]
    path = os.pathsep.join(filter(None, [str(ROOT / "src"), os.environ.get("PYTHONPATH")]))
    command = [sys.executable, "-m", "pytest", *files, "-m", "gpu", "-q", f"--junitxml={report}"]
    subprocess.run(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": path}, check=False)
    rows = []
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        bad = next((child for child in case if child.tag in OUTCOMES), None)
        file = next(part for part in str(case.get("classname")).split(".") if part.startswith("test_"))
        row: dict[str, Any] = {"file": file, "test": case.get("name")}
        row |= {"outcome": "passed" if bad is None else bad.tag, "seconds": float(case.get("time") or 0)}
        rows.append(row | {"why": None if bad is None else str(bad.get("message")).partition("\n")[0][:200]})
    return rows


def machine() -> dict[str, Any]:
    versions = {"python": platform.python_version(), "torch": torch.__version__, "triton": version("triton")}
    return {"device": torch.cuda.get_device_name(), "versions": versions}


def table(where: dict[str, Any], rows: list[dict[str, Any]]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in where["versions"].items())
    lines = [
        f"# Kernel tests on {where['device']} ({versions})",
        "",
        "`python benchmarks/gpu_tests.py`: `pytest -m gpu`",
        "",
    ]
    body = []
    for file in [*dict.fromkeys(row["file"] for row in rows), None]:
        own = [row for row in rows if file in (row["file"], None)]
        counts = [str(sum(row["outcome"] == outcome for row in own)) for outcome in OUTCOMES]
        seconds = sum(row["seconds"] for row in own)
        body.append([file or "all", str(len(own)), *counts, f"{seconds:.0f}"])
    lines += grid(["file", "tests", *OUTCOMES, "seconds"], body)
    bad = [row for row in rows if row["outcome"] in ("failure", "error")]
    lines += ["", *(f"- {row['outcome']}: {row['file']} {row['test']}: {row['why']}" for row in bad[:20])]
    return "\n".join(lines).rstrip() + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("out/kernels"))
    parser.add_argument("--files", nargs="*", default=[], help="parts of the tests' file names; all of them by default")
    args = parser.parse_args()
    out = args.out.absolute()
    if not torch.cuda.is_available():
        print("no GPU here", file=sys.stderr)
        return 2
    out.mkdir(parents=True, exist_ok=True)
    rows, where = run(out / "kernels.xml", args.files), machine()
    if args.files and (out / "kernels.json").exists():
        held = json.loads((out / "kernels.json").read_text())
        if held["machine"] != where:
            print("the other rows were made on another machine or by other versions", file=sys.stderr)
            return 2
        again = {row["file"] for row in rows}
        rows = sorted([row for row in held["tests"] if row["file"] not in again] + rows, key=lambda row: row["file"])
    write_json(out / "kernels.json", {"machine": where, "tests": rows})
    write_text(out / "kernels.md", text := table(where, rows))
    print(text)
    return 1 if not rows or any(row["outcome"] in ("failure", "error") for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
