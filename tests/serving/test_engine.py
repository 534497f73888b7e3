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
from scipy.stats import spearmanr
from transformers import AutoTokenizer

import vmoer
from vmoer.demo import model_path
from vmoer.serving.rows import Rows, unpack
from vmoer.tasks import load
from vmoer.tasks.prompt import encode

pytestmark = pytest.mark.serving
HERE = Path(__file__).parent
METHODS = ("vglr-mf", "vglr-lr", "laplace", "map", "mcdr", "swag")
BACKEND = {f"{name}, transformers": name for name in served.CONFIGS}
"""The same models through vLLM's Transformers backend."""


def run_cases(spec: dict[str, Any], out: Path, multiprocessing: bool = False, seconds: int = 1800) -> None:
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
def narrow(work: Path, granite: tuple[Path, Path]) -> dict[str, tuple[Path, Path, list[list[int]]]]:
    """What bfloat16 is tried on: random weights on random tokens, and the embedded model, which is trained, on its questions."""
    seeded, demo = torch.Generator().manual_seed(3), model_path("map")
    texts = torch.randint(4, served.VOCAB, (6, 250), generator=seeded).tolist()
    asked = encode(AutoTokenizer.from_pretrained(demo), load("demo", "test", limit=125), 256)
    return {"random": (*granite, texts), "trained": (demo, served.train(demo, "everywhere", work / "trained"), asked)}


@pytest.fixture(scope="module")
def answers(
    work: Path, runs: dict[str, tuple[Path, Path]], narrow: dict[str, tuple[Path, Path, list[list[int]]]]
) -> Path:
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
    for case, (base, run, texts) in narrow.items():
        given = [{"prompt_token_ids": text} for text in texts]
        spec[case] = {"model": str(base), "router": str(run), "rounds": [given], "new": 1}
        spec[case]["options"] = {"dtype": "bfloat16"}
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


def same(ours: np.ndarray, theirs: np.ndarray) -> float:
    """The share of tokens and layers with equal experts."""
    return float((np.sort(ours, -1) == np.sort(theirs, -1)).all(-1).mean())


@pytest.mark.parametrize("case", ["random", "trained"])
def test_bfloat16_on_given_tokens(
    case: str, narrow: dict[str, tuple[Path, Path, list[list[int]]]], answers: Path
) -> None:
    """Texts diverge in bfloat16, so both engines read the same tokens: 3,000 choices of experts, and 12,000.

    Near ties fall either way: vLLM may differ from transformers, and from float32, about as often as transformers in bfloat16
    differs from float32, and from itself with another attention, which sums the same numbers in another order.
    """
    base, run, texts = narrow[case]
    rows = [rows_of(answers, case, 0, place) for place in range(len(texts))]
    vllm = np.concatenate([x.experts[:, x.layers] for x in rows])
    hf = served.teacher_forced(base, run, texts, torch.bfloat16)
    other = served.teacher_forced(base, run, texts, torch.bfloat16, attn_implementation="eager")
    exact = served.teacher_forced(base, run, texts, torch.float32)
    least = same(hf["experts"], exact["experts"]) - 0.009
    assert least > 0.96
    assert same(vllm, hf["experts"]) >= max(least, same(other["experts"], hf["experts"]) - 0.01)
    assert same(vllm, exact["experts"]) >= least
    for name, values in hf["signals"].items():
        ours = np.concatenate([x.signals[name] for x in rows])
        assert spearmanr(ours.ravel(), values.ravel()).statistic >= 0.99


def test_torch_compile(work: Path, runs: dict[str, tuple[Path, Path]]) -> None:
    """Compiled as on a GPU, where the experts lie in one operator, and as on a CPU, where vLLM then does not note them.

    The Transformers backend's own router is compiled in either case.
    """
    about = {"rounds": [served.PROMPTS]}
    cases: dict[str, tuple[str, bool, dict[str, Any]]] = {
        "gpu": ("granite", True, {}),
        "cpu": ("granite", False, {}),
        "backend": ("granite", True, {"model_impl": "transformers"}),
    }
    spec = {}
    for case, (name, opaque, options) in cases.items():
        model, router = map(str, runs[name])
        spec[case] = about | {"model": model, "router": router, "as_on_a_gpu": opaque}
        spec[case]["options"] = options | {"enforce_eager": False}
    run_cases(spec, work / "compiled")
    expected = served.recorded(*runs["granite"], served.PROMPTS)
    for case, (_, opaque, _) in cases.items():
        assert_as_recorded(work / "compiled", case, 0, expected, experts=opaque)


def test_a_routing_function_of_its_own_is_refused(work: Path) -> None:
    """vLLM has one router for all functions on a CPU, and another class for such ones on a GPU. Oracle: the reason."""
    base = served.build("phimoe", work / "phimoe")
    run = served.train(base, "vglr-fc", work / "phimoe-vglr-fc")
    own = {"hf_overrides": {"architectures": ["PhiMoEForCausalLM"]}}  # vLLM's class, under the name it has there
    spec = {"phimoe": {"model": str(base), "router": str(run), "rounds": [], "options": own}}
    with pytest.raises(AssertionError, match="layer 1 routes by a function of its own"):
        run_cases(spec, work / "phimoe-answers")


def test_tensor_parallel(work: Path, runs: dict[str, tuple[Path, Path]]) -> None:
    """Two processes, each with half of every matrix."""
    base, run = runs["granite"]
    about = {"model": str(base), "router": str(run), "rounds": [served.PROMPTS], "executor": "mp"}
    spec = {"tp2": about | {"options": {"tensor_parallel_size": 2}}}
    run_cases(spec, work / "tp2", multiprocessing=True)
    assert_as_recorded(work / "tp2", "tp2", 0, served.recorded(base, run, served.PROMPTS))
