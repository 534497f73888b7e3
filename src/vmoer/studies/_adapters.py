"""Labels of posteriors over the adapter, which people use in place of variational routing: what they train with, and open."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from vmoer.live.adapters import AdapterNoise
from vmoer.models import Opened
from vmoer.tasks import Question
from vmoer.training import laplace_lora
from vmoer.training.drawn import KINDS, open_drawn


def over_adapter(label: str) -> bool:
    """Whether a label's answers are averaged over samples of its adapter."""
    return label.partition("+")[0] in (*KINDS, laplace_lora.KEY)


def adapter_of(label: str) -> AdapterNoise | None:
    """What a label's adapter is drawn by in stage 1."""
    kind = KINDS.get(label.partition("+")[0])
    return None if kind is None else kind()


def answering(label: str) -> dict[str, Any]:
    """Options of `predict_task` that a label's answers take."""
    return {"batch_tokens": laplace_lora.BATCH_TOKENS} if label.partition("+")[0] == laplace_lora.KEY else {}


def open_posterior(label: str, run: Path, known: Callable[[], Sequence[Question]], **how: Any) -> Opened:
    """The run of a label's stage 1, which learned from the questions of `known`, with the posterior over its adapter."""
    if label.partition("+")[0] in KINDS:
        return open_drawn(run, **how)
    return laplace_lora.open_fitted(run, known(), **how)
