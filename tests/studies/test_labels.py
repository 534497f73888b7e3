"""Names of methods in studies. Oracles: what the docs say each name means, written out."""

import json
from pathlib import Path
from typing import Any

import pytest
from train_workers import world

from vmoer import tasks
from vmoer.errors import InputError
from vmoer.files import digest
from vmoer.report.labels import split
from vmoer.studies import Study, calibration
from vmoer.studies._grid import run
from vmoer.studies._labels import member_of, parse, passes_of, stage1_label
from vmoer.studies._variants import prepare, train_label
from vmoer.training import laplace_lora
from vmoer.training.data import Examples
from vmoer.training.run import Plan

STUDY = Study("demo", "demo", Path("out"), methods=("map", "vglr-mf", "map+orders4"), averaging=("router", "orders"))


@pytest.mark.parametrize(
    ("label", "parts", "passes"),
    [
        ("map", ("map", "default", "router"), 1),
        ("map+orders", ("map", "default", "orders"), 8),
        ("map+orders4", ("map", "default", "orders"), 4),
        ("vglr-fc@paper+full", ("vglr-fc", "paper", "full"), 8),
        ("mcdr+orders+routing16", ("mcdr", "default", "orders+routing"), 16),
        ("blob", ("map", "permuted", "full"), 8),
        ("laplace-lora+full16", ("map", "permuted", "full"), 16),
    ],
)
def test_a_label_says_method_preset_averaging_and_passes(label: str, parts: tuple[str, ...], passes: int) -> None:
    assert parse(label) == parts
    assert passes_of(label, STUDY.passes) == passes


@pytest.mark.parametrize("label", ["map+order", "map+routing", "map+4", "mip+orders", "map@papers+orders"])
def test_other_labels_are_refused(label: str) -> None:
    with pytest.raises(InputError, match=r"averaging is|choose|did you mean"):
        parse(label)


def test_orders_are_for_every_method_and_routing_for_those_that_draw() -> None:
    assert calibration.labels(STUDY) == ["map", "map+orders", "vglr-mf", "vglr-mf+orders", "map+orders4"]
    both = Study("demo", "demo", Path("out"), methods=("map", "vglr-mf"), averaging=("full", "orders+routing"))
    assert calibration.labels(both) == ["map", "vglr-mf", "vglr-mf+full", "vglr-mf+orders+routing"]


def test_the_legend_knows_the_parts_of_a_label() -> None:
    assert split("vglr-mf@paper+orders+routing8+ts") == ["vglr-mf", "@paper", "+orders", "+routing", "+ts"]


@pytest.mark.parametrize(
    ("label", "parsed", "starts_from", "member"),
    [
        ("map-all", ("map", "permuted", "router"), "map-all", 0),
        ("map-all.2+orders", ("map", "permuted", "orders"), "map-all.2", 2),
        ("vglr-mf@permuted", ("vglr-mf", "permuted", "router"), "map-all", 0),
        ("vglr-mf@permuted-both", ("vglr-mf", "permuted-both", "router"), "map@permuted-both", 0),
        ("vglr-fc@printed-fast", ("vglr-fc", "printed-fast", "router"), "map@printed", 0),
        ("vglr-fc", ("vglr-fc", "default", "router"), "map", 0),
        ("vglr-fc@paper", ("vglr-fc", "paper", "router"), "map@paper", 0),
        ("lora-dropout", ("map", "permuted", "full"), "lora-dropout", 0),
        ("blob+full4", ("map", "permuted", "full"), "blob", 0),
        ("laplace-lora", ("map", "permuted", "full"), "map-all", 0),
    ],
)
def test_labels_share_the_map_model_they_start_from(
    label: str, parsed: tuple[str, ...], starts_from: str, member: int
) -> None:
    assert parse(label) == parsed
    assert stage1_label(label) == starts_from
    assert member_of(label) == member


