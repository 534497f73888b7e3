"""`vmoer.training.run.train`: the whole command on a model folder and a data folder."""

import hashlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from train_workers import job, world
from typer.testing import CliRunner

import vmoer
from vmoer import cli, metrics, tasks
from vmoer.errors import InputError
from vmoer.live.attach import attached, routers_of, sampled
from vmoer.models import open_model
from vmoer.routers import Search
from vmoer.studies._variants import Study, prepare
from vmoer.tasks.batches import padded
from vmoer.tasks.prompt import encode
from vmoer.training import stages
from vmoer.training.data import hold_out
from vmoer.training.layers import preset_layers
from vmoer.training.objective import evaluate
from vmoer.training.run import DEFAULT, PAPER, Data, Plan, Running, Stages, Workers, encode_questions, train
from vmoer.training.stages import validation_nll

PLANS: dict[str, Any] = {"stage1": {"epochs": 2, "lr": 1e-3}, "stage2": {"epochs": 3, "lr": 1e-3}}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    return world.save(tmp_path_factory.mktemp("world"))


def go(place: tuple[str, str], out: Path, method: Any = "vglr-fc", **more: Any) -> dict[str, Any]:
    plans = {name: Plan(**plan) for name, plan in PLANS.items()}
    stages: dict[str, Any] = {"rank": 2, **plans} | {
        name: more.pop(name) for name in [*more] if name in Stages.__dataclass_fields__
    }
    data = Data(root=place[1], stage2=more.pop("stage2_data", None))
    more = {"running": Running(checkpoint_every=3, log_every=2)} | more
    return train(place[0], "sciq", method, out=out, stages=Stages(**stages), data=data, **more)


