"""A model answers questions into files: `predictions.parquet`, `routing.parquet`, `meta.json`. Metrics read nothing else.

A prompt ends where the answer letter would start. At its last token

    log_probs   log (1/M) sum_m softmax(logits of the question's own letters in pass m),   M = 1 for "router" averaging
    a signal    its mean over the attached layers (and the passes)

Prompts of similar length share a batch. A finished batch is a file in `.parts/`, named by a hash of everything that
decides its numbers. So a run that was killed goes on from there, and ends with the same bytes.

Shapes: M passes, B prompts, V letters, T columns of the batch, K selected experts.
"""

import hashlib
import json
import platform
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

import torch
import transformers
from torch import Tensor, nn

from vmoer._version import __version__
from vmoer.errors import InputError, RunError
from vmoer.evaluation.predictions import in_order
from vmoer.evaluation.writing import Batch, finish, read_part, write_part
from vmoer.inference.averaging import Averaging, mean_log_probs, mutual_information, predict_passes, shares_prompts
from vmoer.live.attach import attached, ready, record
from vmoer.live.inputs import context_length, last_positions, memory_for, seeded
from vmoer.live.recording import Record
from vmoer.saved.calibrator import Stored
from vmoer.saved.store import adapter_fingerprint, fingerprint
from vmoer.tasks import Question
from vmoer.tasks.batches import by_length, padded
from vmoer.tasks.prompt import encode, letter_ids


