"""The documentation site: it builds without a warning, mirrors the modules, loads nothing from the network, and its code runs.

The blocks of a page run in order in one namespace and an empty folder. What a block prints is compared with the block titled
"prints" that follows it. A block titled "not run: reason" is left out; shell lines are parsed by the command line itself.
"""

import contextlib
import importlib.util
import io
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.glob("*.md"))
NOT_RUN = 'title="not run'


class Fence(NamedTuple):
    """A code block of a page: its language, the rest of its first line, its text, and where that text starts."""

    language: str
    more: str
    text: str
    line: int


def fences(path: Path) -> list[Fence]:
    found, text = [], path.read_text()
    for match in re.finditer(r"^```(\w+)?([^\n]*)\n(.*?)^```$", text, re.M | re.S):
        language, more, body = match.groups()
        found.append(Fence(language or "", more.strip(), body, text[: match.start(3)].count("\n")))
    return found


def runs(fence: Fence) -> bool:
    return fence.language == "python" and not fence.more.startswith(NOT_RUN)


@pytest.mark.parametrize("page", [p for p in PAGES if any(map(runs, fences(p)))], ids=lambda p: p.stem)
def test_the_code_of_a_page_runs_and_prints_what_it_says(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    found = fences(page)
    # a module, so that what a block defines can be pickled and its dataclasses resolve their annotations
    module = ModuleType("page")
    monkeypatch.setitem(sys.modules, "page", module)
    for fence, following in zip(found, [*found[1:], None], strict=True):
        if not runs(fence):
            continue
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            code = compile("\n" * fence.line + fence.text, str(page), "exec")  # errors name the page's own line
            exec(code, vars(module))
        if following is not None and following.more == 'title="prints"':
            assert printed.getvalue() == following.text, f"{page.name}, line {fence.line}"


def test_few_blocks_are_left_out_and_every_block_is_of_a_known_kind() -> None:
    everything = [(page, fence) for page in PAGES for fence in fences(page)]
    left_out = [f"{page.name}:{fence.line}" for page, fence in everything if fence.more.startswith(NOT_RUN)]
    assert len(left_out) <= 6, left_out
    for page, fence in everything:
        where = f"{page.name}:{fence.line}"
        assert max(map(len, fence.text.splitlines())) <= 90, f"{where}: wider than a page shows"
        assert fence.language in ("python", "sh", "text", "json", "yaml"), where
        assert not fence.more or re.fullmatch(r'title="(not run: .+|prints|[\w./ -]+)"', fence.more), where
    for page in PAGES:  # an indented block would be seen by the reader and not by the tests
        assert not re.search(r"^[ \t]+```", page.read_text(), re.M), page.name
        assert page.read_text().count("\n```") == 2 * len(fences(page)), page.name


# -- the command line --------------------------------------------------------------------------------------------------


def shell_lines() -> Iterator[tuple[str, list[str]]]:
    for page in PAGES:
        for fence in fences(page):
            if fence.language == "sh":
                for line in fence.text.replace("\\\n", " ").splitlines():
                    if words := shlex.split(line, comments=True):
                        yield f"{page.name}: {line.strip()}", words


def commands() -> dict[str, Any]:
    from vmoer.cli import COMMANDS, command

    return {name: command(name) for name in COMMANDS}


def test_every_shell_line_is_one_that_would_be_accepted() -> None:
    """By the parser of the command, and by what reads its methods, layers, presets, tasks and studies."""
    from vmoer import tasks
    from vmoer.live.brittleness import parse_layers
    from vmoer.routers import method
    from vmoer.studies import STUDIES
    from vmoer.studies._labels import parse
    from vmoer.training.presets import preset_named

    known = commands()

    def task(name: str) -> None:
        assert name in tasks.names() or name.endswith(".jsonl"), name

    checks: dict[str, Callable[[str], object]] = {"method": method, "preset": preset_named, "layers": parse_layers}
    checks |= {"task": task, "ood": task, "methods": parse}
    several = ("ood", "methods")
    makefile, lines = (ROOT / "Makefile").read_text(), list(shell_lines())
    for where, words in lines:
        words = [word for word in words if not re.fullmatch(r"[A-Z_]+=\S*", word)]  # settings of the environment
        if "launch" in words and words[0] == "accelerate":
            words = _launched(where, words)
        if words[0] == "vmoer" and len(words) > 1 and not words[1].startswith("-"):
            assert words[1] in known, where
            try:
                found = known[words[1]].make_context(words[1], words[2:])
            except Exception as error:
                pytest.fail(f"{where}: {getattr(error, 'message', error)}")
            for name, check in checks.items():
                # of calibrate, --method is a calibrator
                value = None if (words[1], name) == ("calibrate", "method") else found.params.get(name)
                for part in str(value).split(",") if name in several else [value]:
                    if value:
                        check(part)  # type: ignore[arg-type]
            if words[1] == "study":
                assert found.params["name"] in (*STUDIES, "all"), where
        elif words[0] == "make":
            assert all(re.search(rf"^{target}:", makefile, re.M) for target in words[1:]), where
        elif words[0] == "python" and words[1] != "-m":
            assert (ROOT / words[1]).exists(), where
        else:
            assert words[0] in ("pip", "vmoer", "python", "ray"), where
    assert sum(words[0] == "vmoer" for _, words in lines) >= 20


def _launched(where: str, words: list[str]) -> list[str]:
    """What accelerate is asked to start, after its own parser has taken its options."""
    from accelerate.commands.launch import launch_command_parser

    asked = launch_command_parser().parse_args(words[2:])
    if asked.config_file:
        assert (ROOT / asked.config_file).exists(), where
    start = [] if asked.no_python else ["python"]
    return [*start, asked.training_script, *asked.training_script_args]


def test_the_page_of_commands_lists_every_command() -> None:
    listed = re.findall(r"^\| \[?`vmoer ([a-z-]+)", (DOCS / "commands.md").read_text(), re.M)
    assert sorted(listed) == sorted(commands())


def test_commands_named_in_prose_exist() -> None:
    known = commands()
    for page in PAGES:
        for name in re.findall(r"`vmoer ([a-z][a-z-]*)[ `]", page.read_text()):
            assert name in known, f"{page.name}: vmoer {name}"


def test_the_page_of_studies_lists_every_study() -> None:
    from vmoer.studies import STUDIES

    text = (DOCS / "studies.md").read_text()
    table = text[text.index("| study |") : text.index("## Names of methods")]
    listed = [name for row in rows(table) for name in re.findall(r"`([a-z-]+)`", row["study"])]
    assert sorted(listed) == sorted([*STUDIES, "all"])


def test_the_table_of_presets_says_what_they_are() -> None:
    from vmoer.training.presets import DEFAULT, PAPER

    text = (DOCS / "training.md").read_text()
    table = rows(text[text.index("| | `default`") : text.index("Both run 3 epochs")])
    said = {row[""]: (row["`default`"], row["`paper`"]) for row in table}
    for column, preset in enumerate((DEFAULT, PAPER)):
        config = preset.config("vglr-fc")
        temperature = preset.config("vtsr")
        assert float(said["beta (`vglr-*`)"][column]) == config.beta  # type: ignore[attr-defined]
        assert float(said["`prior_scale`"][column]) == config.prior_scale  # type: ignore[attr-defined]
        assert float(said["stage 2 learning rate"][column]) == preset.stage2.lr
        assert said["noise at inference"][column].endswith(f", {config.samples}")  # type: ignore[attr-defined]
        assert f"`{temperature.regulariser}`" in said["`vtsr` regulariser"][column]  # type: ignore[attr-defined]
        start = f"T = {temperature.prior_mean:g}"  # type: ignore[attr-defined]
        assert said["`vtsr` starts at, weighs by"][column].startswith(start)


# -- numbers -----------------------------------------------------------------------------------------------------------


def rows(text: str) -> list[dict[str, str]]:
    """A Markdown table's rows, their cells by column."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    header, _, *body = [[cell.strip().replace("**", "") for cell in line.strip("|").split("|")] for line in lines]
    return [dict(zip(header, cells, strict=True)) for cells in body]


def test_tables_of_numbers_stand_in_the_results_they_name() -> None:
    """`<!-- rows of FILE, SECTION -->`: every row of the table below is, cell by cell, part of a row there."""
    found = 0
    for page in PAGES:
        for match in re.finditer(r"<!-- rows of (\S+), (.+?) -->\n+((?:\|.*\n)+)", page.read_text()):
            file, section, table = match.groups()
            sections = re.split(r"^### ", (ROOT / file).read_text(), flags=re.M)
            there = next(rows(text) for text in sections if text.startswith(f"{section}\n"))
            for row in rows(table):
                found += 1
                assert any(row.items() <= theirs.items() for theirs in there), f"{page.name}: {row} is not in {file}"
    assert found > 10


def test_the_number_of_supported_classes_is_that_of_the_table() -> None:
    from vmoer.gates.table import RULES

    (number,) = re.findall(r"\*\*(\d+) router classes\*\*", (DOCS / "index.md").read_text())
    assert int(number) == len(RULES)


# -- the pages of the modules, and the site ----------------------------------------------------------------------------


def public_modules() -> set[str]:
    """By Python's own list of modules, not the script's."""
    import pkgutil

    import vmoer

    found = pkgutil.walk_packages(vmoer.__path__, "vmoer.", onerror=lambda _: None)
    names = ["vmoer", *(module.name for module in found)]
    return {name for name in names if not any(part.startswith("_") for part in name.split("."))}


def test_every_public_module_has_its_page_and_every_page_its_module() -> None:
    spec = importlib.util.spec_from_file_location("docs_pages", DOCS / "pages.py")
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    titles = {path: text.splitlines()[0].removeprefix("# ") for path, text in script.pages().items()}
    assert set(titles.values()) == public_modules()
    for path, name in titles.items():
        assert [part for part in path.with_suffix("").parts if part != "index"] == name.split(".")[1:]
        assert script.pages()[path] == f"# {name}\n\n::: {name}\n"


@pytest.mark.slow
def test_the_site_builds_without_a_warning_and_loads_nothing_from_the_network(tmp_path: Path) -> None:
    """Strict: a warning, a broken link or anchor, a page outside the navigation are all errors."""
    import vmoer

    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    built = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert built.returncode == 0, built.stderr
    assert "WARNING" not in built.stderr
    built_pages = list(tmp_path.rglob("*.html"))
    assert len(built_pages) > len(PAGES)
    for name in public_modules():
        page = tmp_path.joinpath("api", *name.split(".")[1:], "index.html")
        assert re.search(rf"<h1[^>]*>{name}<", page.read_text()), page
    for name in vmoer.__all__:  # the table on the package's own page
        assert f"<code>vmoer.{name}</code>" in (tmp_path / "api" / "index.html").read_text()
    for page in built_pages:
        html = page.read_text()
        loaded = re.findall(r"""<(?:script|img|iframe|link|source)\b[^>]*?\b(?:src|href)=["']?([^"'\s>]+)""", html)
        assert not [url for url in loaded if re.match(r"(https?:)?//", url) and "canonical" not in url], page
    for sheet in tmp_path.rglob("*.css"):
        assert not re.search(r"(@import|url\()\s*[\"']?(https?:)?//", sheet.read_text()), sheet
