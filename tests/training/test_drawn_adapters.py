"""Adapters that are drawn: LoRA dropout and BLoB. Oracles: torch.distributions, a posterior known in closed form, the plain
adapter with the sampled weights written into it, and runs that were never stopped or cut into pieces."""

import hashlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Normal, kl_divergence
from train_workers import world

from vmoer import tasks
from vmoer.errors import InputError
from vmoer.evaluation.answers import answer_questions
from vmoer.inference.averaging import predict_passes
from vmoer.live.adapters import OWN, AdapterNoise, divergence, draw, drawn_layers, layers_A, taken_off
from vmoer.live.attach import attach, sampled
from vmoer.live.context import Attachment
from vmoer.routers import Deterministic
from vmoer.training.blob import BLoB
from vmoer.training.drawn import open_drawn
from vmoer.training.lora import add_lora, folded_quickly
from vmoer.training.lora_dropout import LoRADropout
from vmoer.training.run import Data, Plan, Running, Stages, train
from vmoer.training.steps import Steps

ROWS, INPUTS = 3, 400
NOISES = [LoRADropout(rate=0.25), BLoB()]
Kind = pytest.mark.parametrize("noise", NOISES, ids=["lora-dropout", "blob"])


def toy(noise: AdapterNoise, inputs: int = INPUTS, rows: int = ROWS) -> tuple[Any, Attachment]:
    """One A, drawn, and what says which pass it is."""
    model = nn.Module()
    model.lora_A = nn.ModuleDict({"default": nn.Linear(inputs, rows, bias=False)})
    attachment = Attachment(routers={})
    draw(model, noise, seed=3, attachment=attachment)
    return model, attachment


def drawn(model: Any, attachment: Attachment, **asked: Any) -> Tensor:
    with attachment.asking(**asked):
        return model.lora_A["default"].weight.detach().clone()


def test_dropout_keeps_or_drops_a_whole_input() -> None:
    """Oracle: each column is zero, or A's divided by what is kept; the share of zeros is binomial, within five deviations."""
    model, attachment = toy(NOISES[0])
    mean = drawn(model, attachment)
    dropped = 0
    for number in range(50):
        now = drawn(model, attachment, passes=number)
        zero_I = (now == 0).all(0)
        torch.testing.assert_close(now[:, ~zero_I], mean[:, ~zero_I] / 0.75)
        dropped += int(zero_I.sum())
    n = 50 * INPUTS
    assert abs(dropped - 0.25 * n) < 5 * (n * 0.25 * 0.75) ** 0.5


def test_a_gaussian_has_its_mean_and_deviation() -> None:
    """Oracle: the mean and the deviation of standard normal numbers, within five standard errors."""
    model, attachment = toy(BLoB())
    layer = model.lora_A["default"]
    scale = layer.get_parameter(OWN).detach().square()
    mean = drawn(model, attachment)
    z = torch.stack([(drawn(model, attachment, passes=m) - mean) / scale for m in range(20)])
    assert abs(z.mean().item()) < 5 * z.numel() ** -0.5
    assert abs(z.std().item() - 1) < 5 * (2 * z.numel()) ** -0.5
    assert layer.get_parameter(OWN).min() > 0.05 / 2**0.5
    assert layer.get_parameter(OWN).max() < 0.05


@Kind
def test_a_draw_is_a_function_of_seed_and_number(noise: AdapterNoise) -> None:
    """Oracle: the draw itself, from another model with the same weights; draws of other numbers differ."""
    model, attachment = toy(noise)
    again, other = toy(noise)
    again.load_state_dict(model.state_dict())
    draws = [
        drawn(model, attachment, **asked) for asked in ({"passes": 0}, {"passes": 1}, {"step": 0}, {"step": 1}, {})
    ]
    assert all(not torch.equal(x, y) for i, x in enumerate(draws) for y in draws[:i])
    assert torch.equal(draws[1], drawn(again, other, passes=1))
    assert torch.equal(draws[2], drawn(again, other, step=0))
    with taken_off(model):
        assert torch.equal(model.lora_A["default"].weight, draws[-1])
        assert not drawn_layers(model)
        assert list(model.state_dict()) == ["lora_A.default.weight"]
    assert torch.equal(draws[0], drawn(model, attachment, passes=0))


