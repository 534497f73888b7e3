"""Attacks on a folder of saved routers: flipped, cut, swapped, rewritten with a right manifest."""

import json
import random
from collections.abc import Callable, Iterator
from itertools import islice

import torch
from safetensors.torch import load, save

from attacks.targets import Outcomes, Target, bit_flips, mutations, swapped
from vmoer.files import sealed
from vmoer.saved import manifest

JSON_FILES = ("manifest.json", "router.json", "run.json", "adapter_config.json", "calibrator.json", "threshold.json")
TENSOR_FILES = ("router.safetensors", "adapter_model.safetensors")
Said = Callable[[str, str, str], None]


def flips(target: Target, step: int = 1) -> Iterator[tuple[str, str, bytes, bool]]:
    """Every `step`th bit of the JSON files, flipped."""
    for name in JSON_FILES:
        for data in islice(bit_flips(target.files[name]), 0, None, step):
            yield "one bit of a JSON file", name, data, False


def torn(target: Target, each: int, seed: int = 0) -> Iterator[tuple[str, str, bytes, bool]]:
    """Cuts, flips, stretches out of place, in every file."""
    for name in (*JSON_FILES, *TENSOR_FILES):
        for data in islice(mutations(target.files[name], random.Random(f"{seed} {name}")), each):
            if data != target.files[name]:
                yield f"torn {name.rpartition('.')[2]}", name, data, False


def rewritten(target: Target, each: int, seed: int = 0) -> Iterator[tuple[str, str, bytes, bool]]:
    """Values of the JSON files replaced, removed and added, under a manifest that is right."""
    for name in JSON_FILES[1:]:
        rng, good = random.Random(f"{seed} {name}"), json.loads(target.files[name])
        for _ in range(each):
            value = swapped(good, rng)
            if name not in manifest.MEMBERS and isinstance(value, dict):  # it has a checksum of its own
                value = sealed(value)
            yield f"rewritten {name}", name, json.dumps(value).encode(), True


def retensored(target: Target, each: int, seed: int = 0) -> Iterator[tuple[str, str, bytes, bool]]:
    """Tensors that are not finite, of other shapes, types and names, and bytes at random, under a manifest that is right."""
    for name in TENSOR_FILES:
        rng, good = random.Random(f"{seed} {name}"), load(target.files[name])
        damaged = mutations(target.files[name], rng)
        for number in range(each):
            if number % 2:
                yield f"rewritten {name}", name, next(damaged), True
                continue
            key = rng.choice(sorted(good))
            tensors = dict(good)
            value = tensors.pop(key).clone()
            how = rng.randrange(6)
            if how == 0:
                value.view(-1)[rng.randrange(value.numel())] = rng.choice((torch.nan, torch.inf, -torch.inf))
            elif how == 1:
                value = value.double() * 1e300
            elif how == 2:
                value = torch.zeros([rng.randrange(5) for _ in range(rng.randrange(4))])
            elif how == 3:
                value = value.to(rng.choice((torch.int64, torch.bool, torch.uint8, torch.complex64)))
            elif how == 4:
                key = rng.choice(
                    (f"{key}x", "base_model.model.lm_head.weight", "base_model.model.model.norm.weight", "0." + key)
                )
            if how < 5:
                tensors[key] = value
            yield f"rewritten {name}", name, save(tensors), True


def run(target: Target, cases: Iterator[tuple[str, str, bytes, bool]], table: dict[str, Outcomes], said: Said) -> None:
    """Load every case, count what came of it, and say what should not have."""
    for row, name, data, reseal in cases:
        outcome, message = target.attack(name, data, reseal)
        table.setdefault(row, Outcomes())[outcome] += 1
        said(row, outcome, f"{name}: {message}")
