"""The registered study of examples/smolmoe: its cells, its document, and its tests on worlds whose answer is known."""

import json
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from scipy.special import log_softmax
from sklearn.metrics import roc_auc_score
from test_smolmoe import EXAMPLE, place

from vmoer.errors import InputError
from vmoer.evaluation import predictions
from vmoer.evaluation.predictions import Answered, Key
from vmoer.metrics.estimates import Estimate
from vmoer.studies._grid import missing

sys.path.insert(0, str(EXAMPLE))

import detection
import equal
import labels
import registered
import run as example
import verdicts
from comparisons import COMPARISONS, SMOLMOE, Comparison

__all__ = ["place"]
BETTER = {"map-all": 1.0, "map-all+orders": 0.5, "vglr-mf@permuted": 1.0, "vglr-mf@permuted+orders+routing": 0.1}
BETTER |= {"vglr-mf@permuted+orders": 0.5, "map-ens3": 0.7}
"""By label: how much noise there is on the logits that answers were drawn from."""


def write(
    results: Path,
    noise: Mapping[str, float],
    at_chance: tuple[str, str] = ("", ""),
    seeds: int | None = None,
    homes: Sequence[str] | None = None,
    of: Comparison = SMOLMOE,
) -> Path:
    """Predictions as run.py --report leaves them. Labels of equal noise are equally good, and differ."""
    seeds = len(of.seeds) if seeds is None else seeds
    for home in of.homes if homes is None else homes:
        tables, shifts = [], list(of.sets(home)[1:])
        for task, split, n in ((home, "validation", 120), (home, "test", 250), *((one, "test", 150) for one in shifts)):
            rng = np.random.default_rng([*map(ord, home + task + split)])
            logits = 1.5 * rng.normal(size=(n, 4))
            answers = (logits * ((home, split) != at_chance) + rng.gumbel(size=logits.shape)).argmax(1)
            for number, (label, size) in enumerate(noise.items()):
                for seed in range(seeds):
                    own = logits + size * np.random.default_rng([*map(ord, home + task + split), number, seed]).normal(
                        size=logits.shape
                    )
                    columns: dict[str, Any] = {
                        "id": [f"{i}" for i in range(n)],
                        "task": [task] * n,
                        "split": [split] * n,
                    }
                    columns |= {"method": [label] * n, "seed": [seed] * n, "answer": answers}
                    columns |= {"log_probs": log_softmax(own, axis=1).tolist(), "prompt_tokens": [50] * n}
                    tables.append(pa.table(columns))
        (results / home).mkdir(parents=True)
        pq.write_table(pa.concat_tables(tables), results / home / "predictions.parquet")
        meta = {"model": of.name, "source_task": home, "ood_tasks": shifts, "split": "test"}
        (results / home / "meta.json").write_text(json.dumps(meta))
        said = {
            f"{label}-s{seed}/meta.json": {"method": label, "seed": seed, "passes": 8}
            | {"config": {"layers": [0]}, "fingerprint": {"base": f"base {seed}"}}
            for label in noise
            for seed in range(seeds)
        }
        (results / home / "files.json").write_text(json.dumps(said))
    (results / "metrics.json").write_text("[]")
    return results


def told(results: Path) -> dict[str, registered.Line]:
    return {line.claim: line for line in registered.lines(results)}


