"""The real sets: row counts against the table in the data's own README, labels and splits against set algebra."""

import re
from pathlib import Path

import pytest

from vmoer.tasks import _REGISTRY as registry
from vmoer.tasks import Hub, load, names
from vmoer.tasks._base import questions, read_jsonl

SPLITS = ("train", "validation", "test")
CARVED = SPLITS[:2]
REAL = [task for task in names() if isinstance(registry[task].source, Hub)]
MADE_BY_SEED = {"sciq": CARVED, "medmcqa": SPLITS, "commonsense_qa": CARVED, "social_iqa": CARVED}


def readme_rows(data_root: Path) -> dict[str, dict[str, int]]:
    """`| sciq | - / 1000 / 1000 | ...` -> {"sciq": {"validation": 1000, "test": 1000}}; `dev 5` names its own split."""
    table = {}
    for line in (data_root / "README.md").read_text().splitlines():
        if match := re.match(r"\| (\w+) \| ([a-z]* ?[\d-]+) / ([\d-]+) / ([\d-]+) \|", line):
            task, *cells = match.groups()
            named = (f"{split} {cell}".split()[-2:] for split, cell in zip(SPLITS, cells, strict=True))
            table[task] = {split: int(count) for split, count in named if count != "-"}
    return table


def test_the_readme_lists_the_built_in_tasks(data_root: Path) -> None:
    """All that it lists but trivia_qa, whose questions have no options."""
    assert sorted(readme_rows(data_root)) == sorted([*REAL, "trivia_qa"])


@pytest.mark.parametrize("task", REAL)
def test_every_file_has_the_rows_its_readme_says(data_root: Path, task: str) -> None:
    counts = {p.stem: len(questions(read_jsonl(p), task, p.stem, "")) for p in (data_root / task).glob("*.jsonl")}
    assert counts == readme_rows(data_root)[task]


@pytest.mark.parametrize("task", REAL)
def test_splits_are_disjoint_complete_seeded_and_labelled(data_root: Path, task: str) -> None:
    """Together the splits hold each row of the files once. Ids are unique within a file, so keys are (file, id)."""
    layout = registry[task].layout(p.stem for p in (data_root / task).glob("*.jsonl"))
    loaded = {split: load(task, split, data_root=data_root) for split in layout}
    keys = [(layout[split].source, q.id) for split, found in loaded.items() for q in found]
    assert len(keys) == len(set(keys)) == sum(readme_rows(data_root)[task].values())
    for split, found in loaded.items():
        assert all(2 <= len(q.choices) <= 10 and 0 <= q.answer < len(q.choices) for q in found)
        assert {(q.task, q.split) for q in found} == {(task, split)}
        assert load(task, split, data_root=data_root) == found
        another = load(task, split, data_root=data_root, seed=1)
        assert len(another) == len(found)
        assert ({q.id for q in another} != {q.id for q in found}) == (split in MADE_BY_SEED.get(task, ()))


def test_the_splits_we_make_have_the_sizes_we_say(data_root: Path) -> None:
    """The sizes in each data set's docstring, and the 3000 / 183 / 1000 that the data's README asks of medmcqa."""
    sizes = {task: [len(load(task, split, data_root=data_root)) for split in SPLITS] for task in MADE_BY_SEED}
    assert sizes == {
        "sciq": [800, 200, 1000],
        "medmcqa": [3000, 183, 1000],
        "commonsense_qa": [8741, 1000, 1221],
        "social_iqa": [31410, 2000, 1954],
    }


@pytest.mark.parametrize("task", ["commonsense_qa", "social_iqa"])
def test_a_carved_validation_shares_no_wording_with_train(data_root: Path, task: str) -> None:
    stems = [{q.question.casefold() for q in load(task, split, data_root=data_root)} for split in SPLITS[:2]]
    assert not stems[0] & stems[1]


def test_the_papers_sizes(data_root: Path) -> None:
    """The paper's table: train 5000 (ARC-C 2000), validation 50, test 500; here train always has fewer rows."""
    for task in ("openbookqa", "arc_challenge", "sciq", "medmcqa"):
        everything = {q.id for q in load(task, "test", data_root=data_root)}
        test = {q.id for q in load(task, "test", data_root=data_root, paper_splits=True)}
        assert len(test) == 500
        assert test <= everything
        assert len(load(task, "validation", data_root=data_root, paper_splits=True)) == 50
        with pytest.warns(UserWarning, match=f"{task} train: the paper takes"):
            load(task, "train", data_root=data_root, paper_splits=True)
    assert len(load("arc_easy", "test", data_root=data_root, paper_splits=True)) == 2376  # no size printed: all of it
