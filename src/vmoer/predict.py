"""Model and questions to files: `predictions.parquet`, `routing.parquet`, `meta.json`, the only things metrics ever read.

A prompt ends where the answer letter would start. At its last token

    log_probs   log (1/M) sum_m softmax(logits of the question's own letters in pass m),   M = 1 for "router" averaging
    a signal    its mean over the attached layers (and the passes)

Prompts of similar length share a batch. A finished batch is a file in `.parts/`, named by a hash of everything that
determines its numbers, so a run that was killed goes on where it was and ends with the same bytes.

Shapes: M passes, B prompts, V letters, T columns of the batch, K selected experts.
"""

import hashlib
import json
import platform
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, get_args

import torch
from torch import Tensor, nn

import vmoer
from vmoer.attach import attach, attached, attachment_of, detach, record
from vmoer.averaging import (
    Averaging,
    last_positions,
    mean_log_probs,
    mutual_information,
    predict,
    predict_passes,
    shares_prompts,
)
from vmoer.errors import InputError, RunError
from vmoer.predictions import ROUTER_SIGNALS, SIGNALS, finish, write_part
from vmoer.recording import Record
from vmoer.routers import Deterministic
from vmoer.store import adapter_fingerprint, fingerprint
from vmoer.tasks import Question
from vmoer.tasks.prompt import encode, letter_ids
from vmoer.training.data import by_length

__all__ = ["predict", "predict_task"]  # `vmoer.predict` is the function, whoever imports this module


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
    progress: bool = False,
) -> Path:
    """Answer the questions and write `folder/predictions.parquet`, a row for each in the order given; returns its path.

    The first question's task is the source, the other tasks are out-of-distribution. A model with nothing attached is
    run as it is (`map`). `name` and `method` are what `meta.json` and the rows say, by default the model's own folder or
    hub id and the attached method's key; `seed` labels the rows and seeds methods that draw fresh noise
    (`sampling="mc"`). `routing` also writes the experts selected at the answer. `meta.json` is written last: where it
    is, the folder is complete.
    """
    if not questions:
        raise InputError("there are no questions to answer")
    if averaging not in get_args(Averaging):
        raise InputError(f"averaging={averaging!r}: choose one of {', '.join(get_args(Averaging))}")
    for option, value in (("batch_tokens", batch_tokens), ("passes", passes)):
        if value < 1:
            raise InputError(f"{option}={value} must be at least 1")
    if routing and averaging != "router":
        raise InputError(f"expert sets are those of one pass: routing does not go with averaging={averaging!r}")
    folder = Path(folder)
    if folder.exists() and not folder.is_dir():
        raise InputError(f"{folder} is a file, not a folder")
    passes = 1 if averaging == "router" else passes
    bare, training = attachment_of(model) is None, model.training
    if bare:
        attach(model, Deterministic())
    model.eval()
    try:
        options = [len(q.choices) for q in questions]
        letters = letter_ids(tokenizer, max(options))
        prompts = encode(tokenizer, questions, _context(model))
        choices = {"averaging": averaging, "passes": passes, "batch_tokens": batch_tokens, "routing": routing}
        meta = _meta(model, name, method, seed, choices, questions, [letters, prompts])
        repeated = passes if averaging == "answer" and not shares_prompts(model) else 1
        batches = by_length([len(p) for p in prompts], batch_tokens // repeated)
        parts = [folder / ".parts" / f"{_digest(meta)[:16]}-{i:05d}.parquet" for i in range(len(batches))]
        parts[0].parent.mkdir(parents=True, exist_ok=True)
        with _bar(len(questions), progress) as advance:
            for number, (part, rows) in enumerate(zip(parts, batches, strict=True)):
                if not part.exists():
                    batch = collate([prompts[row] for row in rows], model)
                    with _seeded(f"{seed} {number}", model), _memory(batch):
                        found = answer(model, batch, letters, [options[row] for row in rows], averaging, passes)
                    _check(found["log_probs"], [questions[row] for row in rows])
                    write_part(part, rows, found, routing)
                advance(len(rows))
        finish(folder, parts, questions, [len(p) for p in prompts], meta)
    finally:
        model.train(training)
        if bare:
            detach(model)
    return folder / "predictions.parquet"


# -- one batch ---------------------------------------------------------------------------------------------------------


def collate(prompts: Sequence[Sequence[int]], model: nn.Module) -> dict[str, Tensor]:
    """Padded on the right, where no position moves and no real token sees the padding."""
    width = max(map(len, prompts))
    ids_BT = torch.tensor([[*p, *[p[-1]] * (width - len(p))] for p in prompts])
    mask_BT = torch.tensor([[1] * len(p) + [0] * (width - len(p)) for p in prompts])
    device = next(model.parameters()).device
    return {"input_ids": ids_BT.to(device), "attention_mask": mask_BT.to(device)}


@torch.no_grad()
def answer(
    model: nn.Module,
    batch: Mapping[str, Tensor],
    letters: Sequence[int],
    options: Sequence[int],
    averaging: Averaging,
    passes: int,
) -> dict[str, list[Any]]:
    """For each prompt: `log_probs` over its own letters, every signal (None where there is none), and `experts`."""
    with record(model) as rec:
        log_probs_MBV = predict_passes(model, batch, averaging=averaging, passes=passes, tokens=list(letters))
    beyond_BV = torch.arange(len(letters)) >= torch.tensor(options).unsqueeze(1)
    log_probs_MBV = log_probs_MBV.double().cpu().masked_fill(beyond_BV, -torch.inf).log_softmax(-1)
    mean_BV = mean_log_probs(log_probs_MBV).log_softmax(-1)
    signals: dict[str, Tensor] = at_answer(rec, batch, averaging)
    signals["predictive_entropy"] = torch.special.entr(mean_BV.exp()).sum(-1)
    if averaging != "router":
        signals["mutual_information"] = mutual_information(log_probs_MBV)
    out: dict[str, list[Any]] = {
        name: signals[name].tolist() if name in signals else [None] * len(options) for name in SIGNALS
    }
    out["log_probs"] = [row[:n] for row, n in zip(mean_BV.tolist(), options, strict=True)]
    if averaging == "router":
        _, entries = rec.passes[-1]
        home = batch["input_ids"].device
        chosen_LTK = torch.stack([entries[layer].experts_TK.to(home) for layer in rec.layers])
        chosen_BLK = chosen_LTK[:, last_tokens(batch)].sort(-1).values.transpose(0, 1)
        out["experts"] = chosen_BLK.tolist()  # [B][layer][K]
    return out


def at_answer(rec: Record, batch: Mapping[str, Tensor], averaging: Averaging) -> dict[str, Tensor]:
    """Each router signal at the prompts' last tokens, [B], averaged over layers and passes."""
    taken = rec.passes[-1:] if averaging == "answer" else rec.passes
    entries = [entries[layer] for _, entries in taken for layer in rec.layers]
    last_B = None if averaging == "answer" else last_tokens(batch)
    found = {}
    for name in ROUTER_SIGNALS:
        if name in entries[0].signals:
            # stacked first, so that the rest is one kernel for all layers
            x_ET = torch.stack([entry.signals[name].to(batch["input_ids"].device) for entry in entries])
            # "answer": the last pass holds that token alone, M times for each prompt
            x_EBM = x_ET.view(len(entries), len(batch["input_ids"]), -1) if last_B is None else x_ET[:, last_B, None]
            found[name] = x_EBM.double().mean((0, 2)).cpu()
    return found


def last_tokens(batch: Mapping[str, Tensor]) -> Tensor:
    """Where each prompt's last token lies among the tokens of the batch, row by row, [B]."""
    last_B = last_positions(batch)
    return torch.arange(len(last_B), device=last_B.device) * batch["input_ids"].shape[1] + last_B


@contextmanager
def _seeded(key: str, model: nn.Module) -> Iterator[None]:
    """Methods that draw fresh noise draw the same in this batch whatever ran before it."""
    device = next(model.parameters()).device
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(int.from_bytes(hashlib.sha256(key.encode()).digest()[:7], "big"))
        yield


@contextmanager
def _memory(batch: Mapping[str, Tensor]) -> Iterator[None]:
    try:
        yield
    except torch.OutOfMemoryError:
        rows, width = batch["input_ids"].shape
        raise RunError(f"out of memory on {rows} prompts of {width} tokens: take smaller --batch-tokens") from None


def _check(log_probs: list[list[float]], questions: Sequence[Question]) -> None:
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
    import transformers

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
            "vmoer": vmoer.__version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "python": platform.python_version(),
        },
    }


