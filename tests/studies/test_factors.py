"""What makes it calibrate: the design, the halves of validation, the rows, and a few levels on a small world."""

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from train_workers import world

import vmoer
from vmoer import gates, metrics, tasks
from vmoer.files import sealed
from vmoer.live.attach import attached, reconfigured, routers_of
from vmoer.models import open_model
from vmoer.report.factors import section
from vmoer.routers import Search
from vmoer.studies import STUDIES, Study, factor_rows, factors, grid
from vmoer.studies._grid import compute
from vmoer.studies._variants import prepare
from vmoer.training.data import halves
from vmoer.training.run import Data, Plan, Running, Stages, Workers, encode_questions, train
from vmoer.training.stages import validation_nll


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    return world.save(tmp_path_factory.mktemp("world"), n=60, validation=40, test=8)


def small(place: tuple[str, str], out: Path, **changes: Any) -> Study:
    plan = Plan(epochs=1, batch_size=16, lr=1e-3)
    settings = {"stage1": plan, "stage2": plan, "passes": 2, "data_root": place[1], "seeds": (0, 1)}
    return Study(model=place[0], task="sciq", out=out, **(settings | changes))  # type: ignore[arg-type]


# -- the design --------------------------------------------------------------------------------------------------------


def test_each_level_changes_one_thing(tmp_path: Path) -> None:
    """Oracle: counting what differs from the default, level by level."""
    study = Study(model="none", task="sciq", out=tmp_path)
    design = factors.levels(study, available=30)
    assert len({level.slug for level in design}) == len(design)
    assert {level.factor for level in design} == set(factors.FACTORS)
    for level in design:
        changes = [*level.config, *level.train]
        changes += ["method"] * (level.label != factors.METHOD)
        changes += ["prior"] * (level.relative is not None) + ["samples"] * (level.samples is not None)
        if level.factor in ("map", "together", "paper"):
            continue
        if level.factor == "noise in stage 1":  # at another scale, or with nothing after it
            assert level.train == {"noisy_stage1": True}
            assert len(changes) <= 2
        elif level.factor == "untrained noise":  # nothing is trained, and its size is what varies
            assert level.label == "fixed-noise"
            assert changes == ["method", "prior"]
        else:
            assert len(changes) == (level is not factors.DEFAULT), level


