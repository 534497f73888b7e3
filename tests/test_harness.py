"""lm-evaluation-harness, the package from PyPI, on two local tasks without a network.

Oracles: its own `hf` model; its own accuracy and Brier score; `vmoer.predict` on the same prompts. The embedded model answers
questions of its world by a letter (one token) and by the word itself (two tokens).
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from filelock import FileLock
from lm_eval.api.metrics import brier_score
from peft import LoraConfig, get_peft_model

import vmoer
from vmoer import cli, harness, metrics, tasks
from vmoer.demo import model_path
from vmoer.errors import InputError
from vmoer.metrics.calibrators import Choice, OutputTemperature
from vmoer.models import open_model
from vmoer.saved import calibrator
from vmoer.tasks.prompt import letter_ids, prompt

pytestmark = pytest.mark.slow
QUESTIONS = 40
LAYERS = tuple(range(8))
TASK = {
    "dataset_path": "json",
    "test_split": "test",
    "output_type": "multiple_choice",
    "doc_to_text": "{{prompt}}",
    "doc_to_target": "answer",
    "doc_to_choice": "choices",
    "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
}


def questions() -> list[tasks.Question]:
    return tasks.load("demo", "test", limit=QUESTIONS)


def write_tasks(folder: Path) -> None:
    tokenizer = open_model("demo", device="cpu").tokenizer
    letters = [
        {"prompt": prompt(tokenizer, q), "choices": list("ABCD")[: len(q.choices)], "answer": q.answer}
        for q in questions()
    ]
    words = [
        {"prompt": f" {q.question}<|answer|>", "choices": [f"{c}<|end|>" for c in q.choices], "answer": q.answer}
        for q in questions()
    ]
    for name, rows in (("letters", letters), ("words", words)):
        data = folder / f"{name}.jsonl"
        data.write_text("".join(json.dumps(row) + "\n" for row in rows))
        settings = TASK | {"task": name, "dataset_kwargs": {"data_files": {"test": str(data)}}}
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(settings))


def attached() -> Any:
    model = open_model("demo", device="cpu").model
    vmoer.attach(model, vmoer.FullCovariance(layers=LAYERS, prior_scale=3.0))
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for p in model.parameters():
            if p.requires_grad:
                p.add_(0.3 * torch.randn(p.shape, generator=generator))
    return model


def save_run(folder: Path) -> None:
    """As `vmoer train` leaves one: an adapter and routers over it."""
    model = open_model("demo", device="cpu").model
    torch.manual_seed(1)
    model = get_peft_model(model, LoraConfig(target_modules=["q_proj", "v_proj"], r=2, init_lora_weights=False))
    vmoer.save(vmoer.attach(model, vmoer.MeanField(layers=[4])), folder)
    choice = Choice(OutputTemperature(3.0), {"temperature": 1.0}, np.zeros((1, 4)))
    how: Any = {"averaging": "router", "passes": 1, "task": "demo", "method": "vglr-mf"}
    calibrator.write(folder, calibrator.described(choice, options=[4] * 60, **how))


def command(folder: Path, model: str, out: str, *more: str, tasks: str = "letters,words") -> list[str]:
    where = ["--tasks", tasks, "--include_path", str(folder), "--output_path", str(folder / out)]
    return ["lm-eval", "--model", *model.split(" "), *where, "--device", "cpu", "--batch_size", "16", *more]


def in_a_process(folder: Path, commands: list[list[str]]) -> list[str]:
    """What each of the commands printed; a process of their own, since lm-eval sets up logging and reads sys.argv."""
    program = """
import json, sys
import lm_eval.tasks, vmoer.cli

class Local(lm_eval.tasks.TaskManager):  # without the index of its 13,000 tasks, which takes longer than all the rest
    def __init__(self, **options):
        super().__init__(include_defaults=False, **options)

lm_eval.tasks.TaskManager = Local
for line in sys.stdin:
    print("@@", vmoer.cli.run(json.loads(line)), flush=True)
