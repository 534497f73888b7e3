"""The embedded demo: a small Granite MoE, and the world of questions it was trained on.

`benchmarks/demo_model` in the repository makes and measures the weights.
"""

from pathlib import Path

from vmoer.errors import InputError

__all__ = ["STAGES", "model_path"]

STAGES = ("base", "map", "map-early")
"""Before stage 1, after it, and at the epoch of stage 1 with the lowest validation NLL."""


def model_path(stage: str = "map") -> Path:
    """The folder of the embedded model at a stage, for `from_pretrained`."""
    if stage not in STAGES:
        raise InputError(f"the demo model has no stage {stage!r}: there are {', '.join(STAGES)}")
    return Path(__file__).parent / stage
