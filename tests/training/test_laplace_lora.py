"""Laplace-LoRA. Oracles: Hessians and Jacobians by torch.autograd, dense linear algebra, the closed form of the best prior
precision, and the MAP model's own answers."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.functional import hessian, jacobian
from train_workers import world

from vmoer import tasks
from vmoer.errors import InputError
from vmoer.evaluation.answers import answer_questions
from vmoer.inference.averaging import sample_logits_by
from vmoer.models import open_model
from vmoer.training.data import encode_questions
from vmoer.training.laplace_lora import (
    Kronecker,
    Posterior,
    best_precision,
    fit,
    jacobians,
    log_evidence,
    matrices,
    open_fitted,
    posterior,
)
from vmoer.training.lora import folded_quickly
from vmoer.training.run import Data, Plan, Running, Stages, train

INPUTS, RANK, LETTERS = 5, 2, 3


class Adapted(nn.Module):
    """logits = W x + B A x, by PEFT's names."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(INPUTS, LETTERS, bias=False, dtype=torch.float64)
        self.lora_A = nn.ModuleDict({"default": nn.Linear(INPUTS, RANK, bias=False, dtype=torch.float64)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(RANK, LETTERS, bias=False, dtype=torch.float64)})

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.base(x) + self.lora_B["default"](self.lora_A["default"](x))
        return out


def toy() -> Any:
    model = nn.Module()
    model.q_proj = Adapted().requires_grad_(False)
    return model


def fitted(model: Any, x_NI: Tensor) -> tuple[Posterior, dict[str, Kronecker]]:
    """The posterior given one token a question."""
    layers = matrices(model)
    logits, seen = jacobians(layers, lambda: model.q_proj(x_NI.unsqueeze(1))[:, 0])
    p = logits.softmax(-1)
    curvature = torch.diag_embed(p) - p.unsqueeze(-1) * p.unsqueeze(-2)
    sums = {}
    for path, layer in layers.items():
        square = [torch.zeros(n, n, dtype=torch.float64) for n in (layer.in_features, layer.out_features)]
        sums[path] = Kronecker(*square)
        sums[path].add(seen[path].a_BTI.flatten(0, 1), seen[path].g_CBTO, curvature)
    return posterior(layers, sums, len(x_NI)), sums


def loss(model: Any, x_NI: Tensor, path: str) -> Any:
    """The questions' negative log-likelihood as a function of one matrix; its Hessian knows nothing of answers."""

    def of(weight: Tensor) -> Tensor:
        a, b = (getattr(model.q_proj, name)["default"].weight for name in ("lora_A", "lora_B"))
        a, b = (weight, b) if "lora_A" in path else (a, weight)
        return -torch.log_softmax(x_NI @ (model.q_proj.base.weight + b @ a).mT, -1)[:, 0].sum()

    return of


@pytest.mark.parametrize("copies", [1, 7])
@pytest.mark.parametrize("name", ["lora_A", "lora_B"])
def test_the_curvature_of_one_question_is_the_hessian(name: str, copies: int) -> None:
    """Oracle: torch.autograd's Hessian of the likelihood in one matrix, in which logits are linear."""
    model = toy()
    x = torch.randn(1, INPUTS, dtype=torch.float64).expand(copies, -1)
    path = f"q_proj.{name}.default"
    own = fitted(model, x)[1][path]
    exact = hessian(loss(model, x, path), matrices(model)[path].weight)
    size = own.a_II.shape[0] * own.g_OO.shape[0]
    torch.testing.assert_close(torch.kron(own.g_OO, own.a_II) / copies, exact.reshape(size, size))


def test_the_curvature_of_many_questions_is_exact_where_it_factorises() -> None:
    """Oracle: torch.autograd's Hessian. With W = B = 0 every answer is uniform, so that B's factors do not vary together."""
    model = toy()
    model.q_proj.base.weight.zero_()
    model.q_proj.lora_B["default"].weight.zero_()
    x = torch.randn(9, INPUTS, dtype=torch.float64)
    path = "q_proj.lora_B.default"
    own = fitted(model, x)[1][path]
    exact = hessian(loss(model, x, path), matrices(model)[path].weight).reshape(RANK * LETTERS, -1)
    torch.testing.assert_close(torch.kron(own.g_OO, own.a_II) / 9, exact)


def dense(model: Any, found: Posterior, sums: dict[str, Kronecker], tokens: int, x_I: Tensor) -> Tensor:
    """J (H + lambda I)^-1 J' by Jacobians of torch.autograd and inverses of whole matrices."""
    total = torch.zeros(LETTERS, LETTERS, dtype=torch.float64)
    for path, layer in found.layers.items():

        def logits(weight: Tensor, path: str = path) -> Tensor:
            a, b = (getattr(model.q_proj, name)["default"].weight for name in ("lora_A", "lora_B"))
            a, b = (weight, b) if "lora_A" in path else (a, weight)
            return (model.q_proj.base.weight + b @ a) @ x_I

        j = jacobian(logits, layer.weight).reshape(LETTERS, -1)
        h = torch.kron(sums[path].g_OO, sums[path].a_II) / tokens
        total += j @ torch.linalg.inv(h + found.precision * torch.eye(len(h), dtype=torch.float64)) @ j.mT
    return total


