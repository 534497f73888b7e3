"""A method that is defined here, registered by one line, and taken through everything; no other file knows of it.

It is the method of docs/adding-a-method.md: noise on the logits whose size is learned for each expert. Its signal is the
variance that the experts would have, weighed by their probabilities: exp(-2) for every token before anything is trained.
"""

import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pyarrow.parquet as pq
import pytest
import torch
import transformers
from torch import Tensor, nn

import vmoer
from vmoer import cli, routers, tasks
from vmoer.bench import reading
from vmoer.evaluation.scores import score
from vmoer.live.attach import routers_of
from vmoer.models import open_model
from vmoer.routers import Call, Config, Points, Posterior, Presets, Router, Routing, at_least, register
from vmoer.studies import efficiency
from vmoer.tasks.prompt import encode, letter_ids


@dataclass(frozen=True)
class ExpertNoisePosterior(Posterior):
    per_token: ClassVar[tuple[str, ...]] = ("log_sd_TN", "logits_TN")
    log_sd_TN: Tensor
    logits_TN: Tensor

    def divergence(self) -> Tensor:
        """KL(N(l, sd^2) || N(l, 1)), summed over experts."""
        return 0.5 * (torch.exp(2 * self.log_sd_TN) - 1 - 2 * self.log_sd_TN).sum(-1)

    def signals(self) -> dict[str, Tensor]:
        p_TN = torch.softmax(self.logits_TN.float(), -1)
        return {"expected_variance": (p_TN * torch.exp(2 * self.log_sd_TN)).sum(-1)}


class ExpertNoiseRouter(Router):
    def __init__(self, config: Any, gate: Any, weight_ND: Tensor | None, layer: int, device: torch.device) -> None:
        super().__init__(config, gate, weight_ND, layer, device)
        self.log_sd_N = nn.Parameter(torch.full((gate.num_experts,), -1.0, device=device))
        self.points = Points(config.samples, gate.num_experts, config.seed + layer, device)

    def forward(self, u_TD: Tensor, logits_TN: Tensor, call: Call, weight_ND: Tensor | None) -> Routing:
        log_sd_TN = self.log_sd_N.float().expand_as(logits_TN)
        posterior = ExpertNoisePosterior(log_sd_TN, logits_TN)
        if call.draws:
            noise_TN = call.normal(self.config.seed, logits_TN.shape[-1])
            sample_TN = logits_TN + log_sd_TN.exp() * noise_TN
            return Routing(sample_TN, sample_TN, posterior)
        logits_TSN = logits_TN.unsqueeze(1) + self.log_sd_N.float().exp() * self.points()
        averaged_TN = self.gate.average(logits_TSN, logits_TN)
        return Routing(averaged_TN, averaged_TN, posterior)


@dataclass(frozen=True, kw_only=True)
class ExpertNoise(Config):
    key: ClassVar[str] = "expert-noise"
    about: ClassVar[str] = "noise of a size learned for each expert"
    router: ClassVar[type[Router]] = ExpertNoiseRouter
    signal: ClassVar[str] = "expected_variance"
    tempered: ClassVar[bool] = True
    presets: ClassVar[Presets] = {"default": {"beta": 0.002}, "paper": {"samples": 35}}

    beta: float = at_least(0, 0.01)
    samples: int = at_least(1, 32)


@pytest.fixture(autouse=True, scope="module")
def _registered() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(routers, "METHODS", dict(routers.METHODS))
        register(ExpertNoise)  # the one line
        yield


def command(*words: object) -> None:
    assert cli.run([str(word) for word in words]) == 0


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "noise"
    settings = ("--limit", 48, "--stage1-epochs", 0, "--stage2-epochs", 1, "--stage2-lr", 0.1)
    command("train", "demo", "--task", "demo", "--method", "expert-noise", *settings, "--out", out)
    return out


@pytest.fixture(scope="module")
def evaluated(run: Path) -> Path:
    out = run.parent / "eval"
    command("eval", run, "--task", "demo", "--ood", "demo-far", "--limit", 24, "--out", out)
    return out


def test_two_methods_do_not_share_a_key() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Other(Config):
        key: ClassVar[str] = "vglr-fc"

    with pytest.raises(vmoer.errors.InputError, match="a key of its own"):
        register(Other)
    assert vmoer.methods()["expert-noise"] is register(ExpertNoise)  # twice is once


def test_attach_and_record() -> None:
    """Oracle: the signal's value by hand, and the counts of what is trained."""
    model = open_model("demo", device="cpu").model
    vmoer.attach(model, ExpertNoise())
    with vmoer.record(model) as rec, torch.no_grad():
        model(input_ids=torch.arange(5, 29).view(2, 12))
    torch.testing.assert_close(
        rec.signals["expected_variance"], torch.full_like(rec.signals["gate_entropy"], math.exp(-2))
    )
    assert {p.numel() for p in model.parameters() if p.requires_grad} == {routers_of(model)[0].gate.num_experts}


