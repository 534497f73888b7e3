"""ARC-Easy (Clark et al., 2018): the easier part of grade-school science exams.

Three to five options; its own three splits.
"""

from ._base import Record, Task
from ._hub import Hub, Row, labelled


def record(row: Row, split: str, index: int) -> Record:
    return labelled(row, f"arc_easy-{row['id']}", row["question"])


TASK = Task("arc_easy", Hub("allenai/ai2_arc", record, config="ARC-Easy"))
