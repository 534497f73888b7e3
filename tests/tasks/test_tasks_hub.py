"""Loading from the hub, with `datasets.load_dataset` handing out rows in each set's column layout.

The oracle is the question written by hand beside each row.
"""

import builtins
import sys
from typing import Any

import pytest
from datasets import ClassLabel, Dataset, DatasetDict

from vmoer.errors import InputError
from vmoer.tasks import load


def labelled(texts: list[str], labels: str = "ABCDE") -> dict[str, list[str]]:
    return {"text": texts, "label": list(labels[: len(texts)])}


FOUR = ["air", "fire", "earth", "water"]
OPENBOOKQA = {"id": "7-9", "question_stem": "Ice is", "choices": labelled(FOUR), "answerKey": "D"}
ARC = {"id": "M_1", "question": "Ice is?", "choices": labelled(FOUR, "1234"), "answerKey": "4"}
COMMONSENSE = {
    "id": "0ab",
    "question": "Ice is?",
    "question_concept": "ice",
    "choices": labelled([*FOUR, "salt"]),
    "answerKey": "E",
}
MEDMCQA = {
    "id": "u-1",
    "question": "Ice is?",
    **dict(zip(("opa", "opb", "opc", "opd"), FOUR, strict=True)),
    "cop": 3,
    "choice_type": "single",
    "exp": None,
    "subject_name": "Physics",
    "topic_name": None,
}
MMLU = {"question": "Is it theft?", "subject": "professional_law", "choices": FOUR, "answer": 2}
SOCIAL = {
    "context": "Jo fell.",
    "question": "How does Jo feel?",
    "answerA": "glad",
    "answerB": "hurt",
    "answerC": "tall",
    "label": "2",
}

# task: (arguments of load_dataset, its splits there, a row, the split to ask for, the question's fields)
SETS: dict[str, tuple[tuple[Any, ...], tuple[str, ...], dict[str, Any], str, tuple[Any, ...]]] = {
    "openbookqa": (
        ("allenai/openbookqa", "main", None),
        ("train", "validation", "test"),
        OPENBOOKQA,
        "test",
        ("openbookqa-7-9", "Ice is", tuple(FOUR), 3),
    ),
    "arc_easy": (
        ("allenai/ai2_arc", "ARC-Easy", None),
        ("train", "validation", "test"),
        ARC,
        "validation",
        ("arc_easy-M_1", "Ice is?", tuple(FOUR), 3),
    ),
    "arc_challenge": (
        ("allenai/ai2_arc", "ARC-Challenge", None),
        ("train", "validation", "test"),
        ARC,
        "train",
        ("arc_challenge-M_1", "Ice is?", tuple(FOUR), 3),
    ),
    "medmcqa": (
        ("openlifescienceai/medmcqa", None, None),
        ("train", "validation", "test"),
        MEDMCQA,
        "train",
        ("medmcqa-u-1", "Ice is?", tuple(FOUR), 3),
    ),
    "mmlu": (
        ("cais/mmlu", "all", None),
        ("test", "validation", "dev", "auxiliary_train"),
        {**MMLU, "subject": "astronomy"},
        "test",
        ("astronomy-test-0", "Is it theft?", tuple(FOUR), 2),
    ),
    "mmlu_law": (
        ("cais/mmlu", "professional_law", None),
        ("test", "validation", "dev"),
        MMLU,
        "dev",
        ("mmlu-professional_law-dev-0", "Is it theft?", tuple(FOUR), 2),
    ),
    "commonsense_qa": (
        ("tau/commonsense_qa", None, None),
        ("train", "validation", "test"),
        COMMONSENSE,
        "test",
        ("commonsense_qa-0ab", "Ice is?", (*FOUR, "salt"), 4),
    ),
    "social_iqa": (
        ("allenai/social_i_qa", None, "refs/convert/parquet"),
        ("train", "validation"),
        SOCIAL,
        "test",
        ("social_iqa-0", "Jo fell. How does Jo feel?", ("glad", "hurt", "tall"), 1),
    ),
}


def serve(monkeypatch: pytest.MonkeyPatch, splits: dict[str, Dataset]) -> list[tuple[Any, ...]]:
    """Stands in for the hub; returns the list that calls are noted in."""
    calls: list[tuple[Any, ...]] = []

    def load_dataset(path: str, name: str | None = None, *, revision: str | None = None) -> DatasetDict:
        calls.append((path, name, revision))
        return DatasetDict(splits)

    monkeypatch.setattr("datasets.load_dataset", load_dataset)
    return calls


@pytest.mark.parametrize("task", SETS)
def test_a_hub_row_becomes_the_right_question(monkeypatch: pytest.MonkeyPatch, task: str) -> None:
    call, splits, row, split, expected = SETS[task]
    calls = serve(monkeypatch, {name: Dataset.from_list([row]) for name in splits})
    (question,) = load(task, split)
    assert calls == [call]
    assert (question.id, question.question, question.choices, question.answer) == expected
    assert (question.task, question.split) == (task, split)


