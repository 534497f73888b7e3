"""Loading from files: oracles are the rows written to the file, and set algebra for splits and subsamples."""

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vmoer.errors import InputError
from vmoer.tasks import Hub, Question, Task, load, names, register


def row(id: object = "q0", question: str = "Which?", choices: Sequence[object] = ("a", "b"), answer: object = 0) -> Any:
    return {"id": id, "question": question, "choices": list(choices), "answer": answer}


Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Writes rows (objects, or lines of text as they are) to a JSONL file."""

    def write(rows: Sequence[object], name: str = "quiz.jsonl") -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(f"{r if isinstance(r, str) else json.dumps(r)}\n" for r in rows), encoding="utf-8")
        return path

    return write


BAD_ROWS = {
    "missing id": ({"question": "?", "choices": ["a", "b"], "answer": 0}, "missing field 'id'"),
    "missing two": ({"id": "q", "question": "?"}, "missing field 'choices', 'answer'"),
    "answer too large": (row(answer=2), "answer 2 is out of range for 2 choices"),
    "answer negative": (row(answer=-1), "answer -1 is out of range"),
    "answer a letter": (row(answer="A"), "'answer' must be the index of a choice, not 'A'"),
    "answer a boolean": (row(answer=True), "'answer' must be the index of a choice, not True"),
    "one option": (row(choices=["a"]), "1 option(s), where 2 to 10 are needed"),
    "eleven options": (row(choices=list("abcdefghijk")), "11 option(s), where 2 to 10 are needed"),
    "choice not a string": (row(choices=["a", 7]), "choice 1 must be a non-empty string, not 7"),
    "empty choice": (row(choices=["a", " "]), "choice 1 must be a non-empty string"),
    "choices not a list": ({**row(), "choices": "ab"}, "'choices' must be a list, not str"),
    "id a number": (row(id=3), "'id' must be a non-empty string, not 3"),
    "empty question": (row(question=""), "'question' must be a non-empty string"),
    "half a surrogate pair": (row(question="\ud800"), "'question' must be a non-empty string"),
    "malformed": ('{"id": "q", ', "not valid JSON"),
    "not an object": ("[1, 2]", "a line must be a JSON object, not list"),
}


@pytest.mark.parametrize(("bad", "message"), BAD_ROWS.values(), ids=BAD_ROWS.keys())
def test_a_bad_row_is_named_by_file_and_line(write: Write, bad: object, message: str) -> None:
    path = write([row("fine"), "", bad])
    with pytest.raises(InputError, match=re.escape(message)) as caught:
        load(path)
    assert str(caught.value).startswith(f"{path}:3: ")
    assert "\n" not in str(caught.value)


def test_a_duplicate_id_names_both_lines(write: Write) -> None:
    path = write([row("x"), row("y"), row("x")])
    with pytest.raises(InputError, match=re.escape(f"{path}:3: id 'x' was already used at {path}:1")):
        load(path)


@pytest.mark.parametrize("lines", [[], ["", "  "]])
def test_an_empty_file_is_an_error(write: Write, lines: list[str]) -> None:
    with pytest.raises(InputError, match="no questions in it"):
        load(write(lines))


def test_unreadable_files_are_input_errors(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no such file"):
        load(tmp_path / "none.jsonl")
    with pytest.raises(InputError, match="no such file"):
        load(tmp_path)
    (tmp_path / "latin.jsonl").write_bytes(b'{"id": "\xe9"}\n')
    with pytest.raises(InputError, match="cannot be read"):
        load(tmp_path / "latin.jsonl")


@pytest.mark.parametrize(
    ("asked", "hint"), [("openbook", "openbookqa"), ("arc-easy", "arc_easy"), ("mmlu-law", "mmlu_law")]
)
def test_an_unknown_task_suggests_close_ones(asked: str, hint: str) -> None:
    with pytest.raises(InputError, match=f"unknown task '{asked}'; did you mean .*{hint}"):
        load(asked, "test")


def test_an_unknown_task_like_no_other_lists_them_all() -> None:
    with pytest.raises(InputError, match=", ".join(names())):
        load("zzz", "test")


def test_a_file_is_read_whole_as_it_stands(write: Write) -> None:
    path = write(["\ufeff" + '{"id": "q", "question": "Où?", "choices": ["a", "b"], "answer": 1, "support": "x"}'])
    assert load(path) == load(str(path)) == [Question("q", "Où?", ("a", "b"), 1, "quiz", "all")]


def test_a_file_splits_70_10_20_without_overlap_whatever_its_order(write: Write) -> None:
    rows = [row(f"q{i}", f"Which {i}?") for i in range(200)]
    path, reversed_path = write(rows), write(rows[::-1], "reversed.jsonl")
    parts = {split: [q.id for q in load(path, split, seed=3)] for split in ("train", "validation", "test")}
    assert {split: len(ids) for split, ids in parts.items()} == {"train": 140, "validation": 20, "test": 40}
    assert sorted(id for ids in parts.values() for id in ids) == sorted(r["id"] for r in rows)
    for split, ids in parts.items():
        assert {q.id for q in load(reversed_path, split, seed=3)} == set(ids)
        assert {q.id for q in load(path, split, seed=4)} != set(ids)
        assert ids == sorted(ids, key=lambda id: int(id[1:]))  # the order of the file is kept


def test_twins_stay_on_one_side_of_a_cut(write: Write) -> None:
    """Every wording occurs twice; at each of the two cuts at most one pair may be torn."""
    path = write([row(f"q{i}", f"Which  {'ONE' if i % 2 else 'one'} of {i // 2}?") for i in range(400)])
    stems = [{" ".join(q.question.lower().split()) for q in load(path, s)} for s in ("train", "validation", "test")]
    assert len(stems[0] & stems[1]) + len(stems[1] & stems[2]) + len(stems[0] & stems[2]) <= 2


def test_a_split_that_a_small_file_leaves_empty_is_an_error(write: Write) -> None:
    with pytest.raises(InputError, match="it has only 2 rows, which leaves none for split 'test'"):
        load(write([row("a"), row("b")]), "test")
    with pytest.raises(InputError, match="no split 'dev'; it has all, train, validation, test"):
        load(write([row("a"), row("b")]), "dev")


def test_limit_is_a_nested_seeded_sample(write: Write) -> None:
    path = write([row(f"q{i}") for i in range(50)])
    small, large = ({q.id for q in load(path, limit=n, seed=1)} for n in (5, 20))
    assert len(small) == 5
    assert len(large) == 20
    assert small < large
    assert small != {q.id for q in load(path, limit=5, seed=2)}
    assert len(load(path, limit=1000)) == 50
    with pytest.raises(InputError, match="limit must be at least 1"):
        load(path, limit=0)


@settings(deadline=None)
@given(st.text(min_size=1), st.integers(2, 10), st.data(), st.integers())
def test_shuffling_options_moves_the_answer_with_them(id: str, n: int, data: st.DataObject, seed: int) -> None:
    """Distinct options: the right one's text must stay right, and none be lost."""
    answer = data.draw(st.integers(0, n - 1))
    question = Question(id, "?", tuple(f"option {i}" for i in range(n)), answer, "t", "s")
    shuffled = question.shuffled(seed)
    assert shuffled.choices[shuffled.answer] == question.choices[answer]
    assert sorted(shuffled.choices) == sorted(question.choices)
    assert shuffled == question.shuffled(seed)


