"""The command line over a tiny random MoE on disk: what it prints, writes and exits with.

Oracles: the files of an undisturbed run, byte for byte; the counts of questions in the data; the configuration the tiny
model was made with. Errors must be one line on stderr and nothing on stdout.
"""

import io
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars
from tiny_letters import save_tiny, tiny_tokenizer
from transformers import LlamaConfig, LlamaForCausalLM

import vmoer
from vmoer.cli import COMMANDS, run
from vmoer.commands._shared import quiet, sentence
from vmoer.errors import RunError
from vmoer.files import write_text

DATA = Path(os.environ.get("VMOER_DATA") or Path(__file__).parents[2] / "shared" / "data")


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.delenv("VMOER_DATA", raising=False)
    monkeypatch.delenv("VMOER_DEBUG", raising=False)


@pytest.fixture(scope="session")
def data_root() -> Path:
    if not (DATA / "README.md").is_file():
        pytest.skip(f"the real data are not at {DATA}; set VMOER_DATA")
    return DATA


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def quiz(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of 40 questions: 8 of them test, 4 validation."""
    path = tmp_path_factory.mktemp("data") / "quiz.jsonl"
    rows = [
        {"id": f"q{i}", "question": f"Number {i}?", "choices": [str(i + j) for j in range(2 + i % 4)], "answer": i % 2}
        for i in range(40)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def fails(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str]:
    """The exit code and the one line of a command that must fail."""
    code = run([str(a) for a in arguments])
    out, err = capsys.readouterr()
    assert code != 0
    assert out == ""
    assert err.count("\n") == 1
    assert err.endswith("\n")
    return code, err.strip()


def test_python_runs_the_package_as_the_command() -> None:
    """Oracle: the same words given to the command's own function: what it prints, and its code."""

    def done(*start: str, words: tuple[str, ...]) -> tuple[int, str, str]:
        found = subprocess.run([sys.executable, *start, *words], capture_output=True, text=True)
        return found.returncode, found.stdout, found.stderr

    for words in (("--version",), ("--help",), ("trian",)):
        package = done("-m", "vmoer", words=words)
        assert package == done("-c", "from vmoer.cli import main; main()", words=words)
        assert package[0] == (2 if words == ("trian",) else 0)


def test_studies_and_tasks_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    """Oracle: the registries."""
    from vmoer.studies import STUDIES
    from vmoer.tasks import names

    assert run(["study", "--list"]) == 0
    out = capsys.readouterr().out
    assert [line.split()[0] for line in out.splitlines()[4:] if line.strip()] == list(STUDIES)
    assert run(["--tasks"]) == 0
    assert capsys.readouterr().out.split() == names()


# -- eval --------------------------------------------------------------------------------------------------------------


def test_eval_of_real_data(tiny: Path, data_root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = [
        "eval",
        tiny,
        "--task",
        "openbookqa",
        "--ood",
        "arc_easy,medmcqa",
        "--limit",
        "25",
        "--data-root",
        data_root,
    ]
    for name in "ab":
        assert run([str(x) for x in (*command, "--out", tmp_path / name, "--routing")]) == 0
        out, err = capsys.readouterr()
        assert "openbookqa" in out
        assert "gate_entropy" in out
        assert err == ""
    names = ["meta.json", "metrics.json", "predictions.parquet", "routing.parquet"]
    assert sorted(p.name for p in (tmp_path / "a").iterdir()) == names
    for name in names:
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    rows = pq.read_table(tmp_path / "a" / "predictions.parquet").to_pylist()
    sets = {
        ("openbookqa", "test"): 25,
        ("openbookqa", "validation"): 25,
        ("arc_easy", "test"): 25,
        ("medmcqa", "test"): 25,
    }
    assert Counter((r["task"], r["split"]) for r in rows) == sets
    metrics = json.loads((tmp_path / "a" / "metrics.json").read_text())
    right = [max(range(len(r["log_probs"])), key=r["log_probs"].__getitem__) == r["answer"] for r in rows[:25]]
    key = {"task": "openbookqa", "method": "map", "metric": "accuracy"}
    assert [m["value"] for m in metrics if key.items() <= m.items()] == [sum(right) / 25]


def test_eval_json_averages_answers(tiny: Path, quiz: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = f"eval {tiny} --task {quiz} --out {tmp_path} --averaging full --passes 2 --seed 4 --json"
    assert run(command.split()) == 0
    rows = json.loads(capsys.readouterr().out)
    assert {r["seed"] for r in rows} == {4}
    meta = json.loads((tmp_path / "meta.json").read_text())
    assert (meta["model"], meta["averaging"], meta["passes"], meta["seed"]) == ("tiny", "full", 2, 4)
    splits = [r["split"] for r in pq.read_table(tmp_path / "predictions.parquet").to_pylist()]
    assert splits == ["test"] * 8 + ["validation"] * 4


def test_eval_without_a_validation_split_says_so(
    tiny: Path, quiz: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "sciq").mkdir()
    (tmp_path / "sciq" / "test.jsonl").write_text(quiz.read_text())
    assert run(f"eval {tiny} --task sciq --data-root {tmp_path} --out {tmp_path / 'out'}".split()) == 0
    err = capsys.readouterr().err
    assert err.startswith("note: without temperature scaling of the output")
    assert err.count("\n") == 1


def test_eval_of_a_run_takes_its_method_and_seed(tiny: Path, quiz: Path, tmp_path: Path) -> None:
    from vmoer.models import open_model

    run_folder = tmp_path / "run"
    model = vmoer.attach(open_model(tiny).model, vmoer.MeanField(layers=[1], samples=4))
    vmoer.save(model, run_folder, run={"model": str(tiny), "method": "vglr-mf", "seed": 7})
    assert run(f"eval {run_folder} --task {quiz} --out {tmp_path / 'out'}".split()) == 0
    rows = pq.read_table(tmp_path / "out" / "predictions.parquet").to_pylist()
    assert {(r["method"], r["seed"]) for r in rows} == {("vglr-mf", 7)}
    assert all(r["logit_variance"] > 0 for r in rows)
    assert json.loads((tmp_path / "out" / "meta.json").read_text())["config"]["layers"] == [1]


def test_killed_and_started_again_it_ends_with_the_same_bytes(tiny: Path, data_root: Path, tmp_path: Path) -> None:
    """kill -9 as soon as a part is there."""
    program = f"import sys; sys.path[:0] = {sys.path!r}; from vmoer.cli import main; main()"
    fixed = ["--task", "openbookqa", "--data-root", data_root, "--limit", "40", "--batch-tokens", "1500", "--out"]

    def start(out: Path) -> "subprocess.Popen[bytes]":
        command = [sys.executable, "-c", program, "eval", tiny, *fixed, out]
        return subprocess.Popen([str(x) for x in command], env={**os.environ, "OMP_NUM_THREADS": "1"})

    cut, whole = tmp_path / "cut", tmp_path / "whole"
    process = start(cut)
    deadline = time.monotonic() + 120
    while process.poll() is None and not list(cut.glob(".parts/*.parquet")) and time.monotonic() < deadline:
        time.sleep(0.001)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    assert list(cut.glob(".parts/*.parquet"))
    assert not (cut / "predictions.parquet").exists()
    arguments = ["eval", tiny, *fixed]
    assert run([str(x) for x in (*arguments, cut)]) == 0
    assert run([str(x) for x in (*arguments, whole)]) == 0
    for name in ("predictions.parquet", "metrics.json", "meta.json"):
        assert (cut / name).read_bytes() == (whole / name).read_bytes()
    assert not (cut / ".parts").exists()


# -- info, report, help ------------------------------------------------------------------------------------------------


def test_info_says_what_the_configuration_says(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["info", str(tiny), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["layer"] for row in rows] == [0, 1, 2]
    for row in rows:
        assert row["path"] == f"model.layers.{row['layer']}.block_sparse_moe.router"
        assert (row["class"], row["experts"], row["top_k"], row["reason"]) == ("GraniteMoeTopKRouter", 6, 2, None)
        assert (row["score"], row["normalise"], row["groups"], row["bias"]) == ("softmax", True, None, None)
    assert run(["info", str(tiny)]) == 0
    out = capsys.readouterr().out
    assert "0-2" in out
    assert "softmax, normalised" in out


def test_info_of_a_dense_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = LlamaConfig(
        vocab_size=128, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    capsys.readouterr()  # the bar of saving
    code, line = fails(capsys, "info", tmp_path)
    assert code == 2
    assert "has no MoE router" in line


def test_report_prints_its_tables_and_where_the_page_is(
    tiny: Path, quiz: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(f"eval {tiny} --task {quiz} --out {tmp_path}".split()) == 0
    capsys.readouterr()
    assert run(["report", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "Calibration: quiz" in out
    page = Path(out.splitlines()[-1])
    assert page.read_text().startswith("<!")
    assert run(["report", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads((tmp_path / "metrics.json").read_text())
    code, line = fails(capsys, "report", tmp_path / "nowhere")
    assert code == 2
    assert "nowhere" in line


def test_version_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--version"]) == 0
    assert capsys.readouterr().out == f"vmoer {vmoer.__version__}\n"
    for arguments in ([], ["--help"]):
        assert run(arguments) == 0
        out = capsys.readouterr().out
        assert all(name in out for name in ("eval", "info", "report"))


@pytest.mark.parametrize("arguments", [["--version"], ["--help"], ["-h"], []])
def test_help_and_version_load_no_torch_and_take_no_time(arguments: list[str]) -> None:
    """Processor time of the whole process, against that of a Python that does nothing but import typer."""
    count = "import resource, sys; u = resource.getrusage(resource.RUSAGE_SELF); "
    count += "print(u.ru_utime + u.ru_stime, 'torch' in sys.modules, file=sys.stderr)"

    def cost(program: str) -> float:
        program = f"import sys; sys.path[:0] = {sys.path!r}; {program}; {count}"
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
        seconds, torch = done.stderr.split()
        assert torch == "False"
        return float(seconds)

    seconds = min(cost(f"from vmoer.cli import run; run({arguments!r})") for _ in range(3))
    assert seconds < max(0.4, 3 * min(cost("import typer") for _ in range(3)))


def test_demo_is_the_embedded_model_beside_a_folder_of_that_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As `vmoer demo --out demo` and `vmoer train demo --out demo` leave it. Oracle: what info says elsewhere."""
    assert run(["info", "demo", "--json"]) == 0
    said = capsys.readouterr().out
    monkeypatch.chdir(tmp_path)
    (tmp_path / "demo").mkdir()
    for content in ("{", json.dumps({"model": "another"})):
        assert run(["info", "demo", "--json"]) == 0
        assert capsys.readouterr().out == said
        assert run(["ask", "demo", "why?", "--choice", "yes", "--choice", "no", "--device", "cpu"]) == 0
        capsys.readouterr()
        (tmp_path / "demo" / "run.json").write_text(content)


def test_a_sentence_on_a_terminal_ends_its_lines_between_words(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Oracle: by hand."""
    sentence("five of nine no-words")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", "15")
    sentence("five of nine no-words")
    assert capsys.readouterr().out == "five of nine no-words\nfive of nine\nno-words\n"


@pytest.mark.parametrize("terminal", [True, False])
def test_downloads_are_seen_on_a_terminal_alone(terminal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: huggingface_hub's own word for whether its bars are shown."""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal, raising=False)
    enable_progress_bars()
    quiet()
    assert are_progress_bars_disabled() is not terminal
    disable_progress_bars()


def test_every_command_has_short_help(capsys: pytest.CaptureFixture[str]) -> None:
    for name, (_, line) in COMMANDS.items():
        assert run(["-h"]) == 0
        assert f"  {name}" in (out := capsys.readouterr().out)
        assert line in out  # at 80 columns none is wrapped or cut
        if name == "lm-eval":  # its options are lm-eval's own
            continue
        assert run([name, "-h"]) == 0
        short = capsys.readouterr().out
        assert run([name, "--help"]) == 0
        assert capsys.readouterr().out == short
        assert short.startswith(f"Usage: vmoer {name} ")


# -- errors ------------------------------------------------------------------------------------------------------------

BAD_INPUT: dict[str, tuple[str, str]] = {
    "unknown task": ("--task openbokqa", "did you mean openbookqa"),
    "unknown ood task": ("--ood arc_eazy", "did you mean arc_easy"),
    "task twice": ("--ood {quiz}", "the task quiz is named twice"),
    "missing data root": ("--task openbookqa --data-root {out}/nowhere", "no such folder; --data-root"),
    "missing file": ("--task {out}/none.jsonl", "no such file"),
    "unknown split": ("--split tset", "no split 'tset'"),
    "unknown model": ("{out}/nothing", "no such folder"),
    "bad averaging": ("--averaging mean", "choose one of router, answer, full"),
    "no passes": ("--averaging full --passes 0", "passes=0"),
    "conflict": ("--averaging full --routing", "routing does not go with averaging='full'"),
    "no batch": ("--batch-tokens 0", "batch_tokens=0"),
    "no limit": ("--limit 0", "limit must be at least 1"),
    "bad number": ("--limit many", "--limit"),
    "bad option": ("--nothing", "--nothing"),
    "bad dtype": ("--dtype int3", "choose one of float32"),
    "bad device": ("--device gpu7", "device='gpu7' cannot be used"),
    "out is a file": ("--out {quiz}", "is a file"),
}


@pytest.mark.parametrize("case", BAD_INPUT)
def test_bad_input_is_one_line_and_code_2(
    case: str, tiny: Path, quiz: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given, message = BAD_INPUT[case]
    extra = given.format(quiz=quiz, out=tmp_path).split()
    model = [] if not extra[0].startswith("-") else [tiny]
    options = {"--task": quiz, "--out": tmp_path / "out"}
    rest = [x for name, value in options.items() if name not in extra for x in (name, value)]
    code, line = fails(capsys, "eval", *model, *extra, *rest)
    assert code == 2
    assert message in line
    assert not (tmp_path / "out").exists()


BAD_DATA = {
    "missing field": ('{"id": "a", "question": "b", "choices": ["c", "d"]}', "missing field 'answer'"),
    "answer out of range": ('{"id": "a", "question": "b", "choices": ["c", "d"], "answer": 2}', "out of range"),
    "a single option": ('{"id": "a", "question": "b", "choices": ["c"], "answer": 0}', "1 option(s)"),
    "duplicate ids": ('{"id": "a", "question": "b", "choices": ["c", "d"], "answer": 0}\n' * 2, "already used"),
    "empty file": ("", "no questions"),
    "malformed JSON": ('\n{"id": ', ":2: not valid JSON"),
}


@pytest.mark.parametrize("case", BAD_DATA)
def test_bad_data_is_one_line_and_code_2(
    case: str, tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text, message = BAD_DATA[case]
    (tmp_path / "bad.jsonl").write_text(text)
    code, line = fails(capsys, "eval", tiny, "--task", tmp_path / "bad.jsonl", "--out", tmp_path / "out")
    assert code == 2
    assert message in line


def test_usage_errors_are_one_line(capsys: pytest.CaptureFixture[str], tiny: Path) -> None:
    code, line = fails(capsys, "repot")
    assert code == 2
    assert line.startswith("unknown command 'repot'; did you mean report? (known: demo, info, ")
    assert fails(capsys, "eval", tiny) == (2, "Missing option '--task'; see vmoer eval --help")
    assert fails(capsys, "info", "no/such-model")[0] == 2


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (RunError("the disk\nis full"), 1, "the disk is full"),
        (ZeroDivisionError("by zero\nat night"), 1, "ZeroDivisionError: by zero (VMOER_DEBUG=1 shows where)"),
    ],
)
def test_failures_are_one_line_and_code_1(
    error: Exception, code: int, line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(_: Any) -> None:
        raise error

    monkeypatch.setattr("vmoer.models.skeleton", broken)
    assert fails(capsys, "info", "x") == (code, line)
    monkeypatch.setenv("VMOER_DEBUG", "1")
    assert run(["info", "x"]) == code
    assert "Traceback" in capsys.readouterr().err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("when", ["at work", "while it loads"])
def test_a_signal_ends_a_command_at_once_and_leaves_nothing_half_written(
    number: signal.Signals, when: str, tmp_path: Path
) -> None:
    """Oracle: the exit codes of shells, 128 + the signal; the folder; a run that nothing stopped."""
    program = f"import sys; sys.path[:0] = {sys.path!r}; from vmoer.cli import main; print(flush=True); main()"
    options = ["--task", "demo", "--device", "cpu", "--batch-tokens", "400", "--limit", "300", "--out"]
    command = [sys.executable, "-c", program, "eval", "demo", *options, str(tmp_path / "cut")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.readline()  # it has begun
        deadline = time.monotonic() + 120
        parts = tmp_path / "cut" / ".parts"
        while when == "at work" and not list(parts.glob("*.parquet")) and time.monotonic() < deadline:
            time.sleep(0.001)
        time.sleep(0.05 if when == "at work" else 0.5)
        process.send_signal(number)
        sent = time.monotonic()
        code = process.wait(timeout=60)
        assert time.monotonic() - sent < 5
        assert code == 128 + number
        assert process.stderr.read().decode().count("\n") <= 1
    left = [path for path in (tmp_path / "cut").rglob("*") if path.is_file()]
    assert all(path.parent == parts and path.suffix == ".parquet" for path in left)
    assert bool(left) == (when == "at work")
    if when == "at work":
        for name in ("cut", "whole"):
            assert run(["eval", "demo", *options, str(tmp_path / name)]) == 0
        for name in ("predictions.parquet", "metrics.json", "meta.json"):
            assert (tmp_path / "cut" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


@pytest.mark.parametrize("raised", [SystemExit(1), RuntimeError("its worker was told too"), KeyboardInterrupt()])
def test_a_signal_has_its_code_whatever_a_library_makes_of_it(
    raised: BaseException, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As Ray does, which gives our exception on as one of its own. Oracle: the code of a shell."""

    def library(_: Any) -> None:
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(5)
        except SystemExit:
            raise raised from None

    monkeypatch.setattr("vmoer.models.skeleton", library)
    assert run(["info", "x"]) == 143
    assert capsys.readouterr().err == "terminated\n"


def test_a_stop_that_nobody_reads_of_keeps_its_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a pipe whose reader ended first."""

    class Broken(io.StringIO):
        def write(self, _: str) -> int:
            raise BrokenPipeError

    monkeypatch.setattr("sys.stderr", Broken())
    monkeypatch.setattr("vmoer.models.skeleton", lambda _: os.kill(os.getpid(), signal.SIGTERM))
    assert run(["info", "x"]) == 143


def test_a_full_disk_is_one_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Oracle: what a device that is always full answers."""

    def full(_: Any) -> None:
        with open("/dev/full", "wb") as file:
            file.write(b"x" * 10**6)

    def replaced(*_: object) -> None:
        full(None)

    monkeypatch.setattr("vmoer.models.skeleton", full)
    assert fails(capsys, "info", "x") == (1, "No space left on device; make room and run the same command again")
    monkeypatch.setattr(os, "replace", replaced)
    monkeypatch.setattr("vmoer.models.skeleton", lambda _: write_text(tmp_path / "file", "text"))
    line = f"{tmp_path / 'file'}: No space left on device; make room and run the same command again"
    assert fails(capsys, "info", "x") == (1, line)
    assert list(tmp_path.iterdir()) == []


def test_an_interrupt_is_code_130(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("vmoer.models.skeleton", interrupted)
    assert run(["info", "x"]) == 130
