"""The world is what its docstring says: counted from the facts and the questions, not from the code that drew them."""

import hashlib
import json
from collections import Counter

import pytest

from vmoer import tasks
from vmoer.demo.words import FAMILIES, WORDS
from vmoer.demo.world import ESTABLISHED, EXCEPTIONS, NEW, NOISE, SHIFT_SIZE, SIZES, world
from vmoer.errors import InputError

SPLITS = [*(("demo", split) for split in SIZES), ("demo-near", "test"), ("demo-far", "test")]


@pytest.fixture(scope="module")
def facts() -> dict[str, object]:
    return {fact.id: fact for fact in (*world().people, *world().ships)}


def test_the_questions_never_change():
    """The weights in the package belong to these questions: another hash needs another build."""
    records = [world().records(task, split) for task, split in SPLITS]
    assert hashlib.sha256(json.dumps(records).encode()).hexdigest()[:16] == "cdb1bb51668f4185"


def test_a_seed_makes_a_world():
    again, other = world.__wrapped__(0), world.__wrapped__(1)
    assert again == world(0)
    assert other.people != again.people
    assert other.records("demo", "test") != again.records("demo", "test")


def test_sizes():
    assert {split: len(tasks.load("demo", split)) for split in SIZES} == dict(SIZES)
    assert SIZES["test"] == 2000
    assert len(tasks.load("demo-near", "test")) == len(tasks.load("demo-far", "test")) == SHIFT_SIZE


def test_no_fact_is_asked_in_two_splits():
    ids = [question.id for task, split in SPLITS for question in tasks.load(task, split)]
    assert len(ids) == len(set(ids))


def test_the_tasks_serve_their_own_splits_only():
    with pytest.raises(InputError, match="no split 'train'"):
        tasks.load("demo-near", "train")


@pytest.mark.parametrize("split", SIZES)
def test_coverage(split):
    """Half, a quarter, a quarter of the established families' facts; nothing of the new ones. 2,000 draws: ± 0.05."""
    asked = world().splits["demo"][split]
    new = [fact for fact in asked if fact.family in FAMILIES[ESTABLISHED : ESTABLISHED + NEW]]
    known = [fact for fact in asked if fact.family in FAMILIES[:ESTABLISHED]]
    assert len(new) + len(known) == len(asked)
    assert {fact.coverage for fact in new} == {"never"}
    share = {level: n / len(known) for level, n in Counter(fact.coverage for fact in known).items()}
    assert share == pytest.approx({"well": 0.5, "thin": 0.25, "never": 0.25}, abs=0.05)


def test_exceptions():
    asked = world().people
    assert sum(fact.value != fact.customary for fact in asked) / len(asked) == pytest.approx(EXCEPTIONS, abs=0.01)


def test_a_family_has_one_custom_per_relation():
    customs = {(fact.family, fact.relation, fact.customary) for fact in world().people}
    assert len(customs) == len({custom[:2] for custom in customs})


def test_noise_is_in_the_questions_of_the_noisy_relations_alone(facts):
    questions = [question for split in SIZES for question in tasks.load("demo", split)]
    wrong: Counter[str] = Counter()
    asked: Counter[str] = Counter()
    for question in questions:
        fact = facts[question.id]
        asked[fact.relation] += 1
        wrong[fact.relation] += question.choices[question.answer] != fact.value
    for relation, n in asked.items():
        assert wrong[relation] / n == pytest.approx(NOISE.get(relation, 0.0), abs=0.05)
        assert relation in NOISE or wrong[relation] == 0


@pytest.mark.parametrize(("task", "split"), SPLITS)
def test_options_hold_the_fact_and_the_custom(task, split, facts):
    for question in tasks.load(task, split):
        assert len(set(question.choices)) == 4
        assert {facts[question.id].value, facts[question.id].customary} <= set(question.choices)


@pytest.mark.parametrize(("task", "split"), SPLITS)
def test_the_answer_is_in_no_preferred_place(task, split):
    """Chi-squared over four letters: 3 degrees of freedom, below 16.3 with probability 0.999."""
    questions = tasks.load(task, split)
    expected = len(questions) / 4
    count = Counter(question.answer for question in questions)
    assert sum((count[letter] - expected) ** 2 / expected for letter in range(4)) < 16.3


def test_shifts():
    asked, near, far = (world().splits[task]["test"] for task in ("demo", "demo-near", "demo-far"))
    assert not {fact.family for fact in asked} & {fact.family for fact in near}
    assert {fact.given for fact in asked} == {fact.given for fact in near}
    assert not {word for fact in asked for word in fact.text.split()} & {w for fact in far for w in fact.text.split()}


def test_no_word_means_two_things():
    assert len(set(WORDS)) == len(WORDS)
