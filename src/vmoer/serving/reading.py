"""From vLLM's outputs, as they pass by, to what the choices of a response say.

An answer goes out whatever happens here: where its rows cannot be read, its `uncertainty` is null, and the log says so once.
"""

import functools
import json
import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from vmoer.saved.calibrator import Stored
from vmoer.serving.options import options
from vmoer.serving.values import Answer, Asked, Threshold, Values, joined

_log = logging.getLogger("vllm.vmoer")  # below vLLM's own, whose handlers and level it takes
Array = npt.NDArray[Any]


@functools.cache
def tell_lost() -> None:
    """Say once in a process, with the error that is being handled, that answers go out without their uncertainty."""
    _log.exception("vmoer: the uncertainty of an answer cannot be read, and the answer goes out without it")


class Cursor:
    """The rows of one request in their order. They arrive in chunks; what was taken is not copied again."""

    def __init__(self, chunks: list[Array]) -> None:
        self.chunks, self.chunk, self.row = chunks, 0, 0

    def take(self, count: int) -> Array:
        taken = []
        while count > 0 and self.chunk < len(self.chunks):
            rows = self.chunks[self.chunk][self.row : self.row + count]
            taken.append(rows)
            count, self.row = count - len(rows), self.row + len(rows)
            if self.row == len(self.chunks[self.chunk]):
                self.chunk, self.row = self.chunk + 1, 0
        return np.concatenate(taken) if taken else self.chunks[0][:0]


class Reader:
    """Reads the choices of one response from vLLM's outputs as they pass by."""

    def __init__(
        self,
        asked: Asked | None,
        letters: list[int],
        threshold: Threshold | None = None,
        calibrator: Stored | None = None,
        judge: Callable[[Values], None] = lambda verdict: None,
    ) -> None:
        self.asked, self.letters, self.threshold, self.calibrator = asked, letters, threshold, calibrator
        self.judge = judge
        """Counts verdicts that no other place can count: those of a threshold on options."""
        self.cursors: dict[int, Cursor] = {}
        self.answers: dict[int, Answer] = {}
        self.fresh: dict[int, list[Values]] = {}
        """What the client has not been given yet, by choice."""
        self.lost: set[int] = set()
        """Choices about which nothing more is known."""

    def read(self, index: int, out: Any) -> None:
        """Take the rows of an output's tokens, which are new ones in a stream, and all of them otherwise."""
        if self.asked is None or index in self.lost:
            return
        try:
            self._read(self.asked, index, out)
        except Exception:
            tell_lost()
            self.lost.add(index)

    def _read(self, asked: Asked, index: int, out: Any) -> None:
        if out.vmoer_rows is None:  # it was said where they were lost
            self.lost.add(index)
            return
        chunks, lead = out.vmoer_rows
        if chunks and out.token_ids:
            first = index not in self.cursors
            cursor = self.cursors.setdefault(index, Cursor(chunks))
            prompt = cursor.take(lead) if first else chunks[0][:0]
            answer = self.answers.setdefault(index, Answer(asked, self.threshold))
            self.fresh.setdefault(index, []).append(answer.add(prompt, cursor.take(len(out.token_ids))))
            if first and self.letters:
                chances = options([out.logprobs[0][letter].logprob for letter in self.letters], self.calibrator)
                self.fresh[index].append(answer.choose(chances))
        if out.finish_reason is not None and index in self.answers:
            end = self.answers[index].end()
            self.fresh.setdefault(index, []).append(end)
            # others are counted whether anybody asked or not
            if self.threshold is not None and self.threshold.on_options:
                self.judge(end)

    def give(self, index: int) -> Values | None:
        """What is new for a choice; None where its rows could not be read."""
        new = self.fresh.pop(index, [])
        return None if index in self.lost else joined(new) or None

    def put(self, line: str) -> str:
        """An event of a stream with what is new for its choices."""
        if not (self.fresh or self.lost) or not line.startswith("data: {"):
            return line
        event = json.loads(line.removeprefix("data: "))
        for choice in event.get("choices", []):
            index, opening = choice["index"], "role" in choice.get("delta", {}) and not choice["delta"].get("content")
            if (index in self.fresh or index in self.lost) and not (opening and choice.get("finish_reason") is None):
                choice["uncertainty"] = self.give(index)
        return f"data: {json.dumps(event)}\n\n"