def test_the_covariance_of_the_logits_is_that_of_dense_algebra() -> None:
    model = toy()
    x = torch.randn(9, INPUTS, dtype=torch.float64)
    found, sums = fitted(model, x)
    found = dataclasses.replace(found, precision=0.7)
    asked = torch.randn(4, INPUTS, dtype=torch.float64)

    def forward() -> Tensor:
        return model.q_proj(asked.unsqueeze(1))[:, 0]  # type: ignore[no-any-return]

    logits, seen = jacobians(found.layers, forward)
    exact = torch.stack([dense(model, found, sums, 9, x_I) for x_I in asked])
    torch.testing.assert_close(found.covariance(seen), exact)
    with torch.no_grad():
        samples = found.sample(forward, 4096)
        torch.testing.assert_close(logits, forward())
    torch.testing.assert_close(samples.mean(0), logits)
    centred = samples - logits
    moments = torch.einsum("mbc,mbd->bcd", centred, centred) / 4096
    torch.testing.assert_close(moments, exact, rtol=0.05, atol=0.05 * exact.diagonal(dim1=1, dim2=2).max().item())


def test_the_best_prior_precision_is_that_of_the_closed_form() -> None:
    """Oracle: with P equal eigenvalues e the evidence is largest where lambda |w|^2 = P e / (e + lambda), a quadratic."""
    e, size, square = 3.0, 40, 2.5
    root = (-square * e + (square**2 * e**2 + 4 * square * size * e) ** 0.5) / (2 * square)
    values = [torch.full((4, 5), e, dtype=torch.float64)] * 2
    assert best_precision(values, square) == pytest.approx(root, rel=1e-3)
    by_hand = 0.5 * (size * torch.tensor(root).log() - root * square - size * torch.tensor(e + root).log())
    assert log_evidence(values, square, root) == pytest.approx(by_hand.item())


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    return world.save(tmp_path_factory.mktemp("world"))


@pytest.fixture(scope="module")
def run(place: tuple[str, str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A MAP model that knows its questions by heart, so that it is sure of what it cannot know: labels are wrong three in ten."""
    out = tmp_path_factory.mktemp("run")
    how: dict[str, Any] = {"stages": Stages(stage1=Plan(epochs=12, lr=1e-2), rank=4), "running": Running(log_every=100)}
    train(place[0], "sciq", "map", out=out, data=Data(root=place[1], stage2="permuted"), layers="all", **how)
    return out


def test_answers_of_a_run(run: Path, place: tuple[str, str]) -> None:
    """Oracle: the MAP model: its answers where one point stands for the Gaussian, and an NLL that a posterior must lower here."""
    questions, known = (tasks.load("sciq", split, data_root=place[1]) for split in ("test", "train"))
    plain = open_model(run)
    before = answer_questions(plain.model, plain.tokenizer, questions)
    opened = open_fitted(run, known, seed=1)

    def answers(passes: int, asked: Any = questions, **how: Any) -> Any:
        return answer_questions(opened.model, opened.tokenizer, asked, averaging="full", passes=passes, **how)

    alone, many, few = answers(1), answers(16), answers(16, questions[5:8])
    for ours, theirs in zip(alone, before, strict=True):
        assert ours.log_probs == pytest.approx(theirs.log_probs, abs=1e-4)
        assert ours.signals["novelty"] == pytest.approx(theirs.signals["novelty"], rel=1e-3)
    for ours, theirs in zip(many[5:8], few, strict=True):
        assert ours.log_probs == pytest.approx(theirs.log_probs, abs=1e-4)
        assert ours.signals["mutual_information"] == pytest.approx(theirs.signals["mutual_information"], abs=1e-4)

    def nll(found: Any) -> float:
        return -sum(one.log_probs[q.answer] for one, q in zip(found, questions, strict=True)) / len(questions)

    assert nll(many) < nll(before) - 0.1
    assert answers(2, questions[:1], batch_tokens=64)[0].signals["mutual_information"] > 0


def test_the_same_posterior_from_batches_of_any_size(run: Path, place: tuple[str, str]) -> None:
    """Oracle: all questions in one batch. In double precision, where rounding is no matter."""
    opened = open_model(run)
    opened.model.double().set_experts_implementation("eager")  # the grouped product knows no doubles
    known = encode_questions(opened.tokenizer, tasks.load("sciq", "train", data_root=place[1]), 128)
    with folded_quickly(opened.model):
        one, many = (fit(opened.model, known, batch_tokens=tokens) for tokens in (10**6, 200))
    assert one.precision == pytest.approx(many.precision, rel=1e-4)
    assert all("experts" not in path and "self_attn" in path for path in one.layers)
    for path, own in one.eigen.items():
        torch.testing.assert_close(own.values_OI, many.eigen[path].values_OI, rtol=1e-6, atol=1e-6)


def test_a_model_without_an_adapter_is_refused(place: tuple[str, str]) -> None:
    with pytest.raises(InputError, match="no LoRA adapter on its attention"):
        matrices(world.model())
    with pytest.raises(InputError, match="no method is attached"):
        sample_logits_by(world.model(), lambda forward, passes: forward().unsqueeze(0))
