"""A router's weights by their content alone, for engines that know them under other names.

    hash = SHA-256 of W_r's bytes in bfloat16

A cast to bfloat16, a device and a parameter's name do not change it.

Shapes: N experts, D model.
"""

import hashlib

import torch
from torch import Tensor


def router_hash(weight_ND: Tensor) -> str:
    """The hash of a router's weights, as hexadecimal digits; it knows nothing of the parameter's name."""
    content = weight_ND.detach().to(torch.bfloat16).contiguous().view(torch.int16).cpu().numpy().tobytes()
    return hashlib.sha256(content).hexdigest()
