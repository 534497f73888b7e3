"""Gaussians over the routing logits, with four shapes of covariance.

    Diagonal    Sigma = diag(sd^2)
    Cholesky    Sigma = L L'                 L lower triangular with a positive diagonal
    Factored    Sigma = diag(sd^2) + V V'
    Scaled      Sigma = v B                  v one number a token, B = F F' shared by all tokens

`samples(eps)` reparameterises, `times(x)` is Sigma x, `kl(center, prior_sd)` the divergence from N(center, prior_sd^2 I) in
closed form, in nats a token. All arithmetic is in the dtype of the inputs; the routers hand in float32.

Shapes: T tokens, N experts, S samples, R rank, C = N(N+1)/2 Cholesky entries, E numbers of noise a sample.
"""

import dataclasses
import functools
import math
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from vmoer.numerics.tokens import PerToken


@dataclass(frozen=True)
class Gaussian(PerToken):
    """What all shapes share."""

    per_token: ClassVar[tuple[str, ...]] = ("mean_TN",)
    mean_TN: Tensor

    @property
    def noise_dim(self) -> int:
        return self.mean_TN.shape[-1]

    @property
    def variance_TN(self) -> Tensor:
        """The diagonal of Sigma."""
        raise NotImplementedError

    def samples(self, eps: Tensor) -> Tensor:
        """mean + Sigma^(1/2) eps for eps [S, E], shared by all tokens, or [T, S, E]: [T, S, N]."""
        raise NotImplementedError

    def times(self, x_TN: Tensor) -> Tensor:
        raise NotImplementedError

    def log_det(self) -> Tensor:
        raise NotImplementedError

    def sample(self, eps_TE: Tensor) -> Tensor:
        return self.samples(eps_TE.unsqueeze(1)).squeeze(1)

    def trace(self) -> Tensor:
        return self.variance_TN.sum(-1)

    def kl(self, center_TN: Tensor, prior_sd: float) -> Tensor:
        """KL(N(m, Sigma) || N(c, s^2 I)) = ((tr Sigma + |m - c|^2) / s^2 - N + N log s^2 - log|Sigma|) / 2"""
        n, precision = self.mean_TN.shape[-1], prior_sd**-2
        quadratic_T = (self.trace() + (self.mean_TN - center_TN).square().sum(-1)) * precision
        return 0.5 * (quadratic_T - n + 2 * n * math.log(prior_sd) - self.log_det())

    def wide(self) -> "Gaussian":
        """The same in float32. On a GPU the heads answer in the model's own dtype, which only the kernels can read."""
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        narrow = {name: x.float() for name, x in fields.items() if isinstance(x, Tensor) and x.element_size() == 2}
        return dataclasses.replace(self, **narrow) if narrow else self

    def moved(self, shift_TN: Tensor | None) -> "Gaussian":
        """The same around another mean."""
        return self if shift_TN is None else dataclasses.replace(self, mean_TN=self.mean_TN + shift_TN)


@dataclass(frozen=True)
class Diagonal(Gaussian):
    """sd = `scale` exp(log_sd)"""

    per_token: ClassVar[tuple[str, ...]] = ("mean_TN", "log_sd_TN")
    log_sd_TN: Tensor
    scale: float = 1.0

    @property
    def variance_TN(self) -> Tensor:
        return self.scale**2 * torch.exp(2 * self.log_sd_TN)

    def samples(self, eps: Tensor) -> Tensor:
        return self.mean_TN.unsqueeze(1) + (self.scale * torch.exp(self.log_sd_TN)).unsqueeze(1) * eps

    def times(self, x_TN: Tensor) -> Tensor:
        return self.variance_TN * x_TN

    def log_det(self) -> Tensor:
        return 2 * self.log_sd_TN.sum(-1) + 2 * self.noise_dim * math.log(self.scale)


