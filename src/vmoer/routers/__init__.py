"""The methods. One file each; `methods()` maps their keys, as the command line and router files spell them, to configurations."""

import difflib

from vmoer.errors import InputError
from vmoer.routers._base import Call, Config, Posterior, Router, Routing
from vmoer.routers.deterministic import Deterministic
from vmoer.routers.full_covariance import FullCovariance
from vmoer.routers.laplace import Laplace
from vmoer.routers.low_rank import LowRank
from vmoer.routers.mc_dropout import MCDropout
from vmoer.routers.mean_field import MeanField
from vmoer.routers.swag import SWAG
from vmoer.routers.temperature import Temperature
from vmoer.routers.variational_temperature import VariationalTemperature

_ALL: tuple[type[Config], ...] = (
    Deterministic,
    Temperature,
    MCDropout,
    SWAG,
    MeanField,
    FullCovariance,
    LowRank,
    VariationalTemperature,
    Laplace,
)


def methods() -> dict[str, type[Config]]:
    return {config.key: config for config in _ALL}


def method(key: str) -> type[Config]:
    """The configuration behind a key, or one clear line."""
    if key not in (known := methods()):
        near = difflib.get_close_matches(key, known, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise InputError(f"unknown method {key!r}{hint} (known: {', '.join(known)})")
    return known[key]


__all__ = [
    "SWAG",
    "Call",
    "Config",
    "Deterministic",
    "FullCovariance",
    "Laplace",
    "LowRank",
    "MCDropout",
    "MeanField",
    "Posterior",
    "Router",
    "Routing",
    "Temperature",
    "VariationalTemperature",
    "method",
    "methods",
]
