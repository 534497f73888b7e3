"""`vmoer ask` on the embedded model, in and out of a terminal. Oracles: `vmoer.generate` and `vmoer.predict` themselves."""

import json
import math
import os
import pty
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from test_cli import fails
from tiny_letters import save_tiny

import vmoer
from vmoer.cli import run
from vmoer.commands.ask import _bracketed, _merged
from vmoer.files import sealed
from vmoer.models import open_model

QUESTION = "amuses Quita Rossi"
ANSI = re.compile(r"\x1b\[[0-9;]*m")


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "run"
    model = vmoer.attach(open_model("demo", device="cpu").model, vmoer.MeanField(layers=[2, 5]))
    vmoer.save(model, folder, run={"model": "demo", "method": "vglr-mf", "seed": 0})
    return folder


@pytest.fixture(scope="module")
def expected(run_folder: Path) -> Any:
    model, tokenizer, *_ = open_model(run_folder, device="cpu")
    return vmoer.generate(model, tokenizer, [{"role": "user", "content": QUESTION}])


def ask(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[str, str]:
    assert run(["ask", *map(str, arguments), "--device", "cpu"]) == 0
    return capsys.readouterr()


def marked(answer: Any) -> str:
    """The answer with brackets by hand: words of one band together, a space before them outside."""
    bands = [0 if p >= 0.9 else 1 if p >= 0.5 else 2 for p in map(math.exp, answer.log_probs)]
    words = [(piece.strip(), band) for piece, band in zip(answer.pieces, bands, strict=True) if piece]
    out: list[tuple[list[str], int]] = []
    for word, band in words:
        if out and out[-1][1] == band:
            out[-1][0].append(word)
        else:
            out.append(([word], band))
    return " ".join(f"[{' '.join(w)}]{'?' * b}" if b else " ".join(w) for w, b in out)


def test_out_of_a_terminal_words_are_bracketed(
    run_folder: Path, expected: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    out, err = ask(capsys, "demo", QUESTION, "--router", run_folder)
    assert err == ""
    assert "\x1b" not in out
    answer, _, legend, score = out.splitlines()
    assert answer == marked(expected)
    assert "?" in answer
    assert legend == "[...]? probability below 0.9  [...]?? below 0.5"
    assert score.startswith(f"sequence_nll {expected.score:.4g}: minus the log-probability of the whole answer")
    assert ask(capsys, run_folder, QUESTION)[0] == out


def test_on_a_terminal_they_are_coloured(run_folder: Path, expected: Any) -> None:
    master, slave = pty.openpty()
    program = f"import sys; sys.path[:0] = {sys.path!r}; from vmoer.cli import main; main()"
    environment = {**os.environ, "TERM": "xterm-256color", "OMP_NUM_THREADS": "1", "COLUMNS": "100"}
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE"):
        environment.pop(name, None)
    command = [sys.executable, "-c", program, "ask", str(run_folder), QUESTION, "--device", "cpu"]
    with subprocess.Popen(command, stdout=slave, stderr=subprocess.PIPE, env=environment) as process:
        os.close(slave)
        shown = b""
        while True:
            try:
                part = os.read(master, 4096)
            except OSError:  # the other end is closed
                break
            if not part:
                break
            shown += part
        error = process.stderr.read() if process.stderr else b""
    os.close(master)
    assert process.returncode == 0, error
    text = shown.decode()
    assert ANSI.sub("", text).splitlines()[0] == expected.text.strip()
    assert "[" not in ANSI.sub("", text)
    assert "\x1b[1;4;31m" in text  # the least likely: bold, underlined, red
    assert "■ probability below 0.9  ■ below 0.5" in ANSI.sub("", text)


def test_json_has_every_token_and_score(run_folder: Path, expected: Any, capsys: pytest.CaptureFixture[str]) -> None:
    said = json.loads(ask(capsys, run_folder, QUESTION, "--json")[0])
    assert said["text"] == expected.text.strip()
    assert [t["text"] for t in said["tokens"]] == expected.pieces
    assert [t["logit_variance"] for t in said["tokens"]] == pytest.approx(expected.signals["logit_variance"])
    assert said["scores"] == pytest.approx(expected.scores)
    assert (said["abstained"], said["threshold"]) == (False, None)


def test_marks_by_a_signal(run_folder: Path, expected: Any, capsys: pytest.CaptureFixture[str]) -> None:
    out, _ = ask(capsys, run_folder, QUESTION, "--mark", "predictive_entropy")
    values = [v for v, piece in zip(expected.signals["predictive_entropy"], expected.pieces, strict=True) if piece]
    worst = [piece for piece in expected.pieces if piece][values.index(max(values))].strip()
    assert f"[{worst}]??" in out
    assert f"predictive_entropy from {max(values):.4g}, the answer's highest third" in out


def test_it_abstains_above_a_number_and_says_why(
    run_folder: Path, expected: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    above, below = expected.score + 0.01, expected.score - 0.01
    assert ask(capsys, run_folder, QUESTION, "--abstain-above", above)[0].startswith(marked(expected))
    out, err = ask(capsys, run_folder, QUESTION, "--abstain-above", below)
    assert out == f"I do not answer: sequence_nll is {expected.score:.4g}, above {below:.4g}\n"
    assert err == ""
    said = json.loads(ask(capsys, run_folder, QUESTION, "--abstain-above", below, "--json")[0])
    assert said["abstained"]
    assert expected.text.strip() not in json.dumps(said)
    lowest = expected.scores["nll"] - 0.01
    out, _ = ask(capsys, run_folder, QUESTION, "--score", "nll", "--abstain-above", lowest)
    assert out.startswith("I do not answer: nll is")


def threshold_file(path: Path, **changes: Any) -> Path:
    chosen = {"format": 2, "form": "text", "method": "vglr-mf", "signal": "max_mutual_information", "threshold": 1e-9}
    chosen |= {"risk": 0.1, "confidence": 0.95, "passes": 3, "task": "demo", "model": "demo"}
    path.write_text(json.dumps(sealed(chosen | changes)))
    return path


def test_a_threshold_of_free_answers(run_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The file's signal decides, made as the file says: here over three routing samples."""
    file = threshold_file(tmp_path / "threshold.json")
    out, err = ask(capsys, run_folder, QUESTION, "--abstain-above", file)
    assert re.fullmatch(
        r"I do not answer: max_mutual_information is .*, above 1e-09 \(for a risk of 0\.1 with confidence 0\.95\)\n",
        out,
    )
    assert err == ""
    out, _ = ask(capsys, run_folder, QUESTION, "--abstain-above", threshold_file(file, threshold=9))
    assert not out.startswith("I do not answer")
    out, err = ask(capsys, "demo", QUESTION, "--abstain-above", tmp_path)  # the folder it lies in; nothing attached
    assert err == "note: the threshold was chosen for vglr-mf, and this is map\n"


def test_a_threshold_of_letters(run_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With options it is held against what `predict` says of the letters; a free answer is told that it promises nothing."""
    from vmoer.tasks import Question
    from vmoer.tasks.prompt import encode, letter_ids

    model, tokenizer, *_ = open_model(run_folder, device="cpu")
    options = ("finch", "otter", "lynx")
    (ids,) = encode(tokenizer, [Question("a", QUESTION, options, 0, "a", "a")], 2048)
    log_p = vmoer.predict(model, {"input_ids": torch.tensor([ids])}, tokens=letter_ids(tokenizer, 3))[0]
    best, p = int(log_p.argmax()), log_p.exp().max().item()
    choices = [x for option in options for x in ("--choice", option)]
    out, _ = ask(capsys, run_folder, QUESTION, *choices)
    assert out.replace("[", "").split("]")[0] == f"{'ABC'[best]}. {options[best]}"
    assert all(f"{'ABC'[i]}. {options[i]}: {log_p[i].exp():.3f}" in out for i in range(3))

    changes = {"form": "letters", "signal": "least_confidence", "passes": 1, "averaging": "router"}
    for limit, abstains in ((1 - p - 1e-4, True), (1 - p + 1e-4, False)):
        file = threshold_file(tmp_path / "t.json", threshold=limit, **changes)
        said = json.loads(ask(capsys, run_folder, QUESTION, *choices, "--abstain-above", file, "--json")[0])
        assert said["abstained"] == abstains
        assert said["value"] == pytest.approx(1 - p, abs=1e-5)
        assert ("probabilities" in said) == (not abstains)
    file = threshold_file(tmp_path / "t.json", threshold=2.0, temperature=2.5, **changes)
    said = json.loads(ask(capsys, run_folder, QUESTION, *choices, "--abstain-above", file, "--json")[0])
    assert said["probabilities"] == pytest.approx((log_p / 2.5).softmax(-1).tolist(), abs=1e-5)
    assert said["value"] == pytest.approx(1 - p, abs=1e-5)  # the threshold is on the model's own
    out, _ = ask(capsys, run_folder, QUESTION, *choices, "--abstain-above", file)
    assert "probabilities at temperature 2.5, fitted on validation questions of demo" in out
    answer: Any = vmoer.generate(model, tokenizer, [{"role": "user", "content": QUESTION}])
    first = 1 - math.exp(answer.log_probs[0])
    file = threshold_file(file, threshold=first - 1e-3, **changes)
    out, err = ask(capsys, run_folder, QUESTION, "--abstain-above", file)
    assert out.startswith(f"I do not answer: least_confidence is {first:.4g}")
    assert err.startswith("note: the threshold was chosen on the letters of demo")
    assert err.count("\n") == 1


def test_options_are_asked_in_several_orders(run_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Oracle: each order asked by itself by this command, and the mean of what it prints."""
    options = ("finch", "otter", "lynx")
    chances: dict[str, float] = {}
    orders = ("--averaging", "orders", "--passes", "3")
    for shift in range(3):
        shown = options[shift:] + options[:shift]
        said = json.loads(ask(capsys, run_folder, QUESTION, *(x for o in shown for x in ("--choice", o)), "--json")[0])
        for option, chance in zip(shown, said["probabilities"], strict=True):
            chances[option] = chances.get(option, 0) + chance / 3
    choices = [x for option in options for x in ("--choice", option)]
    said = json.loads(ask(capsys, run_folder, QUESTION, *choices, *orders, "--json")[0])
    assert said["probabilities"] == pytest.approx([chances[option] for option in options], abs=1e-5)
    assert said["signals"]["mutual_information"] > 0


def test_without_a_chat_template_the_question_is_put_plainly(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A tokenizer that can stop at a line's end: the embedded one without its template."""
    model, tokenizer, *_ = open_model("demo", device="cpu")
    tokenizer.chat_template = None
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    said = json.loads(ask(capsys, tmp_path, "Who?", "--max-new-tokens", "3", "--json")[0])
    expected: Any = vmoer.generate(model, tokenizer, "Question: Who?\nAnswer:", max_new_tokens=3, stop_strings=["\n"])
    assert [t["text"] for t in said["tokens"]] == expected.pieces


def test_bad_input_is_one_line_and_code_2(run_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = save_tiny(tmp_path / "tiny")
    capsys.readouterr()  # what transformers said of the folders above
    for message, arguments in {
        "no such file; give a number": ("demo", "x", "--abstain-above", "many"),
        "--abstain-above nan": ("demo", "x", "--abstain-above", "nan"),
        "leave --router out": (run_folder, "x", "--router", run_folder),
        "has no router.json": ("demo", "x", "--router", tmp_path),
        "was trained on another base model": (other, "x", "--router", run_folder),
        "cannot load the model": (tmp_path / "nothing", "x"),
        "score='luck': choose one of": ("demo", "x", "--score", "luck"),
        "mark='luck': choose one of probability, gate_entropy": ("demo", "x", "--mark", "luck"),
        "one --choice is not enough": ("demo", "x", "--choice", "a"),
        "is for questions with options": ("demo", "x", "--averaging", "orders"),
        "choose one of float32": ("demo", "x", "--dtype", "int3"),
        "was chosen on free answers": (
            *("demo", "x", "--choice", "a", "--choice", "b"),
            *("--abstain-above", threshold_file(tmp_path / "t.json")),
        ),
        "this answer has no novelty": (
            "demo",
            "x",
            "--abstain-above",
            threshold_file(tmp_path / "n.json", signal="novelty"),
        ),
    }.items():
        code, line = fails(capsys, "ask", *arguments)
        assert code == 2
        assert message in line


def test_brackets_by_hand() -> None:
    pieces = [(" The", 0), (" c", 2), ("at", 2), (" sat", 1), ("", 2), (".\n", 0), (" So", 1)]
    merged = _merged(pieces)
    assert merged == [("The", 0), (" cat", 2), (" sat", 1), (".\n", 0), (" So", 1)]
    assert "".join(_bracketed(p, m) if m else p for p, m in merged) == "The [cat]?? [sat]?.\n [So]?"
    assert _merged([]) == []
    assert _bracketed("\n", 2) == "\n"
