"""Calibrated uncertainty for Mixture-of-Experts language models by variational routing."""

__version__ = "0.1.0"

from vmoer.attach import attach, detach, record
from vmoer.averaging import predict
from vmoer.fitting import fit
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
from vmoer.store import load, save

__all__ = [
    "SWAG",
    "Deterministic",
    "FullCovariance",
    "Laplace",
    "LowRank",
    "MCDropout",
    "MeanField",
    "Temperature",
    "VariationalTemperature",
    "attach",
    "detach",
    "fit",
    "load",
    "methods",
    "predict",
    "record",
    "save",
]
