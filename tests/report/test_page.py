"""The page: well formed, self-contained, named for screen readers; in Chromium without errors or sideways scrolling."""

import csv
import html
import json
import math
import os
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from vmoer.errors import InputError
from vmoer.report import Section, page, read, report

VOID = {"meta", "link", "br", "path", "use", "rect"}
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
needs_browser = pytest.mark.skipif(
    CHROMIUM is None and os.environ.get("VMOER_TEST_BROWSER") != "required", reason="chromium is not installed"
)
FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
]
FLAGS += ["--disable-component-update", "--disable-sync", "--enable-logging=stderr", "--allow-file-access-from-files"]


class Checker(HTMLParser):
    """Collects elements, and fails where one closes that is not open."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag, attrs):
        self.seen.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.seen.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        if tag not in VOID:
            assert self.open.pop() == tag, self.getpos()


@pytest.fixture(scope="module")
def written(results, tmp_path_factory) -> Path:
    copy = tmp_path_factory.mktemp("page") / "results"
    shutil.copytree(results, copy)
    return report(copy).page


@pytest.fixture(scope="module")
def parsed(written) -> Checker:
    checker = Checker()
    checker.feed(written.read_text())
    checker.close()
    assert checker.open == []
    return checker


def test_files(written):
    tables = [
        f"{kind}-quiz{shift}" for kind in ("calibration", "selective", "verdicts") for shift in ("", "-near", "-far")
    ]
    tables += ["ood-quiz-near", "ood-quiz-far"]
    expected = {"index.html", "tables.md", *(f"{name}.{kind}" for name in tables for kind in ("csv", "tex"))}
    assert {path.name for path in written.parent.iterdir()} == expected


def test_nothing_comes_from_outside(written, parsed):
    for tag, attributes in parsed.seen:
        for name, value in attributes.items():
            if name in ("src", "href", "xlink:href", "srcset", "data", "action"):
                assert (value or "").startswith(("#", "data:")), (tag, name, value)
    text = re.sub(r'xmlns(:\w+)?="[^"]*"', "", written.read_text())
    assert "http://" not in text
    assert "https://" not in text
    assert "@import" not in text
    assert not re.search(r"url\((?!#)", text)


def test_figures_have_names_and_sections_ids(parsed):
    drawings = [attributes for tag, attributes in parsed.seen if tag == "svg"]
    # Three first; reliability of five methods, risk-coverage, ROC on two shifts, histograms of three signals and length.
    assert len(drawings) == 3 + 5 + 1 + 2 + 4
    assert all(attributes["role"] == "img" and len(attributes["aria-label"] or "") > 40 for attributes in drawings)
    ids = [attributes["id"] for _, attributes in parsed.seen if "id" in attributes]
    assert len(ids) == len(set(ids))
    assert {
        "verdict",
        "labels",
        "calibration-quiz",
        "signals-quiz",
        "shift-quiz-near",
        "shift-quiz-far",
        "sources",
    } <= set(ids)
    links = {value[1:] for tag, a in parsed.seen if tag in ("a", "use") for n, value in a.items() if n.endswith("href")}
    assert links <= set(ids)


def test_same_bytes_twice(written):
    before = {path: path.read_bytes() for path in written.parent.iterdir()}
    report(written.parent.parent)
    assert {path: path.read_bytes() for path in written.parent.iterdir()} == before


def test_the_first_screen_shows_the_rows(results, written):
    """Oracle: the rows themselves. The forest has every label against map+ts, with the differences of metrics.json."""
    picked = {(r["method"], r["metric"]): r for r in read(results) if r["task"] == "quiz" and r["seed"] is None}
    text = html.unescape(written.read_text())
    (alt,) = re.findall(r'id="overview-methods">\s*<svg [^>]*aria-label="([^"]*)"', text)
    for method in ("map", "mean_only", "vglr-fc", "vglr-fc+full"):
        assert f"{method}: quiz {picked[method, 'nll_minus_map_ts']['value']:.3f}" in alt
    assert "map+ts: quiz" not in alt
    (caption,) = re.findall(r'id="overview-reliability">.*?<figcaption>(.*?)</figcaption>', text, re.S)
    for method in ("map", "map+ts"):
        assert f"{method}: ECE {picked[method, 'ece']['value']:.3f}" in caption
    assert text.index("overview-methods") < text.index("<details")


def test_sections_can_be_added():
    text = page.render("T <1>", "a & b", [], [Section("more", "More", ["words"])], [("map", "x")], ["here"])
    assert "T &lt;1&gt;" in text
    assert '<details id="more">' in text
    assert "a &amp; b" in text


def test_without_predictions_the_rows_are_drawn(results, tmp_path):
    shutil.copy(results / "metrics.json", tmp_path)
    text = report(tmp_path).page.read_text()
    assert "<table>" in text
    assert {"overview-methods", "overview-detection"} == set(re.findall(r'<figure id="([^"]*)"', text))


def test_metrics_are_computed_where_absent(results, tmp_path, monkeypatch):
    for name in ("predictions.parquet", "meta.json"):
        shutil.copy(results / name, tmp_path)
    called = []

    def write(folder):
        called.append(folder)
        shutil.copy(results / "metrics.json", folder)

    monkeypatch.setattr("vmoer.evaluation.scores.write", write)
    assert read(tmp_path) == read(results)
    assert called == [tmp_path]


@pytest.mark.parametrize("text", ["{", "[]", "{}", '[{"metric": "nll"}]', "[1]"])
def test_bad_metrics(tmp_path, text):
    (tmp_path / "metrics.json").write_text(text)
    with pytest.raises(InputError, match=r"metrics\.json"):
        report(tmp_path)
    assert not (tmp_path / "report").exists()


MEASURE = """
const page = document.getElementById("screen").contentDocument, view = document.getElementById("screen").contentWindow;
for (const one of page.querySelectorAll("details")) one.open = true;
if (PRINTED) for (const rule of page.styleSheets[0].cssRules)
  if (rule.media && rule.media.mediaText == "print") rule.media.mediaText = "all";
