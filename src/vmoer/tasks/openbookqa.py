"""OpenBookQA (Mihaylov et al., 2018): elementary science facts and common sense, four options; its own three splits."""

from vmoer.tasks._base import Record, Task
from vmoer.tasks._hub import Hub, HubRow, labelled


def record(row: HubRow, split: str, index: int) -> Record:
    return labelled(row, f"openbookqa-{row['id']}", row["question_stem"])


TASK = Task(
    "openbookqa",
    Hub("allenai/openbookqa", record, config="main"),
    paper_sizes={"train": 5000, "validation": 50, "test": 500},
)
