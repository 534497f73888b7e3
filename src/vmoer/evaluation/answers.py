"""A model answers questions into files: `predictions.parquet`, `routing.parquet`, `meta.json`. Metrics read nothing else.

A prompt ends where the answer letter would start. At its last token

    log_probs   log (1/M) sum_m softmax(logits of the question's own letters in pass m),   M = 1 for "router" averaging
    a signal    its mean over the attached layers (and the passes)

views.py has what is peculiar to orders of the options. Prompts of similar length share a batch. A finished batch is a file in
`.parts/`, named by a hash of everything that decides its numbers. So a run that was killed goes on, and ends with the same bytes.

Shapes: M passes, B prompts, V letters, T columns of the batch, K selected experts.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, get_args

import torch
from torch import Tensor, nn

from vmoer.errors import InputError, RunError
from vmoer.evaluation.meta import digest_of, meta_of_answers, of_run
from vmoer.evaluation.predictions import in_order
from vmoer.evaluation.views import View, answer_orders, last_tokens, views
from vmoer.evaluation.writing import Batch, finish, read_part, refuse_other, write_part
from vmoer.inference import ORDERS, Averaging
from vmoer.inference.averaging import (
    mean_log_probs,
    mutual_information,
    predict_passes,
    shares_prompts,
)
from vmoer.live.attach import ready, record
from vmoer.live.inputs import context_length, memory_for, seeded
from vmoer.live.recording import Record
from vmoer.saved.calibrator import Stored
from vmoer.tasks import Question
from vmoer.tasks.batches import by_length, padded
from vmoer.tasks.prompt import letter_ids


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
    signals: Mapping[str, Sequence[float]] | None = None,
    run: Mapping[str, Any] | None = None,
    replace: bool = True,
    progress: Callable[[str, int, int], object] | None = None,
) -> Path:
    """Answer questions into `folder/predictions.parquet`, a row for each in the order given. `meta.json` is written last.

    Args:
        model: Run as it is (`map`) where nothing is attached.
        tokenizer: The model's own.
        questions: The task of the first is the source; the other tasks are out-of-distribution.
        folder: Where the files go. A run that was stopped goes on from what it left there.
        name: What `meta.json` calls the model; by default its own folder or hub id.
        method: What the rows call the method; by default the key of what is attached.
        seed: A label of the rows; it also seeds methods that draw fresh noise (`sampling="mc"`).
        averaging: What is averaged: "router", "answer", "full", "orders" or "orders+routing" (inference/averaging.py).
        passes: How many passes are averaged; at most so many orders. "router" always takes one.
        batch_tokens: The size of a batch with its padding.
        routing: Also write the experts that are selected at the answer, into `routing.parquet`.
        calibrator: The run's own. The answers stay raw; `meta.json` keeps it, and metrics have the rows `METHOD+cal`.
        signals: Further columns, a number for each question, such as those of baseline_signals.py.
        run: `run.json`, of which `meta.json` keeps what questions the model has seen, and whether training moved its routers.
        replace: Whether finished answers of something else in the folder may be replaced.
        progress: Called after each batch with a word, how many questions are answered, and of how many.

    Returns:
        The path of `predictions.parquet`.
    """
    folder = Path(folder)
    _check_request(questions, folder, averaging, passes, batch_tokens, routing)
    passes = 1 if averaging == "router" else passes
    choices = {"averaging": averaging, "passes": passes, "batch_tokens": batch_tokens, "routing": routing}
    with ready(model):
        asked = _asked(model, tokenizer, questions, averaging, passes, batch_tokens)
        meta = meta_of_answers(model, name, method, seed, choices, questions, asked.tokens)
        if not replace:
            refuse_other(folder, meta)
        parts = [folder / ".parts" / f"{digest_of(meta)[:16]}-{i:05d}.parquet" for i in range(len(asked.batches))]
        parts[0].parent.mkdir(parents=True, exist_ok=True)
        done, tables = 0, []
        for number, (part, rows) in enumerate(zip(parts, asked.batches, strict=True)):
            options = [len(questions[row].choices) for row in rows]
            table = read_part(part, rows, options)
            if table is None:
                write_part(part, rows, _answered(model, asked, questions, number, seed), routing)
                table = read_part(part, rows, options)
            tables.append(table)
            done += len(rows)
            if progress is not None:
                progress("answering", done, len(questions))
        meta |= {} if calibrator is None or calibrator.kind == "none" else {"calibrator": calibrator.file}
        meta |= of_run(run or {})
        lengths = [len(own[0].prompt) for own in asked.views]
        finish(folder, parts[0].parent, tables, questions, lengths, meta, signals or {})
    return folder / "predictions.parquet"


class LetterAnswer(NamedTuple):
    """A question's answer: log-probabilities over its options in their own order, and every signal."""

    log_probs: list[float]
    signals: dict[str, float]


