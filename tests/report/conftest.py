"""Fixed small predictions, and the directory of results made from them."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from vmoer.evaluation import scores

METHODS = {"map": 2.2, "mean_only": 2.1, "vglr-fc": 1.3, "vglr-fc+full": 1.0}  # how overconfident
SHIFTS = {"quiz": 0.0, "near": 0.5, "far": 2.0}


def predictions() -> dict[str, list]:
    """Two seeds of four methods on 240 questions a task; `far` has prompts of other lengths."""
    columns: dict[str, list] = {}
    for number, (task, shift) in enumerate(SHIFTS.items()):
        for split in ("validation", "test") if task == "quiz" else ("test",):
            # Uniform numbers only: numpy promises that their stream stays the same.
            rng = np.random.default_rng([number, len(split)])
            logits = 4 * rng.random((240, 4)) - 2
            answers = ((1 - shift / 3) * logits - np.log(-np.log(rng.random((240, 4))))).argmax(1)
            tokens = (20 + 100 * (task == "far") + rng.integers(8, size=240)).tolist()
            for method, scale in METHODS.items():
                for seed in (0, 1):
                    own = scale * (logits + rng.random((240, 4)) / 2)
                    log_probs = own - np.log(np.exp(own).sum(1, keepdims=True))
                    cell: dict[str, Any] = {
                        "id": [f"q{i}" for i in range(240)],
                        "task": [task] * 240,
                        "split": [split] * 240,
                    }
                    cell |= {"method": [method] * 240, "seed": [seed] * 240, "answer": answers.tolist()}
                    cell |= {"log_probs": log_probs.tolist(), "prompt_tokens": tokens}
                    cell["gate_entropy"] = (rng.random(240) + shift / 10).tolist()
                    variational = method.startswith("vglr")
                    cell["novelty"] = (rng.random(240) + shift).tolist() if variational else [None] * 240
                    if split == "validation" and method != "map":
                        continue  # map alone is given with an output temperature
                    for name, values in cell.items():
                        columns.setdefault(name, []).extend(values)
    return columns


@pytest.fixture(scope="session")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A results directory with predictions, meta and metrics. Tests write only below its copy."""
    directory = tmp_path_factory.mktemp("results")
    pq.write_table(pa.table(predictions()), directory / "predictions.parquet")
    meta = {"model": "org/tiny-moe", "source_task": "quiz", "ood_tasks": ["near", "far"]}
    (directory / "meta.json").write_text(json.dumps(meta))
    scores.write(directory, draws=200)
    return directory