def test_what_paper_covers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: docs/studies.md. `@paper` is asked with our prompt, labels of the printed protocol with the one that is given."""
    asked: dict[str, Any] = {}
    monkeypatch.setattr(
        "vmoer.studies._variants.train",
        lambda model, task, method, *, preset, data, **how: asked.update({preset: data}),
    )
    study = Study("demo", "demo", tmp_path, system_prompt="Printed.")
    for label in ("map", "map@paper", "map@printed"):
        train_label(study, label, out=tmp_path / "runs" / label, seed=0)
    prompts = {preset: data.system_prompt for preset, data in asked.items()}
    assert prompts == {"default": None, "paper": None, "printed": "Printed."}
    text = " ".join((Path(__file__).parents[2] / "docs" / "studies.md").read_text().split())
    assert "`@paper` covers training: " in text
    assert "Its prompt is ours, the system line included" in text


def test_every_label_of_a_comparison_saw_the_same_questions(tmp_path: Path) -> None:
    """Oracle: ids of the files. Labels at equal data say the same digest; the default's MAP has seen a fifth less in training."""
    model, data = world.save(tmp_path, n=40)
    plan = Plan(epochs=1, lr=1e-3)
    study = Study(model, "sciq", tmp_path / "out", data_root=data, stage1=plan, stage2=plan, vary_data=True)
    said = {}
    for label in ("map-all", "map-all.1", "vglr-mf@permuted", "map@permuted-both", "lora-dropout", "blob"):
        for seed in (0, 1):
            prepare(study, label, seed)
            folder = next((tmp_path / "out" / "runs").glob(f"{label}-s{seed}"))
            said[label, seed] = run = json.loads((folder / "run.json").read_text())
            mine = {q.id: q for split in ("train", "validation") for q in study.questions("sciq", split, seed)}
            published = tasks.load("sciq", "train", data_root=data) + tasks.load("sciq", "validation", data_root=data)
            assert set(mine) == {q.id for q in published}
            assert run["seen"] == {"training": 40, "validation": 24, "questions": digest({"ids": sorted(mine)})}
    assert len({run["seen"]["questions"] for run in said.values()}) == 1
    cuts = [{q.id for q in study.questions("sciq", "validation", seed)} for seed in (0, 1)]
    assert cuts[0] != cuts[1]
    assert [q.id for q in study.questions("sciq", "test", 0)] == [q.id for q in study.questions("sciq", "test", 1)]
    for seed in (0, 1):
        seeds = {label: run["seed"] for (label, of), run in said.items() if of == seed}
        assert seeds == dict.fromkeys(seeds, seed) | {"map-all.1": 1000 + seed}


def test_posteriors_over_the_adapter_are_answered_like_all_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: the study's passes in the files, the questions that the posterior was fitted on counted against the training file,
    and mutual information, which is zero where passes agree."""
    import pyarrow.parquet as pq

    model, data = world.save(tmp_path, n=40)
    fitted: list[list[int]] = []
    real = laplace_lora.fit

    def fit(opened: Any, examples: Examples, **how: Any) -> Any:
        fitted.append(sorted(map(len, examples.prompts)))
        return real(opened, examples, **how)

    monkeypatch.setattr(laplace_lora, "fit", fit)
    plan = Plan(epochs=2, lr=1e-2)
    methods = ("lora-dropout", "laplace-lora", "blob")
    study = Study(model, "sciq", tmp_path / "out", methods=methods, data_root=data, stage1=plan, stage2=plan, passes=3)
    outcome = run(calibration.cells(study), study.out, say=lambda text: None)
    assert not outcome.failed
    for label in methods:
        folder = study.out / f"{label}-s0"
        said = json.loads((folder / "meta.json").read_text())
        assert (said["method"], said["averaging"], said["passes"]) == (label, "full", 3)
        table = pq.read_table(folder / "predictions.parquet")
        assert set(table["split"].to_pylist()) == {"test", "validation"}  # an output temperature is fitted on these
        assert min(table["mutual_information"].to_pylist()) > 0
    assert {path.name for path in (study.out / "runs").iterdir() if path.is_dir()} == {
        *(f"{label}-s0" for label in ("lora-dropout", "map-all", "blob"))
    }
    assert len(fitted) == 1
    assert len(fitted[0]) == len(tasks.load("sciq", "train", data_root=data))
    before = (study.out / "blob-s0" / "predictions.parquet").stat().st_mtime_ns
    assert not run(calibration.cells(study), study.out, say=lambda text: None).failed
    assert (study.out / "blob-s0" / "predictions.parquet").stat().st_mtime_ns == before
    assert len(fitted) == 1


def test_posteriors_over_the_adapter_need_a_stage_1_and_whole_passes() -> None:
    embedded = Study("demo", "demo", Path("out"), stage1=Plan(epochs=0))
    with pytest.raises(InputError, match="needs a stage 1"):
        prepare(embedded, "blob", 0)
    with pytest.raises(InputError, match=r"\+full is all"):
        parse("blob+orders")
    with pytest.raises(InputError, match="takes no preset"):
        parse("blob@paper")
    assert calibration.labels(
        Study("demo", "demo", Path("out"), methods=("blob",), averaging=("router", "orders"))
    ) == ["blob"]
