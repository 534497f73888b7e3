"""What is attacked: a tiny run folder, the readers of its files, and what an attack can end in.

Memory is judged apart: test_bombs.py runs under a limit of the address space, and the long run looks at the peak of its process.
An outcome is one of

    refused     one clear line, and the model as it was
    identical   the damage changed nothing that is read: logits, calibrator and threshold are those of before, bit for bit
    taken       the folder was rewritten consistently, manifest and all, and is a valid one: other routers, not a damaged file
    different   other numbers from a damaged file, without a word
    raw         an error of a library or of Python, or one of several lines
    changed     a refusal after which the model is not what it was
    hang        longer than SECONDS
"""

import copy
import random
import shutil
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import tiny
import torch
from peft import LoraConfig, get_peft_model
from scipy.special import log_softmax

import vmoer
from vmoer.errors import InputError, RunError
from vmoer.evaluation.meta import of_run
from vmoer.evaluation.threshold import read_threshold, write_threshold
from vmoer.metrics.calibrators import choose
from vmoer.saved import calibrator, manifest
from vmoer.saved.store import read_folder, read_run

GOOD = ("refused", "identical", "taken")
BAD = ("different", "raw", "changed", "hang")
SECONDS = 10.0
Outcomes = Counter[str]


def _answers() -> tuple[Any, Any, list[str]]:
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(60, 3))
    return log_softmax(logits, -1), rng.integers(3, size=60), [f"q{i}" for i in range(60)]


ANSWERS = _answers()


def adapted(base: Any) -> Any:
    model = get_peft_model(base, LoraConfig(target_modules=["q_proj"], r=2, init_lora_weights=False))
    generator = torch.Generator().manual_seed(1)
    for name, p in model.named_parameters():
        if "lora_" in name:
            p.data = torch.randn(p.shape, generator=generator)
    return model


RUN: dict[str, Any] = {
    "model": "base",
    "task": "t",
    "method": "vglr-lr",
    "seed": 0,
    "settings": {},
    "stage2": {"moved": {"parameters": 0.1}},
}


def make_run(folder: Path) -> Path:
    """As `vmoer train`, `calibrate` and `threshold` leave one: adapter, routers with novelty, calibrator, threshold, manifest."""
    model = vmoer.attach(adapted(tiny.model("granitemoe")), vmoer.LowRank(layers=[1], samples=4, rank=2))
    vmoer.fit(model, [tiny.batch()], rank=3)
    vmoer.save(model, folder, run=RUN)
    log_probs, answers, ids = ANSWERS
    choice = choose(log_probs, answers, ids, "vector")
    how: dict[str, Any] = {"averaging": "router", "passes": 1, "task": "t", "method": "vglr-lr"}
    calibrator.write(folder, calibrator.described(choice, options=[3] * len(answers), **how))
    told = {"format": 2, "form": "letters", "signal": "predictive_entropy", "threshold": 0.7, "temperature": 1.5}
    write_threshold(folder / "threshold.json", told)
    return folder