def test_an_option_order_depends_on_seed_and_id_only(write: Write) -> None:
    path = write([row(f"q{i}", choices="abcdefghij", answer=i % 10) for i in range(60)])
    all_of_them = {q.id: q for q in load(path, shuffle_options=True, seed=5)}
    for question in load(path, limit=7, shuffle_options=True, seed=5):
        assert question == all_of_them[question.id]
    other = {q.id: q for q in load(path, shuffle_options=True, seed=6)}
    assert sum(all_of_them[id].choices != other[id].choices for id in other) > 50


def test_shuffled_answers_are_uniform() -> None:
    """2000 questions whose answer is always the first of four: each letter 500 times, give or take five sigma."""
    counts = [0] * 4
    for i in range(2000):
        counts[Question(f"q{i}", "?", ("a", "b", "c", "d"), 0, "t", "s").shuffled(0).answer] += 1
    assert max(abs(count - 500) for count in counts) < 5 * (2000 * 0.25 * 0.75) ** 0.5


def test_data_root_serves_what_the_folder_has(write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write([row("only")], "openbookqa/test.jsonl")
    expected = [Question("only", "Which?", ("a", "b"), 0, "openbookqa", "test")]
    assert load("openbookqa", "test", data_root=tmp_path) == expected
    with pytest.raises(InputError, match="no split 'train'; it has test"):
        load("openbookqa", "train", data_root=tmp_path)
    monkeypatch.setenv("VMOER_DATA", str(tmp_path))
    assert load("openbookqa", "test") == expected


def test_a_data_root_without_the_task_is_an_error_not_a_download(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="sciq: no such folder; --data-root"):
        load("sciq", "test", data_root=tmp_path)
    (tmp_path / "sciq").mkdir()
    with pytest.raises(InputError, match=r"sciq: no \.jsonl files in it"):
        load("sciq", "test", data_root=tmp_path)


def test_only_the_asked_file_is_read(write: Write, tmp_path: Path) -> None:
    write([row("fine")], "arc_easy/test.jsonl")
    write(["broken"], "arc_easy/train.jsonl")
    assert len(load("arc_easy", "test", data_root=tmp_path)) == 1


def test_the_papers_sizes_are_a_subsample_and_too_few_rows_a_warning(write: Write, tmp_path: Path) -> None:
    """OBQA in the paper's appendix: 5000 / 50 / 500."""
    write([row(f"t{i}") for i in range(60)], "openbookqa/validation.jsonl")
    write([row(f"t{i}") for i in range(60)], "openbookqa/test.jsonl")
    paper = load("openbookqa", "validation", data_root=tmp_path, paper_splits=True)
    assert len(paper) == 50
    assert paper == load("openbookqa", "validation", data_root=tmp_path, limit=50)
    with pytest.warns(UserWarning, match="openbookqa test: the paper takes 500 rows, there are 60"):
        assert len(load("openbookqa", "test", data_root=tmp_path, paper_splits=True)) == 60


def test_a_new_data_set_is_one_registration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A source that is not the hub is served even where a data root without that folder is set."""
    monkeypatch.setattr("vmoer.tasks._REGISTRY", {})
    task = Task("mine", lambda: {"test": [row("m")]})
    register(task)
    assert names() == ["mine"]
    assert load("mine", "test", data_root=tmp_path) == [Question("m", "Which?", ("a", "b"), 0, "mine", "test")]
    register(task)  # the same again is no conflict
    with pytest.raises(ValueError, match="already registered"):
        register(Task("mine", Hub("x/y", lambda row, split, index: row)))


def test_train_and_validation_are_cut_anew(tmp_path: Path) -> None:
    """Oracle: set arithmetic. Sizes and test stay; a task whose test is cut by the seed is refused."""
    folder = tmp_path / "sciq"
    folder.mkdir()
    for split, n in (("train", 30), ("validation", 10), ("test", 5)):
        rows = [
            {"id": f"{split}{i}", "question": f"{split} {i}?", "choices": ["a", "b"], "answer": 0} for i in range(n)
        ]
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    cuts = []
    for seed in (0, 1):
        train, valid = (
            load("sciq", split, data_root=tmp_path, seed=seed, recut=True) for split in ("train", "validation")
        )
        assert (len(train), len(valid)) == (30, 10)
        assert len({q.id for q in (*train, *valid)}) == 40
        assert {q.split for q in train} == {"train"}
        cuts.append({q.id for q in valid})
    assert cuts[0] != cuts[1]
    assert {q.id for q in load("sciq", "test", data_root=tmp_path, seed=1, recut=True)} == {
        f"test{i}" for i in range(5)
    }
    (tmp_path / "medmcqa").mkdir()
    many = [{"id": f"{i}", "question": f"{i}?", "choices": ["a", "b"], "answer": 0} for i in range(3200)]
    (tmp_path / "medmcqa" / "validation.jsonl").write_text("".join(json.dumps(row) + "\n" for row in many))
    with pytest.raises(InputError, match="cannot be cut anew"):
        load("medmcqa", "train", data_root=tmp_path, recut=True)