"""
    offline = {
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
        "HF_HOME": str(folder / "home"),
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        [sys.executable, "-c", program],
        input="".join(json.dumps(c) + "\n" for c in commands),
        env=os.environ | offline | {"LMEVAL_LOG_LEVEL": "ERROR"},
        capture_output=True,
        text=True,
        cwd=folder,
        check=False,
    )
    printed = done.stdout.split("@@")
    assert len(printed) == len(commands) + 1, done.stderr[-3000:]
    codes = [text.split("\n")[0].strip() for text in printed[1:]]
    return [f"{code}\n{text}\n{done.stderr}" for code, text in zip(codes, printed, strict=False)]


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """Every command of these tests, in two processes; made once, though pytest's own workers may share the tests out."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "harness"
    with FileLock(f"{folder}.lock"):
        if not (printed := folder.with_suffix(".json")).exists():
            folder.mkdir(exist_ok=True)
            printed.write_text(json.dumps(run_all(folder)))
    return folder, json.loads(printed.read_text())


def run_all(folder: Path) -> list[str]:
    write_tasks(folder)
    vmoer.save(attached(), folder / "router")
    save_run(folder / "run")
    base = f"pretrained={model_path('map')},dtype=float32"
    ours = f"vmoer --model_args {base},router={folder / 'router'}"
    commands = [
        command(folder, f"hf --model_args {base}", "hf"),
        command(folder, f"{ours},enabled=False", "off"),
        command(folder, ours, "on"),
        command(folder, f"{ours},averaging=full,passes=3", "full"),
        command(folder, f"hf --model_args {base},peft={folder / 'run'}", "peft", tasks="letters"),
        command(folder, f"vmoer --model_args {base},router={folder / 'run'},enabled=False", "adapted", tasks="letters"),
        command(folder, f"vmoer --model_args {base}", "none"),
        ["lm-eval", "--model", "hf", "--model_args", base, "--tasks", "letters", "--include_path", str(folder)],
        command(folder, f"vmoer --model_args {base},router={folder / 'run'}", "calibrated", tasks="letters"),
    ]
    first = in_a_process(folder, commands)
    again = in_a_process(folder, [command(folder, ours, "again", "--batch_size", "7")])
    return first + again


def results(runs: tuple[Path, list[str]], out: str) -> dict[str, Any]:
    (path,) = (runs[0] / out).rglob("results_*.json")
    return json.loads(path.read_text())


def likelihoods(runs: tuple[Path, list[str]], out: str, task: str) -> np.ndarray:
    (path,) = (runs[0] / out).rglob(f"samples_{task}_*.jsonl")
    rows = sorted((json.loads(line) for line in path.read_text().splitlines()), key=lambda row: row["doc_id"])
    return np.array([[float(pair[0]) for pair in row["filtered_resps"]] for row in rows])


def probabilities(runs: tuple[Path, list[str]], out: str, task: str) -> np.ndarray:
    lls = likelihoods(runs, out, task)
    return np.exp(lls - np.logaddexp.reduce(lls, 1, keepdims=True))


def calibration(runs: tuple[Path, list[str]], out: str) -> dict[tuple[str, str], Any]:
    (path,) = (runs[0] / out).rglob("calibration_*.json")
    return {(row["task"], row["metric"]): row for row in json.loads(path.read_text())}


TASKS = pytest.mark.parametrize("task", ["letters", "words"])


@TASKS
def test_switched_off_it_is_lm_evals_own_model(runs: tuple[Path, list[str]], task: str) -> None:
    """Every log-likelihood to the last bit, and so its accuracy, which is not that of guessing."""
    assert np.array_equal(likelihoods(runs, "hf", task), likelihoods(runs, "off", task))
    own = results(runs, "hf")["results"][task]
    assert results(runs, "off")["results"][task] == own
    assert own["acc,none"] > (0.6 if task == "letters" else 0.0)


