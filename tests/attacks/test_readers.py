"""Readers of files from elsewhere, fed with anything: they answer, or refuse in one line. Hypothesis, derandomised."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from vmoer import tasks
from vmoer.errors import InputError
from vmoer.evaluation.meta import of_run
from vmoer.evaluation.predictions import load
from vmoer.evaluation.threshold import read_threshold
from vmoer.files import read_json, read_rows, sealed
from vmoer.report import read
from vmoer.saved import adapter, manifest
from vmoer.saved.store import read_run

HUGE = st.sampled_from([10**400, -(10**400)])  # no float holds them
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | HUGE | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
FUZZED = settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])


def survives(read: Callable[[], object]) -> None:
    try:
        read()
    except InputError as error:
        assert "\n" not in str(error)  # noqa: PT017


def text_of(value: Any) -> bytes:
    return json.dumps(value).encode()


READERS: dict[str, tuple[str, Callable[[Path], object]]] = {
    "questions": ("q.jsonl", lambda path: tasks.load(path, "all")),
    "threshold": ("threshold.json", lambda path: read_threshold(path.parent)),
    "rows": ("metrics.json", lambda path: read_rows(path)),
    "packed rows": ("metrics.json.gz", lambda path: read_rows(path.with_suffix(""))),
    "metrics": ("metrics.json", lambda path: read(path.parent)),
    "JSON": ("any.json", lambda path: read_json(path)),
    "predictions": ("predictions.parquet", lambda path: load(path.parent)),
}


@pytest.mark.parametrize("name", READERS)
@FUZZED
@given(data=st.binary(max_size=200) | JSON.map(text_of))
def test_anything_at_all(name: str, data: bytes, tmp_path: Path) -> None:
    file, reader = READERS[name]
    (tmp_path / file).write_bytes(data)
    survives(lambda: reader(tmp_path / file))


@FUZZED
@given(changes=st.dictionaries(st.sampled_from(["format", "form", "signal", "threshold", "temperature"]), JSON))
def test_sealed_thresholds(changes: dict[str, Any], tmp_path: Path) -> None:
    good = {"format": 2, "form": "text", "signal": "nll", "threshold": 1.0}
    (tmp_path / "threshold.json").write_text(json.dumps(sealed(good | changes)))
    survives(lambda: read_threshold(tmp_path))


@FUZZED
@given(changes=st.dictionaries(st.sampled_from(["r", "lora_alpha", "target_modules", "peft_type", "bias", "x"]), JSON))
def test_settings_of_adapters(changes: dict[str, Any]) -> None:
    good = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj"]}
    survives(lambda: adapter.checked(good | changes, "adapter_config.json"))


@FUZZED
@given(changes=st.dictionaries(st.sampled_from(["id", "question", "choices", "answer", "other"]), JSON))
def test_rows_of_questions(changes: dict[str, Any], tmp_path: Path) -> None:
    good = {"id": "q", "question": "?", "choices": ["a", "b"], "answer": 0}
    (tmp_path / "q.jsonl").write_text(json.dumps(good | changes))
    survives(lambda: tasks.load(tmp_path / "q.jsonl", "all"))


@FUZZED
@given(changes=st.dictionaries(st.sampled_from(["model", "task", "method", "seed", "stage1", "stage2"]), JSON))
def test_what_a_run_says_of_itself(changes: dict[str, Any], tmp_path: Path) -> None:
    """What is taken can be written beside answers."""
    good = {"model": "base", "task": "sciq", "method": "vglr-fc", "seed": 0, "stage2": {"moved": {"mean": 0.1}}}
    (tmp_path / "run.json").write_text(json.dumps(good | changes))
    manifest.seal(tmp_path)
    survives(lambda: of_run(read_run(tmp_path)))