const drawn = [...page.querySelectorAll("svg")].filter(svg => svg.getBoundingClientRect().height > 50);
const wide = [...page.querySelectorAll(".scroll")].filter(box => box.scrollWidth > box.clientWidth);
const colours = ["body", "h1", "td", "td small", "th", "a", "summary", ".verdict"].map(one => page.querySelector(one))
  .filter(one => one).map(one => view.getComputedStyle(one).color);
document.title = JSON.stringify([page.documentElement.scrollWidth, drawn.length, wide.length,
  view.getComputedStyle(page.body).backgroundColor, colours]);
"""


def measured(page: Path, folder: Path, width: int, dark: bool, printed: bool = False) -> list[Any]:
    """Of the page with everything unfolded: its width, figures drawn, tables that scroll, and colours. The console is silent."""
    # Headless windows have a least width above 390 px, so the screen is a frame.
    wrapper = folder / "screen.html"
    script = MEASURE.replace("PRINTED", str(printed).lower())
    frame = f'<iframe id="screen" width="{width}" height="800" style="border:0" src="{page.as_uri()}"></iframe>'
    wrapper.write_text(f'{frame}<script>document.getElementById("screen").onload = () => {{{script}}};</script>')
    command = [str(CHROMIUM), *FLAGS, f"--user-data-dir={folder / 'profile'}", "--virtual-time-budget=5000"]
    command += ["--window-size=1400,900", f"--blink-settings=preferredColorScheme={int(not dark)}"]
    done = subprocess.run([*command, "--dump-dom", wrapper.as_uri()], capture_output=True, text=True, timeout=120)
    found = re.search(r"<title>(\[.*\])</title>", done.stdout)
    assert found, done.stderr
    assert "CONSOLE" not in done.stderr
    return list(json.loads(html.unescape(found[1])))


def luminance(colour: str) -> float:
    """Of WCAG 2, from what a browser says."""
    shares = [int(part) / 255 for part in re.findall(r"\d+", colour)[:3]]
    linear = (x / 12.92 if x <= 0.03928 else ((x + 0.055) / 1.055) ** 2.4 for x in shares)
    return sum(weight * x for weight, x in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


@pytest.mark.slow
@needs_browser
@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [390, 1280])
def test_in_chromium(written, tmp_path, width, dark):
    """Nothing scrolls sideways but a phone's tables; every figure is drawn; all text has the contrast that WCAG asks for, 4.5."""
    wide, drawn, scrolling, ground, colours = measured(written, tmp_path, width, dark)
    assert wide <= width
    assert drawn == written.read_text().count("<svg")
    assert (scrolling > 0) == (width == 390)
    assert (luminance(ground) < 0.05) == dark
    for colour in colours:
        low, high = sorted((luminance(ground), luminance(colour)))
        assert (high + 0.05) / (low + 0.05) >= 4.5, colour


