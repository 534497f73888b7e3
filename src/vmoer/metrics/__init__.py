"""Metrics: pure functions of arrays, so that every number can be recomputed from saved predictions without a model."""

from vmoer.metrics._inputs import pad
from vmoer.metrics.calibration import (
    NoiseFloor,
    Reliability,
    accuracy,
    apply_temperature,
    brier,
    brier_per_question,
    confidence,
    correct_per_question,
    cross_tempered,
    debiased_ece,
    ece,
    fit_temperature,
    mce,
    nll,
    nll_per_question,
    noise_floor,
    reliability,
    smooth_ece,
)
from vmoer.metrics.estimates import detection
from vmoer.metrics.ood import auprc, auroc, fpr95, length_match
from vmoer.metrics.resampling import Interval, bootstrap, bootstrap_metric, paired_bootstrap
from vmoer.metrics.selective import augrc, aurc, risk_coverage, threshold_for_risk

__all__ = [
    "Interval",
    "NoiseFloor",
    "Reliability",
    "accuracy",
    "apply_temperature",
    "augrc",
    "auprc",
    "aurc",
    "auroc",
    "bootstrap",
    "bootstrap_metric",
    "brier",
    "brier_per_question",
    "confidence",
    "correct_per_question",
    "cross_tempered",
    "debiased_ece",
    "detection",
    "ece",
    "fit_temperature",
    "fpr95",
    "length_match",
    "mce",
    "nll",
    "nll_per_question",
    "noise_floor",
    "pad",
    "paired_bootstrap",
    "reliability",
    "risk_coverage",
    "smooth_ece",
    "threshold_for_risk",
]
