"""examples/smolmoe: the order of its jobs, stopping and going on, packs, and the study on a small world."""

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from train_workers import world

from vmoer import metrics
from vmoer.errors import InputError
from vmoer.evaluation import scores
from vmoer.studies import Cell, Study
from vmoer.studies import _packing as packing
from vmoer.studies._grid import missing

EXAMPLE = Path(__file__).parent.parent / "examples" / "smolmoe"
sys.path.insert(0, str(EXAMPLE))

import audit  # noqa: E402
import pooled  # noqa: E402
import run as example  # noqa: E402
import tempering  # noqa: E402
import verdicts  # noqa: E402
from cells import PARTS, questions, study_of  # noqa: E402

QUICK = ["--limit", "16", "--stage1-epochs", "1", "--stage2-epochs", "1", "--passes", "2", "--workers", "1"]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """A small model, and every data set the study asks for, in the sizes that their splits need."""
    folder = tmp_path_factory.mktemp("world")
    model, data = world.save(folder, n=40, validation=20, test=20)
    for task in ("openbookqa", "arc_challenge", "arc_easy", "mmlu_law"):
        shutil.copytree(Path(data) / "sciq", Path(data) / task)
    asked = [json.loads(line) for line in (Path(data) / "sciq" / "train.jsonl").read_text().splitlines()]
    many = [asked[i % 40] | {"id": f"m{i}", "question": f"w{i % 24} o{i % 39}"} for i in range(3210)]
    for task, split in (("medmcqa", "validation"), ("commonsense_qa", "train")):
        (Path(data) / task).mkdir()
        (Path(data) / task / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in many))
    return model, data


def go(place: tuple[str, str], out: Path, *more: str) -> int:
    start = ["--model", place[0], "--data-root", place[1], "--out", str(out), "--seeds", "0"]
    return example.main([*start, *QUICK, *more])


# -- the list ----------------------------------------------------------------------------------------------------------


def listed(place: tuple[str, str], out: Path, *more: str) -> list[Cell]:
    start = ["--model", place[0], "--data-root", place[1], "--out", str(out), "--limit", "16"]
    return example.wanted(example.parser().parse_args([*start, *more]))


def test_the_list_is_in_order_and_complete(place: tuple[str, str], tmp_path: Path) -> None:
    """Oracle: what the study is to compute, written out; what a cell needs comes before it."""
    found = missing(listed(place, tmp_path, "--seeds", "0,1"), tmp_path)
    names = [cell.title for cell in found]
    assert len(set(names)) == len(names)
    parts = [cell.key["part"] for cell in found]
    assert list(dict.fromkeys(parts)) == ["main", "paper", "tasks", "factors", "layers", "paper-tasks"]
    files = [cell.leaves for cell in found]
    for i, cell in enumerate(found):
        assert {need.leaves for need in cell.needs} <= set(files[:i]), cell.title
    methods: tuple[str, ...] = ("temp-scale", "mcdr", "swag", "vglr-mf", "vglr-fc", "vglr-lr", "vtsr", "laplace")
    methods += ("mean-only", "fixed-noise", "tuned-noise")
    for task in ("openbookqa", "arc_challenge", "sciq", "medmcqa"):
        for label in ("map", "map-early", *methods, "vglr-fc@paper", "vglr-mf@paper", "vtsr@paper"):
            for seed in (0, 1):
                assert f"{task}: {label}, seed {seed}" in names
    fc = next(cell for cell in found if cell.title == "openbookqa: vglr-fc, seed 0")
    assert {path.parent.name for path in fc.leaves[:3]} == {"vglr-fc-s0", "vglr-fc+answer-s0", "vglr-fc+full-s0"}
    assert fc.leaves[3].name.startswith("stability-")
    assert names[:4] == [
        "openbookqa: stage 1, seed 0",
        "openbookqa: map, seed 0",
        "openbookqa: stage 1, seed 1",
        "openbookqa: map, seed 1",
    ]
    study = study_of(Study(place[0], "", tmp_path, data_root=place[1], limit=16), "openbookqa")
    assert {q.task for q in questions(study, validation=False)} == {
        *("openbookqa", "arc_easy", "arc_challenge", "medmcqa", "mmlu_law")
    }
    gb = {cell.title: cell.gb for cell in found}
    assert gb["openbookqa: laplace, seed 0"] < gb["openbookqa: vtsr, seed 0"] < gb["openbookqa: stage 1, seed 0"]


