"""SciQ (Welbl et al., 2017): broad science, four options.

The hub has all three splits. Where there is no train, the validation rows are cut by seed: 800 to train on, the rest
(200 of 1000) for validation; test is always test.
"""

from vmoer.tasks._base import OWN, Part, Record, Task, digest
from vmoer.tasks._hub import Hub, HubRow

WITHOUT_TRAIN = {"train": Part("validation", 0, 800), "validation": Part("validation", 800), "test": Part("test")}


def record(row: HubRow, split: str, index: int) -> Record:
    """The hub keeps the right answer in a column of its own; a hash of the question decides where it goes."""
    options = [row["correct_answer"], row["distractor1"], row["distractor2"], row["distractor3"]]
    order = sorted(range(4), key=lambda i: digest("sciq", row["question"], i))
    return {
        "id": f"sciq-{split}-{index}",
        "question": row["question"],
        "choices": [options[i] for i in order],
        "answer": order.index(0),
    }


TASK = Task(
    "sciq",
    Hub("allenai/sciq", record),
    layouts=(OWN, WITHOUT_TRAIN),
    paper_sizes={"train": 5000, "validation": 50, "test": 500},
)
