"""Data sets from the Hugging Face hub, through the `datasets` library, which is an extra."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from vmoer.errors import InputError
from vmoer.tasks._base import Record

HubRow = Mapping[str, Any]
"""A row as the hub's data set has it."""


@dataclass(frozen=True)
class Hub:
    """A data set on the hub; `record(row, split, index)` puts one of its rows into our form, or says None to leave it out."""

    id: str
    record: Callable[[HubRow, str, int], Record | None]
    config: str | None = None
    revision: str | None = None

    def __call__(self) -> Mapping[str, Iterable[Record]]:
        try:
            from datasets import load_dataset
        except ImportError as error:
            raise InputError(
                f"{self.id}: the hub needs `pip install vmoer[data]`; or give local files by --data-root DIR"
            ) from error
        try:
            splits = load_dataset(self.id, self.config, revision=self.revision)
        except Exception as error:  # no network, a proxy, a gated or moved set: httpx, hub and OS errors share no base
            reason = (str(error).splitlines() or [""])[0]
            raise InputError(
                f"{self.id}: cannot be loaded from the hub ({type(error).__name__}: {reason}); "
                "give local files by --data-root DIR or VMOER_DATA"
            ) from error
        return {str(name): self._records(rows, str(name)) for name, rows in splits.items()}

    def _records(self, rows: Iterable[HubRow], split: str) -> Iterator[Record]:
        for index, row in enumerate(rows):
            try:
                found = self.record(row, split, index)
            except (KeyError, IndexError, TypeError, ValueError) as error:
                raise InputError(
                    f"{self.id} {split} row {index}: not in the expected form ({type(error).__name__}: {error})"
                ) from error
            if found is not None:
                yield found


def labelled(row: HubRow, id: str, question: str) -> Record:
    """A row whose `choices` are parallel lists of `text` and `label`, its `answerKey` one of the labels.

    Labels are looked up, not counted from A: some rows of ARC are labelled 1 to 4.
    """
    choices = row["choices"]
    answer = list(choices["label"]).index(row["answerKey"])
    return {"id": id, "question": question, "choices": list(choices["text"]), "answer": answer}
