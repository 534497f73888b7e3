"""The methods. One file each; `methods()` maps their keys, as the command line and router files spell them, to configurations.

A new method is one file beside these and one line below (docs/adding-a-method.md). An installed package can bring methods too:
its entry points of the group `vmoer.methods` are read when the first method is looked up, in every process.
"""

from functools import cache
from importlib.metadata import entry_points

from vmoer.errors import InputError, first_line, unknown
from vmoer.routers._base import (
    Call,
    Config,
    Control,
    Points,
    Posterior,
    Presets,
    Router,
    Routing,
    Search,
    at_least,
    choice,
)
from vmoer.routers.deterministic import Deterministic
from vmoer.routers.full_covariance import FullCovariance
from vmoer.routers.laplace import Laplace
from vmoer.routers.low_rank import LowRank
from vmoer.routers.mc_dropout import MCDropout
from vmoer.routers.mean_field import MeanField
from vmoer.routers.swag import SWAG
from vmoer.routers.temperature import Temperature
from vmoer.routers.variational_temperature import VariationalTemperature

METHODS: dict[str, type[Config]] = {}
"""The registry, in the order in which methods are listed."""


def register(config: type[Config]) -> type[Config]:
    """Make a method known by its key: to the command line, to studies and benchmarks, and to files of saved routers."""
    if not config.key or METHODS.get(config.key, config) is not config:
        raise InputError(f"{config.__name__} needs a key of its own, and {config.key!r} is none")
    METHODS[config.key] = config
    return config


for _config in (
    Deterministic,
    Temperature,
    MCDropout,
    SWAG,
    MeanField,
    FullCovariance,
    LowRank,
    VariationalTemperature,
    Laplace,
):
    register(_config)


@cache
def _of_packages() -> None:
    """Register the methods of installed packages, once."""
    for point in entry_points(group="vmoer.methods"):
        try:
            register(point.load())
        except Exception as error:
            named = f"the method {point.name} = {point.value} of an installed package"
            raise InputError(f"{named} cannot be read: {first_line(error)}") from error


def methods() -> dict[str, type[Config]]:
    """Every method's configuration, by its key."""
    _of_packages()
    return dict(METHODS)


def controls() -> dict[str, Control]:
    """The methods' controls, by their names."""
    return {name: control for config in methods().values() for name, control in config.controls().items()}


def method(key: str) -> type[Config]:
    """The configuration behind a key, or one clear line."""
    if key not in (known := methods()):
        raise unknown("method", key, known)
    return known[key]


__all__ = [
    "METHODS",
    "SWAG",
    "Call",
    "Config",
    "Control",
    "Deterministic",
    "FullCovariance",
    "Laplace",
    "LowRank",
    "MCDropout",
    "MeanField",
    "Points",
    "Posterior",
    "Presets",
    "Router",
    "Routing",
    "Search",
    "Temperature",
    "VariationalTemperature",
    "at_least",
    "choice",
    "controls",
    "method",
    "methods",
    "register",
]