def test_the_tests_find_what_is_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Oracle: the world. Less noise is better, equal noise is not, and the label with the least noise is the primary one."""
    found = told(write(tmp_path / "results", BETTER))
    best = "vglr-mf@permuted+orders+routing"
    assert f"the primary label, chosen on validation: {best}" in found
    goals = [line.holds for claim, line in found.items() if claim.startswith("goal")]
    assert goals == [True, True, True]
    for where in ("home", "shifts pooled"):
        for ours, theirs, holds in (
            (best, "map-all", True),
            ("map-all+orders", "map-all", True),
            ("vglr-mf@permuted", "map-all", False),
            (best, "map-all+orders", True),
            ("vglr-mf@permuted+orders", "map-all+orders", False),
            ("vglr-fc@permuted", "map-all", None),  # not run
        ):
            assert found[f"{ours} below {theirs}, {where}"].holds is holds, (ours, theirs, where)
    sys.argv = ["verdicts.py", str(tmp_path / "results")]
    assert verdicts.main() == 0
    out = capsys.readouterr().out
    assert f"yes {best} below map-all, home" in out
    assert "-   vglr-fc@permuted below map-all, home\n      not run" in out


def test_nothing_is_found_where_nothing_is(tmp_path: Path) -> None:
    """Oracle: labels of equal noise. The best of them on validation is no better on test."""
    found = told(write(tmp_path / "results", dict.fromkeys(BETTER, 0.7)))
    assert not any(line.holds for claim, line in found.items() if "accurate" not in claim)
    assert sum(line.holds is False for line in found.values()) > 10


def test_what_people_use_instead_stands_beside_the_labels(tmp_path: Path) -> None:
    """Oracle: the world. Half the noise is better, by an interval that says so; what was not run is not there."""
    results = write(tmp_path / "results", {"map-all": 1.0, "blob": 0.5}, seeds=2)
    _, _, row = labels.beside(SMOLMOE, results, registered.metas(results)).splitlines()
    label, passes, seeds, home, shifts, accuracy = (cell.strip() for cell in row.strip("|").split("|"))
    assert (label, passes, seeds) == ("blob", "8", "0, 1")
    for found in (home, shifts):
        value, low, high = map(float, re.findall(r"[-+][.\d]+", found))
        assert low < value < high < 0
    assert accuracy.startswith("+")
    assert not any(line.claim.startswith("blob") for line in registered.lines(results))


def test_a_home_at_chance_is_reported_apart(tmp_path: Path) -> None:
    """Oracle: a world in which one home's validation answers have nothing to do with its logits. Those of test do not matter."""
    found = told(write(tmp_path / "results", BETTER, at_chance=("sciq", "validation")))
    assert "sciq: reported apart, map-all is not better than a constant there" in found
    assert "homes openbookqa, arc_easy, arc_challenge; seeds 0, 1, 2, 3, 4" in found
    found = told(write(tmp_path / "test", BETTER, at_chance=("sciq", "test")))
    assert "homes openbookqa, arc_easy, arc_challenge, sciq; seeds 0, 1, 2, 3, 4" in found


@pytest.mark.parametrize(
    ("seeds", "homes", "says"),
    [
        (4, SMOLMOE.homes, "home sciq, seed 4: no map-all on all sets"),
        (5, SMOLMOE.homes[:3], "home sciq is missing"),
        (6, SMOLMOE.homes, "seed 5 is none of the study's"),
    ],
)
def test_an_incomplete_study_has_no_verdict(tmp_path: Path, seeds: int, homes: tuple[str, ...], says: str) -> None:
    """Oracle: what was left out of the world, in which the labels differ."""
    (line,) = registered.lines(
        write(tmp_path / "results", {"map-all": 1.0, "map-all+orders": 0.1}, seeds=seeds, homes=homes)
    )
    assert line.holds is None
    assert says in line.found.split("; ")


def test_a_seed_on_two_base_models_is_named(tmp_path: Path) -> None:
    """Oracle: one fingerprint that is changed by hand."""
    results = write(tmp_path / "results", BETTER)
    assert not any("base models" in claim for claim in told(results))
    place = results / "sciq" / "files.json"
    said = json.loads(place.read_text())
    said["map-ens3-s1/meta.json"]["fingerprint"]["base"] = "made again"
    place.write_text(json.dumps(said))
    assert "seed 1 was run on 2 base models" in told(results)