@functools.lru_cache(maxsize=64)
def _triangle(n: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Two indices for a lower triangle stored row by row.

    The first maps each place of the flattened N x N matrix to its entry, and places above the diagonal to C. The second says
    which of the C entries lie on the diagonal.
    """
    row, col = torch.tril_indices(n, n, device=device)
    entry = torch.full((n * n,), len(row), device=device)
    entry[row * n + col] = torch.arange(len(row), device=device)
    return entry, row == col


@dataclass(frozen=True)
class Cholesky(Gaussian):
    """`raw_TC` holds the lower triangle row by row, the logarithm on the diagonal; L is `scale` times that."""

    per_token: ClassVar[tuple[str, ...]] = ("mean_TN", "raw_TC")
    raw_TC: Tensor
    scale: float = 1.0

    def entries(self) -> Tensor:
        _, diagonal_C = _triangle(self.noise_dim, self.raw_TC.device)
        return self.scale * torch.where(diagonal_C, self.raw_TC.masked_fill(~diagonal_C, 0).exp(), self.raw_TC)

    def factor(self) -> Tensor:
        n = self.noise_dim
        entry, _ = _triangle(n, self.raw_TC.device)
        flat = F.pad(self.raw_TC, (0, 1)).index_select(1, entry)  # the added zero fills the upper triangle
        flat[:, :: n + 1] = flat[:, :: n + 1].exp()
        return (flat if self.scale == 1 else self.scale * flat).view(-1, n, n)

    @property
    def variance_TN(self) -> Tensor:
        return self.factor().square().sum(-1)

    def trace(self) -> Tensor:
        return self.entries().square().sum(-1)

    def samples(self, eps: Tensor) -> Tensor:
        factor = self.factor()
        return torch.baddbmm(self.mean_TN.unsqueeze(1), eps.expand(len(factor), *eps.shape[-2:]), factor.mT)

    def times(self, x_TN: Tensor) -> Tensor:
        factor = self.factor()
        return (factor @ (factor.mT @ x_TN.unsqueeze(-1))).squeeze(-1)

    def log_det(self) -> Tensor:
        _, diagonal_C = _triangle(self.noise_dim, self.raw_TC.device)
        return 2 * (self.raw_TC * diagonal_C).sum(-1) + 2 * self.noise_dim * math.log(self.scale)


@dataclass(frozen=True)
class Factored(Gaussian):
    """Sigma is `scale`^2 times the sum above."""

    per_token: ClassVar[tuple[str, ...]] = ("mean_TN", "log_sd_TN", "factor_TNR")
    log_sd_TN: Tensor
    factor_TNR: Tensor
    scale: float = 1.0

    @property
    def noise_dim(self) -> int:
        return self.mean_TN.shape[-1] + self.factor_TNR.shape[-1]

    @property
    def variance_TN(self) -> Tensor:
        return self.scale**2 * (torch.exp(2 * self.log_sd_TN) + self.factor_TNR.square().sum(-1))

    def samples(self, eps: Tensor) -> Tensor:
        n = self.mean_TN.shape[-1]
        own = torch.exp(self.log_sd_TN).unsqueeze(1) * eps[..., :n]
        return self.mean_TN.unsqueeze(1) + self.scale * (own + eps[..., n:] @ self.factor_TNR.mT)

    def times(self, x_TN: Tensor) -> Tensor:
        shared = self.factor_TNR @ (self.factor_TNR.mT @ x_TN.unsqueeze(-1))
        return self.scale**2 * (torch.exp(2 * self.log_sd_TN) * x_TN + shared.squeeze(-1))

    def log_det(self) -> Tensor:
        """log|D + V V'| = log|D| + log|I + V' D^-1 V| (determinant lemma), the second by an R x R Cholesky factor."""
        rank = self.factor_TNR.shape[-1]
        scaled = self.factor_TNR * torch.exp(-self.log_sd_TN).unsqueeze(-1)
        inner = torch.eye(rank, dtype=scaled.dtype, device=scaled.device) + scaled.mT @ scaled
        half = torch.linalg.cholesky_ex(inner).L.diagonal(dim1=-2, dim2=-1)  # cholesky_ex: no host synchronisation
        sizes = 2 * self.log_sd_TN.sum(-1) + 2 * half.log().sum(-1)
        return sizes + 2 * self.mean_TN.shape[-1] * math.log(self.scale)


@dataclass(frozen=True)
class Scaled(Gaussian):
    per_token: ClassVar[tuple[str, ...]] = ("mean_TN", "scale_T")
    scale_T: Tensor
    factor_NN: Tensor

    @property
    def variance_TN(self) -> Tensor:
        return self.scale_T.unsqueeze(-1) * self.factor_NN.square().sum(-1)

    def trace(self) -> Tensor:
        return self.scale_T * self.factor_NN.square().sum()

    def samples(self, eps: Tensor) -> Tensor:
        return self.mean_TN.unsqueeze(1) + self.scale_T.sqrt()[:, None, None] * (eps @ self.factor_NN.mT)

    def times(self, x_TN: Tensor) -> Tensor:
        return self.scale_T.unsqueeze(-1) * (x_TN @ self.factor_NN @ self.factor_NN.mT)

    def log_det(self) -> Tensor:
        n = self.mean_TN.shape[-1]
        return n * self.scale_T.log() + 2 * self.factor_NN.diagonal().log().sum()
