"""Every `vmoer` line of the documentation runs, page by page, on the embedded model with the smallest sizes.

A hub's model becomes the embedded one, its task and shifts those of the embedded world. Lines of other programs, and those that
need a second machine or the network, are parsed in test_site.py; `LEFT_OUT` says what runs them instead.
"""

import dataclasses
import re
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from test_site import PAGES, fences
from tiny import GEOMETRY

from vmoer import cli, tasks
from vmoer.bench import overhead
from vmoer.studies import demo, efficiency, layer_count, layer_placement, paper, temperature_sweep
from vmoer.training import presets
from vmoer.training.plan import Plan

README = Path(__file__).parent.parent / "README.md"
QUESTIONS = 12
LEFT_OUT = {
    "vmoer serve": "starts vLLM; tests/serving",
    "vmoer lm-eval": "needs the harness's data sets; tests/test_harness.py",
    "vmoer threshold out/sciq": "reads what examples/short_answers.py wrote; tests/test_short_answers.py",
}
HUB = {
    "ibm-granite/granite-3.1-3b-a800m-instruct": "demo",
    "granite": "demo",
    "qwen": "demo",
    "openbookqa": "demo",
    "arc_challenge,mmlu_law": "demo-near,demo-far",
    "0,1,2": "0",
    "0.1": "0.9",  # a risk that twelve questions can promise
    "router,answer,full": "router,full",
}


def lines(page: Path) -> list[str]:
    text = [f.text.replace("\\\n", " ") for f in fences(page) if f.language == "sh"]
    found = [
        re.sub(r"\s+", " ", re.sub(r"^[A-Z_]+=\S+ | #.*$", "", line)) for block in text for line in block.splitlines()
    ]
    return [line for line in found if line.startswith("vmoer ") and not left_out(line)]


def left_out(line: str) -> bool:
    return line.startswith(tuple(LEFT_OUT)) or "--backend ray" in line  # a cluster: tests/studies/test_ray.py


def small(line: str) -> list[str]:
    words = [HUB.get(word, word) for word in shlex.split(line)][1:]
    if words[0] == "study" and "--seeds" not in words:
        words += ["--seeds", "0"]
    if words[0] == "demo":
        words += ["--workers", "1"]  # in this process, whose sizes are the smallest
    return [*words, "--passes", "2"] if words[0] == "study" else words


@pytest.fixture
def smallest(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Few questions, two steps, three methods."""
    load = tasks.load
    monkeypatch.setattr(
        tasks, "load", lambda *a, **k: load(*a, **k | {"limit": min(k.get("limit") or QUESTIONS, QUESTIONS)})
    )
    for name, preset in presets.PRESETS.items():
        monkeypatch.setitem(presets.PRESETS, name, dataclasses.replace(preset, stage2=Plan(epochs=2)))
    few = ("map", "vglr-fc", "vglr-fc@paper")
    for place, value in (
        ("vmoer.studies.demo.FULL", few),
        ("vmoer.routers._base.BETAS", (0.01,)),
    ):
        monkeypatch.setattr(place, value)
    monkeypatch.setattr(demo, "QUICK", few)
    monkeypatch.setattr(paper, "METHODS", ("map", "temp-scale", "vglr-fc"))
    monkeypatch.setattr(layer_count, "METHODS", ("vglr-fc",))
    monkeypatch.setattr(layer_placement, "METHODS", ("vglr-fc",))
    monkeypatch.setattr(temperature_sweep, "TEMPERATURES", (0.3,))
    monkeypatch.setattr(efficiency, "ROUNDS", 2)
    monkeypatch.setattr(overhead, "KNOWN", {"tiny": GEOMETRY})
    monkeypatch.setattr(overhead.transformers.masking_utils, "find_packed_sequence_indices", lambda ids: None)
    monkeypatch.chdir(tmp_path)
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run that several pages begin with, as the page of training makes it."""
    folder = tmp_path_factory.mktemp("prepared") / "runs"
    short = ["--stage1-epochs", "0", "--stage2-epochs", "1", "--limit", str(QUESTIONS)]
    assert cli.run(["train", "demo", "--task", "demo", "--method", "vglr-fc", "--out", str(folder / "fc"), *short]) == 0
    return folder


def test_few_lines_are_left_out() -> None:
    every = [line for page in PAGES for line in lines(page)]
    assert len(every) >= 25
    left = [
        line
        for page in PAGES
        for fence in fences(page)
        if fence.language == "sh"
        for line in fence.text.replace("\\\n", " ").splitlines()
        if left_out(re.sub(r"\s+", " ", line))
    ]
    assert len(left) <= 6, left


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page in (README, *PAGES) if lines(page)], ids=lambda page: page.stem)
def test_every_line_of_a_page_runs(
    page: Path, runs: Path, smallest: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if not any("--out runs/fc" in line for line in lines(page)):
        shutil.copytree(runs, tmp_path / "runs")
    for line in lines(page):
        code = cli.run(small(line))
        said = capsys.readouterr()
        assert code == 0, f"{page.name}: {line}: {said.err.strip().splitlines()[-1:]}"
        if line.startswith("vmoer report "):
            titles = (tmp_path / line.split()[2] / "report" / "tables.md").read_text()
            assert titles.startswith("### "), line
            assert said.out.strip().endswith("index.html")
