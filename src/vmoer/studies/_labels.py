"""What stands in a study's rows: a method as it was trained, by name.

vglr-fc              a method key, with the default preset
vglr-fc@paper        the same with the paper's protocol
vglr-fc@permuted     both stages on all questions, stage 2 with their options in new orders every epoch
map, map-early       stage 1 alone, in its last state and in its best on validation
map-all, map-all.1   the same on all questions, which is map@permuted; and from another seed, on the same questions
lora-dropout, blob   map-all with dropout in its adapter, or a Gaussian over it (BLoB), over as many passes as the study takes
laplace-lora         map-all with a Laplace posterior over its adapter, over as many samples
mean-only            a trained mean without variance          } the controls without which a gain is
fixed-noise          untrained noise of fixed size            } credited to the wrong cause
tuned-noise          the same, its size chosen on validation  }
vglr-fc+full         predictions averaged over answers rather than in the router (+answer, +full), or over orders of
map+orders4          the options (+orders, +orders+routing); with a number over so many passes, else over the study's

Methods and controls that say so (`tempered`) answer validation questions too under the default preset: their rows come a second
time with an output temperature (+ts), so that what routing adds to plain temperature scaling can be seen.
"""

import dataclasses
import re
from typing import Any, get_args

from vmoer.errors import InputError
from vmoer.inference import Averaging
from vmoer.routers import Config, controls, method
from vmoer.studies._adapters import adapter_of, over_adapter
from vmoer.training.presets import PRESETS, preset_named

STATES = ("map", "map-early")
AVERAGED = tuple(kind for kind in get_args(Averaging) if kind != "router")
ALL = "map-all"
DIGITS = "0123456789"
OTHER = 1000  # between the seeds of an ensemble's members


def with_preset(label: str, preset: str) -> str:
    """The label under a preset, unless it names one itself."""
    head, plus, averaging = label.partition("+")
    return label if preset == "default" or "@" in head else f"{head}@{preset}{plus}{averaging}"


def parse(label: str) -> tuple[str, str, str]:
    """A label's method, preset and averaging; map-all is map@permuted."""
    head, _, averaging = label.partition("+")
    if over_adapter(label) or re.fullmatch(rf"{ALL}(\.[1-9])?", head):
        head = "map@permuted"
    key, _, preset = head.partition("@")
    if over_adapter(key) and preset:
        raise InputError(f"{label}: {key} is trained on all questions, and takes no preset")
    if key not in (*STATES, *controls()):
        method(key)
    preset_named(preset or "default")
    averaging = averaging.rstrip(DIGITS)
    if averaging not in AVERAGED and "+" in label:
        raise InputError(f"{label}: averaging is {', '.join(f'+{kind}' for kind in AVERAGED)}")
    if over_adapter(label) and averaging not in ("", "full"):
        raise InputError(
            f"{label}: samples of an adapter are of whole passes, so +full is all that it can be averaged by"
        )
    return key, preset or "default", averaging or ("full" if over_adapter(label) else "router")


def member_of(label: str) -> int:
    """Of map-all.2 the 2: a MAP model on the same questions from another seed, for ensembles."""
    head = label.partition("+")[0]
    return int(head.removeprefix(f"{ALL}.")) if head.startswith(f"{ALL}.") else 0


def passes_of(label: str, passes: int) -> int:
    """How many passes a label's answers take at most, where the study takes so many."""
    number = label[len(label.rstrip(DIGITS)) :] if "+" in label else ""
    return 1 if parse(label)[2] == "router" else int(number or passes)


def tempered(label: str) -> bool:
    """Whether validation questions are answered too, which an output temperature is fitted on."""
    key, preset, averaging = parse(label)
    if not PRESETS[preset].paper_splits and preset != "default":
        return True  # in a comparison at equal data all are calibrated
    if preset != "default" or averaging == "answer" or key == "map-early":
        return False
    return controls()[key].tempered if key in controls() else method(key).tempered


def config_of(label: str, **changes: Any) -> Config:
    """The configuration a label is trained with, before validation or another study chooses any of it."""
    key, preset, _ = parse(label)
    if key in controls():
        return dataclasses.replace(controls()[key].config, **changes)
    return PRESETS[preset].config("map" if key in STATES else key, **changes)


def stage1_label(label: str) -> str:
    """The label of the MAP model that a label starts from."""
    _, preset, _ = parse(label)
    if preset.startswith("printed"):
        return "map@printed"  # they differ in stage 2
    if adapter_of(label) is not None:
        return label.partition("+")[0]
    if preset == "permuted":
        return f"{ALL}.{member_of(label)}" if member_of(label) else ALL
    return "map" if preset == "default" else f"map@{preset}"