class Target:
    """One base model that mutated copies of a run folder are loaded onto, again and again."""

    def __init__(self, run: Path, place: Path) -> None:
        self.run, self.place = run, place
        self.base, self.batch = tiny.model("granitemoe").eval(), tiny.batch()
        self.files = {path.name: path.read_bytes() for path in run.iterdir()}
        self.before = snapshot(self.base)
        self.expected = [self.logits(vmoer.load(copy.deepcopy(self.base), run)), *self.told(run)]
        shutil.copytree(run, place)

    def told(self, folder: Path) -> list[torch.Tensor]:
        """What the calibrator and the threshold of a folder make of answers, and what files of answers keep of the run."""
        stored, threshold = calibrator.of(read_folder(folder)), read_threshold(folder)
        mapped = ANSWERS[0] if stored is None else stored.apply(ANSWERS[0])
        numbers = torch.tensor([threshold.value, threshold.file.get("temperature", 1.0)], dtype=torch.float64)
        run = read_run(folder)
        of_run(run)
        return [numbers, torch.from_numpy(mapped), torch.tensor(run.get("seed", 0))]

    def logits(self, model: Any) -> torch.Tensor:
        with torch.no_grad():
            return model.eval()(**self.batch).logits

    def attack(self, name: str, data: bytes, reseal: bool = False) -> tuple[str, str]:
        """The outcome of loading the folder with one file's content replaced, and what was said."""
        path = self.place / name
        path.write_bytes(data)
        if reseal and name in manifest.MEMBERS:
            manifest.seal(self.place)
        try:
            return self.load(reseal)
        finally:
            path.write_bytes(self.files[name])
            (self.place / manifest.NAME).write_bytes(self.files[manifest.NAME])

    def load(self, reseal: bool = False) -> tuple[str, str]:
        started, loaded = time.monotonic(), None
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                loaded = vmoer.load(self.base, self.place)  # first: what it refuses must leave the model as it was
                found = [self.logits(loaded), *self.told(self.place)]
            same = all(map(torch.equal, found, self.expected))
            outcome, said = ("identical" if same else "taken" if reseal else "different"), ""
            if reseal and not all(bool(torch.isfinite(one).all()) for one in found):
                outcome = "different"
        except Exception as error:
            outcome, said = judge(error), f"{type(error).__name__}: {error}"
        if loaded is not None:
            self.base = tiny.model("granitemoe").eval()
            self.before = snapshot(self.base)
        elif snapshot(self.base) != self.before:
            outcome = "changed"
        return ("hang" if time.monotonic() - started > SECONDS else outcome), said


def judge(error: Exception) -> str:
    clear = isinstance(error, InputError | RunError) and "\n" not in str(error) and len(str(error)) < 2000
    return "refused" if clear else "raw"


def snapshot(model: Any) -> list[Any]:
    """Everything that a failed load could leave behind: modules, classes, hooks, attributes, values, requires_grad."""
    out: list[Any] = []
    for name, module in model.named_modules():
        hooks = [len(vars(module)[kind]) for kind in sorted(vars(module)) if kind.endswith("_hooks")]
        out.append((name, id(module), type(module), sorted(vars(module)), hooks, module.training))
    return [
        *out,
        *((name, id(p), p.requires_grad, float(p.detach().double().sum())) for name, p in model.named_parameters()),
    ]


def bit_flips(data: bytes) -> Iterator[bytes]:
    """Every bit of every byte flipped, one at a time."""
    for place in range(len(data)):
        for bit in range(8):
            yield data[:place] + bytes([data[place] ^ 1 << bit]) + data[place + 1 :]


def mutations(data: bytes, rng: random.Random) -> Iterator[bytes]:
    """Without end: truncations, flips, swaps, insertions, repeated and zeroed stretches."""
    while True:
        kind, at = rng.randrange(6), rng.randrange(len(data))
        end = min(len(data), at + rng.choice((1, 2, 8, 64)))
        yield (
            data[:at],
            data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :],
            data[:at] + data[at:end][::-1] + data[end:],
            data[:at] + rng.randbytes(end - at) + data[at:],
            data[:at] + data[at:end] * 2 + data[end:],
            data[:at] + bytes(end - at) + data[end:],
        )[kind]


VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2, 3, 0.5, 1.5, 10**7, 2**31, 2**63, 2**70, -(2**40), 10**400, -(10**400), 1e300, -1e300, 1e-300,
    "", "x", "LORA",
    "q_proj", "../../x", "$\\frac$", "a" * 5000, "(a+)+$", [], {}, [[]], [0], [1], [0.9], ["q_proj"], ["router"], ["lm_head"],
    [1] * 10_000, {"q_proj": 1}, {"a": {"b": [1]}}, [[0, 2]] * 5000,
)  # fmt: skip


def swapped(value: Any, rng: random.Random) -> Any:
    """A JSON value with one of its parts replaced, removed, renamed or added."""
    value = copy.deepcopy(value)
    place = value
    while True:
        keys = list(place) if isinstance(place, dict) else list(range(len(place)))
        if not keys:
            return value
        key = rng.choice(keys)
        if isinstance(place[key], dict | list) and place[key] and rng.random() < 0.7:
            place = place[key]
            continue
        how = rng.randrange(8)
        if how == 0:
            del place[key]
        elif how == 1 and isinstance(place, dict):
            place[f"{key}x"] = place.pop(key)
        elif how == 2 and isinstance(place, dict):
            place["new"] = rng.choice(VALUES)
        else:
            place[key] = rng.choice(VALUES)
        return value