def predict_task(
    model: nn.Module,
    tokenizer: Any,
    questions: Sequence[Question],
    *,
    folder: str | Path,
    name: str | None = None,
    method: str | None = None,
    seed: int = 0,
    averaging: Averaging = "router",
    passes: int = 8,
    batch_tokens: int = 8192,
    routing: bool = False,
    calibrator: Stored | None = None,
    progress: Callable[[str, int, int], object] | None = None,
) -> Path:
    """Answer questions into `folder/predictions.parquet`, a row for each in the order given.

    `meta.json` is written last: where it is, the folder is complete.

    Args:
        model: Run as it is (`map`) where nothing is attached.
        tokenizer: The model's own.
        questions: The task of the first is the source; the other tasks are out-of-distribution.
        folder: Where the files go. A run that was stopped goes on from what it left there.
        name: What `meta.json` calls the model; by default its own folder or hub id.
        method: What the rows call the method; by default the key of what is attached.
        seed: A label of the rows; it also seeds methods that draw fresh noise (`sampling="mc"`).
        averaging: Where samples are averaged: in the "router", over "answer"s, or over "full" passes.
        passes: How many answers or passes are averaged; "router" always takes one.
        batch_tokens: The size of a batch with its padding.
        routing: Also write the experts that are selected at the answer, into `routing.parquet`.
        calibrator: The run's own. The answers stay raw; `meta.json` keeps it, and metrics have the rows `METHOD+cal`.
        progress: Called after each batch with a word, how many questions are answered, and of how many.

    Returns:
        The path of `predictions.parquet`.
    """
    folder = Path(folder)
    _check_request(questions, folder, averaging, passes, batch_tokens, routing)
    passes = 1 if averaging == "router" else passes
    choices = {"averaging": averaging, "passes": passes, "batch_tokens": batch_tokens, "routing": routing}
    with ready(model):
        options = [len(q.choices) for q in questions]
        letters = letter_ids(tokenizer, max(options))
        prompts = encode(tokenizer, questions, context_length(model))
        meta = _meta(model, name, method, seed, choices, questions, [letters, prompts])
        repeated = passes if averaging == "answer" and not shares_prompts(model) else 1
        batches = by_length([len(p) for p in prompts], batch_tokens // repeated)
        parts = [folder / ".parts" / f"{_digest(meta)[:16]}-{i:05d}.parquet" for i in range(len(batches))]
        parts[0].parent.mkdir(parents=True, exist_ok=True)
        done, tables = 0, []
        for number, (part, rows) in enumerate(zip(parts, batches, strict=True)):
            table = read_part(part, rows, [options[row] for row in rows])
            if table is None:
                batch = padded([prompts[row] for row in rows], next(model.parameters()).device)
                with seeded(f"{seed} {number}", model), memory_for(batch, "--batch-tokens"):
                    found = answer(model, batch, letters, [options[row] for row in rows], averaging, passes)
                _check_numbers(found.log_probs, [questions[row] for row in rows])
                write_part(part, rows, found, routing)
                table = read_part(part, rows, [options[row] for row in rows])
            tables.append(table)
            done += len(rows)
            if progress is not None:
                progress("answering", done, len(questions))
        meta |= {} if calibrator is None or calibrator.kind == "none" else {"calibrator": calibrator.file}
        finish(folder, parts[0].parent, tables, questions, [len(p) for p in prompts], meta)
    return folder / "predictions.parquet"


def _check_request(
    questions: Sequence[Question], folder: Path, averaging: str, passes: int, batch_tokens: int, routing: bool
) -> None:
    if not questions:
        raise InputError("there are no questions to answer")
    if averaging not in get_args(Averaging):
        raise InputError(f"averaging={averaging!r}: choose one of {', '.join(get_args(Averaging))}")
    for option, value in (("batch_tokens", batch_tokens), ("passes", passes)):
        if value < 1:
            raise InputError(f"{option}={value} must be at least 1")
    if routing and averaging != "router":
        raise InputError(f"expert sets are those of one pass: routing does not go with averaging={averaging!r}")
    if folder.exists() and not folder.is_dir():
        raise InputError(f"{folder} is a file, not a folder")


# -- one batch ---------------------------------------------------------------------------------------------------------


@torch.no_grad()
def answer(
    model: nn.Module,
    batch: Mapping[str, Tensor],
    letters: Sequence[int],
    options: Sequence[int],
    averaging: Averaging,
    passes: int,
) -> Batch:
    """Answer a batch of prompts: log-probabilities over each question's own letters, and every signal.

    Args:
        model: With a method attached.
        batch: `input_ids` and `attention_mask`.
        letters: The tokens of A, B, C, ...
        options: How many of these each question has.
        averaging: Where samples are averaged.
        passes: How many answers or passes are averaged.
    """
    with record(model, signals="all") as rec:
        log_probs_MBV = predict_passes(model, batch, averaging=averaging, passes=passes, tokens=list(letters))
    beyond_BV = torch.arange(len(letters)) >= torch.tensor(options).unsqueeze(1)
    log_probs_MBV = log_probs_MBV.double().cpu().masked_fill(beyond_BV, -torch.inf).log_softmax(-1)
    mean_BV = mean_log_probs(log_probs_MBV).log_softmax(-1)
    signals = at_answer(rec, batch, averaging)
    signals["predictive_entropy"] = torch.special.entr(mean_BV.exp()).sum(-1)
    if averaging != "router":
        signals["mutual_information"] = mutual_information(log_probs_MBV)
    return Batch(
        [row[:n] for row, n in zip(mean_BV.tolist(), options, strict=True)],
        {name: signals[name].tolist() for name in in_order(signals) if name in signals},
        experts_at_answer(rec, batch) if averaging == "router" else None,
    )


def at_answer(rec: Record, batch: Mapping[str, Tensor], averaging: Averaging) -> dict[str, Tensor]:
    """Every signal that the routers recorded, at the prompts' last tokens, [B], averaged over layers and passes."""
    taken = rec.passes[-1:] if averaging == "answer" else rec.passes
    entries = [entries[layer] for _, entries in taken for layer in rec.layers]
    last_B = None if averaging == "answer" else last_tokens(batch)
    found = {}
    for name in entries[0].signals:
        # stacked first, so that the rest is one kernel for all layers
        x_ET = torch.stack([entry.signals[name].to(batch["input_ids"].device) for entry in entries])
        # "answer": the last pass holds that token alone, M times for each prompt
        x_EBM = x_ET.view(len(entries), len(batch["input_ids"]), -1) if last_B is None else x_ET[:, last_B, None]
        found[name] = x_EBM.double().mean((0, 2)).cpu()
    return found


def experts_at_answer(rec: Record, batch: Mapping[str, Tensor]) -> list[list[list[int]]]:
    """The experts selected at the prompts' last tokens, ascending, [B][layer][K]."""
    _, entries = rec.passes[-1]
    chosen_LTK = torch.stack([entries[layer].experts_TK.to(batch["input_ids"].device) for layer in rec.layers])
    found: list[list[list[int]]] = chosen_LTK[:, last_tokens(batch)].sort(-1).values.transpose(0, 1).tolist()
    return found


def last_tokens(batch: Mapping[str, Tensor]) -> Tensor:
    """Where each prompt's last token lies among the tokens of the batch, row by row, [B]."""
    last_B = last_positions(batch)
    return torch.arange(len(last_B), device=last_B.device) * batch["input_ids"].shape[1] + last_B


def _check_numbers(log_probs: list[list[float]], questions: Sequence[Question]) -> None:
    for row, question in zip(log_probs, questions, strict=True):
        if not all(value == value and value > -float("inf") for value in row):
            raise RunError(f"question {question.id!r} of {question.task}: the model's logits are not finite numbers")


# -- what determines the numbers ---------------------------------------------------------------------------------------


def _meta(
    model: Any,
    name: str | None,
    method: str | None,
    seed: int,
    choices: dict[str, Any],
    questions: Sequence[Question],
    tokens: object,
) -> dict[str, Any]:
    attachment, parameter = attached(model), next(model.parameters())
    source, *others = dict.fromkeys(q.task for q in questions)
    asked = [(q.id, q.task, q.split, q.answer, len(q.choices)) for q in questions]
    return {
        "model": _plain(name or str(getattr(model.config, "name_or_path", ""))),
        "method": method or attachment.config.key,
        "config": attachment.config.to_dict() | {"layers": attachment.layers},
        "seed": seed,
        **choices,
        "split": questions[0].split,
        "source_task": source,
        "ood_tasks": others,
        "questions": _digest(asked, tokens),
        "fingerprint": {
            "base": fingerprint(model),
            "adapter": adapter_fingerprint(model),
            "weights": _checksum(model),
        },
        "dtype": str(parameter.dtype).removeprefix("torch."),
        "device": parameter.device.type,
        "versions": {
            "vmoer": __version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "python": platform.python_version(),
        },
    }


def _plain(name: str) -> str:
    """A hub id, or the last name of a local folder: files say nothing about the machine they were made on."""
    path = Path(name)
    return path.resolve().name if path.is_absolute() or path.is_dir() else name


def _digest(*values: object) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def _checksum(model: Any) -> str:
    """A hash of the sums of every weight's bits, base and routers: it takes no longer than reading them."""
    integers = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    sums = []
    for name, value in sorted(model.state_dict().items()):
        bits = value.detach().contiguous().view(-1).view(integers[value.element_size()])
        sums.append([name, list(value.shape), str(value.dtype), int(bits.sum(dtype=torch.int64))])
    settings = {k: v for k, v in model.config.to_dict().items() if k not in ("_name_or_path", "transformers_version")}
    return _digest(sums, json.dumps(settings, sort_keys=True, default=str))
