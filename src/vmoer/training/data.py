"""Questions as token ids, and the order they are trained in.

Prompts are tokenised once, or once an epoch where their options stand in new orders. The order of an epoch is a function of
(seed, epoch), and that of a question's options of (stage, seed, epoch, question), so that a resumed run continues as if it had
never stopped. Batches hold prompts of similar length: an epoch's shuffled questions are cut into pools, each pool is sorted by
length and cut into batches, and the batches are shuffled.

Shapes: B rows, T tokens, C options (letters), U columns whose logits are wanted.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vmoer.errors import InputError
from vmoer.tasks import Part, Question, take
from vmoer.tasks.batches import padded
from vmoer.tasks.prompt import encode, letter_ids

POOL = 32  # batches a pool: enough to find prompts of like length, few enough that an epoch stays well mixed


@dataclass(frozen=True)
class Examples:
    """Encoded questions. `letters` are the token ids of the answer letters, as many as the longest list of options."""

    prompts: Sequence[Sequence[int]]
    answers: Sequence[int]
    options: Sequence[int]
    letters: Sequence[int]

    def __post_init__(self) -> None:
        if not self.prompts:
            raise InputError("there are no questions to train or validate on")

    def __len__(self) -> int:
        return len(self.prompts)

    @property
    def lengths(self) -> list[int]:
        return [len(prompt) for prompt in self.prompts]

    def at(self, epoch: int) -> "Examples":
        """What an epoch trains on."""
        return self


@dataclass(frozen=True)
class Reordered(Examples):
    """The questions as they are written, and for every epoch with their options in an order of its own."""

    of_epoch: Callable[[int], Examples]

    def at(self, epoch: int) -> Examples:
        return self.of_epoch(epoch)


@dataclass(frozen=True)
class Batch:
    """Prompts padded on the right, where no position moves; only the columns that some prompt ends in get logits."""

    inputs: dict[str, Tensor]
    columns_U: Tensor
    place_B: Tensor
    """Which of those columns is the prompt's last."""
    last_B: Tensor
    answers_B: Tensor
    beyond_BC: Tensor
    """Letters that are no option of this question."""
    letters_C: Tensor


def encode_questions(
    tokenizer: Any,
    questions: Sequence[Question],
    max_length: int,
    letters: int = 0,
    *,
    orders: tuple[int, int] | None = None,
) -> Examples:
    """Tokenise.

    Args:
        tokenizer: the model's own.
        questions: in the order of the rows.
        max_length: the longest prompt that the model takes.
        letters: how many there are at least, so that splits whose questions have fewer options agree.
        orders: a stage and a seed, for options in new orders every epoch.
    """
    options = [len(question.choices) for question in questions]
    answering = letter_ids(tokenizer, max([letters, *options]))

    def encoded(asked: Sequence[Question], keep: bool) -> dict[str, Any]:
        prompts = encode(tokenizer, asked, max_length, keep=keep)
        return {"prompts": prompts, "answers": [q.answer for q in asked], "options": options, "letters": answering}

    def of_epoch(epoch: int) -> Examples:
        assert orders is not None
        return Examples(**encoded([question.shuffled(*orders, epoch) for question in questions], False))

    if orders is None:
        return Examples(**encoded(questions, True))
    return Reordered(**encoded(questions, True), of_epoch=of_epoch)


def hold_out(questions: Sequence[Question], share: float, seed: int) -> tuple[list[Question], list[Question]]:
    """The questions that stage 1 trains on, and those it never sees. Questions of one wording stay on one side."""
    known = round((1 - share) * len(questions))
    if not 0 < known < len(questions):
        raise InputError(f"a held-out share of {share} leaves nothing on one side of {len(questions)} questions")
    everything = list(questions)
    return take(Part("train", 0, known), everything, seed), take(Part("train", known), everything, seed)


def halves(validation: Sequence[Question], seed: int) -> tuple[list[Question], list[Question]]:
    """Two halves of validation: the first for stopping and choosing, the second for comparing what was stopped and chosen."""
    return hold_out(validation, 0.5, seed)


def epoch_batches(lengths: Sequence[int], batch_size: int, seed: int, epoch: int) -> list[list[int]]:
    """The epoch's batches of row numbers, each full: what is missing in the last is taken from the epoch's beginning."""
    generator = torch.Generator().manual_seed((seed + 1) * 1_000_003 + epoch)
    order = torch.randperm(len(lengths), generator=generator).tolist()
    short = -len(order) % batch_size
    order += [order[i % len(lengths)] for i in range(short)]
    batches = []
    for start in range(0, len(order), POOL * batch_size):
        pool = sorted(order[start : start + POOL * batch_size], key=lambda row: lengths[row])
        batches += [pool[i : i + batch_size] for i in range(0, len(pool), batch_size)]
    return [batches[i] for i in torch.randperm(len(batches), generator=generator).tolist()]


def collate(examples: Examples, rows: Sequence[int], device: torch.device) -> Batch:
    """One batch on the device. The mask is always given, also where no row is padded."""
    prompts = [examples.prompts[row] for row in rows]
    width = max(map(len, prompts))
    if device.type == "cuda" and width == min(map(len, prompts)):
        width += 1  # without padding attention takes a path of its own, whose gradient was seen not to be finite there
    last = [len(prompt) - 1 for prompt in prompts]
    columns = sorted(set(last))
    options_B = torch.tensor([examples.options[row] for row in rows])

    def put(tensor: Tensor) -> Tensor:
        return tensor.to(device, non_blocking=True)

    return Batch(
        inputs=padded(prompts, device, width),
        columns_U=put(torch.tensor(columns)),
        place_B=put(torch.tensor([columns.index(column) for column in last])),
        last_B=put(torch.tensor(last)),
        answers_B=put(torch.tensor([examples.answers[row] for row in rows])),
        beyond_BC=put(torch.arange(len(examples.letters)) >= options_B.unsqueeze(1)),
        letters_C=put(torch.tensor(examples.letters)),
    )
