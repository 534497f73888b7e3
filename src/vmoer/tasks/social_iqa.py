"""Social IQa (Sap et al., 2019): what people feel, want and do next, three options.

It has no labelled test: its validation rows serve as test, and 2000 rows of train, drawn by seed, as validation.
Rows have no id of their own; ours is the row's number, unique within a source split but not across train and test.
"""

from vmoer.tasks._base import Part, Record, Task
from vmoer.tasks._hub import Hub, HubRow

LAYOUT = {"train": Part("train", 2000), "validation": Part("train", 0, 2000), "test": Part("validation")}


def record(row: HubRow, split: str, index: int) -> Record:
    return {
        "id": f"social_iqa-{index}",
        "question": f"{row['context']} {row['question']}",
        "choices": [row["answerA"], row["answerB"], row["answerC"]],
        "answer": int(row["label"]) - 1,  # labelled "1" to "3"
    }


TASK = Task(
    "social_iqa",
    # The repository itself is a loading script, which `datasets` 4 no longer runs; the hub keeps its rows as parquet.
    Hub("allenai/social_i_qa", record, revision="refs/convert/parquet"),
    layouts=(LAYOUT, {"test": Part("validation")}),
)