def test_the_divergence_is_that_of_torch() -> None:
    """Oracle: torch.distributions.kl_divergence."""
    noise = BLoB(prior_scale=0.3)
    mean, own = torch.randn(4, 7), torch.rand(4, 7) + 0.1
    expected = kl_divergence(Normal(mean, own.square()), Normal(0.0, 0.3)).sum()
    torch.testing.assert_close(noise.divergence(mean, own), expected)
    model = toy(noise)[0]
    layer = model.lora_A["default"]
    found = divergence(model)
    assert found is not None
    torch.testing.assert_close(found, noise.divergence(layer.weight, layer.get_parameter(OWN)))
    assert divergence(toy(NOISES[0])[0]) is None


def test_blob_learns_a_posterior_known_in_closed_form() -> None:
    """Oracle: linear regression on orthogonal inputs, whose Gaussian posterior factorises: precision 1/s^2 + sum x^2 / v."""
    inputs, noise_sd, prior = 6, 0.5, 0.7
    x = torch.diag(torch.linspace(0.3, 2.0, inputs)).repeat(5, 1)
    y = x @ torch.randn(inputs, ROWS) + noise_sd * torch.randn(len(x), ROWS)
    precision_I1 = (1 / prior**2 + x.square().sum(0) / noise_sd**2).unsqueeze(1)
    mean_IR = x.mT @ y / noise_sd**2 / precision_I1
    model, attachment = toy(BLoB(prior_scale=prior, start_scale=0.5), inputs)
    layer = model.lora_A["default"]
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    average = torch.optim.swa_utils.AveragedModel(layer)
    for step in range(2000):
        optimizer.zero_grad()
        with attachment.asking(step=step):
            nll = -Normal(layer(x), noise_sd).log_prob(y).sum()
        penalty = divergence(model)
        assert penalty is not None
        (nll + penalty).backward()
        optimizer.step()
        if step >= 500:
            average.update_parameters(layer)
    mean_RI, own_RI = (p.detach() for p in average.module.parameters())
    exact_RI = precision_I1.mT.rsqrt().expand(ROWS, -1)
    torch.testing.assert_close(own_RI.square(), exact_RI, rtol=0.07, atol=0)
    assert ((mean_RI - mean_IR.mT) / exact_RI).abs().max() < 0.15


# -- on a model --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    return world.save(tmp_path_factory.mktemp("world"), n=40)


def go(place: tuple[str, str], out: Path, noise: AdapterNoise | None, micro: int | None = None, **how: Any) -> None:
    stages = Stages(stage1=Plan(epochs=2, lr=1e-2, micro_batch=micro), rank=2, adapter=noise)
    data = Data(root=place[1], stage2="permuted")
    running = Running(checkpoint_every=1, log_every=1, **how)
    train(place[0], "sciq", "map", out=out, stages=stages, layers="all", data=data, running=running)


@pytest.fixture(scope="module", params=NOISES, ids=["lora-dropout", "blob"])
def run(request: pytest.FixtureRequest, place: tuple[str, str], tmp_path_factory: pytest.TempPathFactory) -> Any:
    out = tmp_path_factory.mktemp("run") / "run"
    go(place, out, request.param)
    return request.param, out


def same(a: Path, b: Path, exactly: bool = True) -> None:
    """The adapter and what was trained beside it."""
    from safetensors.torch import load_file

    names = [path.name for path in (a / "map").glob("ada*.safetensors")]
    assert names == [path.name for path in (b / "map").glob("ada*.safetensors")]
    for name in names:
        ours, theirs = load_file(a / "map" / name), load_file(b / "map" / name)
        for key, value in ours.items():
            torch.testing.assert_close(
                value, theirs[key], **({"rtol": 0, "atol": 0} if exactly else {"rtol": 0, "atol": 1e-4})
            )


