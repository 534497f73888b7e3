"""MedMCQA (Pal et al., 2022): medical entrance exams, four options.

Its own test split has no labels, so the labelled validation rows (4183) are cut by seed. With a train split (the hub):
3183 for validation and 1000 for test. Without: 3000 for train, 183 for validation and the same 1000 for test.
"""

from vmoer.tasks._base import Part, Record, Task
from vmoer.tasks._hub import Hub, HubRow

TEST = Part("validation", 3183)
WITH_TRAIN = {"train": Part("train"), "validation": Part("validation", 0, 3183), "test": TEST}
WITHOUT_TRAIN = {"train": Part("validation", 0, 3000), "validation": Part("validation", 3000, 3183), "test": TEST}


def record(row: HubRow, split: str, index: int) -> Record:
    choices = [row[column] for column in ("opa", "opb", "opc", "opd")]
    return {"id": f"medmcqa-{row['id']}", "question": row["question"], "choices": choices, "answer": row["cop"]}


TASK = Task(
    "medmcqa",
    Hub("openlifescienceai/medmcqa", record),
    layouts=(WITH_TRAIN, WITHOUT_TRAIN),
    paper_sizes={"train": 5000, "validation": 50, "test": 500},
)
