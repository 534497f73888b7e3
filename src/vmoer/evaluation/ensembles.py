"""The mean of several models' answers, from their predictions alone.

    p(y) = (1/M) sum_m p_m(y)

`mutual_information` is between the answer and the member; every other signal is the mean of the members, where all have it.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from vmoer import metrics
from vmoer.errors import InputError
from vmoer.evaluation.predictions import KEYS, entropy, meta_of, read_meta, read_parquet
from vmoer.evaluation.writing import parquet
from vmoer.files import SEAL, write_bytes
from vmoer.inference.averaging import mean_log_probs, mutual_information


def ensemble(members: Sequence[Path], folder: Path, *, method: str, seed: int) -> Path:
    """Average the predictions of folders into `folder/predictions.parquet`; returns its path.

    Args:
        members: folders of finished predictions, of the same questions in the same order.
        folder: where the files go.
        method: what the rows call it.
        seed: of the rows.
    """
    import pyarrow as pa

    if len(members) < 2:
        raise InputError("an ensemble has at least two members")
    metas = [read_meta(member / "meta.json", required=True) for member in members]
    tables = [_read(member) for member in members]
    for member, table in zip(members, tables, strict=True):
        if any(table[name] != tables[0][name] for name in (*KEYS, "answer")):
            raise InputError(f"{member} and {members[0]} answer different questions")
    options = [len(row) for row in tables[0]["log_probs"].to_pylist()]
    log_probs_MnC = torch.tensor(np.stack([metrics.pad(table["log_probs"].to_pylist()) for table in tables]))
    mean_nC = mean_log_probs(log_probs_MnC).log_softmax(-1)
    common = [name for name in tables[0].column_names if all(name in table.column_names for table in tables)]
    columns: dict[str, Any] = {name: tables[0][name] for name in common}
    columns["method"] = pa.array([method] * len(options), pa.string())
    columns["seed"] = pa.array([seed] * len(options), pa.int64())
    rows = [row[:n] for row, n in zip(mean_nC.tolist(), options, strict=True)]
    columns["log_probs"] = pa.array(rows, pa.list_(pa.float64()))
    for name in common:
        if pa.types.is_float64(tables[0].schema.field(name).type):
            whole = not any(table[name].null_count for table in tables)
            mean = pa.array(np.mean([table[name].to_numpy() for table in tables], 0)) if whole else None
            columns[name] = pa.nulls(len(options), pa.float64()) if mean is None else mean
    columns["mutual_information"] = pa.array(mutual_information(log_probs_MnC).numpy())
    columns["predictive_entropy"] = pa.array(entropy(mean_nC.numpy()))
    write_bytes(folder / "predictions.parquet", parquet(pa.table(columns)))
    said = {name: value for name, value in metas[0].items() if name not in ("files", SEAL, "calibrator", "moved")}
    said |= {"method": method, "seed": seed, "members": [meta["method"] for meta in metas]}
    said |= {"passes": sum(meta["passes"] for meta in metas), "averaging": "ensemble"}
    write_bytes(folder / "meta.json", (json.dumps(meta_of(folder, said), indent=2) + "\n").encode())
    return folder / "predictions.parquet"


def _read(folder: Path) -> Any:
    """The predictions of a folder, every number in float64: those that came out of a pack are float32."""
    import pyarrow as pa

    table = read_parquet(folder / "predictions.parquet")
    for i, field in enumerate(table.schema):
        if pa.types.is_floating(field.type):
            table = table.set_column(i, field.name, table[i].cast(pa.float64()))
        elif pa.types.is_list(field.type) and pa.types.is_floating(field.type.value_type):
            table = table.set_column(i, field.name, table[i].cast(pa.list_(pa.float64())))
    return table


def other_answers(source: Path, folder: Path, log_probs: Sequence[Sequence[float]], *, method: str) -> Path:
    """The predictions of a folder with other probabilities, row by row, under another name; returns their path."""
    import pyarrow as pa

    meta, table = read_meta(source / "meta.json", required=True), _read(source)
    columns: dict[str, Any] = {name: table[name] for name in table.column_names}
    options = [len(row) for row in table["log_probs"].to_pylist()]
    rows = [list(row)[:n] for row, n in zip(log_probs, options, strict=True)]
    columns |= {
        "method": pa.array([method] * len(options), pa.string()),
        "log_probs": pa.array(rows, pa.list_(pa.float64())),
    }
    columns["predictive_entropy"] = pa.array(entropy(metrics.pad(rows)))
    write_bytes(folder / "predictions.parquet", parquet(pa.table(columns)))
    said = {name: value for name, value in meta.items() if name not in ("files", SEAL, "calibrator")} | {
        "method": method
    }
    write_bytes(folder / "meta.json", (json.dumps(meta_of(folder, said), indent=2) + "\n").encode())
    return folder / "predictions.parquet"
