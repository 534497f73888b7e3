"""The registered study on a larger base: its table, its document, the curve over subjects, and its path on a small Qwen2Moe."""

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import transformers as tf
from scipy.special import log_softmax
from scipy.stats import spearmanr
from sklearn.metrics import roc_auc_score
from test_registered import QUICK, told, write
from test_smolmoe import EXAMPLE, place
from train_workers import world

from vmoer.evaluation import predictions
from vmoer.evaluation.predictions import Key
from vmoer.metrics.calibrators import choose
from vmoer.studies._grid import missing

sys.path.insert(0, str(EXAMPLE))

import curve
import equal
import labels
import registered
import run as example
import verdicts
from comparisons import COMPARISONS, LARGER, SMOLMOE, of_results

__all__ = ["place"]
SUBJECTS = ("anatomy", "high_school_physics", "us_history")


# -- the table and its document ----------------------------------------------------------------------------------------


def test_the_document_says_what_the_table_does() -> None:
    """Oracle: LARGER.md, read as text: what differs from REGISTERED.md, and the arithmetic of the memory."""
    text = (EXAMPLE / LARGER.document).read_text()
    assert "**Homes**: arc_challenge." in text
    assert LARGER.homes == ("arc_challenge",)
    assert f"openbookqa ({LARGER.shifted['openbookqa']} questions)" in text
    assert f"mmlu ({LARGER.shifted['mmlu']} questions of each of its 56 subjects)" in text
    assert f"At most {LARGER.most} test questions" in text
    assert "**Seeds** 0 to 2" in text
    assert LARGER.seeds == (0, 1, 2)
    assert "seed 3" in text.partition("## The printed protocol")[2]
    assert LARGER.own_seeds == {"printed": (3,)}
    assert f"learning rate {LARGER.stage1.lr:g}".replace("0.0002", "2e-4") in text
    assert LARGER.asked == SMOLMOE.asked
    assert LARGER.ensembles == SMOLMOE.ensembles
    assert not LARGER.adapters
    written = set(re.findall(r"`((?:vglr|map)[\w@.-]*@printed[\w-]*)`", text))
    assert written == set(LARGER.printed)
    table = (f"{LARGER.gb:.0f} GB", f"{LARGER.gb_each[0] * 16 + LARGER.gb_fixed:.0f} GB")
    assert all(one in text for one in table)


def test_the_arithmetic_of_the_base_is_that_of_its_configuration() -> None:
    """Oracle: the parameters of a model of these measures, built without memory; with the head that the file has of its own."""
    text = (EXAMPLE / LARGER.document).read_text()
    for experts in (4, 8):
        config = tf.Qwen2MoeConfig(
            vocab_size=151_936,
            hidden_size=1536,
            intermediate_size=8960,
            num_hidden_layers=28,
            num_attention_heads=12,
            num_key_value_heads=2,
            num_experts=experts,
            num_experts_per_tok=2,
            moe_intermediate_size=8960,
            shared_expert_intermediate_size=16,
            qkv_bias=True,
            tie_word_embeddings=False,
        )
        with torch.device("meta"):
            size = sum(p.numel() for p in tf.Qwen2MoeForCausalLM(config).parameters())
        assert f"{size / 1e9:.2f}B parameters" in text
        assert f"{2 * size / 1e9:.1f} GB in bfloat16" in text
        assert f"{20 * size / 1e9:.0f} GB to specialise" in text


def test_what_a_base_is_built_with_is_what_its_script_says() -> None:
    """Oracle: LARGER.md. The options of the base stand in seeds.sh, once."""
    script, text = ((EXAMPLE / name).read_text() for name in ("seeds.sh", LARGER.document))
    built = script.partition("larger)")[2].partition(";;")[0]
    for option in re.findall(r"--(?:experts|router-sd|dtype|batch-size|lr) [\w.-]+", built):
        assert option in text
    assert len(re.findall(r"--\S+ \S+", built)) >= 5