def _context(model: Any) -> int:
    config = model.config.get_text_config() if hasattr(model.config, "get_text_config") else model.config
    return int(getattr(config, "max_position_embeddings", None) or sys.maxsize)


def _plain(name: str) -> str:
    """A local folder by its name alone: files say nothing about the machine they were made on."""
    path = Path(name)
    return path.resolve().name if path.is_absolute() or path.is_dir() else name


def _digest(*values: object) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def _checksum(model: Any) -> str:
    """Of every weight, base and routers: sums of their bits, which take no longer than reading them."""
    integers = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    sums = []
    for name, value in sorted(model.state_dict().items()):
        bits = value.detach().contiguous().view(-1).view(integers[value.element_size()])
        sums.append([name, list(value.shape), str(value.dtype), int(bits.sum(dtype=torch.int64))])
    settings = {k: v for k, v in model.config.to_dict().items() if k not in ("_name_or_path", "transformers_version")}
    return _digest(sums, json.dumps(settings, sort_keys=True, default=str))


# -- progress ----------------------------------------------------------------------------------------------------------


@contextmanager
def _bar(total: int, wanted: bool) -> Iterator[Callable[[int], object]]:
    """A progress bar on a terminal's stderr, where rich is installed."""
    try:
        from rich.console import Console
        from rich.progress import Progress
    except ImportError:
        wanted = False
    if not wanted:
        yield lambda n: None
        return
    console = Console(stderr=True)
    with Progress(console=console, disable=not console.is_terminal, transient=True) as progress:
        task = progress.add_task("answering", total=total)
        yield lambda n: progress.advance(task, n)
