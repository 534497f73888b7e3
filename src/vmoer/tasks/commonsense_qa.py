"""CommonsenseQA (Talmor et al., 2019): everyday concepts, five options.

Its own test split has no labels: its validation rows serve as test, and 1000 rows of train, drawn by seed, as
validation.
"""

from vmoer.tasks._base import Part, Record, Task
from vmoer.tasks._hub import Hub, HubRow, labelled

LAYOUT = {"train": Part("train", 1000), "validation": Part("train", 0, 1000), "test": Part("validation")}


def record(row: HubRow, split: str, index: int) -> Record:
    return labelled(row, f"commonsense_qa-{row['id']}", row["question"])


TASK = Task("commonsense_qa", Hub("tau/commonsense_qa", record), layouts=(LAYOUT, {"test": Part("validation")}))