def test_cells_have_the_names_that_were_timed(place: tuple[str, str], tmp_path: Path) -> None:
    """Oracle: what the runs of results/smolmoe were called, by which the time of a cell is guessed."""
    found = {cell.kind for cell in missing(listed(place, tmp_path), tmp_path)}
    timed = {kind for kind in example.times(tmp_path) if ", layers: " not in kind}  # the model there has more layers
    assert len(timed) > 90
    assert timed <= found


def test_a_part_may_take_fewer_seeds(
    place: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    few = ("--seeds", "0,1,2", "--seeds-of", "tasks=1", "layers=3")
    found = missing(listed(place, tmp_path, *few), tmp_path)
    seeds = {part: {cell.key["seed"] for cell in found if cell.key["part"] == part} for part in PARTS}
    assert seeds["tasks"] == {0}
    assert seeds["factors"] == {0, 1}
    assert seeds["main"] == seeds["layers"] == {0, 1, 2}
    some = [cell.key["method"] for cell in listed(place, tmp_path, "--only", "factors", "--factors", "beta")]
    assert {method.removeprefix("factors, ").partition(":")[0] for method in some} == {"map", "default", "beta"}
    with pytest.raises(SystemExit):
        go(place, tmp_path, "--seeds-of", "everything=2")
    assert "write PART=N" in capsys.readouterr().err


def test_a_pack_made_meanwhile_speaks_of_nothing_that_it_does_not_hold(tmp_path: Path) -> None:
    task = tmp_path / "a" / "t"
    (task / "cells").mkdir(parents=True)
    for name in ("whole-s0", "half-s0"):
        (task / name).mkdir()
        (task / name / "meta.json").write_text("{}")
    pq.write_table(pa.table({"id": ["q"], "log_probs": [[-1.0, -2.0]]}), task / "whole-s0" / "predictions.parquet")
    packing.pack(tmp_path / "a", tmp_path / "pack")
    assert packing.unpack(tmp_path / "pack", tmp_path / "b") == 1
    assert [path.parent.name for path in (tmp_path / "b").rglob("meta.json")] == ["whole-s0"]


def test_a_pack_holds_what_was_made_from_another_pack(tmp_path: Path) -> None:
    """float32 beside float64: predictions that were copied from unpacked ones, and new ones. Oracle: the rows by hand."""
    task = tmp_path / "a" / "t"
    (task / "cells").mkdir(parents=True)
    for name, kind in (("new-s0", pa.float64()), ("old-s0", pa.float32())):
        (task / name).mkdir()
        (task / name / "meta.json").write_text("{}")
        columns = {"id": ["q"], "log_probs": pa.array([[-1.0, -2.0]], pa.list_(kind)), "novelty": pa.array([0.5], kind)}
        pq.write_table(pa.table(columns), task / name / "predictions.parquet")
    packing.pack(tmp_path / "a", tmp_path / "pack")
    assert packing.unpack(tmp_path / "pack", tmp_path / "b") == 2
    for path in (tmp_path / "b").rglob("predictions.parquet"):
        assert pq.read_table(path).to_pylist() == [{"id": "q", "log_probs": [-1.0, -2.0], "novelty": 0.5}]


def test_a_stage_1_that_was_made_again_is_named() -> None:
    """Labels of other stage 1s, and what has none of its own, are no sign of it; a router on another adapter than MAP is."""
    made = {"map-all": "a", "vglr-mf@permuted": "a", "map@permuted-both": "b", "map-all.1": "c", "lora-dropout": "d"}
    made |= {"map-ens3": "e", "last-laplace": "f", "map@printed": "g", "vglr-fc@printed-best": "g"}
    told: list[str] = []

    def check() -> list[str]:
        metas = [{"method": name, "seed": 0, "fingerprint": {"adapter": own}} for name, own in made.items()]
        packing._check_stage1("sciq", metas, told.append)
        return told

    assert check() == []
    made["vglr-mf@permuted+full"] = "h"
    assert check() == ["sciq, seed 0: map-all was made 2 times: methods and map are not paired exactly"]


@pytest.mark.parametrize("folder", ["../../map-s0", "/tmp/map-s0"])
def test_a_pack_writes_nowhere_else(folder: str, tmp_path: Path) -> None:
    task = tmp_path / "results" / "t"
    task.mkdir(parents=True)
    pq.write_table(pa.table({"folder": [folder], "id": ["q"], "log_probs": [[-1.0]]}), task / "predictions.parquet")
    (task / "files.json").write_text(json.dumps({f"{folder}/meta.json": {}}))
    with pytest.raises(InputError, match="it would write to"):
        packing.unpack(tmp_path / "results", tmp_path / "out" / "here")
    assert not list(tmp_path.rglob("map-s0"))


def test_two_runs_of_one_seed_are_not_mixed(tmp_path: Path) -> None:
    """The same predictions twice are nothing new; others under the same name are another model's, and would be paired."""
    for name, value in (("a", -1.0), ("b", -1.5)):
        task = tmp_path / name / "t"
        (task / "cells").mkdir(parents=True)
        (task / "map-s0").mkdir()
        (task / "map-s0" / "meta.json").write_text("{}")
        pq.write_table(pa.table({"id": ["q"], "log_probs": [[value, -2.0]]}), task / "map-s0" / "predictions.parquet")
        packing.pack(tmp_path / name, tmp_path / f"{name}.pack")
    out = tmp_path / "out"
    assert [packing.unpack(tmp_path / "a.pack", out) for _ in range(2)] == [1, 0]
    with pytest.raises(InputError, match=r"b\.pack has other predictions of t/map-s0 than those here"):
        packing.unpack(tmp_path / "b.pack", out)


@pytest.mark.parametrize("serves", [True, False])
def test_a_service_that_serves_nobody_is_ended_first(
    serves: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Oracle: what the stand-ins for the service and for a process under it were asked, in order."""
    asked: list[str] = []

    def run(command: list[str], **how: Any) -> None:
        asked.append("probe" if command[0] == sys.executable else "start" if "-d" in command else how["input"].decode())
        if asked[-1] == "probe" and not serves:
            raise subprocess.CalledProcessError(1, command)

    monkeypatch.setattr(subprocess, "run", run)
    with example._mps():
        asked.append("cells")
    assert asked == (["start", "probe", "cells", "quit\n"] if serves else ["start", "probe", "quit\n", "cells"])
    assert ("no CUDA MPS" in capsys.readouterr().out) is not serves


# -- all tasks together --------------------------------------------------------------------------------------------------


def test_a_difference_over_tasks_is_the_mean_of_theirs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Oracle: answers whose losses differ by a known number on each task; noise that the tasks do not share averages out."""
    rng, known = np.random.default_rng(3), {"a": -0.1, "b": 0.02}
    for task, less in known.items():
        rows = []
        for seed in (0, 1):
            for i in range(400):
                loss = rng.uniform(0.7, 1.5)
                for method, own in (("map", loss), ("x", loss + less + rng.normal(0, 0.1))):
                    log_probs = [-own, float(np.log1p(-np.exp(-own)))]
                    one = {"task": task, "split": "test", "method": method, "seed": seed, "id": str(i), "answer": 0}
                    rows.append(one | {"log_probs": log_probs, "prompt_tokens": 9})
        (tmp_path / task).mkdir()
        (tmp_path / task / "meta.json").write_text(json.dumps({"model": "m", "source_task": task}))
        pq.write_table(pa.Table.from_pylist(rows), tmp_path / task / "predictions.parquet")
    assert pooled.main([str(tmp_path), "x", "map", "--against", "map"]) == 0
    head, _, line, same = capsys.readouterr().out.splitlines()
    assert head == "| NLL - map | a | b | all |"
    numbers = [float(n) for n in re.findall(r"[-+][.\d]+", line)]
    for (value, low, high), expected in zip(np.reshape(numbers, (3, 3)), (-0.1, 0.02, -0.04), strict=True):
        assert value == pytest.approx(expected, abs=0.012)
        assert low < expected < high
        assert high - low < 0.04
    assert re.findall(r"[-+][.\d]+", same) == ["+.000"] * 9
    whole = pq.read_table(tmp_path / "b" / "predictions.parquet")
    for wrong in (["y"], ["x", "--against", "y"], ["x", "--against", "map", "--shifts"], ["x", "--against", "map"]):
        assert pooled.main([str(tmp_path), *wrong]) == 2
        assert len(capsys.readouterr().err.splitlines()) == 1
        pq.write_table(whole.slice(0, len(whole) - 1), tmp_path / "b" / "predictions.parquet")  # one answer is missing


# -- a temperature that follows a signal ---------------------------------------------------------------------------------


def test_the_novelty_temperature_is_found_again() -> None:
    """Oracle: answers drawn at a known temperature and slope, 20,000 of them; NLL there is the least."""
    rng = np.random.default_rng(0)
    novelty = np.exp(0.5 * rng.normal(size=20_000))
    logits = 4 * rng.normal(size=(20_000, 4))
    warm = logits / (2.0 * (novelty / np.median(novelty)) ** 0.7)[:, None]
    answers = (warm + rng.gumbel(size=warm.shape)).argmax(1)
    fitted = tempering.fit(logits, answers, np.log(novelty))
    assert fitted[0] == pytest.approx(2.0, rel=0.03)
    assert fitted[1] == pytest.approx(0.7 * np.log(novelty).std(), rel=0.05)
    beyond = tempering.apply(logits[:1], np.array([1e6]), fitted)
    np.testing.assert_array_equal(beyond, tempering.apply(logits[:1], np.log(novelty).max(keepdims=True), fitted))


def test_without_differences_in_novelty_it_is_temperature_scaling() -> None:
    rng = np.random.default_rng(1)
    logits = 3 * rng.normal(size=(2000, 4))
    answers = (logits / 1.7 + rng.gumbel(size=logits.shape)).argmax(1)
    log_probs = logits - np.log(np.exp(logits).sum(1, keepdims=True))
    found = tempering.fit(log_probs, answers, np.full(2000, 0.2))
    assert found[0] == pytest.approx(metrics.fit_temperature(log_probs, answers), rel=1e-3)
    novel = rng.uniform(1, 2, 2000)
    # more certain where it is new: not taken
    easier = (logits * novel[:, None] + rng.gumbel(size=logits.shape)).argmax(1)
    assert tempering.fit(log_probs, easier, np.log(novel))[1] == 0


def test_what_novelty_adds_to_a_temperature_is_seen() -> None:
    """Oracle: sets whose right temperature is their novelty; one for all must be worse on the nearest and the farthest."""

    def answers(novelty: float, seed: int) -> tempering.Answers:
        rng = np.random.default_rng(seed)
        logits = 4 * rng.normal(size=(4000, 4))
        drawn = (logits / novelty + rng.gumbel(size=logits.shape)).argmax(1)
        own = logits - np.log(np.exp(logits).sum(1, keepdims=True))
        return tempering.Answers(own, drawn, np.log(novelty) + 0.01 * rng.normal(size=4000))

    right = {"near": 2.0, "middle": 3.0, "far": 4.0}
    shifts = {name: answers(novelty, i + 1) for i, (name, novelty) in enumerate(right.items())}
    for name, losses, slope in tempering.compared(answers(1.0, 0), shifts):
        seen = [1.0, *(novelty for other, novelty in right.items() if other != name)]
        assert slope == pytest.approx(np.log(seen).std(), rel=0.1), name  # T is novelty itself: one power of it
        means = {kind: loss.mean() for kind, loss in losses.items()}
        if name != "middle":  # which the pooled temperature happens to fit
            assert means["pooled, s"] < means["pooled"] - 0.01, name
        assert means["pooled"] < means["home"]
        assert means["home"] == pytest.approx(means["as it is"], abs=0.02)


def test_the_table_of_temperatures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Oracle: each column fitted by hand. By entropy it needs no column; a signal that a method lacks is one line."""
    rng, columns = np.random.default_rng(2), []
    for task, split, heat in (("own", "validation", 2.0), ("own", "test", 2.0), ("shift", "test", 3.0)):
        logits = 4 * rng.normal(size=(300, 4))
        answers = (logits / heat + rng.gumbel(size=logits.shape)).argmax(1)
        log_probs = logits - np.log(np.exp(logits).sum(1, keepdims=True))
        columns.append((task, split, log_probs, answers))
    rows = [
        {"task": task, "split": split, "method": "map", "seed": 0, "answer": int(answer), "log_probs": p.tolist()}
        | {"novelty": 1.0, "gate_entropy": None}
        for task, split, log_probs, answers in columns
        for p, answer in zip(log_probs, answers, strict=True)
    ]
    schema = pa.Table.from_pylist(rows).schema
    schema = schema.set(schema.get_field_index("gate_entropy"), pa.field("gate_entropy", pa.float64()))
    pq.write_table(pa.Table.from_pylist(rows, schema=schema), tmp_path / "predictions.parquet")
    (_, _, home, home_answers), *tests = columns
    temperature = metrics.fit_temperature(home, home_answers)
    for by in ("novelty", "predictive_entropy"):
        assert tempering.main([str(tmp_path), "--by", by]) == 0
        head, *lines = capsys.readouterr().out.splitlines()
        assert f"what {by} adds" in head
        assert [line.split()[1] for line in lines] == ["own", "shift"]
        for line, (_, _, log_probs, answers) in zip(lines, tests, strict=True):
            plain, at_home = line.split()[2:4]
            assert float(plain) == pytest.approx(metrics.nll(log_probs, answers), abs=6e-4)
            scaled = metrics.apply_temperature(log_probs, temperature)
            assert float(at_home) == pytest.approx(metrics.nll(scaled, answers), abs=6e-4)
            if by == "novelty":  # the same everywhere: nothing is added
                assert line.count("+0.000") + line.count("-0.000") == 6
    for wrong in ([str(tmp_path), "--by", "gate_entropy", "map"], [str(tmp_path), "swag"], [str(tmp_path / "none")]):
        assert tempering.main(wrong) == 2
        assert len(capsys.readouterr().err.splitlines()) == 1


# -- verdicts ----------------------------------------------------------------------------------------------------------


def world_of_answers(results: Path, worse: float = 0.0) -> Path:
    """Four tasks and a shift where map is overconfident by 3, and vglr-fc is not; with `worse` vglr-fc loses accuracy."""
    for task in verdicts.TASKS:
        shifts = ["medmcqa"] if task == "openbookqa" else []
        tables = []
        for asked, split in ((task, "validation"), (task, "test"), *((shift, "test") for shift in shifts)):
            n, far = 400, asked != task
            rng = np.random.default_rng([*map(ord, asked + split)])
            logits = (0.3 if far else 1.5) * rng.normal(size=(n, 4))
            answers = (logits + rng.gumbel(size=logits.shape)).argmax(1)
            novelty = np.exp(0.2 * rng.normal(size=n)) * (4 if far else 1)
            for method, scale in (("map", 3.0), ("vglr-fc", 1.0)):
                own = scale * logits / (0.1 if far else 1) / (3 if far and method == "vglr-fc" else 1)
                if method == "vglr-fc" and worse:
                    own = own + worse * rng.normal(size=own.shape)
                own = own - np.log(np.exp(own).sum(1, keepdims=True))
                tables.append(
                    pa.table(
                        {
                            "id": [f"{i}" for i in range(n)],
                            "task": [asked] * n,
                            "split": [split] * n,
                            "method": [method] * n,
                            "seed": [0] * n,
                            "answer": answers,
                            "log_probs": own.tolist(),
                            "prompt_tokens": rng.integers(50, 60, n),
                            "gate_entropy": rng.normal(size=n),
                            "novelty": novelty,
                        }
                    )
                )
        (results / task).mkdir(parents=True)
        pq.write_table(pa.concat_tables(tables), results / task / "predictions.parquet")
        meta = {"model": "m", "source_task": task, "ood_tasks": shifts, "split": "test"}
        (results / task / "meta.json").write_text(json.dumps(meta))
    rows = scores.score(results, draws=100)
    stable = {"study": "stability", "method": "vglr-fc", "seed": None, "metric": "jaccard_minus_map", "gamma": 0.01}
    rows += [stable | {"value": 0.01, "low": 0.005, "high": 0.02, "task": "openbookqa"}]
    (results / "metrics.json").write_text(json.dumps(rows))
    return results


def test_the_time_of_a_seed_is_its_share_of_the_gpu() -> None:
    """Oracle: by hand. Two runs; of the first minute of each half belongs to a job that is not of the main table."""
    stage1, other = ("factors", f"{verdicts.SOURCE}: stage 1"), ("tasks", "sciq: map")
    told = [(0, 60, *stage1, 0), (0, 120, *other, 0), (120, 60, "main", "openbookqa: map", 0)]
    told += [(0, 60, "main", "openbookqa: map", 1), (0, 60, *other, 1), (60, 30, *stage1, 7)]
    rows = [
        {"start": float(start), "seconds": float(seconds), "tier": tier, "job": f"{job}, seed {seed}"}
        for start, seconds, tier, job, seed in told
    ]
    assert verdicts.gpu_minutes(rows) == pytest.approx({0: 1.5, 1: 0.5})
    assert verdicts.gpu_minutes([]) == {}


def test_verdicts_can_say_yes_and_no(tmp_path: Path) -> None:
    """Oracle: worlds in which the answer is known."""
    found = {
        claim.partition(":")[2] or claim: passed
        for passed, claim, _ in verdicts.lines(world_of_answers(tmp_path / "a"))
    }
    assert [passed for claim, passed in found.items() if "debiased ECE at most a third" in claim] == [True]
    assert [passed for claim, passed in found.items() if "NLL below map's on all four" in claim] == [True]
    assert [passed for claim, passed in found.items() if "a routing signal is" in claim] == [True]
    assert [passed for claim, passed in found.items() if "stabler" in claim] == [True]
    ranked = verdicts.candidates(tmp_path / "a")
    assert next(iter(ranked)).startswith("vglr-fc")
    assert {"vglr-fc", "vglr-fc+ts"} == ranked.keys()
    lost = {claim: passed for passed, claim, _ in verdicts.lines(world_of_answers(tmp_path / "b", worse=4.0))}
    assert [passed for claim, passed in lost.items() if "debiased ECE at most a third" in claim] == [False]
    assert [passed for claim, passed in lost.items() if "no worse than map+ts" in claim] == [False]


# -- the study ---------------------------------------------------------------------------------------------------------


def columns(path: Path) -> tuple[list[str], Any]:
    table = pq.read_table(path / "predictions.parquet")
    return table["id"].to_pylist(), np.array(table["log_probs"].to_pylist())


@pytest.mark.slow
def test_stop_pack_go_on_elsewhere_and_report(
    place: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Oracle: the files of the first machine. What came in a pack is not computed again, and is what it was but for rounding."""
    labels = ["--only", "main", "--labels", "map", "vglr-fc"]
    assert go(place, tmp_path / "a", *labels, "--minutes", "0") == 0
    said = capsys.readouterr().out
    assert "missing: 3 of 3 cells" in said
    assert "main: openbookqa: vglr-fc, seed 0" in said

    pack = tmp_path / "one.tar.xz"
    assert go(place, tmp_path / "a", *labels, "--pack", str(pack)) == 0
    assert "missing: 0 of 3 cells" in capsys.readouterr().out
    here = tmp_path / "a" / "openbookqa"
    assert not (here / "runs" / "vglr-fc-s0").exists()  # nothing needs it any more
    assert json.loads((here / "records" / "vglr-fc-s0.json").read_text())["method"] == "vglr-fc"
    assert pack.stat().st_size < 60_000
    with tarfile.open(pack) as packed:
        assert not any(name.endswith("safetensors") for name in packed.getnames())

    labels.append("mean-only")
    there = tmp_path / "b" / "openbookqa"
    second = tmp_path / "two.tar.xz"
    assert go(place, tmp_path / "b", *labels, "--unpack", str(pack), "--pack", str(second)) == 0
    said = capsys.readouterr().out
    assert "4 folders of predictions came" in said
    assert [line.split("] ")[1].split(":")[1] for line in said.splitlines() if line.startswith("[")] == [
        *(" stage 1, seed 0", " mean-only, seed 0")
    ]
    for folder in ("map-s0", "vglr-fc-s0", "vglr-fc+answer-s0", "vglr-fc+full-s0"):
        (ids, ours), (same, theirs) = columns(there / folder), columns(here / folder)
        assert ids == same
        np.testing.assert_allclose(ours, theirs, rtol=2**-14)
        assert (there / folder / "meta.json").read_text() != ""
    assert second.stat().st_size < pack.stat().st_size  # what came is not packed again

    assert go(place, tmp_path / "c", "--unpack", str(pack), str(second), "--report") == 0
    said = capsys.readouterr().out
    results = tmp_path / "c" / "results"
    rows = json.loads((results / "metrics.json").read_text())
    nll = {row["method"]: row["value"] for row in rows if row["metric"] == "nll" and row["task"] == "openbookqa"}
    assert {
        "map",
        "map+ts",
        "vglr-fc",
        "vglr-fc+answer",
        "vglr-fc+full",
        "vglr-fc+full+ts",
        "mean-only",
    } <= nll.keys()
    table = pq.read_table(here / "vglr-fc-s0" / "predictions.parquet")
    keys = zip(table["task"].to_pylist(), table["split"].to_pylist(), strict=True)
    own = [i for i, key in enumerate(keys) if key == ("openbookqa", "test")]
    picked = [table["log_probs"][i].as_py()[table["answer"][i].as_py()] for i in own]
    assert nll["vglr-fc"] == pytest.approx(-np.mean(picked), rel=1e-4)
    assert {row["study"] for row in rows} >= {"stability", "brittleness"}
    assert 'id="stability"' in (results / "report" / "index.html").read_text()
    assert str(results / "report" / "index.html") in said

    assert go(place, tmp_path / "again", "--unpack", str(results), "--report") == 0  # results are a pack
    for name in ("metrics.json", "openbookqa/files.json", "openbookqa/meta.json", "timing.jsonl"):
        assert (tmp_path / "again" / "results" / name).read_text() == (results / name).read_text()
    assert go(place, tmp_path / "d", "--unpack", str(tmp_path / "a")) == 2
    assert "no folder of results" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        go(place, tmp_path, "--only", "everything")
    assert go(place, tmp_path / "d", "--unpack", str(tmp_path / "none.tar.xz")) == 2
    assert "no such file" in capsys.readouterr().err


@pytest.mark.slow
def test_processes_share_the_work(place: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The command itself, in two processes that keep their models: both seeds are there, and a second call does nothing."""
    command = [sys.executable, str(EXAMPLE / "run.py"), "--model", place[0], "--data-root", place[1]]
    command += [
        "--out",
        str(tmp_path),
        *QUICK[:-1],
        "2",
        "--seeds",
        "0,1",
        "--labels",
        "map",
        "mean-only",
        "--only",
        "main",
    ]
    first = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "missing: 0 of 6 cells" in first.stdout, first.stdout + first.stderr
    for seed in (0, 1):
        for label in ("map", "mean-only"):
            assert (tmp_path / "openbookqa" / f"{label}-s{seed}" / "meta.json").exists()
    capsys.readouterr()
    assert example.main(command[2:]) == 0
    assert not [line for line in capsys.readouterr().out.splitlines() if line.startswith("[")]


@pytest.mark.slow
def test_one_command_from_the_model_to_the_verdicts(place: tuple[str, str], tmp_path: Path) -> None:
    """all.sh over a model that is built already (tests/test_upcycle.py builds one): the page, and every verdict printed last."""
    model = tmp_path / "out" / "model" / "specialised"
    shutil.copytree(place[0], model)
    (model / "check.json").write_text("{}")
    command = [str(EXAMPLE / "all.sh"), "dense.gguf", str(tmp_path / "out"), "--data-root", place[1], *QUICK]
    command += ["--seeds", "0", "--only", "main", "tasks", "--labels", "map", "mean-only"]
    environment = os.environ | {"PYTHON": sys.executable, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    results = tmp_path / "out" / "study" / "results"
    assert "missing: 0 of 9 cells" in done.stdout
    assert (results / "report" / "index.html").is_file()
    rows = json.loads((results / "metrics.json").read_text())
    own = {
        row["task"]
        for row in rows
        if row["method"] == "mean-only" and row["metric"] == "nll" and row.get("source") is None
    }
    assert own == {"openbookqa", "arc_challenge", "sciq", "medmcqa"}
    said = [line for passed, claim, found in verdicts.lines(results) for line in (claim, f"      {found}")]
    assert [line[4:] if i % 2 == 0 else line for i, line in enumerate(done.stdout.splitlines()[-len(said) :])] == said
    failing = subprocess.run(
        [*command, "--dry-run", "--data-root", "nowhere"], env=environment, capture_output=True, text=True
    )
    assert failing.returncode == 2
    assert len(failing.stderr.strip().splitlines()) == 1, failing.stderr
    assert subprocess.run([command[0]], capture_output=True, text=True).returncode == 2


def test_the_tables_of_the_readme_are_those_of_the_metrics(capsys: pytest.CaptureFixture[str]) -> None:
    """Oracle: the metrics in the repository, by the command that the text names."""
    import table

    results = Path(__file__).parents[1] / "results" / "smolmoe"
    assert table.main([str(results)]) == 0
    text = (results / "README.md").read_text()
    for command in re.findall(r"`python examples/smolmoe/pooled\.py results/smolmoe ([^`]+)`", text):
        assert pooled.main([str(results), *command.split()]) == 0
    printed = [line for line in capsys.readouterr().out.splitlines() if line]
    assert sum("NLL - " in line and "| all |" in line for line in printed) == 3
    assert [line for line in printed if line not in text.splitlines()] == []


def test_a_number_of_a_table_is_written_without_its_leading_zero() -> None:
    import table

    written = [table.short(value) for value in (0.579, -0.0104, 1.5249, 10.25, 0.0)]
    assert written == [".579", "-.010", "1.525", "10.250", ".000"]
    assert table.interval({"value": 0.026, "low": -0.0081, "high": 1.0621}) == "+.026 [-.008, +1.062]"
    assert table.interval(None) == ""


# -- the audit -----------------------------------------------------------------------------------------------------------


def page_rows(command: str) -> list[str]:
    """The lines of the tables that docs/audit.md says the command printed."""
    text = (Path(__file__).parents[1] / "docs" / "audit.md").read_text()
    tables = re.findall(rf"<!-- printed by {re.escape(command)} -->\n+((?:\|.*\n)+)", text)
    return [line for table in tables for line in table.splitlines()]


@pytest.mark.slow
def test_the_tables_of_the_audit_are_what_its_command_prints(capsys: pytest.CaptureFixture[str]) -> None:
    """Oracle: the predictions in the repository, by the command that the page names."""
    results = Path(__file__).parents[1] / "results" / "smolmoe"
    assert audit.main([str(results)]) == 0
    printed = [line for line in capsys.readouterr().out.splitlines() if line]
    told = page_rows("python examples/smolmoe/audit.py results/smolmoe")
    assert len(told) == 31
    assert [line for line in told if line not in printed] == []
    assert audit.main([str(results / "nowhere")]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


@pytest.mark.slow
@pytest.mark.skipif("VMOER_DATA" not in os.environ, reason="needs the questions: VMOER_DATA")
def test_the_table_of_unseen_words_is_what_its_command_prints(capsys: pytest.CaptureFixture[str]) -> None:
    results = Path(__file__).parents[1] / "results" / "smolmoe"
    assert audit.main([str(results), "--data-root", os.environ["VMOER_DATA"]]) == 0
    printed = capsys.readouterr().out.splitlines()
    told = page_rows("python examples/smolmoe/audit.py results/smolmoe --data-root DATA")
    assert len(told) == 6
    assert [line for line in told if line not in printed] == []


def test_adjusted_p_values() -> None:
    """Oracles: Holm's steps by hand; of one estimate, and of copies of it, the largest of all is no more than itself."""
    from scipy.stats import norm

    from vmoer.metrics.estimates import Estimate

    draws = np.random.default_rng(0).normal(size=(3, 20000))
    draws = (draws - draws.mean(1, keepdims=True)) / draws.std(1, keepdims=True)
    values = np.array([1.0, -3.0, 2.5])
    alone, holm, largest = audit.adjusted([Estimate(v, v + d) for v, d in zip(values, draws, strict=True)])
    one, three, two = alone
    assert alone == pytest.approx(2 * norm.sf(np.abs(values)))
    assert holm == pytest.approx([max(3 * three, 2 * two, one), 3 * three, max(3 * three, 2 * two)])
    assert largest == pytest.approx(1 - (1 - alone) ** 3, abs=0.01)  # the three are independent
    _, _, copies = audit.adjusted([Estimate(2.0, 2 + draws[0])] * 5)
    assert copies == pytest.approx(2 * norm.sf(2), abs=0.005)


def test_letters_that_a_model_likes_too_much_are_found() -> None:
    """Oracle: answers drawn from known probabilities, which were then sharpened and shifted towards a letter."""
    rng = np.random.default_rng(1)
    true = rng.dirichlet(np.ones(4), 4000)
    answers = np.array([rng.choice(4, p=p) for p in true])
    bias = np.array([0.9, 0, 0, 0])
    told = audit.scaled(np.log(true), np.append(2.0, bias))
    inverse, *found = audit.fit_letters(told, answers)
    assert inverse == pytest.approx(0.5, abs=0.05)
    assert np.array(found) - np.mean(found) == pytest.approx(-(bias - bias.mean()) / 2, abs=0.1)