@pytest.fixture(scope="module")
def run(place: tuple[str, str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("run")
    go(place, out)
    return out


def valid(place: tuple[str, str], tokenizer: Any) -> Any:
    return encode_questions(tokenizer, tasks.load("sciq", "validation", data_root=place[1]), 128)


def weights(folder: Path) -> dict[str, str]:
    """Every file of a run, by its checksum."""
    files = [*folder.rglob("*.safetensors"), *folder.rglob("telemetry.jsonl"), *folder.rglob("*.json")]
    return {str(f.relative_to(folder)): hashlib.sha256(f.read_bytes()).hexdigest() for f in files}


def test_a_run_folder_opens_and_is_what_validation_chose(run: Path, place: tuple[str, str]) -> None:
    """Oracle: the validation NLL of the opened folder, computed anew, is the best of the history in run.json."""
    said = json.loads((run / "run.json").read_text())
    assert {"model", "task", "method", "preset", "stage1", "stage2", "seed", "vmoer"} <= said.keys()
    opened = open_model(run, device="cpu")
    assert attached(opened.model).config.key == said["method"] == "vglr-fc"
    examples = valid(place, opened.tokenizer)
    assert validation_nll(opened.model, examples, Workers()) == pytest.approx(
        said["stage2"]["best_validation_nll"], abs=1e-5
    )
    assert all(router.fitted for router in routers_of(opened.model).values())
    for state, index in (("map", -1), ("map-early", said["stage1"]["best_epoch"])):
        mapped = open_model(run / state, device="cpu")
        expected = said["stage1"]["history"][index]["validation_nll"]
        assert validation_nll(mapped.model, examples, Workers()) == pytest.approx(expected, abs=1e-5)
    assert not list(run.glob("stage*.safetensors"))


def test_stage_2_learns_from_questions_that_stage_1_never_saw(place: tuple[str, str]) -> None:
    """Oracle: set arithmetic on ids."""
    questions = tasks.load("sciq", "train", data_root=place[1])
    known, unseen = hold_out(questions, 0.2, 0)
    assert {q.id for q in known} | {q.id for q in unseen} == {q.id for q in questions}
    assert not {q.id for q in known} & {q.id for q in unseen}
    assert not {q.question for q in known} & {q.question for q in unseen}
    assert len(unseen) == pytest.approx(0.2 * len(questions), abs=3)


@pytest.mark.slow
def test_killed_in_either_stage_the_same_command_gives_the_same_bytes(place: tuple[str, str], tmp_path: Path) -> None:
    """Oracle: every file of the run that was never killed. Signal 9 hits stage 1 and, in a second attempt, stage 2."""
    config: dict[str, Any] = {"layers": [0, 1], "beta": 0.001}
    method = vmoer.FullCovariance(**config)
    arguments = {
        "model": place[0],
        "task": "sciq",
        "data_root": place[1],
        "rank": 2,
        "method": "vglr-fc",
        "settings": config,
    }
    # stage 1 has ten steps: the first attempt dies in its seventh, the second goes on after its sixth and dies in stage 2
    for _ in range(2):
        arguments |= {"out": str(tmp_path / "killed"), "die_at": 7, **PLANS}
        killed = subprocess.run([sys.executable, job.__file__, json.dumps(arguments)], capture_output=True, text=True)
        assert killed.returncode == -9, killed.stderr
    assert (tmp_path / "killed" / "map-early" / "manifest.json").exists()
    assert not (tmp_path / "killed" / "manifest.json").exists()
    go(place, tmp_path / "killed", method)
    go(place, tmp_path / "whole", method)
    assert weights(tmp_path / "killed") == weights(tmp_path / "whole")


def test_a_finished_run_is_returned_and_other_settings_are_refused(
    run: Path, place: tuple[str, str], tmp_path: Path
) -> None:
    (run / "stage2.safetensors").touch()  # where it was killed after it had written the last file
    assert go(place, run) == json.loads((run / "run.json").read_text())
    assert not (run / "stage2.safetensors").exists()
    with pytest.raises(InputError, match="was begun with stage2="):
        go(place, run, objective="predictive")
    for state in ("map", "map-early"):
        (tmp_path / state).symlink_to(run / state)
    with pytest.raises(InputError, match="was begun with rank=2"):
        go(place, tmp_path, rank=4)
    with pytest.raises(InputError, match="is a run folder"):
        go((str(run), place[1]), run / "x")


def test_methods_share_a_stage_1(run: Path, place: tuple[str, str], tmp_path: Path) -> None:
    """Oracle: the adapter's bytes; and a stage 1 on other data is refused."""
    said = go(place, tmp_path / "b", "vtsr", from_map=run, objective="predictive", passes=2)
    adapter = "adapter_model.safetensors"
    assert (tmp_path / "b" / adapter).read_bytes() == (run / "map" / adapter).read_bytes()
    assert said["stage2"]["passes"] == 2
    with pytest.raises(InputError, match="held_out"):
        go(place, tmp_path / "c", "vtsr", from_map=run, stage2_data="train")
    with pytest.raises(InputError, match="no finished stage 1"):
        go(place, tmp_path / "c", "vtsr", from_map=tmp_path / "nothing")


def test_temp_scale_takes_the_temperature_that_validates_best(
    run: Path, place: tuple[str, str], tmp_path: Path
) -> None:
    """Oracle: every temperature of the grid, evaluated by hand on the MAP model."""
    said = go(place, tmp_path / "t", "temp-scale", from_map=run)
    found = {}
    for temperature in (0.01, 0.1, 0.2, 0.3, 0.5, 0.7, 1.0, 1.5, 2.0):
        opened = open_model(run / "map", device="cpu")
        vmoer.attach(vmoer.detach(opened.model), vmoer.Temperature(temperature=temperature))
        examples = valid(place, opened.tokenizer)
        found[temperature] = metrics.nll(evaluate(opened.model, examples, Workers()).numpy(), examples.answers)
    assert said["config"]["temperature"] == min(found, key=lambda t: found[t])
    assert list(said["stage2"]["tried"].values()) == pytest.approx(list(found.values()), abs=1e-5)


def test_search_chooses_beta_and_keeps_its_routers(
    run: Path, place: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: the values tried, in run.json, and the validation NLL of the opened folder."""
    monkeypatch.setattr(vmoer.MeanField, "search", Search("beta", (0.001, 10.0)))
    said = go(place, tmp_path / "s", "vglr-mf", from_map=run, search=True)
    best = min(said["stage2"]["tried"], key=said["stage2"]["tried"].get)
    assert f"beta={said['config']['beta']}" == best
    opened = open_model(tmp_path / "s", device="cpu")
    nll = validation_nll(opened.model, valid(place, opened.tokenizer), Workers())
    assert nll == pytest.approx(said["stage2"]["tried"][best], abs=1e-5)
    with pytest.raises(InputError, match="no beta or temperature"):
        go(place, tmp_path / "m", "mcdr", from_map=run, search=True)


def test_search_chooses_the_size_of_untrained_noise(
    run: Path, place: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: answers averaged over eight sampled passes, a temperature fitted on every other question for the rest."""
    monkeypatch.setattr(vmoer.MeanField, "search", Search("prior_scale", (0.1, 3.0), passes=8))
    said = go(place, tmp_path / "s", vmoer.MeanField(learn="nothing"), from_map=run, search=True)
    found = {}
    for scale in (0.1, 3.0):
        opened = open_model(run / "map", device="cpu")
        model = vmoer.attach(vmoer.detach(opened.model), vmoer.MeanField(learn="nothing", prior_scale=scale))
        examples = valid(place, opened.tokenizer)
        answers = np.asarray(examples.answers)
        passes = []
        for number in range(8):
            with sampled(model, number):
                passes.append(np.exp(evaluate(model, examples, Workers()).numpy()))
        log_probs = np.log(np.mean(passes, axis=0))
        total = 0.0
        for half in (0, 1):
            rest = metrics.fit_temperature(log_probs[1 - half :: 2], answers[1 - half :: 2])
            scaled = torch.from_numpy(log_probs[half::2] / rest).log_softmax(-1).numpy()
            total -= scaled[np.arange(len(scaled)), answers[half::2]].sum()
        found[f"prior_scale={scale}"] = total / len(answers)
    assert said["stage2"]["tried"] == pytest.approx(found, abs=1e-5)
    assert f"prior_scale={said['config']['prior_scale']}" == min(found, key=lambda name: found[name])
    assert abs(found["prior_scale=0.1"] - found["prior_scale=3.0"]) > 1e-3  # a choice that matters


@pytest.mark.filterwarnings("ignore:.*snapshots fit")
@pytest.mark.parametrize("method", ["map", "laplace", "swag", "mcdr"])
def test_every_method_leaves_a_folder_that_opens(
    method: str, run: Path, place: tuple[str, str], tmp_path: Path
) -> None:
    said = go(place, tmp_path, method, from_map=run, map_state="map-early")
    opened = open_model(tmp_path, device="cpu")
    assert torch.isfinite(evaluate(opened.model, valid(place, opened.tokenizer), Workers())).all()
    assert said["method"] == method


def test_the_papers_protocol_runs_as_printed(place: tuple[str, str], tmp_path: Path) -> None:
    """On this small world: fresh noise at inference, stage 2 on the training set, susceptible layers measured."""
    with pytest.warns(UserWarning, match="the paper takes"):
        said = go(place, tmp_path, "vglr-fc", preset=PAPER, layers="susceptible:1", stage2=Plan(epochs=1))
    assert said["preset"] == "paper"
    assert said["config"]["sampling"] == "mc"
    assert len(said["config"]["layers"]) == 1
    assert said["stage1"]["held_out"] == 0


@pytest.mark.filterwarnings("ignore:sciq .*the paper takes")
@pytest.mark.parametrize("more", [[], ["--beta", "0.02"]])
def test_the_papers_ten_layers_on_a_small_model(
    more: list[str], place: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Oracle: ten in thirty-two of the two MoE layers is one, rounded up; the study takes as many."""
    short = ["--stage1-epochs", "0", "--stage2-epochs", "1", "--data-root", place[1], "--preset", "paper", *more]
    command = ["train", place[0], "--task", "sciq", "--out", str(tmp_path / "run"), *short]
    assert cli.run(command) == 0
    note = f"note: the paper takes 10 layers of 32, and {place[0]} has 2 with experts: taking 1"
    assert capsys.readouterr().err.splitlines().count(note) == 1
    said = json.loads((tmp_path / "run" / "run.json").read_text())
    assert said["settings"]["stage2"]["layers"] == "susceptible:1"
    assert len(said["config"]["layers"]) == 1

    study = Study(model=place[0], task="sciq", out=tmp_path, data_root=place[1], stage1=Plan(epochs=0))
    assert attached(prepare(study, "vglr-fc@paper", 0).model).layers == said["config"]["layers"]
    command = ["study", "calibration", "--model", place[0], "--task", "sciq", "--out", str(tmp_path / "s"), "--dry-run"]
    for methods, times in (("map,vglr-fc", 0), ("map,vglr-fc@paper", 1)):
        assert cli.run([*command, "--data-root", place[1], "--methods", methods]) == 0
        assert capsys.readouterr().err.splitlines().count(note) == times


@pytest.mark.parametrize(("available", "taken"), [(32, 10), (10, 10), (9, 3), (1, 1), (0, 10)])
def test_the_papers_share_of_layers(
    available: int, taken: int, place: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: by hand, ten wherever there are ten; a dense model is refused later. From Python the note is a warning."""
    monkeypatch.setattr("vmoer.training.layers.skeleton", lambda name: name)
    monkeypatch.setattr("vmoer.training.layers.find", lambda model: range(available))
    layers, note = preset_layers(PAPER, "some/model")
    assert layers == f"susceptible:{taken}"
    assert bool(note) == (0 < available < 10)
    assert preset_layers(DEFAULT, "some/model") == ("all", "")
    if note:
        with pytest.raises(UserWarning, match="the paper takes 10 layers of 32"):
            train(place[0], "sciq", "vglr-fc", out=tmp_path, data=Data(root=place[1]), preset=PAPER)


def test_bad_input_is_one_line(place: tuple[str, str], tmp_path: Path) -> None:
    cases: tuple[tuple[dict[str, Any], str], ...] = (
        ({"stage2_data": "held-out:2"}, "write train, permuted, split:NAME, or held-out:0.2"),
        ({"preset": "papre"}, "unknown preset .*did you mean paper"),
        ({"method": "vglr"}, "unknown method"),
        ({"layers": "7"}, "7"),
        ({"stage1": Plan(epochs=1, batch_size=9, micro_batch=2)}, "does not divide"),
    )
    for number, (changes, message) in enumerate(cases):
        method = changes.pop("method", "vglr-fc")
        with pytest.raises(InputError, match=message):
            go(place, tmp_path / str(number), method, **{"stage1": Plan(epochs=0), **changes})


def test_novelty_knows_the_questions_of_both_stages(place: tuple[str, str], tmp_path: Path) -> None:
    """Oracle: over the prompts that A is made of, u' A^-1 u sums to tr(A^-1 (A - I)), D - tr(A^-1)."""
    go(place, tmp_path / "run", "vglr-mf")
    opened = open_model(tmp_path / "run")
    asked = tasks.load("sciq", "train", data_root=place[1])
    sums = {}
    for name, questions in (("both", asked), ("stage 1", hold_out(asked, 0.2, 0)[0])):
        batch = padded(encode(opened.tokenizer, questions, 2**31), next(opened.model.parameters()).device)
        with torch.no_grad(), vmoer.record(opened.model) as rec:
            opened.model(**batch)
        last = batch["attention_mask"].sum(1) - 1
        sums[name] = rec.signals["novelty"][:, torch.arange(len(last)), last].double().sum(1)
    roots = [router.novelty_root_RD.double() for router in routers_of(opened.model).values()]
    expected = torch.stack([len(root_DD) - root_DD.square().sum() for root_DD in roots])
    torch.testing.assert_close(sums["both"], expected, rtol=1e-4, atol=0)
    assert (sums["stage 1"] < 0.95 * expected).all()


def test_options_reach_the_run(place: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: whether the layers were run again when stage 1 began."""
    seen: list[bool] = []
    real = stages.optimise

    def optimise(model: Any, train: Any, valid: Any, plan: Any, stage: Any, running: Any) -> Any:
        if stage.number == 1:
            seen.append(model.is_gradient_checkpointing)
        return real(model, train, valid, plan, stage, running)

    monkeypatch.setattr(stages, "optimise", optimise)
    short = ["--task", "sciq", "--method", "map", "--data-root", place[1], "--stage1-epochs", "1", "--limit", "16"]
    for options in ([], ["--recompute"]):
        run = ["train", place[0], *short, *options, "--out", str(tmp_path / str(len(options)))]
        assert CliRunner().invoke(cli.app, run).exit_code == 0
    assert seen == [False, True]
