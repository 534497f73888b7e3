"""MMLU professional law (Hendrycks et al., 2021): bar exam cases, four options.

Prompts are several times longer than those of the other sets. Its own splits are test, validation and five dev rows.
There is no train split and none is made, because this set serves as out-of-distribution data.
"""

from vmoer.tasks._base import Part, Record, Task
from vmoer.tasks._hub import Hub, HubRow


def record(row: HubRow, split: str, index: int) -> Record:
    return {
        "id": f"mmlu-professional_law-{split}-{index}",
        "question": row["question"],
        "choices": list(row["choices"]),
        "answer": row["answer"],
    }


TASK = Task(
    "mmlu_law",
    Hub("cais/mmlu", record, config="professional_law"),
    layouts=({name: Part(name) for name in ("dev", "validation", "test")},),
)
