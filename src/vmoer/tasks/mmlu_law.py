"""MMLU professional law (Hendrycks et al., 2021): bar exam cases, four options, prompts several times longer than the
other sets'. Its own splits are test, validation and five dev rows; there is no train, and none is made of it: it is
here to be out of distribution."""

from ._base import Part, Record, Task
from ._hub import Hub, Row


def record(row: Row, split: str, index: int) -> Record:
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
