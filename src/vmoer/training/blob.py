"""BLoB, Bayesian low-rank adaptation by backpropagation (Wang et al. 2024): a mean-field Gaussian over A; B has no posterior.

    q(A) = prod N(A_ij | M_ij, G_ij^4),    p(A) = prod N(A_ij | 0, s^2)
    loss = E_q[-log p(y | A, B)] + KL(q || p) / questions

With B fixed, KL over A is the KL over the whole weight under the paper's low-rank prior (their theorem 3.2). The standard
deviation is the square of what is trained, G, as there, and so are the start, G ~ U(e / sqrt 2, e), and s. One sample of A a
step, by the same hash as all noise here: their Flipout draws signs for every row of a batch, which experts stacked in one tensor
do not allow. The KL has the weight that the bound gives it; theirs is larger by a schedule over a made-up number of batches.

Shapes: R rows of A, I inputs.
"""

import math
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from vmoer.errors import InputError
from vmoer.live.adapters import AdapterNoise
from vmoer.numerics.noise import Key, normal, uniform


@dataclass(frozen=True, kw_only=True)
class BLoB(AdapterNoise):
    """A Gaussian over the adapter's A, trained in stage 1.

    Args:
        prior_scale: s, the prior's standard deviation.
        start_scale: e; standard deviations start between e^2 / 2 and e^2.
    """

    key: ClassVar[str] = "blob"
    prior_scale: float = 0.2
    start_scale: float = 0.05

    def __post_init__(self) -> None:
        if not self.prior_scale > 0 or not self.start_scale > 0:
            raise InputError(f"scales must be positive: {self}")

    def described(self) -> dict[str, Any]:
        return {"kind": self.key, **asdict(self)}

    def start(self, mean_RI: Tensor, *key: Key) -> Tensor:
        u_RI = uniform(*key, -1, _places(mean_RI)).to(mean_RI.dtype)
        low = self.start_scale / math.sqrt(2)
        return low + (self.start_scale - low) * u_RI

    def sample(self, mean_RI: Tensor, own_RI: Tensor | None, *key: Key) -> Tensor:
        assert own_RI is not None
        return mean_RI + own_RI.square() * normal(*key, _places(mean_RI)).to(mean_RI.dtype)

    def divergence(self, mean_RI: Tensor, own_RI: Tensor | None) -> Tensor:
        """KL(q || p), summed over A."""
        assert own_RI is not None
        variance_RI, prior = own_RI.pow(4), self.prior_scale**2
        ratio_RI = (variance_RI + mean_RI.square()) / prior
        return 0.5 * (ratio_RI - 1 - torch.log(variance_RI / prior)).sum()


def _places(mean_RI: Tensor) -> Tensor:
    """The number of each entry."""
    return torch.arange(mean_RI.numel(), device=mean_RI.device).view_as(mean_RI)
