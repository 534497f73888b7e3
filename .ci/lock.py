"""`python .ci/lock.py INDEX`: `hashes.txt` from `constraints.txt`, every file that a package index has of each pinned version.

INDEX is the address of a simple index. Only files for Linux and macOS and the Pythons of `make test` are listed, and sources.
torch is left out: which build of it fits depends on the machine.
"""

import re
import sys
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).parents[1]
LINK = re.compile(r'href="[^"]*?([^/"#]+)#sha256=([0-9a-f]{64})"')
OURS = re.compile(r"-(cp31[123]|cp3\d?-abi3|py3|py2\.py3)[-.].*?(any|manylinux[^-]*(x86_64|aarch64)|macosx[^-]*)\.whl$")
ABI3 = re.compile(r"-cp3\d+-abi3-(manylinux[^-]*(x86_64|aarch64)|macosx[^-]*)\.whl$")
LINUX = ("triton", "bitsandbytes")  # those that pyproject.toml asks for on Linux alone
HEAD = """\
# What `make test` installs, with the SHA-256 of every file that may be taken. Made from constraints.txt by .ci/lock.py.
"""


def files(index: str, name: str, version: str) -> dict[str, str]:
    """Each file of a version that fits one of our platforms, and its hash."""
    page = urllib.request.urlopen(f"{index.rstrip('/')}/{re.sub(r'[-_.]+', '-', name).lower()}/").read().decode()
    begin = re.compile(rf"{re.sub(r'[-_.]+', '[-_.]+', name)}-{re.escape(version)}(-|\.tar\.gz|\.zip)", re.IGNORECASE)
    found = {file: digest for file, digest in LINK.findall(page) if begin.match(file)}
    return {f: d for f, d in found.items() if not f.endswith(".whl") or OURS.search(f) or ABI3.search(f)}


def main() -> int:
    pins = [line.split("==") for line in (ROOT / "constraints.txt").read_text().split() if "==" in line]
    pins = [pin for pin in pins if pin[0] != "torch"]
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda pin: files(sys.argv[1], *pin), pins))
    if lacking := [name for (name, _), one in zip(pins, found, strict=True) if not one]:
        print(f"the index has no files of {', '.join(lacking)}", file=sys.stderr)
        return 1
    lines = []
    for (name, version), one in zip(pins, found, strict=True):
        where = "; platform_system == 'Linux'" if name in LINUX else ""
        hashes = sorted(set(one.values()))
        lines.append(" \\\n    ".join([f"{name}=={version}{where}", *(f"--hash=sha256:{digest}" for digest in hashes)]))
    (ROOT / "hashes.txt").write_text(HEAD + "\n".join(lines) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
