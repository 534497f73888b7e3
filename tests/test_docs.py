"""What the documents say is what the code does."""

import os
import re
import runpy
from pathlib import Path
from typing import Any

import models_table
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from scipy.optimize import minimize_scalar
from scipy.special import softmax

ROOT = Path(__file__).parent.parent


def test_models_table_is_current() -> None:
    assert (ROOT / "docs" / "models.md").read_text() == models_table.table()


def test_the_readme_example_prints_what_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    """Its ten lines on the embedded model's questions. Oracle: the block below them, and the task of each question."""
    from vmoer import tasks

    text = (ROOT / "README.md").read_text()
    (block,) = re.findall(r"```python\n(.*?)```", text, re.S)
    (printed,) = re.findall(r"```text\n(.*?)```", text, re.S)
    exec(compile(block, "README.md", "exec"), {})
    assert capsys.readouterr().out == printed
    far = {question.question for question in tasks.load("demo-near", "test")}
    novelty = {line[:18].strip(): float(line.split()[-1]) for line in printed.splitlines()}
    assert sum(name in far for name in novelty) == 3
    known = max(value for name, value in novelty.items() if name not in far)
    assert all(value > 5 * known for name, value in novelty.items() if name in far)  # "far from what it knows"


def test_the_figure_of_the_readme_shows_what_was_measured() -> None:
    """Oracle: the predictions read by pyarrow, and the rule, the temperature and the NLL computed here by numpy and scipy."""
    parts = [
        pq.read_table(path) for path in (ROOT / "results/smolmoe/openbookqa/predictions.parquet").glob("*.parquet")
    ]
    rows = [row for row in pa.concat_tables(parts).to_pylist() if row["seed"] == 0]

    def of(task: str, split: str, method: str) -> list[dict[str, Any]]:
        found = [row for row in rows if (row["task"], row["split"], row["method"]) == (task, split, method)]
        return sorted(found, key=lambda row: row["id"])

    def nll(t: float, found: list[dict[str, Any]]) -> float:
        scaled = [np.array(row["log_probs"]) / t for row in found]
        return float(np.mean([np.logaddexp.reduce(x) - x[row["answer"]] for x, row in zip(scaled, found, strict=True)]))

    def tempered(method: str) -> float:
        valid = of("openbookqa", "validation", method)
        return float(minimize_scalar(lambda t: nll(t, valid), bounds=(0.05, 20), method="bounded").x)

    figure = runpy.run_path(str(ROOT / "docs" / "figure.py"))
    written = (ROOT / "docs" / "assets" / "confidence.svg").read_text()
    label, t = "vglr-fc+answer", tempered("vglr-fc+answer")
    known = np.array([row["novelty"] for row in of("openbookqa", "validation", label)])
    near, far = of("openbookqa", "test", label), of("medmcqa", "test", label)
    sure = {row["id"]: softmax(np.array(row["log_probs"]) / t).max() for row in [*near, *far]}
    middle = sorted(far, key=lambda row: row["novelty"])[len(far) // 2]
    close = [row for row in near if abs(sure[row["id"]] - sure[middle["id"]]) <= 0.01]
    twin = sorted(close, key=lambda row: row["novelty"])[len(close) // 2]
    for row, word in ((twin, "familiar"), (middle, "unfamiliar")):
        assert f">{sure[row['id']]:.0%}<" in written
        assert f">{word}: rank {(known < row['novelty']).mean():.0%}<" in written
    limit = np.quantile(known, 0.9)
    beyond = [np.mean([row["novelty"] > limit for row in found]) for found in (near, far)]
    assert f"{beyond[0]:.0%} of the school questions, {beyond[1]:.0%} of the medical ones" in written
    test = of("openbookqa", "test", "map")
    assert f"as fine-tuned: NLL {nll(1, test):.2f}" in written
    assert f"with an output temperature: NLL {nll(tempered('map'), test):.2f}" in written
    if os.environ.get("VMOER_DATA"):  # the questions' words
        assert written == figure["svg"](ROOT / "results" / "smolmoe"), "run `python docs/figure.py`"


def test_the_printed_tree_is_the_tree() -> None:
    """Every public module and package stands in the tree of the architecture page, and nothing else; other folders below."""
    text = (ROOT / "docs" / "architecture.md").read_text()
    section = text[text.index("src/vmoer/  ") :]
    block, _, below = section.partition("```")
    listed = [line.split()[0] for line in block.splitlines()[1:]]
    assert len(listed) <= 22
    package = ROOT / "src" / "vmoer"
    there = {f"{p.parent.name}/" for p in package.glob("*/__init__.py")} | {p.name for p in package.glob("[!_]*.py")}
    assert len(listed) == len(set(listed))
    assert set(listed) == there
    folders = {name for name in ("tests", "docs", "examples", "benchmarks", "results") if (ROOT / name).is_dir()}
    assert {name for name in folders if f"`{name}/`" in below} == folders


def test_the_picture_of_the_imports_is_current() -> None:
    picture = runpy.run_path(str(ROOT / "docs" / "picture.py"))
    written = (ROOT / "docs" / "assets" / "ladder.svg").read_text()
    assert written == picture["svg"](), "run `python docs/picture.py`"


def test_an_import_becomes_an_arrow(tmp_path: Path) -> None:
    """Oracle: a package written by hand. What two arrows say together is not said by a third."""
    picture = runpy.run_path(str(ROOT / "docs" / "picture.py"))
    files = {"__init__.py": "from vmoer.top import x", "low/__init__.py": "", "low/deep.py": "import os, vmoer"}
    files |= {"middle.py": "def f():\n    from vmoer.low.deep import y", "top/__init__.py": "from . import a"}
    files |= {"top/a.py": "from vmoer import low, middle\nfrom .b import z", "top/b.py": "from ..low import deep"}
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    found = picture["imports"](tmp_path, ["low", "middle", "top"])
    assert found == {("middle", "low"), ("top", "low"), ("top", "middle")}
    assert picture["implied"](found) == {("top", "low")}


def test_the_readmes_loop_calibrates_before_it_says_a_confidence() -> None:
    """The run is made, calibrated, scored and asked, in this order; tests/test_shell_lines.py runs the lines."""
    (block,) = re.findall(r"## Did it help\?\n\n```sh\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    words = [line.split() for line in block.splitlines()]
    assert [line[:2] for line in words] == [["vmoer", name] for name in ("train", "calibrate", "eval", "ask")]
    made = words[0][words[0].index("--out") + 1]
    assert [line[2] for line in words[1:]] == [made] * 3


def test_the_bibtex_of_the_readme_is_that_of_the_citation_file() -> None:
    """Oracle: CITATION.cff, read as YAML."""
    yaml = pytest.importorskip("yaml")
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    (paper,) = cited["references"]
    (block,) = re.findall(r"```bibtex\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    ours, library = (dict(re.findall(r"(\w+) +?= \{(.*)\}", entry)) for entry in block.split("\n\n"))
    people = " and ".join(f"{one['family-names']}, {one['given-names']}" for one in paper["authors"])
    assert ours == {"title": paper["title"], "author": people, "year": str(paper["year"])}
    assert library == {
        "title": cited["title"],
        "author": f"{{{cited['authors'][0]['name']}}}",
        "version": cited["version"],
        "year": str(cited["date-released"])[:4],
        "url": cited["repository-code"],
    }


def test_every_command_of_the_readme_exists() -> None:
    from vmoer.cli import COMMANDS

    text = (ROOT / "README.md").read_text()
    assert set(re.findall(r"^vmoer ([a-z-]+)", text, re.M)) == set(COMMANDS)


def test_the_quickstart_runs(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(ROOT / "examples" / "quickstart.py"))
    assert "saved, detached and loaded again" in capsys.readouterr().out


def test_what_the_page_says_of_the_papers_tables_is_what_the_numbers_say() -> None:
    """Oracle: benchmarks/paper_tables.py, which the page names."""
    said = runpy.run_path(str(ROOT / "benchmarks" / "paper_tables.py"))
    page = " ".join((ROOT / "docs" / "paper.md").read_text().split())
    found = list(said["lines"]())
    assert sum("ECE" in line for line in found) == 5
    assert "in 5 of the 12 MAP cells" in page
    assert [line for line in found if "NLL" in line] == [
        "granite arc_challenge vglr-mf: NLL 0.125 below 0.145, the least (0.144 with rounding)",
        "granite arc_challenge vglr-fc: NLL 0.122 below 0.148, the least (0.146 with rounding)",
    ]
    assert all(number in page for number in (".122", ".148", ".125", ".145", "1.462"))
    assert [line for line in found if "MCE" in line] == ["deepseek medmcqa map: MCE 1.462 above 1"]
    five = [
        said["printed"]()["granite", "openbookqa", m]["nll"] for m in ("mcdr", "swag", "vglr-mf", "vglr-fc", "vtsr")
    ]
    assert (min(five), max(five)) == (0.650, 0.667)


def test_no_probabilities_have_less_than_the_least_nll() -> None:
    """Oracles: without a limit on ECE right answers are sure and wrong ones a tie of two; and probabilities drawn at random."""
    import numpy as np

    from vmoer import metrics

    least = runpy.run_path(str(ROOT / "benchmarks" / "paper_tables.py"))["least_nll"]
    assert least(0.88, 1.0) == pytest.approx(0.12 * np.log(2), abs=1e-6)
    assert least(1.0, 0.0) == pytest.approx(0, abs=1e-6)
    rng = np.random.default_rng(0)
    for options in (2, 4):
        for sharpness in (0.1, 0.5, 2.0):
            p = rng.dirichlet(np.full(options, sharpness), 3000)
            answers = np.array([rng.choice(options, p=row) for row in p])
            log_probs = np.log(p.clip(1e-12) / p.clip(1e-12).sum(1, keepdims=True))
            confidence, correct = metrics.confidence(log_probs), metrics.correct_per_question(log_probs, answers)
            bound = least(correct.mean(), metrics.ece(confidence, correct))
            assert 0 < bound < metrics.nll(log_probs, answers), (options, sharpness)


def test_every_file_that_the_architecture_page_names_exists() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text().partition("## The tree\n")[0]
    named = set(re.findall(r"`([a-z_]+(?:/[a-z_]+)*(?:\.py|/))`", text))
    assert len(named) > 25
    assert [name for name in sorted(named) if not (ROOT / "src" / "vmoer" / name).exists()] == []
