"""Calibrated uncertainty for Mixture-of-Experts language models by variational routing."""

from vmoer.attach import attach, detach, record
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

__version__ = "0.1.0"