@pytest.mark.slow
@needs_browser
def test_on_paper(written, tmp_path):
    """A4 less its margins is 703 px wide: nothing is cut off there, and it is black on white on a dark screen too."""
    wide, drawn, scrolling, ground, colours = measured(written, tmp_path, 703, dark=True, printed=True)
    assert wide <= 703
    assert drawn == written.read_text().count("<svg")
    assert scrolling == 0
    assert ground == "rgb(255, 255, 255)"
    assert colours[0] == "rgb(0, 0, 0)"
    out = tmp_path / "page.pdf"
    command = [
        str(CHROMIUM),
        *FLAGS,
        f"--user-data-dir={tmp_path / 'profile'}",
        f"--print-to-pdf={out}",
        written.as_uri(),
    ]
    subprocess.run(command, capture_output=True, check=True, timeout=120)
    assert out.read_bytes().startswith(b"%PDF")


@pytest.mark.slow
def test_the_page_of_the_largest_study_is_below_two_megabytes(tmp_path):
    folder = shutil.copytree(Path(__file__).parents[2] / "results" / "smolmoe", tmp_path / "smolmoe")
    assert report(folder).page.stat().st_size < 2e6


def hostile(folder, names):
    """Predictions whose tasks and methods have such names."""
    columns: dict[str, list[Any]] = {
        name: [] for name in ("id", "task", "split", "method", "seed", "answer", "log_probs", "prompt_tokens")
    }
    for name in names:
        for i in range(4):
            told = (f"q{i}", name, "test", name, 0, i % 2, [-0.5, -0.9329], 5 + i)
            for column, value in zip(columns.values(), told, strict=True):
                column.append(value)
    folder.mkdir()
    pq.write_table(pa.table(columns), folder / "predictions.parquet")
    meta = {"model": names[0], "source_task": names[0], "ood_tasks": names[1:]}
    (folder / "meta.json").write_text(json.dumps(meta))
    return folder


def test_names_that_mean_something_elsewhere(tmp_path):
    """Formulas of LaTeX and of spreadsheets, markup, and names that differ in a space alone: two tasks, two files."""
    names = [r"$\\frac$", "=1+1", "@cmd", "<b>x</b>", "a b", "a_b", "../up", "-2+3"]
    folder = hostile(tmp_path / "results", names)
    made = report(folder)
    assert len({table.name for table in made.tables}) == len(made.tables)
    for path in (folder / "report").glob("*.csv"):
        for row in csv.reader(path.read_text().splitlines()):
            for cell in row:
                assert cell == "-" or not cell.startswith(("=", "+", "-", "@")) or math.isfinite(float(cell))
    assert "<b>x</b>" not in made.page.read_text()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["results"]


def test_an_empty_name_is_refused(tmp_path):
    with pytest.raises(InputError, match="has an empty name"):
        report(hostile(tmp_path / "results", [""]))
