"""vLLM's own classes of tiny models with routers attached, float32 on a CPU.

Oracle: `vmoer.record` on the same model in transformers, which shares no code with vLLM's.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import served
import torch
import transformers as tf
from scipy.stats import spearmanr

import vmoer
from vmoer.serving.rows import Rows, unpack

pytestmark = pytest.mark.serving
HERE = Path(__file__).parent
METHODS = ("vglr-mf", "vglr-lr", "laplace", "map", "mcdr", "swag")
BACKEND = {f"{name}, transformers": name for name in served.CONFIGS}
"""The same models through vLLM's Transformers backend."""


def run_cases(spec: dict[str, Any], out: Path, multiprocessing: bool = False, seconds: int = 600) -> None:
    out.mkdir()
    (out / "spec.json").write_text(json.dumps(spec))
    environment = served.environment() | {"VLLM_ENABLE_V1_MULTIPROCESSING": str(int(multiprocessing))}
    command = [sys.executable, str(HERE / "offline.py"), str(out / "spec.json"), str(out)]
    with (out / "log").open("w") as log:
        done = subprocess.run(command, env=environment, stdout=log, stderr=log, timeout=seconds)
    assert done.returncode == 0, (out / "log").read_text()[-3000:]


@pytest.fixture(scope="module")
def runs(work: Path, granite: tuple[Path, Path]) -> dict[str, tuple[Path, Path]]:
    """Every architecture with one method, and one architecture with every method."""
    found = {"granite": granite}
    for name in served.CONFIGS:
        if name != "granite":
            base = served.build(name, work / name)
            found[name] = base, served.train(base, "vglr-fc", work / f"{name}-vglr-fc")
    for method in METHODS:
        found[method] = granite[0], served.train(granite[0], method, work / f"granite-{method}")
    return found | {case: found[name] for case, name in BACKEND.items()}


@pytest.fixture(scope="module")
def answers(work: Path, runs: dict[str, tuple[Path, Path]]) -> Path:
    """What vLLM says in every case, in one process."""
    spec: dict[str, Any] = {
        name: {"model": str(base), "router": str(run), "rounds": [served.PROMPTS], "sampled": [served.PROMPTS]}
        for name, (base, run) in runs.items()
    }
    for case in BACKEND:
        spec[case]["options"] = {"model_impl": "transformers"}
    base, run = runs["granite"]
    spec["plain"] = {"model": str(base), "router": None, "rounds": [], "sampled": [served.PROMPTS]}
    about = {"model": str(base), "router": str(run)}
    small = {"max_num_batched_tokens": 16, "block_size": 32}
    spec["chunked"] = about | {"rounds": [[served.LONG], [served.LONG]], "options": small}
    ids = tf.AutoTokenizer.from_pretrained(base)(served.LONG)["input_ids"]
    spec["bfloat16"] = about | {"rounds": [[{"prompt_token_ids": ids}]], "options": {"dtype": "bfloat16"}, "new": 1}
    run_cases(spec, work / "answers")
    return work / "answers"


def rows_of(answers: Path, case: str, number: int, place: int) -> Rows:
    return unpack(np.load(answers / f"{case}.{number}.{place}.npy"))


def assert_as_recorded(
    answers: Path, case: str, number: int, expected: list[dict[str, Any]], experts: bool = True
) -> None:
    said = json.loads((answers / f"{case}.json").read_text())[number]
    for place, want in enumerate(expected):
        rows = rows_of(answers, case, number, place)
        assert said["ids"][place] == want["ids"]
        assert rows.layers == served.LAYERS
        assert set(rows.signals) == set(want["signals"])
        for name, values in want["signals"].items():
            np.testing.assert_allclose(rows.signals[name], values, rtol=1e-4, atol=1e-6)
        if experts:
            theirs = np.sort(np.array(want["experts"]), -1)
            assert np.array_equal(np.sort(rows.experts[:, served.LAYERS], -1), theirs)


@pytest.mark.parametrize("case", [*served.CONFIGS, *METHODS, *BACKEND])
def test_tokens_experts_and_signals_are_those_of_transformers(
    case: str, runs: dict[str, tuple[Path, Path]], answers: Path
) -> None:
    expected = served.recorded(*runs[case], served.PROMPTS)
    assert len({tuple(row) for want in expected for row in np.array(want["experts"])[:, 0].tolist()}) > 3
    assert_as_recorded(answers, case, 0, expected)


def test_the_transformers_backend_chose_experts_in_both_ways(answers: Path) -> None:
    """By vLLM's router and by the model's own. Oracle: what vLLM says of it."""
    said = (answers / "log").read_text()
    assert "(external routing)" in said
    assert "(internal routing)" in said