def test_a_run_brings_its_adapter(runs: tuple[Path, list[str]]) -> None:
    """The run with its routers off is lm-eval's own model with the run as its PEFT adapter."""
    adapted = likelihoods(runs, "adapted", "letters")
    assert np.array_equal(adapted, likelihoods(runs, "peft", "letters"))
    assert np.abs(adapted - likelihoods(runs, "hf", "letters")).max() > 0.05


@TASKS
def test_switched_on_it_is_another_and_the_same_every_time(runs: tuple[Path, list[str]], task: str) -> None:
    """Other numbers than the plain model's; in a second process and in other batches the same."""
    on = likelihoods(runs, "on", task)
    assert np.abs(on - likelihoods(runs, "hf", task)).max() > 0.05
    assert results(runs, "on")["results"][task]["acc,none"] != results(runs, "hf")["results"][task]["acc,none"]
    np.testing.assert_allclose(likelihoods(runs, "again", task), on, atol=1e-4)
    assert results(runs, "again")["results"][task]["acc,none"] == results(runs, "on")["results"][task]["acc,none"]


@pytest.mark.parametrize(("out", "averaging"), [("on", "router"), ("full", "full")])
def test_letters_are_scored_as_vmoer_scores_them(runs: tuple[Path, list[str]], out: str, averaging: Any) -> None:
    """`vmoer.predict` over the same prompts gives the same probabilities of the letters, and its metrics our table's."""
    model, tokenizer = attached(), open_model("demo", device="cpu").tokenizer
    ids = [tokenizer(prompt(tokenizer, q), return_tensors="pt", add_special_tokens=False) for q in questions()]
    asked = {
        "averaging": averaging,
        "passes": 3,
    }  # over the vocabulary, as lm-eval scores: letters are picked afterwards
    over_all = torch.cat([vmoer.predict(model, {"input_ids": i["input_ids"]}, **asked) for i in ids])
    expected = torch.log_softmax(over_all[:, letter_ids(tokenizer, 4)], -1).numpy()
    answers = np.array([q.answer for q in questions()])
    np.testing.assert_allclose(probabilities(runs, out, "letters"), np.exp(expected), atol=1e-4)
    found = calibration(runs, out)
    for name, value in (("nll", metrics.nll(expected, answers)), ("brier", metrics.brier(expected, answers))):
        assert found["letters", name]["value"] == pytest.approx(value, abs=1e-4)


@TASKS
@pytest.mark.parametrize("out", ["hf", "on", "full"])
def test_calibration_beside_the_samples(runs: tuple[Path, list[str]], out: str, task: str) -> None:
    """Accuracy is lm-eval's own, the Brier score is by its own function; ECE has its floor; model and method are named."""
    own, found = results(runs, out)["results"][task], calibration(runs, out)
    assert found[task, "accuracy"]["value"] == pytest.approx(own["acc,none"])
    p, answers = probabilities(runs, out, task), np.array([q.answer for q in questions()])
    theirs = brier_score(list(zip(answers.tolist(), p, strict=True)))
    assert found[task, "brier"]["value"] == pytest.approx(theirs, abs=1e-9)
    assert found[task, "questions"]["value"] == QUESTIONS
    assert found[task, "ece"]["value"] == pytest.approx(metrics.ece(p.max(1), p.argmax(1) == answers))
    assert 0 < found[task, "ece_floor"]["value"] < found[task, "ece_floor"]["high"]
    assert found[task, "nll"]["low"] < found[task, "nll"]["value"] < found[task, "nll"]["high"]
    row = found[task, "nll"]
    assert (row["model"], row["method"]) == (
        str(model_path("map")),
        {"hf": "hf", "on": "vglr-fc", "full": "vglr-fc+full"}[out],
    )


