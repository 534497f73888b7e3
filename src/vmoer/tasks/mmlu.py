"""MMLU (Hendrycks et al., 2021) without professional law, which is a set of its own (mmlu_law): 56 subjects, four options.

The subjects lie at many distances from any one training set, so they serve as graded shifts. A question's id begins with its
subject. There is no train split and none is made.
"""

from vmoer.tasks._base import Part, Record, Task
from vmoer.tasks._hub import Hub, HubRow


def record(row: HubRow, split: str, index: int) -> Record | None:
    if row["subject"] == "professional_law":
        return None
    return {
        "id": f"{row['subject']}-{split}-{index}",
        "question": row["question"],
        "choices": list(row["choices"]),
        "answer": row["answer"],
    }


TASK = Task(
    "mmlu",
    Hub("cais/mmlu", record, config="all"),
    layouts=({name: Part(name) for name in ("validation", "test")},),
)