def replayed(model: Any, ids: list[list[int]], rows: list[np.ndarray], new: int) -> list[np.ndarray]:
    """The log-probabilities of each text's new tokens, the texts in one padded batch, with the experts of the rows."""
    width = max(map(len, ids))
    padded = torch.tensor([[3] * (width - len(row)) + row for row in ids])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in ids])
    with vmoer.replay(model, rows), torch.no_grad():
        logits = model(input_ids=padded, attention_mask=mask).logits
    found = torch.log_softmax(logits[:, -new - 1 : -1], -1).gather(-1, padded[:, -new:, None])
    return list(found.squeeze(-1).numpy())


@pytest.mark.parametrize("case", ["plain", *served.CONFIGS, *METHODS, *BACKEND])
def test_a_sampled_text_replayed_in_transformers_has_its_probabilities(
    case: str, runs: dict[str, tuple[Path, Path]], answers: Path
) -> None:
    """Oracle: the log-probabilities that vLLM says it sampled with. With the experts of other tokens they are others."""
    base, run = runs["granite" if case == "plain" else case]
    said = json.loads((answers / f"{case}.json").read_text())[-1]
    number = 0 if case == "plain" else 1
    rows = [np.load(answers / f"{case}.{number}.{place}.npy") for place in range(len(said["ids"]))]
    assert [len(x) + 1 for x in rows] == list(map(len, said["ids"]))
    model = served.opened(base)
    if case != "plain":
        vmoer.load(model, run)
    for ours, theirs in zip(replayed(model, said["ids"], rows, served.NEW), said["log_probs"], strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-4, rtol=0)
    others = replayed(model, said["ids"], [np.roll(x, 1, 0) for x in rows], served.NEW)
    assert np.abs(np.array(others) - np.array(said["log_probs"])).max() > 1e-2


def test_chunked_prefill_and_prefix_cache(runs: dict[str, tuple[Path, Path]], answers: Path) -> None:
    """A prompt in pieces of 16 tokens; again from the cache, whose rows are byte for byte the same."""
    expected = served.recorded(*runs["granite"], [served.LONG])
    assert expected[0]["prompt_tokens"] > 64
    assert_as_recorded(answers, "chunked", 0, expected)
    assert_as_recorded(answers, "chunked", 1, expected)
    first, second = json.loads((answers / "chunked.json").read_text())
    assert first["cached"] == [0]
    assert second["cached"][0] >= 32
    rows = [np.load(answers / f"chunked.{number}.0.npy") for number in (0, 1)]
    cached = second["cached"][0]
    assert np.array_equal(rows[0][:cached], rows[1][:cached])


def test_bfloat16_on_given_tokens(runs: dict[str, tuple[Path, Path]], answers: Path) -> None:
    """Texts diverge in bfloat16, so both engines read the same tokens.

    Random weights have near ties, which bfloat16 breaks either way: vLLM may differ from float32 as often as transformers does.
    """
    base, run = runs["granite"]
    ids = tf.AutoTokenizer.from_pretrained(base)(served.LONG)["input_ids"]
    narrow, wide = (served.teacher_forced(base, run, ids, dtype) for dtype in (torch.bfloat16, torch.float32))
    rows = rows_of(answers, "bfloat16", 0, 0)
    ours = np.sort(rows.experts[:, served.LAYERS], -1)
    theirs, exact = (np.sort(np.array(found["experts"]), -1) for found in (narrow, wide))
    assert (ours == theirs).all(-1).mean() >= 0.95
    assert (ours == exact).all(-1).mean() >= (theirs == exact).all(-1).mean() - 0.02
    for name, values in narrow["signals"].items():
        assert spearmanr(rows.signals[name].ravel(), np.array(values).ravel()).statistic >= 0.99


def test_torch_compile(work: Path, runs: dict[str, tuple[Path, Path]]) -> None:
    """Compiled, on a CPU. vLLM does not note the experts there (on a GPU that lies outside the compiled graph)."""
    base, run = runs["granite"]
    options = {"enforce_eager": False}
    spec = {"compiled": {"model": str(base), "router": str(run), "rounds": [served.PROMPTS], "options": options}}
    run_cases(spec, work / "compiled")
    assert_as_recorded(work / "compiled", "compiled", 0, served.recorded(base, run, served.PROMPTS), experts=False)


def test_tensor_parallel(work: Path, runs: dict[str, tuple[Path, Path]]) -> None:
    """Two processes, each with half of every matrix."""
    base, run = runs["granite"]
    about = {"model": str(base), "router": str(run), "rounds": [served.PROMPTS], "executor": "mp"}
    spec = {"tp2": about | {"options": {"tensor_parallel_size": 2}}}
    run_cases(spec, work / "tp2", multiprocessing=True)
    assert_as_recorded(work / "tp2", "tp2", 0, served.recorded(base, run, served.PROMPTS))