def test_a_run_brings_its_calibrator(runs: tuple[Path, list[str]]) -> None:
    """Oracle: probabilities to the power 1/T, in rows of their own; with the routers off there are none."""
    (path,) = (runs[0] / "calibrated").rglob("calibration_*.json")
    found = {(row["method"], row["metric"]): row["value"] for row in json.loads(path.read_text())}
    raw, answers = probabilities(runs, "calibrated", "letters"), np.array([q.answer for q in questions()])
    cooler = raw ** (1 / 3) / (raw ** (1 / 3)).sum(1, keepdims=True)
    for method, p in (("vglr-mf", raw), ("vglr-mf+cal", cooler)):
        assert found[method, "nll"] == pytest.approx(-np.log(p[np.arange(len(p)), answers]).mean(), abs=1e-6)
    (path,) = (runs[0] / "adapted").rglob("calibration_*.json")
    assert {row["method"] for row in json.loads(path.read_text())} == {"map"}


def test_what_is_printed(runs: tuple[Path, list[str]]) -> None:
    """lm-eval's table, then ours; with no folder for the samples too, and then nothing is left behind."""
    hf, off, on, _, _, _, none, loose, _, _ = runs[1]
    for text in (hf, off, on, loose):
        assert text.startswith("0\n")
        assert text.index("|letters|") < text.index("Calibration over the options") < text.index("ECE floor")
    assert none.startswith("2\n")
    assert "the model vmoer needs router=RUN" in none
    made = {"letters.jsonl", "letters.yaml", "words.jsonl", "words.yaml", "router", "run", "home"}
    made |= {"hf", "off", "on", "full", "peft", "adapted", "calibrated", "again"}
    assert {p.name for p in runs[0].iterdir()} <= made
    info = results(runs, "on")["config"]["vmoer"]
    assert (info["router_config"]["method"], tuple(info["router_config"]["layers"])) == ("vglr-fc", LAYERS)


# -- samples alone -----------------------------------------------------------------------------------------------------


def sample(doc: int, options: list[tuple[str, str, float]], target: Any, **more: Any) -> dict[str, Any]:
    """A line as lm-eval writes it: numbers as text, arguments by number."""
    arguments = {f"gen_args_{i}": {"arg_0": c, "arg_1": t} for i, (c, t, _) in enumerate(options)}
    resps = [[str(value), "False"] for *_, value in options]
    return {
        "doc_id": doc,
        "target": str(target),
        "arguments": arguments,
        "filtered_resps": resps,
        "filter": "none",
        **more,
    }


def samples_file(folder: Path, name: str, rows: list[dict[str, Any]]) -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / f"samples_{name}_2026-01-02T03-04-05.678901.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_how_samples_say_which_option_is_right(tmp_path: Path) -> None:
    """By number, by text, by accuracy where two contexts share one ending; options without their prompt are left out."""
    logs = [-1.0, -2.0, -4.0]
    three = [("Q:", f" {word}", value) for word, value in zip(("red", "blue", "green"), logs, strict=True)]
    alone = [("", text, -9.0) for _, text, _ in three]
    rows = [
        sample(0, three, 0, acc=1.0),
        sample(1, three, "blue", acc=0.0),
        sample(2, three + alone, 2, acc=0.0),
        sample(3, [("Ann", " left", -3.0), ("Bob", " left", -1.0)], "left", acc=0.0),
    ]
    read = harness.read_samples(samples_file(tmp_path, "t", rows))
    assert read.answers.tolist() == [0, 1, 2, 0]
    np.testing.assert_allclose(np.exp(read.log_probs[2]), np.exp(logs) / np.exp(logs).sum())
    np.testing.assert_allclose(np.exp(read.log_probs[3]), [1 / (1 + np.e**2), 1 / (1 + np.e**-2), 0])


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (sample(0, [("Q:", " a", -1.0)], 0), "not a multiple-choice task"),
        (
            {"doc_id": 0, "target": "5", "arguments": {}, "filtered_resps": ["5"], "filter": "none"},
            "not a multiple-choice",
        ),
        (sample(0, [("Q:", " a", -1.0), ("Q:", " b", -2.0)], [0, 1], acc=1.0), "which single option is right"),
        (sample(0, [("Q:", " a", -1.0), ("Q:", " b", -2.0)], 1, acc=1.0), "its accuracy is not that of"),
    ],
)
def test_tasks_without_calibration_say_why(tmp_path: Path, row: dict[str, Any], reason: str) -> None:
    rows, left_out = harness.calibrate([samples_file(tmp_path, "t", [row])])
    assert rows == []
    assert reason in left_out["t"]
    assert [p.name for p in tmp_path.iterdir()] == ["samples_t_2026-01-02T03-04-05.678901.jsonl"]