def test_a_difference_is_the_mean_over_sets_and_its_spread_that_of_questions_and_seeds() -> None:
    """Oracles: the mean by hand; the spread of independent questions, var / n, where seeds are the same."""
    rng = np.random.default_rng(0)
    homes = {}
    for home in ("openbookqa", "sciq"):
        sets = {}
        for task, n in ((home, 400), ("medmcqa", 100)):
            base, ours = rng.normal(size=n), rng.normal(size=n)
            ids = tuple(map(str, range(n)))
            cells = {name: registered.Scored(ids, loss, loss) for name, loss in (("map-all", base), ("x", ours))}
            sets[task] = {name: dict.fromkeys((0, 1), cell) for name, cell in cells.items()}
        homes[home] = registered.Home(sets, {"map-all": {0: 0.0, 1: 0.0}}, 0.0)
    changes = [homes[h].sets[h]["x"][0].nll - homes[h].sets[h]["map-all"][0].nll for h in homes]
    found = registered.difference(homes, ("x", "map-all"), shifts=False)
    assert isinstance(found, Estimate)
    assert found.value == pytest.approx(np.mean([change.mean() for change in changes]))
    expected = np.sqrt(sum(change.var() / len(change) for change in changes)) / 2
    assert found.draws.std() == pytest.approx(expected, rel=0.06)
    shifted = [homes[h].sets["medmcqa"]["x"][0].nll - homes[h].sets["medmcqa"]["map-all"][0].nll for h in homes]
    away = registered.difference(homes, ("x", "map-all"), shifts=True)
    assert away.value == pytest.approx(np.mean([change.mean() for change in shifted]))


def test_an_interval_over_homes_covers_as_often_as_it_says() -> None:
    """Oracle: 400 worlds in which the difference is zero, and models of all homes err on the same questions. Homes that ask
    questions of their own, by other ids, are drawn apart: their interval would be too narrow for these."""
    rng, covered = np.random.default_rng(0), {"same": 0, "own": 0}
    for _ in range(400):
        shared = rng.normal(size=100)
        worlds: dict[str, dict[str, registered.Home]] = {name: {} for name in covered}
        for home in SMOLMOE.homes:
            change = [shared + rng.normal(size=100) for _ in range(3)]
            for name, more in (("same", ""), ("own", home)):
                ids = tuple(f"{more}{i}" for i in range(100))
                zero = dict.fromkeys(range(3), registered.Scored(ids, np.zeros(100), np.zeros(100)))
                ours = {seed: registered.Scored(ids, one, one) for seed, one in enumerate(change)}
                sets = {"medmcqa": {"map-all": zero, "x": ours}}
                worlds[name][home] = registered.Home(sets, {"map-all": dict.fromkeys(range(3), 0.0)}, 0.0)
        for name, homes in worlds.items():
            low, high = registered.interval(registered.difference(homes, ("x", "map-all"), shifts=True))
            covered[name] += low < 0 < high
    assert 0.93 <= covered["same"] / 400 <= 0.97
    assert covered["own"] / 400 < 0.9


def test_a_set_that_lacks_some_of_a_tasks_questions_is_drawn_with_the_others() -> None:
    """Oracle: a set that has them all. On each draw the mean is that of the questions that both have, as often as drawn."""
    change = np.random.default_rng(0).normal(size=60)
    ids = [f"{i:02}" for i in range(60)]
    cells = [{0: registered.Scored(tuple(ids[::2]), x[::2], x[::2])} for x in (change, np.zeros(60))]
    indicator = np.arange(60) % 2 == 0
    parts = []
    for values in (np.where(indicator, change, 0.0), indicator.astype(float)):
        whole = [{0: registered.Scored(tuple(ids), x, x)} for x in (values, np.zeros(60))]
        parts.append(registered.difference_on(whole, [0], "sciq", "nll", ids))
    found = registered.difference_on(cells, [0], "sciq", "nll", ids)
    np.testing.assert_allclose(found.draws, parts[0].draws / parts[1].draws)
    assert found.value == pytest.approx(change[::2].mean())
    with pytest.raises(InputError, match="sciq: labels have not answered the same questions"):
        registered.difference_on(cells, [0], "sciq", "nll", ids[:30])


