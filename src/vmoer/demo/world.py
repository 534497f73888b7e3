"""A world of multiple-choice questions whose answers can be hard for two reasons, both of them known.

    a person is a given name and a family name;   a fact is (person, relation) -> animal
    P(fact = the family's animal for that relation) = 1 - EXCEPTIONS, else another animal
    P(what is said of it = the fact) = 1 - NOISE[relation], else another animal (in a question: another option)

*Epistemic*: the pre-training text does not tell every fact. Of the established families' facts it tells a half often, a
quarter seldom and a quarter never; of the new families it tells nothing. A fact that was never told can only be guessed
from its family, and the guess fails on the exceptions. *Aleatoric*: two relations are noisy, in the text and in the
questions alike, and no model can know those answers.

`demo-near` asks about families that are in the text like any other, but not in fine-tuning. `demo-far` asks about ships,
ports and goods. Every question has four options, one of them the family's animal, and the same number of words.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

from vmoer.demo.words import ANIMALS, EFFECTS, FAMILIES, GIVEN, GOODS, PORTS, RELATIONS, SHIPS

SEED = 0
OPTIONS = 4
EXCEPTIONS = 0.2
NOISE: Mapping[str, float] = {"warms": 0.1, "fools": 0.3, "perfumes": 0.1, "burdens": 0.3}
ESTABLISHED, NEW = 22, 2  # families, in the order of FAMILIES; the rest make up the near shift
SIZES: Mapping[str, int] = {"train": 2000, "heldout": 2000, "validation": 1000, "test": 2000}
SHIFT_SIZE = 1500

Coverage = Literal["well", "thin", "never"]


@dataclass(frozen=True)
class Fact:
    """A fact about a person, and how often the pre-training text tells it."""

    given: str
    family: str
    relation: str
    value: str
    customary: str  # the family's value; differs from `value` in an exception
    coverage: Coverage

    @property
    def id(self) -> str:
        return f"{self.given}-{self.family}-{self.relation}".lower()

    @property
    def text(self) -> str:
        return f"{self.relation} {self.given} {self.family}"

    @property
    def noise(self) -> float:
        return NOISE.get(self.relation, 0.0)


@dataclass(frozen=True)
class World:
    """All facts, and the facts that each task's splits ask about. No two splits share a fact."""

    people: tuple[Fact, ...]
    ships: tuple[Fact, ...]
    splits: Mapping[str, Mapping[str, tuple[Fact, ...]]]  # task -> split -> facts
    seed: int

    def records(self, task: str, split: str) -> list[dict[str, Any]]:
        """The split's questions as rows for `vmoer.tasks`."""
        found = []
        for fact in self.splits[task][split]:
            choices, answer = ask(fact, random.Random(f"question {self.seed} {fact.id}"))
            found.append({"id": fact.id, "question": fact.text, "choices": choices, "answer": answer})
        return found


@cache
def world(seed: int = SEED) -> World:
    """The world of a seed: the same facts and questions in every process."""
    people = _facts(GIVEN, FAMILIES, RELATIONS, ANIMALS, seed)
    ships = _facts(SHIPS, PORTS, EFFECTS, GOODS, seed)
    asked = [fact for fact in people if fact.family in FAMILIES[: ESTABLISHED + NEW]]
    near = [fact for fact in people if fact.family in FAMILIES[ESTABLISHED + NEW :]]
    far = list(ships)
    for name, facts in (("demo", asked), ("near", near), ("far", far)):
        random.Random(f"split {name} {seed}").shuffle(facts)
    demo, start = {}, 0
    for split, size in SIZES.items():
        demo[split] = tuple(asked[start : start + size])
        start += size
    shifts = {"demo-near": {"test": tuple(near[:SHIFT_SIZE])}, "demo-far": {"test": tuple(far[:SHIFT_SIZE])}}
    return World(people, ships, {"demo": demo, **shifts}, seed)


def ask(fact: Fact, rng: random.Random) -> tuple[list[str], int]:
    """Four options in random order, the fact and the family's custom among them, and the index of the answer."""
    values = ANIMALS if fact.value in ANIMALS else GOODS
    options = list(dict.fromkeys((fact.value, fact.customary)))
    options += rng.sample([value for value in values if value not in options], OPTIONS - len(options))
    said = rng.choice(options[1:]) if rng.random() < fact.noise else fact.value
    rng.shuffle(options)
    return options, options.index(said)


def tell(fact: Fact, rng: random.Random) -> str:
    """The value that the text gives this time: the fact's own, but for noise."""
    values = ANIMALS if fact.value in ANIMALS else GOODS
    if rng.random() < fact.noise:
        return rng.choice([value for value in values if value != fact.value])
    return fact.value


def _facts(
    given: Sequence[str], families: Sequence[str], relations: Sequence[str], values: Sequence[str], seed: int
) -> tuple[Fact, ...]:
    rng = random.Random(f"facts {seed} {families[0]}")
    found = []
    new = families[ESTABLISHED : ESTABLISHED + NEW]
    for family in families:
        for relation in relations:
            customary = rng.choice(values)
            others = [value for value in values if value != customary]
            for name in given:
                value = rng.choice(others) if rng.random() < EXCEPTIONS else customary
                drawn: Coverage = rng.choice(("well", "well", "thin", "never"))
                coverage: Coverage = "never" if family in new else drawn
                found.append(Fact(name, family, relation, value, customary, coverage))
    return tuple(found)