@pytest.mark.parametrize(("study", "bases"), [("smolmoe", 5), ("larger", 4)])
def test_a_seed_is_built_and_computed_by_its_own_commands(tmp_path: Path, study: str, bases: int) -> None:
    """Oracle: what a stand-in for Python is called with: the base of the seed's number once, and then the study."""
    stub, told = tmp_path / "python", tmp_path / "told"
    stub.write_text(f'#!/bin/sh\n[ "$1" = -c ] || echo "$@" >> {told}\n')
    stub.chmod(0o755)
    (tmp_path / "base0" / "specialised").mkdir(parents=True)
    (tmp_path / "base0" / "specialised" / "check.json").write_text("{}")
    environment = os.environ | {"PYTHON": str(stub), "STUDY": study}
    command = ["bash", str(EXAMPLE / "seeds.sh"), "dense.gguf", str(tmp_path), "0 1", "--workers", "3"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    models = " ".join(f"{tmp_path}/base{number}/specialised" for number in range(bases))
    lines = [re.sub(r"^\S*/(\w+\.py)", r"\1", line) for line in told.read_text().splitlines()]
    own = {
        "smolmoe": ("", "--seconds 900 --seed 1"),
        "larger": (
            " --experts 4 --router-sd 0.03 --dtype bfloat16",
            "--seconds 240 --seed 1 --batch-size 32 --lr 1e-4",
        ),
    }[study]
    base, rest = tmp_path / "base1", f"--out {tmp_path}/equal --mps --workers 3"
    assert lines == [
        f"run.py --registered {study} --model {models} --seeds 0 {rest}",
        f"upcycle.py --dense dense.gguf --out {base}/upcycled{own[0]}",
        f"specialise.py --model {base}/upcycled --out {base}/specialised {own[1]}",
        f"check.py --model {base}/specialised",
        f"run.py --registered {study} --model {models} --seeds 1 {rest}",
    ]
    environment["STUDY"] = "other"
    assert subprocess.run(command, env=environment, capture_output=True).returncode == 2


def data_of(place: tuple[str, str], folder: Path) -> tuple[str, str]:
    """A small Qwen2Moe in place of the GraniteMoe, and mmlu beside the other sets: three subjects of eight questions."""
    model, data = folder / "qwen", folder / "data"
    shutil.copytree(place[1], data)
    settings: dict[str, Any] = dict(vocab_size=world.VOCAB, hidden_size=32, num_hidden_layers=2, num_attention_heads=4)
    settings |= dict(num_key_value_heads=2, num_experts=4, num_experts_per_tok=2, norm_topk_prob=True, qkv_bias=True)
    settings |= dict(moe_intermediate_size=32, shared_expert_intermediate_size=16, max_position_embeddings=128)
    torch.manual_seed(0)
    tf.Qwen2MoeForCausalLM(tf.Qwen2MoeConfig(**settings, pad_token_id=0, eos_token_id=2)).save_pretrained(model)
    tf.AutoTokenizer.from_pretrained(place[0]).save_pretrained(model)
    asked = [json.loads(line) for line in (data / "sciq" / "test.jsonl").read_text().splitlines()]
    rows = [
        q | {"id": f"{name}-test-{i}", "question": f"w{i} o{j} w{j}"}
        for j, name in enumerate(SUBJECTS)
        for i, q in enumerate(asked[:8])
    ]
    (data / "mmlu").mkdir()
    (data / "mmlu" / "test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(model), str(data)


def arguments(model: str, data: str, out: Path, *more: str) -> list[str]:
    models = ["--model", *[model] * 4]
    return ["--registered", "larger", *models, "--data-root", data, "--out", str(out), *QUICK, *more]


def test_the_list_has_its_own_labels_seeds_and_sets(place: tuple[str, str], tmp_path: Path) -> None:
    """Oracle: LARGER.md. Seeds 0 to 2 have the labels at equal data, seed 3 the printed protocol; every cell ends in time."""
    model, data = data_of(place, tmp_path)
    found = missing(example.wanted(example.parser().parse_args(arguments(model, data, tmp_path / "out"))), tmp_path)
    assert {cell.study for cell in found} == {"arc_challenge"}
    seeds = {part: {cell.key["seed"] for cell in found if cell.key["part"] == part} for part in LARGER.parts}
    assert seeds == {"equal": {0, 1, 2}, "ensembles": {0, 1, 2}, "printed": {3}}
    left = {path.parent.name for cell in found for path in cell.leaves if cell.key["part"] != "printed"}
    assert {f"{label}-s{seed}" for label in LARGER.labels() for seed in range(3)} <= left
    assert all(0 < equal.expected(LARGER, cell) < 1000 for cell in found)
    assert {cell.gb for cell in found if "stage 1" in cell.title} == {LARGER.gb_fixed + 16 * LARGER.gb_each[0]}
    study = found[0].work.args[0]  # type: ignore[attr-defined]
    questions = equal.asked(LARGER, replace(study, limit=None), 0)
    counts = {name: sum(equal.subject(q.id) == name for q in questions if q.task == "mmlu") for name in SUBJECTS}
    assert counts == dict.fromkeys(SUBJECTS, 8)
    few = equal.asked(replace(LARGER, shifted={**LARGER.shifted, "mmlu": 5}), replace(study, limit=None), 0)
    assert sum(q.task == "mmlu" for q in few) == 15
    with_adapters = arguments(model, data, tmp_path / "out", "--only", "adapters")
    assert example.main(with_adapters) == 2


def test_its_verdicts_are_over_its_own_homes_and_seeds(tmp_path: Path) -> None:
    """Oracle: the world of tests/test_registered.py, with one home and three seeds."""
    noise = {"map-all": 1.0, "map-all+orders": 0.5, "vglr-mf@permuted": 1.0, "vglr-mf@permuted+orders+routing": 0.1}
    results = write(tmp_path / "results", noise, of=LARGER)
    assert of_results(results) is LARGER
    found = told(results)
    assert "homes arc_challenge; seeds 0, 1, 2" in found
    best = "vglr-mf@permuted+orders+routing"
    assert found[f"goal: {best} below map-all at home"].holds is True
    assert found["map-all+orders below map-all, shifts pooled"].holds is True
    assert found["map-all+orders4 below map-all, home"].holds is None
    (line,) = registered.lines(write(tmp_path / "short", noise, of=LARGER, seeds=2))
    assert line.found == "home arc_challenge, seed 2: no map-all on all sets"


# -- the curve ---------------------------------------------------------------------------------------------------------


def curved(results: Path, subjects: int = 12, seeds: int = 2) -> Path:
    """Subjects further and further from home, whose answers get worse: those of map-all by more than the other label's."""
    (results / "arc_challenge").mkdir(parents=True)
    tables = []
    sets: list[tuple[str, str, int, int | None]] = [
        ("arc_challenge", part, 200, None) for part in ("validation", "test")
    ]
    sets += [("mmlu", "test", 60, number) for number in range(subjects)]
    for task, split, n, number in sets:
        rng = np.random.default_rng([len(split), number or 0])
        names = [f"s{number:02}-test-{i}" if task == "mmlu" else f"{i}" for i in range(n)]
        logits, far = 2 * rng.normal(size=(n, 4)), 0 if number is None else 1 + number
        answers = (logits + rng.gumbel(size=logits.shape)).argmax(1)
        for label, share in (("map-all", 0.25), ("vglr-mf@permuted", 0.1)):
            for seed in range(seeds):
                noise = np.random.default_rng([far, seed]).normal(size=logits.shape)
                columns: dict[str, Any] = {"id": names, "task": [task] * n, "split": [split] * n}
                columns |= {"method": [label] * n, "seed": [seed] * n, "answer": answers, "prompt_tokens": [50] * n}
                columns["log_probs"] = log_softmax(logits + share * far * noise, axis=1).tolist()
                signal = np.random.default_rng([far, seed, 1]).normal(size=n) + 0.2 * far
                columns |= dict.fromkeys(("last_mahalanobis", "novelty", "logit_variance"), signal)
                tables.append(pa.table(columns))
    pq.write_table(pa.concat_tables(tables), results / "arc_challenge" / "predictions.parquet")
    meta = {"model": "larger", "source_task": "arc_challenge", "ood_tasks": ["mmlu"], "split": "test"}
    (results / "arc_challenge" / "meta.json").write_text(json.dumps(meta))
    said = {"map-all-s0/meta.json": {"method": "map-all", "seed": 0}}
    (results / "arc_challenge" / "files.json").write_text(json.dumps(said))
    return results


def test_the_curve_by_hand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Oracles: scipy's rank correlation, scikit-learn's AUROC, and the NLL of calibrated answers by hand."""
    results = curved(tmp_path / "results")
    shown = ("last layer, Mahalanobis", "novelty", "variance, vglr-mf@permuted", "entropy, calibrated")
    monkeypatch.setattr(curve, "SHIFTS", {name: curve.SHIFTS[name] for name in shown})
    (group,) = predictions.load(results)
    groups = [curve.calibrated(group)]
    found = curve.measured(LARGER, groups, "last_mahalanobis", ["vglr-mf@permuted", "map-ens3"])
    assert len(found) == 12
    assert [one.distance for one in found] == sorted(one.distance for one in found)
    one = next(one for one in found if one.name == "s05")
    losses, rates, distances = [], [], []
    for seed in (0, 1):
        valid, home, away = (
            group.cells[Key(task, split, "map-all", seed)]
            for task, split in (("arc_challenge", "validation"), ("arc_challenge", "test"), ("mmlu", "test"))
        )
        at = np.array([id_.startswith("s05-") for id_ in away.ids])
        answers = choose(valid.log_probs, valid.answers, valid.ids).calibrator.apply(away.log_probs)[at]
        losses.append(-answers[np.arange(60), away.answers[at]].mean())
        there, here = away.signals["last_mahalanobis"][at], home.signals["last_mahalanobis"]
        distances.append((there.mean() - here.mean()) / here.std())
        rates.append(roc_auc_score([0] * len(here) + [1] * 60, [*here, *there]))
    assert one.nll["map-all"] == pytest.approx(np.mean(losses))
    assert one.distance == pytest.approx(np.mean(distances))
    assert one.auroc["last layer, Mahalanobis"] == pytest.approx(np.mean(rates))
    assert "map-ens3" not in one.nll  # it was not run

    x, y = (np.array(values) for values in zip(*((s.distance, s.nll["map-all"]) for s in found), strict=True))
    value, low, high = map(float, re.findall(r"[-+][.\d]+", curve.correlation(x, y)))
    assert value == pytest.approx(spearmanr(x, y)[0], abs=0.005)
    assert 0.5 < low <= value <= high

    assert curve.main([str(results), "--bins", "4"]) == 0
    out = capsys.readouterr().out
    losses_table, rates_table, correlations = out.split("\n\n")[1:]
    rows = [[cell.strip() for cell in row.split("|")[1:-1]] for row in losses_table.splitlines()[2:]]
    assert [row[1] for row in rows] == ["3"] * 4
    assert float(rows[0][3]) < float(rows[-1][3])
    assert float(rows[-1][4]) < float(rows[0][4]) < 0.05  # the other label loses less, the more the further
    assert rates_table.count("AUROC") == 4
    assert "| NLL vglr-mf@permuted, less | -" in correlations


def test_results_without_subjects_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert curve.main([str(write(tmp_path / "results", {"map-all": 1.0}))]) == 2
    assert "is of no registered study with a set that is asked by subject" in capsys.readouterr().err
    assert curve.main([str(curved(tmp_path / "own")), "--bins", "0"]) == 2
    assert "bins=0 must be at least 1" in capsys.readouterr().err


# -- the whole path ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*the paper takes .* rows, there are")
def test_a_qwen2_moe_goes_the_whole_way(
    place: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Oracle: LARGER.md. A seed and the printed protocol, from training to the curve, in packs of their own."""
    model, data = data_of(place, tmp_path)
    kept = ("map-all", "vglr-mf@permuted", "mcdr@permuted", "map-all.1", "map-all.2")
    printed = {head: LARGER.printed[head] for head in ("map@printed", "vglr-fc@printed-best")}
    small = replace(LARGER, seeds=(0,), asked={head: LARGER.asked[head] for head in kept}, printed=printed)
    monkeypatch.setitem(COMPARISONS, "larger", small)
    there = tmp_path / "there"
    for seed in ("0", "3"):
        pack = ["--pack", str(tmp_path / f"seed{seed}")]
        assert example.main(arguments(model, data, tmp_path / f"out{seed}", "--seeds", seed, *pack)) == 0
    packs = ["--unpack", str(tmp_path / "seed0"), str(tmp_path / "seed3")]
    assert example.main(["--registered", "larger", "--out", str(there), *packs, "--report"]) == 0
    results = there / "results"
    assert of_results(results) is small
    said = registered.metas(results)
    seen = {method: meta["seen"] for (_, method, seed), meta in said.items() if seed == 0}
    assert set(seen) == {*small.labels(), *small.further, "map-all.1", "map-all.2"}
    assert len({about["questions"] for about in seen.values()}) == 1  # equal data
    assert {method for (_, method, seed) in said if seed == 3} == {
        *("map@printed", "vglr-fc@printed-best", "vglr-fc@printed-best+full35")
    }
    monkeypatch.setattr(registered, "kept_apart", lambda homes: [])  # so small a model learns nothing
    capsys.readouterr()
    for module in (labels, verdicts):
        monkeypatch.setattr(sys, "argv", ["it", str(results)])
        assert module.main() == 0
    out = capsys.readouterr().out
    assert "| arc_challenge | vglr-fc@printed-best+full35 |" in out
    assert "goal: " in out
    assert curve.main([str(results), "--bins", "3"]) == 0
    out = capsys.readouterr().out
    assert f"{len(SUBJECTS)} subjects of mmlu" in out
    assert "novelty" in out
