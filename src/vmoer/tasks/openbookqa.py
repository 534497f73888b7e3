"""OpenBookQA (Mihaylov et al., 2018): elementary science facts and common sense, four options; its own three splits."""

from ._base import Record, Task
from ._hub import Hub, Row, labelled


def record(row: Row, split: str, index: int) -> Record:
    return labelled(row, f"openbookqa-{row['id']}", row["question_stem"])


TASK = Task(
    "openbookqa",
    Hub("allenai/openbookqa", record, config="main"),
    paper_sizes={"train": 5000, "validation": 50, "test": 500},
)
