"""Which layers a preset takes of a model."""

import math

from vmoer.gates import find
from vmoer.live.brittleness import parse_layers
from vmoer.models import skeleton
from vmoer.training.presets import Preset

LAYERS = 32  # of the model that the paper's ten are taken from


def preset_layers(preset: Preset, model: str) -> tuple[str, str]:
    """The preset's layers on a model, and a note where they are fewer than it says, else nothing.

    A model with fewer MoE layers than the paper's ten gives the same share, ten in thirty-two.
    """
    strategy, n = parse_layers(preset.layers)
    if strategy == "all" or (available := len(find(skeleton(model)))) >= n or not available:
        return preset.layers, ""  # one without any is refused where routers are attached
    share = math.ceil(available * n / LAYERS)
    note = f"the paper takes {n} layers of {LAYERS}, and {model} has {available} with experts: taking {share}"
    return f"{strategy}:{share}", note