def test_a_class_label_is_its_index(monkeypatch: pytest.MonkeyPatch) -> None:
    """`cais/mmlu` and `medmcqa` store the answer as a ClassLabel, which reads back as an integer."""
    rows = Dataset.from_list([MMLU]).cast_column("answer", ClassLabel(names=list("ABCD")))
    serve(monkeypatch, {"test": rows, "validation": rows, "dev": rows})
    assert load("mmlu_law", "test")[0].answer == 2


def test_mmlu_leaves_professional_law_to_its_own_set(monkeypatch: pytest.MonkeyPatch) -> None:
    subjects = ("anatomy", "professional_law", "astronomy")
    rows = Dataset.from_list([{**MMLU, "subject": subject} for subject in subjects])
    serve(monkeypatch, {"test": rows, "validation": rows})
    assert [question.id for question in load("mmlu", "test")] == ["anatomy-test-0", "astronomy-test-2"]


def test_sciq_answers_are_spread_over_the_options_and_stay_right(monkeypatch: pytest.MonkeyPatch) -> None:
    """The right option's text is known; each place gets 100 of 400, give or take five sigma, whatever the seed."""
    rows = Dataset.from_list(
        [
            {
                "question": f"What is {i}?",
                "distractor3": "w3",
                "distractor1": "w1",
                "distractor2": "w2",
                "correct_answer": f"right {i}",
                "support": "",
            }
            for i in range(400)
        ]
    )
    calls = serve(monkeypatch, {"train": rows, "validation": rows, "test": rows})
    found = load("sciq", "train")
    assert calls == [("allenai/sciq", None, None)]
    assert [q.id for q in found[:2]] == ["sciq-train-0", "sciq-train-1"]
    assert all(q.choices[q.answer] == f"right {i}" for i, q in enumerate(found))
    assert all(sorted(q.choices) == sorted(["w1", "w2", "w3", f"right {i}"]) for i, q in enumerate(found))
    places = [sum(q.answer == place for q in found) for place in range(4)]
    assert max(abs(count - 100) for count in places) < 5 * (400 * 0.25 * 0.75) ** 0.5
    assert load("sciq", "train", seed=9) == found


def test_medmcqa_keeps_its_hub_train_and_the_same_test_as_without(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    """The unlabelled test of the hub (cop = -1) is never served; 1000 of the 4183 validation rows are."""
    rows = [{**MEDMCQA, "id": f"v{i}", "question": f"Q {i}?"} for i in range(4183)]
    unlabelled = Dataset.from_list([{**MEDMCQA, "cop": -1}])
    splits = {"train": Dataset.from_list([MEDMCQA]), "validation": Dataset.from_list(rows), "test": unlabelled}
    serve(monkeypatch, splits)
    test, validation = load("medmcqa", "test"), load("medmcqa", "validation")
    assert [q.id for q in load("medmcqa", "train")] == ["medmcqa-u-1"]
    assert (len(test), len(validation)) == (1000, 3183)
    assert not {q.id for q in test} & {q.id for q in validation}
    serve(monkeypatch, {"validation": splits["validation"]})
    assert load("medmcqa", "test") == test
    assert len(load("medmcqa", "train")) == 3000


def test_no_network_is_one_line_that_names_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def load_dataset(*args: object, **options: object) -> None:
        raise ConnectionError("Couldn't reach 'allenai/sciq' on the Hub\nand more lines")

    monkeypatch.setattr("datasets.load_dataset", load_dataset)
    with pytest.raises(
        InputError, match=r"allenai/sciq: cannot be loaded .*Couldn't reach .*--data-root DIR"
    ) as caught:
        load("sciq", "test")
    assert "\n" not in str(caught.value)


def test_no_datasets_library_is_one_line_that_names_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    real_import = builtins.__import__

    def without_datasets(name: str, *args: Any, **options: Any) -> Any:
        if name == "datasets":
            raise ImportError("No module named 'datasets'")
        return real_import(name, *args, **options)

    monkeypatch.delitem(sys.modules, "datasets")
    monkeypatch.setattr(builtins, "__import__", without_datasets)
    with pytest.raises(InputError, match=r"vmoer\[data\].*--data-root DIR"):
        load("openbookqa", "test")


def test_changed_columns_on_the_hub_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = Dataset.from_list([{"id": "1", "stem": "?"}])
    serve(monkeypatch, {"train": rows, "validation": rows, "test": rows})
    with pytest.raises(InputError, match=r"allenai/openbookqa test row 0: .*KeyError: 'question_stem'"):
        load("openbookqa", "test")
