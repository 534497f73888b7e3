"""Random numbers without state: every draw is a function of integers.

A generator that advances makes routing depend on what ran before it: on the batch's other rows, on the number of ranks, on
whether a checkpointed layer is run a second time. Here a draw is a hash of its coordinates (seed, layer, position, ...), the
same on every device, so gradient checkpointing, accumulation, resumption and data parallelism all see the same noise.

    uniform(seed, layer, position, expert) = (mix32(...) + 1/2) / 2^23 in (0, 1)
"""

from typing import Any

import torch
from torch import Tensor

_MASK = 0xFFFFFFFF
Key = int | Tensor


def _mix(x: Any) -> Any:
    """The 32-bit finaliser of MurmurHash3, in int64: products wrap, and only their low 32 bits are kept."""
    x = (x ^ (x >> 16)) * 0x85EBCA6B & _MASK
    x = (x ^ (x >> 13)) * 0xC2B2AE35 & _MASK
    return x ^ (x >> 16)


def combine(*keys: Key) -> Key:
    """One 32-bit hash per entry of the keys' broadcast shape; a plain number where all keys are. The keys' order matters."""
    state: Key = 0x9E3779B9  # a number until a key is a tensor: numbers cost no kernels
    for key in keys:
        state = _mix((state * 5 + 0x52DCE729 + (key & _MASK)) & _MASK)
    return state


def hash32(*keys: Key) -> Tensor:
    """`combine` as a tensor."""
    return torch.as_tensor(combine(*keys))


def uniform(*keys: Key) -> Tensor:
    """Float32 in the open interval (0, 1): 23 bits and a half, so that neither end is ever rounded to."""
    return ((hash32(*keys) >> 9).float() + 0.5) * 2.0**-23


def normal(*keys: Key) -> Tensor:
    """Standard normal, by inversion."""
    return torch.special.ndtri(uniform(*keys))


def gumbel(*keys: Key) -> Tensor:
    """Standard Gumbel, -log(-log u)."""
    return -torch.log(-torch.log(uniform(*keys)))


def sobol_normal(samples: int, dim: int, seed: int) -> Tensor:
    """[S, dim] scrambled Sobol points pushed through the normal quantile function, each coordinate of mean 0 and variance 1.

    One set serves every token, so that routing stays a function of the input. Standardising the coordinates makes the
    average exact for what is linear in the noise, and for the diagonal of what is quadratic.
    """
    engine = torch.quasirandom.SobolEngine(dim, scramble=True, seed=seed)
    points = torch.special.ndtri(engine.draw(samples, dtype=torch.float64).clamp(2.0**-40, 1 - 2.0**-40))
    if samples == 1:
        return torch.zeros(1, dim)
    points = points - points.mean(0)
    return (points / points.square().mean(0).sqrt()).float()