def test_the_size_of_tuned_noise_is_chosen_on_validation_and_that_of_fixed_noise_is_not(
    tmp_path: Path, place: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: what the runs say was tried, with a study that searches and with one that does not."""
    monkeypatch.setattr(vmoer.MeanField, "search", Search("prior_scale", (0.1, 0.7), passes=8))
    study = small(place, tmp_path)
    for search in (False, True):
        here = dataclasses.replace(study, search=search, out=tmp_path / str(search))
        for label in ("tuned-noise", "fixed-noise", "laplace", "mcdr"):  # the last two have nothing to search
            prepare(here, label, 0)
        runs = here.out / "runs"
        tuned, fixed = (
            json.loads((runs / f"{label}-s0" / "run.json").read_text()) for label in ("tuned-noise", "fixed-noise")
        )
        assert [*tuned["stage2"]["tried"]] == ["prior_scale=0.1", "prior_scale=0.7"]
        assert tuned["config"]["prior_scale"] in (0.1, 0.7)
        assert fixed["stage2"]["tried"] is None
        assert fixed["config"]["prior_scale"] == 2.0


def test_it_is_a_study_of_its_own(tmp_path: Path, place: tuple[str, str]) -> None:
    """It is asked for by name; `all`, which is the paper's experiments, leaves it out."""
    assert "factors" in STUDIES
    study = small(place, tmp_path, methods=("map",), ood=("sciq",))
    everything = {cell.study for cell in grid("all", study)}
    assert "factors" not in everything
    assert "calibration" in everything


# -- validation --------------------------------------------------------------------------------------------------------


def test_stopping_and_scoring_share_no_question(place: tuple[str, str], tmp_path: Path) -> None:
    """Oracle: set arithmetic on ids and wordings; and the validation NLL of a run, computed by hand on the first half."""
    whole = tasks.load("sciq", "validation", data_root=place[1])
    stop, score = halves(whole, 0)
    asked = factors.scored(small(place, tmp_path), with_stop=False)
    assert {q.id for q in asked} == {q.id for q in score}
    assert not {q.question for q in asked} & {q.question for q in stop}
    assert {q.id for q in stop} | {q.id for q in asked} == {q.id for q in whole}

    plan = Plan(epochs=1, lr=1e-3)
    found = {}
    for half in (True, False):
        out = tmp_path / str(half)
        stages, data = Stages(stage1=Plan(epochs=0), stage2=plan), Data(root=place[1], half_validation=half)
        said = train(place[0], "sciq", "vglr-mf", out=out, stages=stages, data=data, running=Running())
        found[half] = said["stage2"]["best_validation_nll"]
        opened = open_model(out, device="cpu")
        by_hand = encode_questions(opened.tokenizer, stop if half else whole, 128)
        assert validation_nll(opened.model, by_hand, Workers()) == pytest.approx(found[half], abs=1e-5)
    assert found[True] != found[False]


# -- rows from files ---------------------------------------------------------------------------------------------------


def write(out: Path, level: dict[str, Any], averaging: str, log_probs: Any, answers: Any, split: str) -> None:
    n = len(answers)
    folder = out / "factors" / f"{level['slug']}-s{level['seed']}"
    (folder / averaging).mkdir(parents=True)
    columns: dict[str, Any] = {"id": [f"q{i:03d}" for i in range(n)], "task": ["t"] * n, "split": [split] * n}
    columns |= {"method": [level["label"]] * n, "seed": [level["seed"]] * n, "answer": answers.tolist()}
    columns |= {"log_probs": log_probs.tolist(), "prompt_tokens": [9] * n}
    pq.write_table(pa.table(columns), folder / averaging / "predictions.parquet")
    (folder / averaging / "meta.json").write_text(json.dumps({"model": "m", "source_task": "t", "split": split}))
    (folder / "level.json").write_text(json.dumps(sealed(level)))


def test_differences_are_paired_over_questions_and_seeds(tmp_path: Path) -> None:
    """Oracle: numpy for the values, `metrics.paired_bootstrap` of the per-question scores for the interval."""
    rng = np.random.default_rng(0)
    answers = rng.integers(4, size=120)
    scores: dict[str, list[Any]] = {"map": [], "other": []}
    for seed in (0, 1):
        logits = rng.normal(size=(120, 4)) * 2
        for name, changed in (("map", logits), ("other", logits / 2 + rng.normal(size=(120, 4)) * 0.1)):
            log_probs = changed - np.log(np.exp(changed).sum(1, keepdims=True))
            level = {"factor": "map" if name == "map" else "beta", "level": name, "label": name, "seed": seed}
            level |= {"slug": name, "reference": "map"}
            write(tmp_path, level, "router", log_probs, answers, factors.SCORE)
            scores[name].append(metrics.nll_per_question(log_probs, answers))
    rows = {(row["level"], row["metric"]): row for row in factor_rows.summary(tmp_path)}
    ours, theirs = np.stack(scores["other"]), np.stack(scores["map"])
    row = rows["other", "nll_minus_map"]
    assert row["value"] == pytest.approx((ours - theirs).mean(), abs=1e-12)
    expected = metrics.paired_bootstrap(ours, theirs, draws=4000)
    assert row["high"] - row["low"] == pytest.approx(expected.high - expected.low, rel=0.15)
    assert row["seeds"] == 2
    # with a temperature nothing is left of a level that halves the logits, but for its noise
    assert abs(rows["other", "tempered_nll_minus_map"]["value"]) < 0.02 < abs(row["value"])
    assert rows["map", "nll"]["value"] == pytest.approx(theirs.mean(), abs=1e-12)
    assert ("map", "nll_minus_map") not in rows
    assert set(factors.METRICS) == {metric for level, metric in rows if level == "map"}
    for folder in (tmp_path / "factors").glob("map-s*"):  # the same files as the default's
        moved = folder.with_name(folder.name.replace("map", factors.DEFAULT.slug))
        shutil.copytree(folder, moved)
        level = json.loads((moved / "level.json").read_text()) | {"slug": factors.DEFAULT.slug, "level": "default"}
        (moved / "level.json").write_text(json.dumps(sealed(level)))
    again = {(row["level"], row["metric"]): row for row in factor_rows.summary(tmp_path)}
    for end in ("value", "low", "high"):
        assert again["other", "nll_minus_default"][end] == again["other", "nll_minus_map"][end]
    assert again["map", "nll_minus_default"]["value"] == 0
    assert ("default", "nll_minus_default") not in again


# -- a few levels ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*the paper takes")
def test_a_few_levels_and_the_section(place: tuple[str, str], tmp_path: Path) -> None:
    """Every way a level can differ once; run again nothing is computed; the table has them all and the figure draws them."""
    study = small(place, tmp_path, seeds=(0,))
    wanted = {
        "map-default-s-stage-1",
        "default-default",
        "S-2",
        "prior-scale-1-x-spread",
        "untrained-noise-0.2-x-spread",
        "noise-in-stage-1-at-the-prior",
    }
    wanted |= {"paper-map", "paper-vglr-fc", "learning-rate-0.003", "posterior-mean-only", "layers-first-1"}
    chosen = [level for level in factors.levels(study, 2) if level.slug in wanted]
    assert {level.slug for level in chosen} == wanted
    for level in chosen:
        assert compute(factors.cell(study, level, 0), tmp_path) == ""
    runs = {path.parent.name: json.loads(path.read_text()) for path in tmp_path.glob("runs/factors-*/run.json")}
    assert runs["factors-learning-rate-0.003-s0"]["stage2"]["plan"]["lr"] == 3e-3
    assert runs["factors-layers-first-1-s0"]["config"]["layers"] == [0]
    assert runs["factors-paper-vglr-fc-s0"]["config"]["sampling"] == "mc"
    assert (tmp_path / "runs" / "factors-noise-in-stage-1-at-the-prior-s0" / "map" / "run.json").exists()
    assert "factors-S-2-s0" not in runs  # the default's own run, asked with two points

    spread = json.loads((tmp_path / "factors" / "prior-scale-1-x-spread-s0" / "level.json").read_text())
    assert runs["factors-prior-scale-1-x-spread-s0"]["config"]["prior_scale"] == pytest.approx(spread["logit_spread"])
    noise = runs["factors-untrained-noise-0.2-x-spread-s0"]["config"]
    assert noise["prior_scale"] == pytest.approx(0.2 * spread["logit_spread"])
    assert noise["learn"] == "nothing"
    opened = open_model(tmp_path / "runs" / "map-s0" / "map", device="cpu")
    asked = tasks.load("sciq", "train", data_root=place[1])
    seen: list[torch.Tensor] = []
    for layer in opened.model.get_base_model().model.layers:
        router = layer.block_sparse_moe.router
        weight_ND = gates.router_weight(router, router.vmoer_gate)
        router.register_forward_hook(lambda module, args, out, w=weight_ND: seen.append((args[0] @ w.mT).std(-1)))
    for prompt in encode_questions(opened.tokenizer, asked, 128).prompts:
        opened.model(input_ids=torch.tensor([prompt]))
    experts = 8
    value = (
        torch.cat(seen).mean().item() * ((experts - 1) / experts) ** 0.5
    )  # of the experts there are, not of a sample
    assert spread["logit_spread"] == pytest.approx(value, rel=1e-3)

    rows = factor_rows.summary(tmp_path)
    page = section(rows)
    shown = {(line[0].text, line[1].text, line[2].text) for line in page.tables[0].rows}
    assert {("default", "default", kind) for kind in ("router", "answer", "full")} <= shown
    assert ("map", "default's stage 1 + output temperature", "router") in shown
    assert ("posterior", "mean-only", "full") not in shown
    assert "prior scale: 1 x spread" in page.figures[0].svg
    same = {row["averaging"]: row["value"] for row in rows if row["level"] == "default" and row["metric"] == "nll"}
    two = {row["averaging"]: row["value"] for row in rows if row["level"] == "2" and row["metric"] == "nll"}
    assert same["router"] != two["router"]  # other points
    assert same["full"] == two["full"]  # the study's passes are two already
    before = sorted(path.stat().st_mtime_ns for path in tmp_path.rglob("predictions.parquet"))
    for level in chosen:
        assert factors.work(study, level, 0) is not None
    assert sorted(path.stat().st_mtime_ns for path in tmp_path.rglob("predictions.parquet")) == before


def test_points_are_replaced_where_only_they_change(
    place: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: the shape of the fixed points while questions are answered, the trained heads, which are the default's own, and
    the number of samples in the files."""
    study = small(place, tmp_path, seeds=(0,))
    few = next(level for level in factors.levels(study, 2) if level.samples == 8)
    default, _ = factors.prepare_level(study, factors.DEFAULT, 0)
    real, seen = factors.predict_task, []

    def predict_task(model: Any, *args: Any, **kwargs: Any) -> Any:
        router: Any
        for layer, router in routers_of(model).items():
            own = routers_of(default.model)[layer]
            assert all((a == b).all() for a, b in zip(router.parameters(), own.parameters(), strict=True))
            config: Any = attached(model).config
            seen.append((router.points().shape[0], router.config.samples, config.samples))
        return real(model, *args, **kwargs)

    monkeypatch.setattr(factors, "predict_task", predict_task)
    factors.work(study, few, 0)
    assert set(seen) == {(8, 8, 8)}
    for averaging, passes in (("router", 1), ("answer", 8), ("full", 8)):
        meta = json.loads((tmp_path / "factors" / "S-8-s0" / averaging / "meta.json").read_text())
        assert (meta["config"]["samples"], meta["passes"]) == (8, passes)


def test_settings_change_inside_the_block_alone(place: tuple[str, str], tmp_path: Path) -> None:
    """Oracle: a model that was attached with these settings from the start."""
    batch = {"input_ids": torch.arange(5, 17).view(2, 6)}
    config = vmoer.FullCovariance(samples=32, seed=3)
    model = vmoer.attach(open_model(place[0], device="cpu").model, config)
    other = vmoer.attach(open_model(place[0], device="cpu").model, dataclasses.replace(config, samples=4))
    before = vmoer.predict(model, batch)
    with reconfigured(model, samples=4):
        assert torch.equal(vmoer.predict(model, batch), vmoer.predict(other, batch))
    assert torch.equal(vmoer.predict(model, batch), before)
    assert not torch.equal(vmoer.predict(other, batch), before)
    assert attached(model).config == config