def test_the_document_says_what_the_code_does() -> None:
    """Oracle: REGISTERED.md, read as text: labels, pairs, homes, numbers."""
    text = (EXAMPLE / "REGISTERED.md").read_text()
    written = set(re.findall(r"`((?:map|vglr|mean|mcdr|last)[\w@+.-]*)`", text.partition("## The printed")[0]))
    assert written - {f"{head}" for head in SMOLMOE.asked} <= set(SMOLMOE.labels())
    assert set(SMOLMOE.labels()) <= written
    contrasts = text.partition("What routing adds")[2].partition("**The goal**")[0]
    for ours, theirs in registered.CONTRASTS:
        assert f"`{ours}`" in contrasts
        assert f"`{theirs}`" in contrasts
    assert ", ".join(SMOLMOE.homes) in text
    assert f"({SMOLMOE.shifted['medmcqa']} of each" in text
    assert f"mmlu_law ({SMOLMOE.shifted['mmlu_law']})" in text
    assert f"{registered.DRAWS:,} draws" in text
    assert f"learning rate {SMOLMOE.stage1.lr:g}".replace("0.0007", "7e-4") in text
    assert SMOLMOE.seeds == (0, 1, 2, 3, 4)
    assert "Seeds** 0 to 4" in text
    assert ", ".join(map(str, [*SMOLMOE.batch.values()][:3])) + f" and {SMOLMOE.batch['sciq']}" in text
    assert registered.LEVEL == 0.05
    assert registered.SLACK == 0.005
    instead = text.partition("## What people use instead")[2]
    assert all(f"`{label}`" in instead for label in SMOLMOE.adapters)
    assert SMOLMOE.own_seeds == {"printed": (0, 1), "adapters": (2, 3)}
    assert text.count("seeds 0 and 1") == text.count("seeds 2 and 3") == 1
    assert equal.BACKGROUND in instead


def test_what_decides_the_default_of_novelty_is_told_home_by_home() -> None:
    """Oracle: scikit-learn, on signals by hand. One form is better on both homes, one on the first alone."""
    rng = np.random.default_rng(0)
    less = {"novelty_tokens": {"openbookqa": 1.5, "sciq": 1.5}, "novelty_others": {"openbookqa": 1.5, "sciq": -1.5}}
    groups = []
    for home, away in (("openbookqa", "sciq"), ("sciq", "openbookqa")):
        found: dict[Key, Answered] = {}
        for task in (home, away, "medmcqa"):
            n, at = 80, task != home
            signals = {"novelty": rng.normal(size=n) + 0.5 * at}
            signals |= {name: -by[home] * at + 0.1 * rng.normal(size=n) for name, by in less.items()}
            ids, ones = tuple(map(str, range(n))), np.ones(n, dtype=np.int64)
            found[Key(task, "test", "map-all", 0)] = Answered(ids, np.zeros((n, 4)), ones, ones, signals)
        groups.append(predictions.Predictions(None, "smolmoe", home, (away, "medmcqa"), found))
    rows = [
        [cell.strip() for cell in row.split("|")[1:-1]] for row in detection.near(groups, SMOLMOE.homes).splitlines()
    ]
    assert rows[0][1:3] == ["openbookqa", "sciq"]
    assert [row[3] for row in rows[2:]] == ["", "yes", "no"]
    for number, group in enumerate(groups):
        own, other = ("openbookqa", "sciq")[:: 1 - 2 * number]
        cells = [group.cells[Key(task, "test", "map-all", 0)].signals for task in (own, other)]
        values = [signals["novelty"] - signals["novelty_tokens"] for signals in cells]
        expected = roc_auc_score([0] * 80 + [1] * 80, np.concatenate(values))
        assert float(rows[3][1 + number]) == pytest.approx(expected, abs=6e-4)
    assert detection.near(groups[:1], ("openbookqa",)) == ""


# -- the cells ---------------------------------------------------------------------------------------------------------

QUICK = ["--limit", "16", "--stage1-epochs", "1", "--stage2-epochs", "1", "--passes", "4", "--workers", "1"]


