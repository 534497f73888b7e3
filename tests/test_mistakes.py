"""Deliberate mistakes on the command line: one line that names the fix, and exit code 2, before any model is opened.

Oracle: a table written by hand, of what was typed and what the line must say. Each is typed to a process of its own, whose
processor time counts from the start of Python.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

OUT = "--out {dir}/out"
MISTAKES = {
    # a name
    "trian demo": "did you mean train?",
    "evla demo": "did you mean eval?",
    "stduy calibration": "did you mean study?",
    f"train demo --task demo --method vglr-fcc {OUT}": "did you mean vglr-fc",
    f"train demo --task demo --method bayes {OUT}": "known: ",
    f"train demo --task demo --preset papper {OUT}": "did you mean paper?",
    f"train demo --task dmeo {OUT}": "did you mean demo",
    f"eval demo --task openbook {OUT}": "did you mean openbookqa?",
    f"eval demo --task demo --ood demo-nera {OUT}": "did you mean demo-near",
    f"eval demo --task demo --split tset {OUT}": "test",
    f"study calibratoin --model demo --task demo {OUT}": "did you mean calibration?",
    f"study calibration --model demo --task demo --preset papre {OUT}": "did you mean paper?",
    "bench --geometries granit-3b": "known: small-granite",
    "bench --methods vglr-fcc": "did you mean vglr-fc",
    # a path
    "info {dir}/rnu": "did you mean {dir}/run?",
    "info ./no/such/folder": "no such folder",
    "info {dir}/empty": "no config.json",
    "info {dir}/unfinished": "is an unfinished run: start the same vmoer train again",
    f"eval {{dir}}/unfinished --task demo {OUT}": "is an unfinished run",
    f"eval {{dir}}/rnu --task demo {OUT}": "did you mean {dir}/run?",
    'ask {dir}/rnu "why?"': "did you mean {dir}/run?",
    f"eval demo --task {{dir}}/no.jsonl {OUT}": "no.jsonl",
    f"eval demo --task {{dir}}/broken.jsonl {OUT}": "broken.jsonl:1",
    f"eval demo --task {{dir}}/nobody.jsonl {OUT}": "no questions",
    "report {dir}/nowhere": "no such folder",
    "report {dir}/empty": "no predictions.parquet",
    "threshold {dir}/empty": "{dir}/empty",
    'ask demo "why?" --abstain-above {dir}/no.json': "no.json",
    # an option
    "info": "Missing argument 'model'",
    "train demo --task demo": "Missing option '--out'",
    f"train demo {OUT}": "Missing option '--task'",
    f"eval demo {OUT}": "Missing option '--task'",
    f"eval demo --task demo --limit many {OUT}": "--limit",
    f"eval demo --task demo --limit 0 {OUT}": "at least 1",
    f"eval demo --task demo --sead 1 {OUT}": "--seed",
    f"eval demo --task demo --dtype int3 {OUT}": "choose one of float32, bfloat16, float16, fp32, bf16, fp16",
    f"train demo --task demo --dtype half {OUT}": "choose one of float32, bfloat16, float16, fp32, bf16, fp16",
    "sensitivity demo --task demo --dtype bf": "choose one of float32",
    'ask demo "why?" --dtype 32': "choose one of float32",
    f"eval demo --task demo --device gpu7 {OUT}": "device='gpu7' cannot be used",
    'ask demo "why?" --device tpu9': "device='tpu9' cannot be used",
    "sensitivity demo --task demo --device gpu": "device='gpu' cannot be used",
    'ask demo "why?" --choice one': "one --choice is not enough: give one for each option",
    'ask demo "why?" --abstain-above nan': "give a number, or a threshold file",
    f"train demo --task demo --batch-size two {OUT}": "--batch-size",
    f"train demo --task demo --layers susceptible:many {OUT}": "susceptible",
    f"train demo --task demo --stage2-data half {OUT}": "held-out:0.2",
    "demo --workers -1": "--workers",
    # what does not go together
    f"study calibration --model demo {OUT}": "needs a task: --task openbookqa",
    f"study calibration --model demo --task demo --table 1 {OUT}": "--table belongs to the study paper",
    f"study paper --model demo --ood demo-far {OUT}": "leave out --ood",
    f"study paper --model demo --preset paper {OUT}": "leave out --ood, --methods and --preset",
    f"study calibration --model demo --task demo --seeds a,b {OUT}": "whole numbers separated by commas",
    f"study calibration --model demo --task demo --backend slurm {OUT}": "choose processes or ray",
    f"study calibration --model demo --task demo --ray-address auto {OUT}": "not backend ray",
    f"study calibration --model demo --task demo --workers 2 --backend ray {OUT}": "a Ray cluster has as many as it has",
    f"eval demo --task demo --ood demo {OUT}": "is named twice",
    f"train demo --task demo --noisy-stage1 --from-map {{dir}}/run {OUT}": "give one of them",
    f"train {{dir}}/run --task demo {OUT}": "is a run folder: name its base model",
    "lm-eval calibration": "takes one folder",
    "lm-eval calibration {dir}/empty": "run lm-eval with --log_samples --output_path",
}


LATER = {
    "study": ("calibratoin", "--backend", "--ray-address"),
    "bench": ("--geometries", "--methods"),
    "train": ("susceptible:many", "--noisy-stage1", "train {dir}/run"),
    "lm-eval": ("{dir}/empty",),
}
"""What is said of these takes the libraries that open models, which alone take longer."""
PROGRAM = """
import resource, sys
from vmoer.cli import run
code = run(sys.argv[1:])
used = resource.getrusage(resource.RUSAGE_SELF)
print(code, used.ru_utime + used.ru_stime, "transformers" in sys.modules)
"""


@pytest.fixture(scope="module")
def limit() -> float:
    """Seconds: two, or twice what Python takes to import torch where that is more."""
    program = "import resource, torch; u = resource.getrusage(resource.RUSAGE_SELF); print(u.ru_utime + u.ru_stime)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    return max(2.0, 2 * float(done.stdout))


@pytest.fixture
def place(tmp_path: Path) -> Path:
    for name in ("run", "empty", "unfinished"):
        (tmp_path / name).mkdir()
    (tmp_path / "run" / "run.json").write_text(json.dumps({"model": "demo"}))
    (tmp_path / "unfinished" / "telemetry.jsonl").write_text("")
    (tmp_path / "broken.jsonl").write_text("{")
    (tmp_path / "nobody.jsonl").write_text("")
    return tmp_path


def test_there_are_sixty() -> None:
    assert len(MISTAKES) >= 60


@pytest.mark.parametrize("typed", MISTAKES)
def test_a_mistake_is_one_line_that_names_the_fix(typed: str, place: Path, limit: float) -> None:
    words = [word.strip('"') for word in typed.replace("{dir}", str(place)).split()]
    clean = {name: value for name, value in os.environ.items() if name != "VMOER_DEBUG"}
    path = os.pathsep.join(filter(None, sys.path))
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *words], capture_output=True, text=True, env=clean | {"PYTHONPATH": path}
    )
    code, seconds, heavy = done.stdout.split()  # nothing else is printed
    assert code == "2", done.stderr
    assert MISTAKES[typed].replace("{dir}", str(place)) in done.stderr
    assert done.stderr.count("\n") == 1
    assert "VMOER_DEBUG" not in done.stderr  # nothing that was not foreseen
    assert not re.search(r"\. \(|\) \(", done.stderr)  # a hint that is stuck behind another's end
    if not any(word in typed for word in LATER.get(words[0], ())):
        assert heavy == "False"
        assert float(seconds) < limit
    assert not (place / "out").exists()
