"""`calibrator.json`: the map that a run's answers go through, and what it was fitted for. It is listed in the folder's manifest.

kind, parameters        of the map (metrics.calibrators)
options                 how many options the questions had that it was fitted on
averaging, passes       how they were answered
task, method, questions whose answers these were, and how many
cross_validated_nll     of every kind that was tried; null where the questions were too few for it
fingerprint             of the base's routers, the adapter, and `router.safetensors`
"""

import dataclasses
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol, get_args

import numpy as np
import numpy.typing as npt

from vmoer._version import __version__
from vmoer.errors import InputError
from vmoer.files import digest, parse_json
from vmoer.inference import Averaging
from vmoer.metrics.calibrators import FOLDS, KINDS, Calibrator, Choice
from vmoer.saved import manifest
from vmoer.saved.fitted_for import CALIBRATOR, calibrated_for, signed

NAME, FORMAT = CALIBRATOR, 1
_LETTERS = 26
_FIELDS = {
    "format": int,
    "vmoer": str,
    "kind": str,
    "parameters": dict,
    "task": str,
    "method": str,
    "questions": int,
    "options": list,
    "averaging": str,
    "passes": int,
    "folds": int,
    "cross_validated_nll": dict,
}


class Read(Protocol):
    """A folder of saved routers that was read (saved.store.Saved)."""

    @property
    def folder(self) -> Path: ...
    @property
    def calibrator(self) -> bytes | None: ...
    @property
    def fingerprint(self) -> Mapping[str, Any] | None: ...


class Stored(NamedTuple):
    """A calibrator and the content of its file."""

    calibrator: Calibrator
    file: dict[str, Any]

    @property
    def kind(self) -> str:
        return self.calibrator.kind

    @property
    def averaging(self) -> str:
        return str(self.file["averaging"])

    @property
    def passes(self) -> int:
        return int(self.file["passes"])

    @property
    def digest(self) -> str:
        """Which calibrator this is: a checksum of its content."""
        return digest(self.file)

    def apply(self, log_probs: npt.ArrayLike) -> npt.NDArray[np.float64]:
        """Calibrated log-probabilities [n, C]; InputError where a question has another number of options than was fitted on."""
        self.check_options((~np.isneginf(np.asarray(log_probs, dtype=np.float64))).sum(-1).tolist())
        return self.calibrator.apply(log_probs)

    def check_options(self, options: Sequence[int]) -> None:
        """Refuse questions with a number of options that the calibrator has not seen."""
        if odd := sorted(set(options) - set(self.file["options"])):
            fitted = " or ".join(map(str, self.file["options"]))
            raise InputError(f"the calibrator was fitted on questions with {fitted} options, and one has {odd[0]}")

    def check_averaging(self, averaging: str, passes: int) -> None:
        """Refuse answers that were averaged in another way."""
        asked = (averaging, 1 if averaging == "router" else passes)
        if asked != (self.averaging, self.passes):
            raise InputError(
                f"the calibrator was fitted for averaging {_said(self.averaging, self.passes)}, and this is {_said(*asked)}"
            )


def _said(averaging: str, passes: int) -> str:
    return averaging if averaging == "router" else f"{averaging} over {passes} passes"


def described(
    choice: Choice, *, options: Sequence[int], averaging: str, passes: int, task: str, method: str
) -> dict[str, Any]:
    """The content of the file, but for the fingerprint.

    Args:
        choice: of `metrics.calibrators.choose`.
        options: how many each question had.
        averaging: how the questions were answered; so is `passes`.
        task: whose questions these were.
        method: whose answers.
    """
    return {
        "format": FORMAT,
        "vmoer": __version__,
        "kind": choice.calibrator.kind,
        "parameters": dataclasses.asdict(choice.calibrator),  # type: ignore[call-overload]
        "task": task,
        "method": method,
        "questions": len(options),
        "options": sorted(set(options)),
        "averaging": averaging,
        "passes": 1 if averaging == "router" else passes,
        "folds": FOLDS,
        "cross_validated_nll": choice.nll,
    }


def write(folder: Path, content: Mapping[str, Any]) -> Stored:
    """Put a calibrator into a folder of saved routers, in place of the one it has."""
    data = signed(content, *_routers(folder))
    manifest.put(folder, NAME, data)
    return parse(data, folder / NAME)


def renew(folder: Path) -> None:
    """Take a damaged calibrator, or one that a killed process left half written, out of a folder. A whole one stays."""
    if NAME not in manifest.listed_in(folder) and not os.path.lexists(folder / NAME):
        return
    try:
        stored = parse(manifest.read_member(folder, NAME), folder / NAME)
        _check_fingerprint(stored, calibrated_for(*_routers(folder)), folder / NAME)
    except InputError:
        manifest.put(folder, NAME, None)


def _routers(folder: Path) -> tuple[dict[str, Any], bytes]:
    """The content of `router.json`, and the bytes of `router.safetensors`."""
    description = parse_json(manifest.read_member(folder, "router.json"), folder / "router.json")
    return description, manifest.read_member(folder, "router.safetensors")


def parse(data: bytes | str, path: Path) -> Stored:
    """The content of the file, every value checked."""
    return checked(parse_json(data, path), path)


def checked(found: Any, name: object) -> Stored:
    """A calibrator from the content of its file; InputError where a value is not what vmoer writes there."""
    again = "run vmoer calibrate again"
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        raise InputError(f"{name} is not a calibrator of this version of vmoer: {again}")
    for field, kind in _FIELDS.items():
        if not isinstance(found.get(field), kind) or isinstance(found.get(field), bool):
            raise InputError(f"{name}: {field} is not what vmoer writes there: {again}")
    kind, options, passes = found["kind"], found["options"], found["passes"]
    whole = all(type(n) is int and 2 <= n <= _LETTERS for n in options) and options == sorted(set(options)) != []
    if kind not in KINDS or not whole or found["averaging"] not in get_args(Averaging) or not 1 <= passes <= 10**6:
        raise InputError(f"{name}: kind, options, averaging or passes is not what vmoer writes there: {again}")
    given = {key: tuple(v) if isinstance(v, list) else v for key, v in found["parameters"].items()}
    try:
        calibrator = KINDS[kind](**given)
    except (InputError, TypeError) as error:
        raise InputError(f"{name}: its parameters are not those of a {kind} calibrator ({error}): {again}") from None
    if kind == "vector" and len(calibrator.biases) != max(options):
        raise InputError(f"{name} has {len(calibrator.biases)} biases for {max(options)} options: {again}")
    return Stored(calibrator, found)


def of(saved: Read) -> Stored | None:
    """The calibrator of a folder that was read, where it has one; it must have been fitted for the routers beside it."""
    if saved.calibrator is None:
        return None
    stored = parse(saved.calibrator, saved.folder / NAME)
    _check_fingerprint(stored, saved.fingerprint, saved.folder / NAME)
    return stored


def _check_fingerprint(stored: Stored, wanted: Any, name: object) -> None:
    if stored.file.get("fingerprint") != wanted:
        raise InputError(f"{name} was fitted for other routers, or another adapter: run vmoer calibrate again")
