"""What a question is, what a data set says of itself, and the checks every row passes whatever its source."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from vmoer.errors import InputError

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

    def shuffled(self, seed: int) -> Question:
        """The same question with its options permuted: a function of (seed, id) alone, so the same in any subset."""
        order = sorted(range(len(self.choices)), key=lambda i: digest("options", seed, self.id, i))
        return replace(self, choices=tuple(self.choices[i] for i in order), answer=order.index(self.answer))


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
"""Where each split that we serve comes from."""

OWN: Layout = {name: Part(name) for name in ("train", "validation", "test")}


@dataclass(frozen=True)
class Task:
    """A data set.

    `source` gives the data set's own splits, each an iterable that is read only when asked for. `layouts` are tried in
    order and the first whose sources all exist is used, so that the hub's copy and a folder with fewer files both
    work; with none that fits, the splits that exist are served as they are. `paper_sizes` are the rows the paper takes.
    """

    name: str
    source: Callable[[], Mapping[str, Iterable[Record]]]
    layouts: tuple[Layout, ...] = (OWN,)
    paper_sizes: Mapping[str, int] | None = None

    def layout(self, available: Iterable[str]) -> Layout:
        have = set(available)
        for layout in self.layouts:
            if {part.source for part in layout.values()} <= have:
                return layout
        return {name: Part(name) for name in sorted(have)}


def digest(*key: object) -> bytes:
    """A number drawn by what it is for, not by when it is drawn: no order of calls can change it."""
    return hashlib.sha256("\x1f".join(map(str, key)).encode()).digest()


def take(part: Part, questions: list[Question], seed: int) -> list[Question]:
    """The part's questions, in the order they had. Questions of the same wording lie together in the seeded order,
    so a split we make does not put one into train and its twin into test (but for one group at each cut)."""
    if part.whole:
        return questions
    ranked = sorted(
        range(len(questions)),
        key=lambda i: (digest("split", seed, _wording(questions[i])), digest("split", seed, questions[i].id)),
    )
    return [questions[i] for i in sorted(ranked[part.start : part.stop])]


def subsample(questions: list[Question], n: int, seed: int) -> list[Question]:
    """n of the questions, in the order they had; a smaller n is a subset of a larger one."""
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
    """The rows as questions, every one of them checked; `where` names the source when it turns out to be empty."""
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
    try:
        row = json.loads(line)
    except (json.JSONDecodeError, RecursionError) as error:
        raise InputError(f"{place}: not valid JSON ({error})") from error
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
    """A string with something in it, and no half of a surrogate pair: JSON can hold one, no tokenizer takes it."""
    return isinstance(value, str) and bool(value.strip()) and value.encode(errors="ignore").decode() == value


def _wording(question: Question) -> str:
    return " ".join(question.question.casefold().split())
