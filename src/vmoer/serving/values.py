"""From rows to what a client is given: `choices[i].uncertainty`.

tokens      a number for each token of the answer and each signal: the mean over the attached layers, where the token was chosen
sequence    `mean_` and `max_` of each over the answer, as `vmoer.generate` has them
layers      on request: the same layer by layer, and the experts
prompt      on request: a number for each token of the prompt
options     on request: the probabilities of a question's options
abstain     where the server has a threshold
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from vmoer.errors import InputError, short, unknown
from vmoer.serving import options
from vmoer.serving.options import Options
from vmoer.serving.rows import SIGNALS, Rows, unpack
from vmoer.tasks import LETTERS

Values = dict[str, Any]
_FORMS = "true, a list of signals, or an object with signals, layers, prompt and options"


@dataclass(frozen=True)
class Asked:
    """What a request asks for."""

    signals: tuple[str, ...] = SIGNALS
    layers: bool = False
    prompt: bool = False
    options: int = 0
    """How many options the question has, if any."""


def parse(asked: Any) -> Asked | None:
    """The content of a request's `uncertainty`; None where nothing is asked for."""
    if asked is None or asked is False:
        return None
    if asked is True:
        return Asked()
    if isinstance(asked, list):
        asked = {"signals": asked}
    if not isinstance(asked, dict):
        raise InputError(f"uncertainty={short(asked)}: give {_FORMS}")
    if odd := sorted(asked.keys() - {"signals", "layers", "prompt", "options"}):
        raise InputError(f"uncertainty has {short(odd[0])}: give {_FORMS}")
    signals = asked.get("signals", list(SIGNALS))
    if not isinstance(signals, list):
        raise InputError(f"uncertainty: signals={short(signals)} is no list of signals")
    for name in signals:
        if name not in SIGNALS:
            raise unknown("signal", str(name), SIGNALS)
    for name in ("layers", "prompt"):
        if not isinstance(asked.get(name, False), bool):
            raise InputError(f"uncertainty: {name}={short(asked[name])} is neither true nor false")
    count = asked.get("options", 0)
    if type(count) is not int or ("options" in asked and not 2 <= count <= len(LETTERS)):
        raise InputError(f"uncertainty: options={short(count)} is no number of options from 2 to {len(LETTERS)}")
    return Asked(tuple(signals), asked.get("layers", False), asked.get("prompt", False), count)


@dataclass(frozen=True)
class Threshold:
    """When to abstain: the content of a file of `vmoer threshold`, for a signal that the server has."""

    form: str
    signal: str
    threshold: float
    risk: float
    confidence: float
    calibrated: bool = False
    """Whether it was chosen on probabilities that had gone through the run's calibrator."""

    def __post_init__(self) -> None:
        known = [*options.SIGNALS, *SIGNALS]
        if self.form != "letters":
            known = [f"{how}_{name}" for how in ("mean", "max") for name in SIGNALS]
        if self.signal not in known:
            raise InputError(f"the server does not compute {self.signal}: run vmoer threshold --signal {known[-1]}")

    @property
    def on_options(self) -> bool:
        """Whether it decides only where a question's options are known."""
        return self.signal in options.SIGNALS

    def value(self, tokens: Values, chances: Options | None) -> float | None:
        """What the threshold is on. A letter is the first token of its answer."""
        if self.on_options:
            return chances and (chances.calibrated if self.calibrated else chances.own)[self.signal]
        if self.form == "letters":
            return float(tokens[self.signal][0]) if tokens.get(self.signal) else None
        return sequence(tokens).get(self.signal)

    def verdict(self, tokens: Values, chances: Options | None = None) -> Values:
        value = self.value(tokens, chances)
        if value is None:
            return {}
        about = {"signal": self.signal, "value": value, "threshold": self.threshold}
        return {
            "abstain": value > self.threshold,
            "decision": about | {"risk": self.risk, "confidence": self.confidence},
        }


def tokens_of(rows: Rows, signals: tuple[str, ...] = SIGNALS) -> dict[str, list[float]]:
    """Each signal's mean over the attached layers, token by token."""
    return {name: _numbers(value.mean(-1)) for name, value in rows.signals.items() if name in signals}


def layers_of(rows: Rows, signals: tuple[str, ...]) -> Values:
    """Signals [token][layer] and experts [token][layer][K] of the attached layers."""
    found = {name: [_numbers(row) for row in value] for name, value in rows.signals.items() if name in signals}
    return {"layers": rows.layers, "signals": found, "experts": rows.experts[:, rows.layers].tolist()}


def sequence(tokens: Values) -> dict[str, float]:
    """Mean and maximum over an answer's tokens."""
    scores: dict[str, float] = {}
    for name, values in tokens.items():
        if values:
            scores |= {f"mean_{name}": float(np.mean(values)), f"max_{name}": max(values)}
    return scores


def _numbers(values: npt.NDArray[np.float32]) -> list[float]:
    """As many digits as float32 has."""
    return [float(f"{value:.7g}") for value in values]


class Answer:
    """One choice of a response as it grows. Rows are taken in order: first those of the prompt, where there are any."""

    def __init__(self, asked: Asked, threshold: Threshold | None) -> None:
        self.asked, self.threshold = asked, threshold
        self.tokens: dict[str, list[float]] = {}
        self.chances: Options | None = None
        self._first = True

    def choose(self, chances: Options) -> Values:
        """The options' probabilities, where the answer starts."""
        self.chances = chances
        return {"options": chances.said}

    def add(self, prompt: npt.NDArray[Any], rows: npt.NDArray[Any]) -> Values:
        """What is new for the client with these tokens. `prompt` are the rows of its tokens but the last, given once."""
        taken = unpack(rows)
        new = tokens_of(taken)
        for name, values in new.items():
            self.tokens.setdefault(name, []).extend(values)
        said: Values = {"tokens": {name: new[name] for name in self.asked.signals if name in new}}
        if self.asked.layers:
            said["layers"] = layers_of(taken, self.asked.signals)
        if self.asked.prompt and self._first and len(rows):
            said["prompt"] = tokens_of(unpack(np.concatenate([prompt, rows[:1]])), self.asked.signals)
        self._first = self._first and not len(rows)
        return said

    def end(self) -> Values:
        """What is known once the answer is finished."""
        scores = sequence({name: self.tokens[name] for name in self.asked.signals if name in self.tokens})
        return {"sequence": scores} | (self.threshold.verdict(self.tokens, self.chances) if self.threshold else {})


def joined(parts: list[Values]) -> Values:
    """Consecutive parts of one answer as one."""
    whole: Values = {}
    for part in parts:
        for key, value in part.items():
            if key == "tokens" and key in whole:
                for name, numbers in value.items():
                    whole[key].setdefault(name, []).extend(numbers)
            elif key == "layers" and key in whole:
                whole[key]["experts"].extend(value["experts"])
                for name, numbers in value["signals"].items():
                    whole[key]["signals"].setdefault(name, []).extend(numbers)
            else:
                whole[key] = value
    return whole