def test_train_eval_and_load(run: Path, evaluated: Path) -> None:
    """Oracles: the preset's beta, parameters that moved, and predictions by the opened folder's own forward pass."""
    said = json.loads((run / "run.json").read_text())
    assert (said["method"], said["config"]["beta"]) == ("expert-noise", 0.002)
    opened = open_model(run, device="cpu")
    assert all((r.log_sd_N + 1).abs().max() > 0.05 for r in routers_of(opened.model).values())
    table = pq.read_table(evaluated / "predictions.parquet")
    first = table["id"].to_pylist()[0]
    asked = [q for q in tasks.load("demo", "test", limit=24) if q.id == first]
    assert table["method"].to_pylist()[0] == "expert-noise"
    letters = letter_ids(opened.tokenizer, len(asked[0].choices))
    with torch.no_grad():
        logits = opened.model(input_ids=torch.tensor(encode(opened.tokenizer, asked, 128))).logits
    expected = logits[0, -1, letters].double().log_softmax(-1).tolist()
    assert table["log_probs"].to_pylist()[0] == pytest.approx(expected, abs=1e-5)


def test_its_signal_is_predicted_and_scored(run: Path, evaluated: Path) -> None:
    """Oracle: the mean over layers of what `record` says at the first question's last token."""
    table = pq.read_table(evaluated / "predictions.parquet")
    opened = open_model(run, device="cpu")
    first = table["id"].to_pylist()[0]
    asked = [q for q in tasks.load("demo", "test", limit=24) if q.id == first]
    with vmoer.record(opened.model) as rec, torch.no_grad():
        opened.model(input_ids=torch.tensor(encode(opened.tokenizer, asked, 128)))
    value = rec.signals["expected_variance"][:, 0, -1].mean().item()
    assert table["expected_variance"].to_pylist()[0] == pytest.approx(value, abs=1e-5)
    detected = [row for row in score(evaluated, draws=20) if row["metric"] == "auroc"]
    assert "expected_variance" in {row["signal"] for row in detected}
    command("report", evaluated)
    assert "expected_variance" in (evaluated / "report" / "index.html").read_text()


@pytest.mark.slow
def test_study_and_report(tmp_path: Path) -> None:
    """The calibration study has it in every kind of averaging and with an output temperature; the page shows it."""
    asked = ("--methods", "map,expert-noise", "--ood", "demo-far", "--limit", 24, "--averaging", "router,full")
    command("study", "calibration", "--model", "demo", "--task", "demo", *asked, "--passes", 2, "--out", tmp_path)
    rows = json.loads((tmp_path / "metrics.json").read_text())
    shown = {row["method"] for row in rows if row["metric"] == "nll"}
    noise = {"expert-noise", "expert-noise+full"}
    assert shown == {"map", "map+ts"} | noise | {f"{name}+ts" for name in noise}
    command("report", tmp_path)
    page = (tmp_path / "report" / "index.html").read_text()
    assert "expert-noise+full" in page
    assert ExpertNoise.about in page


def test_what_it_costs_is_counted() -> None:
    """Oracle: forty numbers in each of ten layers, and no matrix product at all."""
    found = {row["metric"]: row["value"] for row in efficiency.cost("expert-noise")}
    assert (found["parameters"], found["macs"]) == (10 * 40, 0)
    assert "expert-noise" in efficiency.kinds()


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU the true geometries are measured")
def test_bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transformers.masking_utils, "find_packed_sequence_indices", lambda ids: None)
    command("bench", "--methods", "expert-noise", "--quick", "--out", tmp_path / "cpu.json")
    rows = json.loads((tmp_path / "cpu.json").read_text())["rows"]
    measured = {(row["method"], row["phase"]) for row in rows if row["time_ratio"]}
    assert measured == {(name, phase) for name in ("map", "expert-noise") for phase in ("prefill", "decode")}
    assert "| expert-noise |" in (tmp_path / "cpu.md").read_text()


def test_the_methods_of_an_installed_package(tmp_path: Path) -> None:
    """Named as an entry point: every process knows it, and one that cannot be read is one line."""
    about = tmp_path / "other-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: other\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text("[vmoer.methods]\nquiet = other_methods:Quiet\n")
    program = "from vmoer import routers; print(routers.method('quiet').__name__, list(routers.methods()))"

    def told(module: str) -> "subprocess.CompletedProcess[str]":
        (tmp_path / "other_methods.py").write_text(module)
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
        return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment)

    found = told("import vmoer\n\nclass Quiet(vmoer.Deterministic):\n    key = 'quiet'\n")
    assert found.stdout == f"Quiet {[*routers.methods(), 'quiet']}\n".replace(", 'expert-noise'", "")
    line = told("import nothing_of_that_name").stderr.splitlines()[-1]
    assert line.startswith("vmoer.errors.InputError: the method quiet = other_methods:Quiet of an installed package")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU the true geometries are measured")
def test_what_reading_it_costs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is among the methods measured unasked; `--quick` leaves prefill and generation."""
    monkeypatch.setattr(transformers.masking_utils, "find_packed_sequence_indices", lambda ids: None)
    for name, value in {"LARGE": 16, "SMALL": 8, "NEW": 2, "LESS": 0.0}.items():
        monkeypatch.setattr(reading, name, value)
    assert "expert-noise" in reading.usual()
    command("bench", "--reading", "--methods", "expert-noise", "--quick", "--out", tmp_path / "reading.json")
    rows = json.loads((tmp_path / "reading.json").read_text())["rows"]
    assert {(row["part"], row["method"], row["mode"]) for row in rows if row["ratio"]} == {
        (part, "expert-noise", mode) for part in ("prefill", "generate") for mode in ("attached", "recorded")
    }
