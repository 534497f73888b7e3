"""Calibrated uncertainty for Mixture-of-Experts language models by variational routing."""

__version__ = "0.1.0"

from vmoer.attach import attach, detach, record
from vmoer.fitting import fit
from vmoer.generation import generate
from vmoer.layers import select_layers
from vmoer.predict import predict
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
    "save",
    "select_layers",
]


def __getattr__(name: str) -> object:
    """`VMoERTrainer` brings transformers' Trainer with it, which takes seconds to import: only when it is asked for."""
    if name == "VMoERTrainer":
        from vmoer.trainer import VMoERTrainer

        return VMoERTrainer
    raise AttributeError(f"module 'vmoer' has no attribute {name!r}")
