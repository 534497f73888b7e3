"""Oracles: hand-computed cases, scikit-learn, and `vmoer.metrics` called directly on the same draws."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from sklearn.metrics import average_precision_score, log_loss, roc_auc_score

from vmoer import metrics as m
from vmoer.errors import InputError
from vmoer.evaluation import scores
from vmoer.evaluation.predictions import SIGNALS
from vmoer.metrics.resampling import percentiles

KEYS = ["study", "model", "task", "split", "method", "seed", "signal", "metric", "value", "low", "high"]
META = {"model": "tiny", "method": "map", "seed": 0, "source_task": "own", "ood_tasks": ["near", "far"]}


def cell(task, method="map", seed=0, split="test", n=250, scale=2.0, draw=0, length=20, **signals):
    """Columns of one cell: overconfident by `scale`; the questions and answers depend on task and split alone."""
    rng = np.random.default_rng([draw, *map(ord, task + split)])
    logits, answers = rng.normal(size=(n, 4)), rng.random((n, 4))
    answers = (logits - np.log(-np.log(answers))).argmax(1)
    noise = np.random.default_rng([seed, *map(ord, method)]).normal(scale=0.3, size=(n, 4))
    logits = scale * (logits + noise)
    log_probs = logits - np.log(np.exp(logits).sum(1, keepdims=True))
    return {
        "id": [f"q{i:04}" for i in range(n)],
        "task": [task] * n,
        "split": [split] * n,
        "method": [method] * n,
        "seed": [seed] * n,
        "answer": answers.tolist(),
        "log_probs": log_probs.tolist(),
        "prompt_tokens": [length + i % 7 for i in range(n)],
        **{name: list(values) for name, values in signals.items()},
    }


def save(directory: Path, *cells, order=None, meta=META) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    names = list(dict.fromkeys(name for one in cells for name in one))
    columns = {name: [v for one in cells for v in one.get(name, [None] * len(one["id"]))] for name in names}
    table = pa.table({n: pa.array(v, pa.float64()) if n in SIGNALS else v for n, v in columns.items()})
    pq.write_table(table if order is None else table.take(order), directory / "predictions.parquet")
    (directory / "meta.json").write_text(json.dumps(meta))
    return directory


def find(rows, metric, method="map", task="own", seed=0, signal=None):
    (row,) = [
        r
        for r in rows
        if (r["metric"], r["method"], r["task"], r["seed"], r["signal"]) == (metric, method, task, seed, signal)
    ]
    return row


def arrays(one):
    return np.array(one["log_probs"]), np.array(one["answer"])


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    """Two methods, two seeds, three tasks; `far` has other prompt lengths. The cells and their rows."""
    rng = np.random.default_rng(3)
    shift = {"own": 0.0, "near": 1.0, "far": 2.0}
    cells = [cell("own", seed=seed, split="validation") for seed in (0, 1)]
    for task in shift:
        for method, scale in {"map": 2.0, "vglr-fc": 1.2}.items():
            for seed in (0, 1):
                signals = {"gate_entropy": rng.normal(shift[task], size=250).round(1)}
                signals |= {"novelty": rng.normal(shift[task], size=250)} if method == "vglr-fc" else {}
                length = 90 if task == "far" else 20
                cells.append(cell(task, method, seed, scale=scale, length=length, **signals))
    directory = save(tmp_path_factory.mktemp("study"), *cells)
    found = {(c["task"][0], c["split"][0], c["method"][0], c["seed"][0]): c for c in cells}
    return directory, cells, found, scores.score(directory, draws=200)


def test_by_hand(tmp_path):
    """Oracle: four questions of two options, right with .8, .5 (a tie), .9 and wrong with .6."""
    p = [[0.8, 0.2], [0.5, 0.5], [0.1, 0.9], [0.6, 0.4]]
    one = cell("own", n=4) | {"log_probs": np.log(p).tolist(), "answer": [0, 1, 1, 1]}
    rows = scores.score(save(tmp_path, one), draws=20)
    assert find(rows, "questions")["value"] == 4
    assert find(rows, "accuracy")["value"] == pytest.approx((1 + 0.5 + 1 + 0) / 4)
    assert find(rows, "nll")["value"] == pytest.approx(-np.log([0.8, 0.5, 0.9, 0.4]).mean())
    assert find(rows, "brier")["value"] == pytest.approx((0.08 + 0.5 + 0.02 + 0.72) / 4)
    assert find(rows, "ece")["value"] == pytest.approx((0.2 + 0 + 0.1 + 0.6) / 4)
    assert find(rows, "mce")["value"] == pytest.approx(0.6)


def test_against_scikit_learn(study):
    _, _, found, rows = study
    log_probs, answers = arrays(found["own", "test", "vglr-fc", 1])
    assert find(rows, "nll", "vglr-fc", seed=1)["value"] == pytest.approx(log_loss(answers, np.exp(log_probs)))
    signals = [found[task, "test", "vglr-fc", 1]["gate_entropy"] for task in ("own", "near")]
    labels = np.repeat([0, 1], 250)
    row = find(rows, "auroc", "vglr-fc", "near", 1, "gate_entropy")
    assert row["value"] == pytest.approx(roc_auc_score(labels, np.concatenate(signals)))
    row = find(rows, "auprc", "vglr-fc", "near", 1, "gate_entropy")
    assert row["value"] == pytest.approx(average_precision_score(labels, np.concatenate(signals)))
    entropy = [-(np.exp(lp) * lp).sum(1) for lp, _ in (arrays(found[t, "test", "map", 0]) for t in ("own", "near"))]
    row = find(rows, "auroc", task="near", signal="predictive_entropy")
    assert row["value"] == pytest.approx(roc_auc_score(labels, np.concatenate(entropy)))


def test_intervals_equal_the_bootstraps_of_the_metrics(study):
    _, _, found, rows = study
    log_probs, answers = arrays(found["own", "test", "map", 0])
    confidence, correct = m.confidence(log_probs), m.correct_per_question(log_probs, answers)
    oracles: dict[str, Any] = {"nll": m.bootstrap(m.nll_per_question(log_probs, answers), draws=200)}
    oracles["brier"] = m.bootstrap(m.brier_per_question(log_probs, answers), draws=200)
    for metric in (m.ece, m.mce, m.debiased_ece):
        oracles[metric.__name__] = m.bootstrap_metric(metric, confidence, correct, draws=200)
    oracles["aurc"] = m.bootstrap_metric(m.aurc, confidence, 1 - correct, draws=200)
    for name, wanted in oracles.items():
        row = find(rows, name)
        assert (row["value"], row["low"], row["high"]) == pytest.approx(wanted), name
    row, expected = find(rows, "smooth_ece"), m.bootstrap_metric(m.smooth_ece, confidence, correct, draws=200)
    assert (row["value"], row["low"], row["high"]) == pytest.approx(expected, abs=1e-3)
    floor = m.noise_floor(confidence, correct, draws=200)
    assert find(rows, "ece_floor")["value"] == pytest.approx(floor.mean)
    assert find(rows, "ece_p")["value"] == pytest.approx(floor.p_value)


def test_differences_are_paired(study):
    _, _, found, rows = study
    (map_probs, answers), (fc_probs, _) = (arrays(found["own", "test", name, 1]) for name in ("map", "vglr-fc"))
    ours, theirs = (m.nll_per_question(log_probs, answers) for log_probs in (fc_probs, map_probs))
    row = find(rows, "nll_minus_map", "vglr-fc", seed=1)
    assert (row["value"], row["low"], row["high"]) == pytest.approx(m.paired_bootstrap(ours, theirs, draws=200))
    columns = [
        f(p, *a) for p in (fc_probs, map_probs) for f, a in ((m.confidence, ()), (m.correct_per_question, (answers,)))
    ]
    expected = m.bootstrap_metric(lambda c, y, d, z: m.debiased_ece(c, y) - m.debiased_ece(d, z), *columns, draws=200)
    row = find(rows, "debiased_ece_minus_map", "vglr-fc", seed=1)
    assert (row["value"], row["low"], row["high"]) == pytest.approx(expected)


def test_the_paper_s_protocol_is_compared_with_its_own_stage_1(tmp_path):
    cells = [cell("own", method) for method in ("map", "map@paper", "vglr-fc", "vglr-fc@paper", "vglr-fc@paper+full")]
    rows = scores.score(save(tmp_path, *cells), draws=20)
    for method in ("vglr-fc@paper", "vglr-fc@paper+full"):
        difference = find(rows, "nll", method)["value"] - find(rows, "nll", "map@paper")["value"]
        assert find(rows, "nll_minus_map@paper", method)["value"] == pytest.approx(difference)
    assert {row["method"] for row in rows if row["metric"].endswith("minus_map@paper")} == {
        *("vglr-fc@paper", "vglr-fc@paper+full")
    }


def test_over_seeds_is_the_nested_bootstrap(tmp_path):
    """Oracle: metrics.bootstrap on [seeds, n], which draws the seeds from another stream: the ends agree up to noise."""
    cells = [cell("own", seed=seed) for seed in (0, 1)]
    expected = m.bootstrap([m.nll_per_question(*arrays(one)) for one in cells])
    row = find(scores.score(save(tmp_path, *cells), draws=2000), "nll", seed=None)
    assert row["value"] == pytest.approx(expected.value)
    assert (row["low"], row["high"]) == pytest.approx(expected[1:], abs=0.1 * (expected.high - expected.low))


def by_resampling(scores, lengths, draws):
    """Oracle: AUROC, AUPRC and FPR95 with percentile intervals, one resampled set of prompts after another."""

    def intervals(own, other, paired):
        rng = np.random.default_rng(0)
        drawn = []
        for _ in range(draws):
            i = rng.integers(len(own), size=len(own))
            j = i if paired else rng.integers(len(other), size=len(other))
            drawn.append([metric(own[i], other[j]) for metric in (m.auroc, m.auprc, m.fpr95)])
        values = [metric(own, other) for metric in (m.auroc, m.auprc, m.fpr95)]
        return [percentiles(value, column, 0.95) for value, column in zip(values, np.transpose(drawn), strict=True)]

    i, j = m.length_match(*lengths)
    matched = intervals(scores[0][i], scores[1][j], True) if len(i) >= 200 else [(None, None, None)] * 3
    return [*intervals(scores[0], scores[1], False), *matched]


def test_detection_equals_resampled_metrics(study):
    _, _, found, rows = study
    own, near, far = (found[task, "test", "vglr-fc", 0] for task in ("own", "near", "far"))
    names = [name + suffix for suffix in ("", "_matched") for name in ("auroc", "auprc", "fpr95")]
    for signal in ("gate_entropy", "novelty", "prompt_tokens"):
        for task, other in (("near", near), ("far", far)):
            scored = [np.asarray(one[signal], dtype=float) for one in (own, other)]
            expected = by_resampling(scored, [one["prompt_tokens"] for one in (own, other)], 200)
            for name, values in zip(names, expected, strict=True):
                row = find(rows, name, "vglr-fc", task, 0, signal)
                assert (row["value"], row["low"], row["high"]) == pytest.approx(values)
    assert find(rows, "auroc_matched", "vglr-fc", "far", None, "novelty")["note"].startswith("not matchable: 0 pairs")
    assert not [r for r in rows if r["method"] == "map" and r["signal"] == "novelty"]


def test_output_temperature(study):
    """Oracle: fitting and applying it by hand, for each seed on its own."""
    _, _, found, rows = study
    for seed in (0, 1):
        temperature = m.fit_temperature(*arrays(found["own", "validation", "map", seed]))
        row = find(rows, "temperature", "map+ts", seed=seed)
        assert (row["value"], row["split"]) == (pytest.approx(temperature), "validation")
        for task in ("own", "near", "far"):
            log_probs, answers = arrays(found[task, "test", "map", seed])
            scaled = m.apply_temperature(log_probs, temperature)
            assert find(rows, "nll", "map+ts", task, seed)["value"] == pytest.approx(m.nll(scaled, answers))
            assert find(rows, "accuracy_minus_map", "map+ts", task, seed)["value"] == 0
    difference = find(rows, "nll", "vglr-fc")["value"] - find(rows, "nll", "map+ts")["value"]
    assert find(rows, "nll_minus_map_ts", "vglr-fc")["value"] == pytest.approx(difference)
    assert {r["signal"] for r in rows if r["method"] == "map+ts"} == {None, "predictive_entropy", "prompt_tokens"}


def test_every_method_with_validation_answers_gets_its_temperature(tmp_path):
    """Oracle: by hand. A split that is scored itself is no place to fit one."""
    cells = [cell("own", method, split=split) for split in ("validation", "test") for method in ("map", "vglr-fc+full")]
    rows = scores.score(save(tmp_path, *cells), draws=20)
    temperature = m.fit_temperature(*arrays(cells[1]))
    assert find(rows, "temperature", "vglr-fc+full+ts")["value"] == pytest.approx(temperature)
    log_probs, answers = arrays(cells[3])
    expected = m.nll(m.apply_temperature(log_probs, temperature), answers)
    assert find(rows, "nll", "vglr-fc+full+ts")["value"] == pytest.approx(expected)
    assert find(rows, "nll_minus_map_ts", "vglr-fc+full+ts")["low"] is not None
    meta = json.loads((tmp_path / "meta.json").read_text()) | {"split": "validation"}
    (tmp_path / "meta.json").write_text(json.dumps(meta))
    assert {row["method"] for row in scores.score(tmp_path, draws=20)} == {"map", "vglr-fc+full"}


def test_best(study):
    _, _, _, rows = study
    for metric in ("nll", "accuracy"):
        overall = {method: find(rows, metric, method, seed=None)["value"] for method in ("map", "map+ts", "vglr-fc")}
        sign = -1 if metric == "accuracy" else 1
        best = min(overall, key=lambda name: (sign * overall[name], name))
        differences = {r["method"]: r for r in rows if r["metric"] == f"{metric}_minus_best" and r["task"] == "own"}
        assert {r["note"] for r in differences.values()} == {f"best: {best}"}
        for method, row in differences.items():
            assert row["value"] == pytest.approx(overall[method] - overall[best])


def test_file_is_a_function_of_the_predictions(study, tmp_path):
    """The same bytes twice, from shuffled rows, and from one file per method; valid JSON with every key."""
    directory, cells, _, _ = study
    expected = scores.write(directory, draws=20).read_bytes()
    assert scores.write(directory, draws=20).read_bytes() == expected
    order = np.random.default_rng(0).permutation(sum(len(one["id"]) for one in cells))
    assert scores.write(save(tmp_path / "shuffled", *cells, order=order), draws=20).read_bytes() == expected
    for method in ("map", "vglr-fc"):
        save(tmp_path / "split" / method, *(one for one in cells if one["method"][0] == method))
    assert scores.write(tmp_path / "split", draws=20).read_bytes() == expected
    assert sorted(path.name for path in directory.iterdir()) == ["meta.json", "metrics.json", "predictions.parquet"]
    rows = json.loads(expected)
    assert all(list(row)[: len(KEYS)] == KEYS and set(row) <= {*KEYS, "note", "source"} for row in rows)
    assert len({tuple(row[key] for key in KEYS[:8]) for row in rows}) == len(rows)
    assert all(row.get("source") == (None if row["task"] == "own" else "own") for row in rows)


def test_number_of_options_may_vary(tmp_path):
    one = cell("own", n=3) | {"log_probs": np.log([[0.7, 0.3]]).tolist() + np.log([[0.2, 0.3, 0.5]] * 2).tolist()}
    rows = scores.score(save(tmp_path, one | {"answer": [0, 2, 1]}), draws=20)
    assert find(rows, "nll")["value"] == pytest.approx(-np.log([0.7, 0.5, 0.3]).mean())


def test_one_question(tmp_path):
    rows = scores.score(save(tmp_path, cell("own", n=1)), draws=20)
    assert find(rows, "nll")["low"] == find(rows, "nll")["high"] == find(rows, "nll")["value"]


def bad(**columns):
    return cell("own", n=3) | columns


@pytest.mark.parametrize(
    ("one", "message"),
    [
        ({k: v for k, v in bad().items() if k not in ("answer", "seed")}, "missing column seed, answer"),
        ({k: [] for k in bad()}, "no rows"),
        (bad(answer=[0, None, 1]), "column answer has 1 missing values"),
        (bad(answer=[0, 4, 1]), "answer 4 of question 1 is not one of its options"),
        (bad(seed=["a", "b", "c"]), "column seed must be int64, not string"),
        (bad(log_probs=[[0.0, 3.0]] * 3), "not normalised"),
        (bad(id=["x", "y", "x"]), "question x is there twice for map seed 0 on own test"),
        (bad(novelty=[1.0, None, 2.0]), "column novelty lacks 1 of 3 values"),
    ],
)
def test_bad_predictions_say_what_is_wrong_in_one_line(tmp_path, one, message):
    with pytest.raises(InputError, match=r"predictions\.parquet: ") as raised:
        scores.write(save(tmp_path, one))
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)
    assert not (tmp_path / "metrics.json").exists()


def test_bad_files_say_what_is_wrong_in_one_line(tmp_path):
    with pytest.raises(InputError, match=r"no predictions\.parquet"):
        scores.score(tmp_path)
    save(tmp_path, cell("own", n=3))
    (tmp_path / "meta.json").write_text("{}")
    with pytest.raises(InputError, match=r"meta\.json: must be a JSON object with source_task"):
        scores.score(tmp_path)
    (save(tmp_path, cell("own", n=3)) / "predictions.parquet").write_bytes(b"PAR1 nothing")
    with pytest.raises(InputError, match=r"predictions\.parquet: not a readable parquet file"):
        scores.score(tmp_path)
    other = save(tmp_path / "other", cell("own", n=3), cell("own", "vtsr", n=4))
    with pytest.raises(
        InputError, match="vtsr seed 0 on own test and map seed 0 on own test answer different questions"
    ):
        scores.score(other)
    save(tmp_path / "twice" / "a", cell("own", n=3))
    save(tmp_path / "twice" / "b", cell("own", n=3))
    with pytest.raises(InputError, match="map seed 0 on own test is already in another file"):
        scores.score(tmp_path / "twice")