def test_calibration_of_samples_logged_before(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`vmoer lm-eval calibration DIR`, no model in sight: a perfectly calibrated coin lies at its own floor."""
    rng = np.random.default_rng(0)
    rows = []
    for i, p in enumerate(rng.uniform(0.5, 1, 400)):
        options = [("Q:", " yes", float(np.log(p))), ("Q:", " no", float(np.log(1 - p)))]
        rows.append(sample(i, options, int(rng.random() > p)))
    samples_file(tmp_path / "model", "coin", rows)
    assert cli.run(["lm-eval", "calibration", str(tmp_path)]) == 0
    assert "coin" in capsys.readouterr().out
    (path,) = tmp_path.rglob("calibration_*.json")
    before = path.read_bytes()
    found = {row["metric"]: row["value"] for row in json.loads(before)}
    assert cli.run(["lm-eval", "calibration", str(tmp_path)]) == 0
    assert path.read_bytes() == before
    assert abs(found["ece"] - found["ece_floor"]) < 0.03
    assert found["ece_p"] > 0.05
    assert cli.run(["lm-eval", "calibration", str(tmp_path / "nowhere")]) == 2
    (tmp_path / "empty").mkdir()
    assert cli.run(["lm-eval", "calibration", str(tmp_path / "empty")]) == 2


def test_a_calibrator_for_other_questions_is_left_out_with_a_note(tmp_path: Path) -> None:
    """Two options, and a calibrator for four."""
    options = [("Q:", " yes", -0.1), ("Q:", " no", -2.0)]
    samples_file(tmp_path / "model", "coin", [sample(0, options, 0), sample(1, options, 1)])
    choice = Choice(OutputTemperature(3.0), {}, np.zeros((1, 4)))
    how: Any = {"options": [4] * 60, "averaging": "router", "passes": 1, "task": "demo", "method": "vglr-mf"}
    ours = {"averaging": "router", "passes": 8, "enabled": True, "router_config": {"method": "vglr-mf"}}
    ours["calibrator"] = calibrator.described(choice, **how)
    (samples,) = tmp_path.rglob("samples_coin_*.jsonl")
    name = samples.name.replace("samples_coin_", "results_").replace(".jsonl", ".json")
    samples.with_name(name).write_text(json.dumps({"config": {"vmoer": ours}}))
    with pytest.warns(UserWarning, match="coin without the run's calibrator: .* 4 options, and one has 2"):
        rows, _ = harness.calibrate([samples])
    assert {row["method"] for row in rows} == {"vglr-mf"}


def test_the_entry_point_is_one_lm_eval_can_resolve() -> None:
    """Its registry takes entry points in place of classes, and makes the class of ours; registering twice is no error."""
    from importlib.metadata import EntryPoint

    from lm_eval.api.registry import Registry, get_model

    registry: Any = Registry("model")
    registry.register("vmoer", target=EntryPoint("vmoer", "vmoer.harness:VMoERLM", "lm_eval.models"))
    assert registry.get("vmoer") is harness.VMoERLM
    harness.register()
    harness.register()
    assert get_model("vmoer") is harness.VMoERLM


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "needs router=RUN"),
        ({"router": "x", "averaging": "answer"}, "choose router or full"),
        ({"router": "x", "averaging": "orders"}, "no option can be moved"),
        ({"router": "x", "passes": 0}, "at least 1"),
    ],
)
def test_wrong_arguments(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        harness.VMoERLM("demo", **options)
