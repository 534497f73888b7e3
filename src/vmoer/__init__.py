"""Uncertainty for Mixture-of-Experts language models by variational routing.

A public name is imported when it is first used: `import vmoer` itself loads neither torch nor anything else.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # for type checkers and editors; `_WHERE` says the same to Python
    from vmoer.inference.averaging import predict
    from vmoer.inference.generation import generate
    from vmoer.live.attach import attach, detach, record
    from vmoer.live.brittleness import select_layers
    from vmoer.live.fitting import fit
    from vmoer.live.replay import replay
    from vmoer.routers import (
        SWAG,
        Deterministic,
        FullCovariance,
        Laplace,
        LowRank,
        MCDropout,
        MeanField,
        Temperature,
        VariationalTemperature,
        methods,
    )
    from vmoer.saved.store import load, save
    from vmoer.training.trainer import VMoERTrainer

    __version__: str

__all__ = [
    "SWAG",
    "Deterministic",
    "FullCovariance",
    "Laplace",
    "LowRank",
    "MCDropout",
    "MeanField",
    "Temperature",
    "VMoERTrainer",
    "VariationalTemperature",
    "attach",
    "detach",
    "fit",
    "generate",
    "load",
    "methods",
    "predict",
    "record",
    "replay",
    "save",
    "select_layers",
]

_WHERE = dict.fromkeys(__all__, "vmoer.routers") | {
    "VMoERTrainer": "vmoer.training.trainer",
    "attach": "vmoer.live.attach",
    "detach": "vmoer.live.attach",
    "fit": "vmoer.live.fitting",
    "generate": "vmoer.inference.generation",
    "load": "vmoer.saved.store",
    "predict": "vmoer.inference.averaging",
    "record": "vmoer.live.attach",
    "replay": "vmoer.live.replay",
    "save": "vmoer.saved.store",
    "select_layers": "vmoer.live.brittleness",
    "__version__": "vmoer._version",
}


def __getattr__(name: str) -> object:
    if name not in _WHERE:
        raise AttributeError(f"module 'vmoer' has no attribute {name!r}")
    globals()[name] = value = getattr(import_module(_WHERE[name]), name)  # found without us from now on
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_WHERE})