def test_a_stopped_run_ends_as_one_that_was_not(
    run: tuple[AdapterNoise, Path], place: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: the files of the run that was never stopped; this one is stopped in its second epoch."""
    real = Steps.take
    taken: list[int] = []

    def take(self: Steps, rows: Any, lr: float, step: int) -> Any:
        if len(taken) == 4:
            raise KeyboardInterrupt
        taken.append(step)
        return real(self, rows, lr, step)

    with monkeypatch.context() as patch:
        patch.setattr(Steps, "take", take)
        with pytest.raises(KeyboardInterrupt):
            go(place, tmp_path, run[0])
    go(place, tmp_path, run[0])
    same(run[1], tmp_path)


@pytest.mark.parametrize("how", [{"micro": 4}, {"recompute": True}], ids=["accumulated", "recomputed"])
def test_pieces_and_recomputed_layers_have_the_same_noise(
    how: dict[str, Any], run: tuple[AdapterNoise, Path], place: tuple[str, str], tmp_path: Path
) -> None:
    """Oracle: the run in one piece."""
    go(place, tmp_path, run[0], **how)
    same(run[1], tmp_path, exactly=False)


def test_noise_moves_what_is_learned(run: tuple[AdapterNoise, Path], place: tuple[str, str], tmp_path: Path) -> None:
    """Oracle: the same stage 1 with a plain adapter, which the files must differ from; and it cannot be opened as a drawn one."""
    from safetensors.torch import load_file

    go(place, tmp_path, None)
    plain, noisy = (load_file(path / "map" / "adapter_model.safetensors") for path in (tmp_path, run[1]))
    assert all((plain[key] - noisy[key]).abs().max() > 1e-4 for key in plain if "lora_B" in key)
    with pytest.raises(InputError, match="has a plain adapter"):
        open_drawn(tmp_path)


def test_a_pass_is_the_plain_adapter_with_its_sample_written_in(run: tuple[AdapterNoise, Path]) -> None:
    """Oracle: PEFT's own forward, A overwritten by the sample. Without a sample asked for, it is the mean."""
    opened = open_drawn(run[1], seed=5)
    model, batch = opened.model, {"input_ids": torch.tensor(world.examples(6, 3, fillers=0).prompts)}
    with folded_quickly(model):
        passes = predict_passes(model, batch, averaging="full", passes=3, tokens=world.LETTERS)
        mean = predict_passes(model, batch, tokens=world.LETTERS)[0]
    weights = []
    for number in range(3):
        with sampled(model, number):
            weights.append({path: layer.weight.detach().clone() for path, layer in drawn_layers(model).items()})
    with taken_off(model):
        torch.testing.assert_close(mean, predict_passes(model, batch, tokens=world.LETTERS)[0])
        for number, sample in enumerate(weights):
            for path, layer in layers_A(model).items():
                layer.weight.data = sample[path]
            torch.testing.assert_close(passes[number], predict_passes(model, batch, tokens=world.LETTERS)[0])
    assert (passes[0] - passes[1]).abs().max() > 1e-6


def test_answers_do_not_depend_on_the_batch(run: tuple[AdapterNoise, Path], place: tuple[str, str]) -> None:
    """Oracle: the same questions alone. Their passes disagree, so mutual information is above zero."""
    opened = open_drawn(run[1], seed=5)
    questions = tasks.load("sciq", "test", data_root=place[1])
    many = answer_questions(opened.model, opened.tokenizer, questions, averaging="full", passes=4)
    few = answer_questions(opened.model, opened.tokenizer, questions[7:10], averaging="full", passes=4)
    for ours, theirs in zip(many[7:10], few, strict=True):
        assert ours.log_probs == pytest.approx(theirs.log_probs, abs=1e-5)
        assert ours.signals["mutual_information"] == pytest.approx(theirs.signals["mutual_information"], abs=1e-6)
        assert ours.signals["mutual_information"] > 0
    with pytest.raises(InputError, match="drawn once for a whole pass"):
        answer_questions(opened.model, opened.tokenizer, questions[:2], averaging="orders+routing", passes=2)


def test_a_changed_file_is_refused(place: tuple[str, str], tmp_path: Path) -> None:
    """Oracle: one byte of what was trained beside A."""
    go(place, tmp_path, BLoB())
    path = tmp_path / "map" / "adapter_noise.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(InputError, match="was changed"):
        open_drawn(tmp_path)
    assert hashlib.sha256(data).hexdigest() not in (tmp_path / "map" / "run.json").read_text()


def test_what_cannot_be_drawn_is_refused(place: tuple[str, str]) -> None:
    model = attach(world.model(), Deterministic())
    with pytest.raises(InputError, match="no LoRA adapter"):
        draw(model, BLoB(), seed=0)
    tuned: Any = attach(add_lora(world.model(), rank=2), Deterministic())
    tuned.merge_adapter()
    with pytest.raises(InputError, match="merged"):
        draw(tuned, BLoB(), seed=0)
    with pytest.raises(InputError, match="between 0 and 1"):
        LoRADropout(rate=1.0)
    with pytest.raises(InputError, match="positive"):
        BLoB(prior_scale=0.0)
    with pytest.raises(InputError, match="give one of them"):
        train(*place, "map", out="out", stages=Stages(adapter=BLoB(), from_map="map"))
