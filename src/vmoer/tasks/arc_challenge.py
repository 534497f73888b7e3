"""ARC-Challenge (Clark et al., 2018): the harder part of grade-school science exams.

Three to five options; its own three splits.
"""

from vmoer.tasks._base import Record, Task
from vmoer.tasks._hub import Hub, HubRow, labelled


def record(row: HubRow, split: str, index: int) -> Record:
    return labelled(row, f"arc_challenge-{row['id']}", row["question"])


TASK = Task(
    "arc_challenge",
    Hub("allenai/ai2_arc", record, config="ARC-Challenge"),
    paper_sizes={"train": 2000, "validation": 50, "test": 500},
)
