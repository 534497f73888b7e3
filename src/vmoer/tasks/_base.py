"""Questions, data sets, and the checks that every row passes, whatever its source."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from vmoer.errors import InputError
from vmoer.files import parse_json

LETTERS = "ABCDEFGHIJ"

Record = Mapping[str, Any]
"""A row in our own form: `id`, `question`, `choices`, `answer`; other keys are ignored."""


@dataclass(frozen=True)
class Question:
    """A multiple-choice question; `answer` is the index of the right option in `choices`."""

    id: str
    question: str
    choices: tuple[str, ...]
    answer: int
    task: str
    split: str

    def ordered(self, order: Sequence[int]) -> Question:
        """The same question with its options in another order: by place, which of its own stands there."""
        return replace(self, choices=tuple(self.choices[i] for i in order), answer=list(order).index(self.answer))

    def shuffled(self, *key: int) -> Question:
        """The same question with its options permuted, by a function of the key and its id alone: the same in any subset."""
        order = sorted(range(len(self.choices)), key=lambda i: digest("options", *key, self.id, i))
        return self.ordered(order)


@dataclass(frozen=True)
class Part:
    """Rows `start:stop` of the data set's own split `source`, taken in seeded order; by default all of them."""

    source: str
    start: int = 0
    stop: int | None = None

    @property
    def whole(self) -> bool:
        return self.start == 0 and self.stop is None


Layout = Mapping[str, Part]
"""The part that each split is made of."""

OWN: Layout = {name: Part(name) for name in ("train", "validation", "test")}


@dataclass(frozen=True)
class Task:
    """A data set."""

    name: str
    source: Callable[[], Mapping[str, Iterable[Record]]]
    """Gives the data set's own splits, each an iterable that is read only when it is needed."""
    layouts: tuple[Layout, ...] = (OWN,)
    """The first layout whose sources all exist is used, so that the hub's copy and a folder with fewer files both work."""
    paper_sizes: Mapping[str, int] | None = None
    """How many rows the paper takes of each split."""

    def layout(self, available: Iterable[str]) -> Layout:
        """The layout for the splits that are there; where none fits, each split is served as it is."""
        have = set(available)
        for layout in self.layouts:
            if {part.source for part in layout.values()} <= have:
                return layout
        return {name: Part(name) for name in sorted(have)}


def digest(*key: object) -> bytes:
    """A pseudo-random number as a function of its key, so that the order of calls cannot change it."""
    return hashlib.sha256("\x1f".join(map(str, key)).encode()).digest()


def take(part: Part, questions: list[Question], seed: int) -> list[Question]:
    """The part's questions, in their own order.

    Questions of the same wording lie together in the seeded order. So a split we make does not put one into train and its
    twin into test, but for one group at each cut.
    """
    if part.whole:
        return questions
    ranked = sorted(
        range(len(questions)),
        key=lambda i: (digest("split", seed, wording(questions[i])), digest("split", seed, questions[i].id)),
    )
    return [questions[i] for i in sorted(ranked[part.start : part.stop])]


def subsample(questions: list[Question], n: int, seed: int) -> list[Question]:
    """n of the questions, in their own order; the questions for a smaller n are among those for a larger one."""
    ranked = sorted(range(len(questions)), key=lambda i: digest("sample", seed, questions[i].id))
    return [questions[i] for i in sorted(ranked[:n])]


def read_jsonl(path: Path) -> Iterator[tuple[str, Record]]:
    """The file's objects, each with its place (`file:line`); blank lines are skipped."""
    try:
        with path.open(encoding="utf-8-sig") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    yield f"{path}:{number}", _parse(line, f"{path}:{number}")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: cannot be read ({error})") from error


def questions(rows: Iterable[tuple[str, Record]], task: str, split: str, where: str) -> list[Question]:
    """The rows as checked questions. `where` names the source in the error for an empty one."""
    found: list[Question] = []
    seen: dict[str, str] = {}
    for place, row in rows:
        question = _question(row, task, split, place)
        if question.id in seen:
            raise InputError(f"{place}: id {question.id!r} was already used at {seen[question.id]}")
        seen[question.id] = place
        found.append(question)
    if not found:
        raise InputError(f"{where}: no questions in it")
    return found


def _parse(line: str, place: str) -> Record:
    row = parse_json(line, place)
    if not isinstance(row, dict):
        raise InputError(f"{place}: a line must be a JSON object, not {type(row).__name__}")
    return row


def _question(row: Record, task: str, split: str, place: str) -> Question:
    missing = [field for field in ("id", "question", "choices", "answer") if field not in row]
    if missing:
        raise InputError(f"{place}: missing field {', '.join(map(repr, missing))}")
    for field in ("id", "question"):
        if not _is_text(row[field]):
            raise InputError(f"{place}: {field!r} must be a non-empty string, not {row[field]!r}")
    choices, answer = row["choices"], row["answer"]
    if not isinstance(choices, list | tuple):
        raise InputError(f"{place}: 'choices' must be a list, not {type(choices).__name__}")
    if not 2 <= len(choices) <= len(LETTERS):
        raise InputError(f"{place}: {len(choices)} option(s), where 2 to {len(LETTERS)} are needed")
    for number, choice in enumerate(choices):
        if not _is_text(choice):
            raise InputError(f"{place}: choice {number} must be a non-empty string, not {choice!r}")
    if not isinstance(answer, int) or isinstance(answer, bool):
        raise InputError(f"{place}: 'answer' must be the index of a choice, not {answer!r}")
    if not 0 <= answer < len(choices):
        raise InputError(f"{place}: answer {answer} is out of range for {len(choices)} choices (counted from 0)")
    return Question(row["id"], row["question"], tuple(choices), answer, task, split)


def _is_text(value: object) -> bool:
    """A non-empty string without half a surrogate pair: JSON can hold one, but no tokenizer takes it."""
    return isinstance(value, str) and bool(value.strip()) and value.encode(errors="ignore").decode() == value


def wording(question: Question) -> str:
    """The question's text without case and spacing."""
    return " ".join(question.question.casefold().split())