def arguments(place: tuple[str, str], out: Path, *more: str) -> list[str]:
    start = ["--registered", "--model", place[0], place[0], "--data-root", place[1], "--out", str(out)]
    return [*start, *QUICK, *more]


def test_the_list_has_every_label_for_every_seed_and_home(place: tuple[str, str], tmp_path: Path) -> None:
    """Oracle: REGISTERED.md, written out. What belongs together comes together, and each seed has the next base model."""
    found = missing(example.wanted(example.parser().parse_args(arguments(place, tmp_path))), tmp_path)
    left = {path.parent.name for cell in found for path in cell.leaves if cell.key["part"] != "printed"}
    for label in SMOLMOE.labels():
        assert {f"{label}-s{seed}" for seed in range(5)} <= left
    own = [(cell.key["seed"], cell.study) for cell in found if cell.key["part"] == "equal"]
    assert list(dict.fromkeys(own)) == [(seed, home) for seed in range(5) for home in SMOLMOE.homes]
    models = [cell.work.args[1].model for cell in found if cell.key["method"] == "map-all"]  # type: ignore[attr-defined]
    assert len(models) == 20
    files = [cell.leaves for cell in found]
    for i, cell in enumerate(found):
        assert {need.leaves for need in cell.needs} <= set(files[:i]), cell.title
    assert all(
        0 < equal.expected(SMOLMOE, cell) < 510 for cell in found
    )  # each ends in a piece of eight and a half minutes
    printed = {cell.key["method"] for cell in found if cell.key["part"] == "printed"}
    assert {"map@printed", "vglr-mf@printed", "vglr-fc@printed-fast-best", "stage 1 of map@printed"} <= printed
    for part, homes in (("printed", SMOLMOE.printed_on), ("adapters", SMOLMOE.homes)):
        places = {(cell.key["seed"], cell.study) for cell in found if cell.key["part"] == part}
        assert places == {(seed, home) for seed in SMOLMOE.own_seeds[part] for home in homes}
    beside = {cell.key["method"] for cell in found if cell.key["part"] == "adapters"}
    assert beside == {*SMOLMOE.adapters, "stage 1 of lora-dropout", "stage 1 of blob"}


def test_a_seed_by_itself_takes_the_parts_that_it_has(place: tuple[str, str], tmp_path: Path) -> None:
    """Oracle: REGISTERED.md. The printed protocol has seeds 0 and 1, and adapters 2 and 3, whichever seeds a machine computes."""
    for seed, more in ((1, {"printed"}), (3, {"adapters"}), (4, set())):
        parts = {"equal", "ensembles", *more}
        asked = example.parser().parse_args(arguments(place, tmp_path, "--seeds", str(seed)))
        assert {cell.key["part"] for cell in example.wanted(asked)} == parts


