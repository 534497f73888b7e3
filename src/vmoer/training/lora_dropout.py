"""LoRA dropout (Lin et al. 2024; Gal and Ghahramani 2016): masks in training, and M of them at inference.

    A_m = A diag(m) / (1 - p),    m_i ~ Bernoulli(1 - p)

That is PEFT's `lora_dropout`, the adapter's input dropped, with one mask for all tokens of a pass: PEFT draws a mask for every
token, and refuses to where experts are stacked in one tensor. Lin et al. mask B's rows as well. Without a sample asked for, the
adapter is whole.

Shapes: R rows of A, I inputs.
"""

from dataclasses import asdict, dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from vmoer.errors import InputError
from vmoer.live.adapters import AdapterNoise
from vmoer.numerics.noise import Key, uniform


@dataclass(frozen=True, kw_only=True)
class LoRADropout(AdapterNoise):
    """Dropout in the adapter, in training and at inference.

    Args:
        rate: The share of inputs that are dropped.
    """

    key: ClassVar[str] = "lora-dropout"
    rate: float = 0.1

    def __post_init__(self) -> None:
        if not 0 < self.rate < 1:
            raise InputError(f"rate={self.rate} must lie between 0 and 1")

    def described(self) -> dict[str, Any]:
        return {"kind": self.key, **asdict(self)}

    def sample(self, mean_RI: Tensor, own_RI: Tensor | None, *key: Key) -> Tensor:
        u_I = uniform(*key, torch.arange(mean_RI.shape[1], device=mean_RI.device))
        return mean_RI * ((u_I >= self.rate).to(mean_RI.dtype) / (1 - self.rate))
