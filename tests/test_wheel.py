"""The newcomer: the built wheel in a fresh environment, away from the sources.

Its dependencies are those of this environment, linked; without extras all are but theirs. So it shows what the wheel holds and
what the commands say, not that an index can resolve it: `make wheel` installs everything anew. Oracles: pyproject.toml's
extras, and the README.
"""

import importlib.util
import os
import re
import subprocess
import sys
import sysconfig
import tomllib
import venv
from pathlib import Path

import pytest
import tiny

import vmoer
from vmoer.cli import COMMANDS
from vmoer.training.lora import add_lora

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
OPTIONAL = ("peft", "pyarrow", "matplotlib", "datasets", "rich", "typer")
NEEDED = {"train": "train", "eval": "eval", "study": "all", "report": "all", "calibrate": "eval", "threshold": "eval"}
NEEDED |= {"sensitivity": "report", "demo": "all"}
OTHERS = {
    "info demo": (0, "GraniteMoe"),
    "ask demo why? --choice a --choice b": (0, "A. a: "),
    "bench --methods vglr-fcc": (2, "did you mean vglr-fc"),  # all that it needs is there
    "merge {run} --out merged": (2, r"LoRA adapters need peft: pip install 'vmoer\[train\]'"),
    "ask demo why? --router {run}": (2, r"LoRA adapters need peft: pip install 'vmoer\[train\]'"),
    "serve demo --router {run}": (2, r"vmoer serve needs vLLM: pip install 'vmoer\[vllm\]'"),
    "lm-eval --help": (2, r"vmoer lm-eval needs lm-eval: pip install 'vmoer\[lm-eval\]'"),
}
"""Commands that need no extra, or only for some of what they are given: exit code, and what they say."""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("hatchling") is None, reason="hatchling is not installed"),
]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(out)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    (built,) = out.glob("*.whl")
    return built


def environment(folder: Path, wheel: Path, without: tuple[str, ...] = ()) -> Path:
    """A fresh environment with the wheel, and links to the installed packages but for some."""
    venv.create(folder, symlinks=True)
    python = folder / "bin" / "python"
    command = [sys.executable, "-m", "pip", "--python", str(python), "install", "--no-deps", "--no-index", "--quiet"]
    subprocess.run([*command, "--disable-pip-version-check", str(wheel)], check=True, env=clean())
    (site,) = (folder / "lib").glob("python*/site-packages")
    links = folder / "linked"
    links.mkdir()
    for path in Path(sysconfig.get_path("purelib")).iterdir():
        if path.name.split("-")[0].split(".")[0] not in (*without, "vmoer", "pip", "__pycache__"):
            (links / path.name).symlink_to(path)
    (site / "linked.pth").write_text(f"{links}\n")
    return folder / "bin"


def clean() -> dict[str, str]:
    return {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VMOER_DATA")} | {"OMP_NUM_THREADS": "1"}


def say(binary: Path, *words: str) -> tuple[int, str, str]:
    done = subprocess.run([str(binary), *words], capture_output=True, text=True, env=clean(), cwd=binary.parent)
    return done.returncode, done.stdout, done.stderr


def test_without_extras_each_command_says_what_to_install(wheel: Path, tmp_path: Path) -> None:
    bare = environment(tmp_path / "bare", wheel, OPTIONAL)
    assert say(bare / "python", "-c", "import vmoer; print(vmoer.__version__)") == (0, f"{PROJECT['version']}\n", "")
    code, out, err = say(bare / "vmoer", "--version")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.endswith("pip install 'vmoer[cli]'\n")
    parser = environment(tmp_path / "parser", wheel, (*OPTIONAL[:4], "lm_eval"))
    assert say(parser / "vmoer", "--version") == (0, f"vmoer {PROJECT['version']}\n", "")
    for command, extra in NEEDED.items():
        code, out, err = say(parser / "vmoer", command, "demo", "--task", "demo", "--out", "out")
        assert (code, out, err.count("\n")) == (2, "", 1), err
        assert re.search(rf"^vmoer {command} needs .*: pip install 'vmoer\[{extra}\]'$", err), err
        missing = err.partition(" needs ")[2].partition(":")[0].split(" and ")
        given = " ".join(PROJECT["optional-dependencies"][extra])
        assert extra == "all" or all(name in given for name in missing)
    run = vmoer.save(vmoer.attach(add_lora(tiny.model("granitemoe")), vmoer.MeanField()), tmp_path / "run")
    for line, (wanted, says) in OTHERS.items():
        code, out, err = say(parser / "vmoer", *(word.format(run=run) for word in line.split()))
        assert (code, err.count("\n")) == (wanted, int(wanted == 2)), (line, err)
        assert re.search(says, out + err), (line, out, err)
    assert {*NEEDED, *(line.split()[0] for line in OTHERS)} == {*COMMANDS}
    assert not {path.name for path in parser.iterdir()} & {"out", "merged"}


def test_with_everything_the_readmes_lines_print_what_is_printed(wheel: Path, tmp_path: Path) -> None:
    everything = environment(tmp_path / "all", wheel)
    text = (ROOT / "README.md").read_text()
    (block,) = re.findall(r"```python\n(.*?)```", text, re.S)
    (printed,) = re.findall(r"```text\n(.*?)```", text, re.S)
    code, out, err = say(everything / "python", "-c", f"import vmoer\nassert 'linked' not in vmoer.__file__\n{block}")
    assert (code, out) == (0, printed), err
    code, out, err = say(everything / "vmoer", "info", "demo")
    assert (code, err) == (0, "")
    assert "GraniteMoe" in out