@pytest.mark.slow
def test_a_seed_is_computed_packed_and_reported_at_equal_data(
    place: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Oracle: the sizes of the small world. The digest of what a label has seen is one for all labels of a home."""
    homes = ("sciq",)
    kept = ("map-all", "vglr-mf@permuted", "map-all.1", "map-all.2")
    small = replace(SMOLMOE, homes=homes, seeds=(0,), asked={head: SMOLMOE.asked[head] for head in kept})
    monkeypatch.setitem(COMPARISONS, "smolmoe", small)
    piece = arguments(place, tmp_path / "out", "--only", "equal", "--seeds", "0", "--pack", str(tmp_path / "pack"))
    assert example.main(piece) == 0
    there = str(tmp_path / "there")
    assert example.main(["--registered", "--out", there, "--unpack", str(tmp_path / "pack"), "--report"]) == 0
    results = tmp_path / "there" / "results"
    for home in homes:
        seen = {method: meta["seen"] for (task, method, _), meta in registered.metas(results).items() if task == home}
        assert set(seen) == {*small.labels(), "map-all.1", "map-all.2"} - {"map-ens5"}
        assert len({about["questions"] for about in seen.values()}) == 1
    capsys.readouterr()
    monkeypatch.setattr(sys, "argv", ["labels.py", str(results)])
    assert labels.main() == 0
    rows = {row.split("|")[1].strip(): row for row in capsys.readouterr().out.splitlines()[2:] if row.startswith("|")}
    cells = {label: [cell.strip() for cell in rows[label].split("|")[2:5]] for label in small.labels() if label in rows}
    assert set(cells) == set(small.labels()) - {"map-ens5"}
    assert cells["map-all"] == ["1", "16", "20"]
    assert cells["map-all+orders4"][0] == "4"
    assert cells["map-ens3"][0] == "3"
    assert cells["last-laplace"] == ["1", "16", "20"]
    signals = pq.read_table(results / "sciq" / "predictions.parquet").column_names
    assert {"unseen_words", "last_mahalanobis", "last_relative", "energy", "probe"} <= set(signals)
    monkeypatch.setattr(sys, "argv", ["detection.py", str(results)])
    assert detection.main() == 0
    rates = dict(row.split("|")[1:3] for row in capsys.readouterr().out.splitlines() if row.startswith("| "))
    group = next(g for g in predictions.load(results) if g.source_task == "sciq")
    cell = group.cells[Key("sciq", "test", "map-all", 0)]
    right = cell.log_probs.argmax(1) == cell.answers
    expected = roc_auc_score(~right, cell.signals["probe"])
    assert float(rates[" probe of the last layer "]) == pytest.approx(expected, abs=6e-4)
    assert "sciq: reported apart, map-all is not better than a constant there" in told(
        results
    )  # so small a model learns nothing
    monkeypatch.setattr(registered, "kept_apart", lambda homes: [])
    lines = {line.claim: line.holds for line in registered.lines(results)}
    assert lines["vglr-mf@permuted below map-all, home"] in (True, False)
    assert lines["map-ens5 below map-all, home"] is None
    assert registered.adjusted([Estimate(0.0, np.zeros(50)), Estimate(-1.0, np.linspace(-2, 0, 50))])[2][0] == 1


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*the paper takes .* rows, there are")
def test_the_labels_beside_the_equal_ones_are_computed_and_described(
    place: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Oracle: REGISTERED.md. Ensembles of five, adapters over as many samples as others take passes, 35 passes as printed."""
    small = replace(
        SMOLMOE,
        homes=("sciq",),
        asked=dict.fromkeys(("map-all", "map-all.1", "map-all.2"), ("",)),
        own_seeds={"printed": (0,), "adapters": (0,)},
        printed_on=("sciq",),
        printed={head: SMOLMOE.printed[head] for head in ("map@printed", "vglr-mf@printed-best")},
    )
    monkeypatch.setitem(COMPARISONS, "smolmoe", small)
    parts = ("equal", "ensembles", "printed", "adapters")
    asked = arguments(place, tmp_path / "out", "--only", *parts, "--seeds", "0", "--pack", str(tmp_path / "pack"))
    assert example.main(asked) == 0
    there = str(tmp_path / "there")
    assert example.main(["--registered", "--out", there, "--unpack", str(tmp_path / "pack"), "--report"]) == 0
    results = tmp_path / "there" / "results"
    passes = {method: meta["passes"] for (_, method, _), meta in registered.metas(results).items()}
    assert passes["map-ens5"] == 5
    assert {passes[label] for label in SMOLMOE.adapters} == {4}
    assert passes["vglr-mf@printed-best+full35"] == 35
    assert passes["vglr-mf@printed-best"] == 1
    capsys.readouterr()
    monkeypatch.setattr(sys, "argv", ["labels.py", str(results)])
    assert labels.main() == 0
    out = capsys.readouterr().out
    for label in (*SMOLMOE.adapters, "map-ens5", "vglr-mf@printed-best+full35"):
        assert f"| {label} |" in out
    (group,) = predictions.load(results)
    cell = group.cells[Key("sciq", "test", "map@printed", 0)]
    whole = -cell.log_probs[np.arange(len(cell.answers)), cell.answers] + cell.signals["outside_letters"]
    assert f"| map@printed, over the vocabulary | {whole.mean():.3f} |" in out
