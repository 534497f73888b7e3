"""benchmarks/serving_operator.py on a small model of the full geometry, as far as a CPU can say."""

import json
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import serving_operator
from rehearsal import shrunk

from vmoer.bench.geometries import GEOMETRIES


def test_batches_are_padded_as_vllm_does() -> None:
    """Oracle: the sizes that vLLM prints when it captures its graphs: 1, 2, 4, and every eighth."""
    asked = {1: 1, 2: 2, 3: 4, 5: 8, 8: 8, 9: 16, 50: 56, 250: 256, 256: 256}
    assert {batch: serving_operator.padded(batch) for batch in asked} == asked


@pytest.mark.parametrize("name", serving_operator.NAMES)
def test_the_floor_counts_what_a_step_reads(name: str) -> None:
    """Oracle, by hand: with every expert hit, all weights but those of an embedding that is only looked up, and the cache."""
    geometry = shrunk(GEOMETRIES[name])
    model, config = geometry.build("cpu", torch.float32), geometry.config
    tokens = 10_000
    looked_up = 0 if config.get("tie_word_embeddings") else config["vocab_size"] * config["hidden_size"]
    head = config.get("head_dim", config["hidden_size"] // config["num_attention_heads"])
    cache = 2 * tokens * 1024 * config["num_key_value_heads"] * head * config["num_hidden_layers"]
    read = sum(p.numel() for p in model.parameters()) - looked_up + cache
    assert serving_operator.floor(model, geometry, tokens, 1.0) == pytest.approx(2 * read, rel=1e-6)
    inside = sum(p.numel() for name, p in model.named_parameters() if "experts" in name)
    one = serving_operator.floor(model, geometry, 1, 1.0)
    share = config["num_experts_per_tok"] / config.get("num_experts", config.get("num_local_experts"))
    expected = read - (1 - share) * inside - cache * (1 - 1 / tokens)
    assert one == pytest.approx(2 * expected, rel=1e-6)


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU the true geometries are measured")
def test_every_row_is_there_and_every_check_holds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serving_operator.tf.masking_utils, "find_packed_sequence_indices", lambda ids: None)
    asked = ["--geometries", "granite-3b", "--batches", "1", "3", "--rounds", "1"]
    serving_operator.main(["--out", str(tmp_path), *asked])
    rows = json.loads((tmp_path / "serving_operator.json").read_text())["rows"]
    assert [(row["batch"], row["padded"], row["signals"]) for row in rows] == [
        (batch, size, level) for batch, size in ((1, 1), (3, 4)) for level in serving_operator.LEVELS
    ]
    for row in rows:
        assert row["replay_equals_eager"] is True
        assert row["unmoved_by_padding"] is True
        assert row["unpadded_difference"] < 0.1
        assert row["alone_seconds"] > 0
        assert 0 < row["floor_seconds"] < row["step_seconds"]
    text = (tmp_path / "serving_operator.md").read_text()
    assert text in capsys.readouterr().out
    assert text.count("| granite-3b |") == len(rows)