def answer_questions(
    model: nn.Module,
    tokenizer: Any,
    questions: Sequence[Question],
    *,
    averaging: Averaging = "router",
    passes: int = 8,
    batch_tokens: int = 8192,
    seed: int = 0,
) -> list[LetterAnswer]:
    """Answer questions in memory: what `predict_task` writes, in the order given.

    Args:
        model: With a method attached; `vmoer.Deterministic()` for the model's own routing.
        tokenizer: The model's own.
        questions: Of any tasks.
        averaging: What is averaged: "router", "answer", "full", "orders" or "orders+routing" (inference/averaging.py).
        passes: How many passes are averaged; at most so many orders. "router" always takes one.
        batch_tokens: The size of a batch with its padding.
        seed: Of methods that draw fresh noise (`sampling="mc"`).
    """
    _check_request(questions, None, averaging, passes, batch_tokens, False)
    found: dict[int, LetterAnswer] = {}
    with ready(model):
        asked = _asked(model, tokenizer, questions, averaging, 1 if averaging == "router" else passes, batch_tokens)
        for number, rows in enumerate(asked.batches):
            batch = _answered(model, asked, questions, number, seed)
            for place, row in enumerate(rows):
                signals = {name: values[place] for name, values in batch.signals.items()}
                found[row] = LetterAnswer(batch.log_probs[place], signals)
    return [found[row] for row in range(len(questions))]


def _check_request(
    questions: Sequence[Question], folder: Path | None, averaging: str, passes: int, batch_tokens: int, routing: bool
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
    if folder is not None and folder.exists() and not folder.is_dir():
        raise InputError(f"{folder} is a file, not a folder")


# -- one batch ---------------------------------------------------------------------------------------------------------


class _Asked(NamedTuple):
    """Questions as token ids in batches, and how they are answered."""

    letters: list[int]
    views: list[list[View]]
    batches: list[list[int]]
    averaging: Averaging
    passes: int

    @property
    def tokens(self) -> list[Any]:
        """All that the model is shown."""
        shown: list[Any] = [own[0].prompt for own in self.views]
        if self.averaging in ORDERS:
            shown = [[(view.prompt, view.order) for view in own] for own in self.views]
        return [self.letters, shown]


def _asked(
    model: nn.Module,
    tokenizer: Any,
    questions: Sequence[Question],
    averaging: Averaging,
    passes: int,
    batch_tokens: int,
) -> _Asked:
    letters = letter_ids(tokenizer, max(len(question.choices) for question in questions))
    asked = views(tokenizer, questions, averaging, passes, context_length(model))
    repeated = passes if averaging == "answer" and not shares_prompts(model) else max(map(len, asked))
    lengths = [max(len(view.prompt) for view in own) for own in asked]
    return _Asked(letters, asked, by_length(lengths, batch_tokens // repeated), averaging, passes)


def _answered(model: nn.Module, asked: _Asked, questions: Sequence[Question], number: int, seed: int) -> Batch:
    """The batch of that number."""
    own = [asked.views[row] for row in asked.batches[number]]
    mine = [questions[row] for row in asked.batches[number]]
    batch = padded([view.prompt for views in own for view in views], next(model.parameters()).device)
    with seeded(f"{seed} {number}", model), memory_for(batch, "--batch-tokens"):
        if asked.averaging in ORDERS:
            found = answer_orders(model, batch, own, asked.letters, routing=asked.averaging != "orders")
        else:
            options = [len(question.choices) for question in mine]
            found = answer(model, batch, asked.letters, options, asked.averaging, asked.passes)
    _check_numbers(found.log_probs, mine)
    return found


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


def _check_numbers(log_probs: list[list[float]], questions: Sequence[Question]) -> None:
    for row, question in zip(log_probs, questions, strict=True):
        if not all(value == value and value > -float("inf") for value in row):
            raise RunError(f"question {question.id!r} of {question.task}: the model's logits are not finite numbers")
