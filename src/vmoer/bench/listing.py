"""Full-covariance routing as the paper's listing has it, for comparison: the factor written out, MultivariateNormal.rsample.

Two things are kinder than the listing: the distribution's argument checks are off and its indices live on the device, since
both synchronise with the host and would forbid a CUDA graph.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from vmoer.routers import Call, FullCovariance, Router, Routing
from vmoer.routers.full_covariance import FullCovarianceRouter


class ListingRouter(FullCovarianceRouter):
    def forward(self, u_TD: Tensor, logits_TN: Tensor, call: Call, weight_ND: Tensor | None) -> Routing:
        n = self.gate.num_experts
        features_TH = torch.relu(self.linear(u_TD, self.backbone))
        mean_head, cholesky_head = self.heads.weight.to(u_TD.dtype).split(self.sizes)
        shift_TN = (features_TH @ mean_head.mT).float()
        flat_TC = (features_TH @ cholesky_head.mT).float()
        row, column = torch.tril_indices(n, n, device=u_TD.device)
        factor_TNN = torch.zeros(len(u_TD), n, n, device=u_TD.device)
        factor_TNN[:, row, column] = flat_TC
        diagonal = torch.arange(n, device=u_TD.device)
        factor_TNN[:, diagonal, diagonal] = torch.exp(factor_TNN[:, diagonal, diagonal])
        q = torch.distributions.MultivariateNormal(logits_TN + shift_TN, scale_tril=factor_TNN, validate_args=False)
        samples_STN = q.rsample((self.config.samples,))
        averaged_TN = torch.log(torch.softmax(samples_STN, -1).mean(0).clamp(min=1e-9))
        return Routing(averaged_TN, averaged_TN)

    def work(self) -> None:
        """What it does is far from what a router of its kind must do."""


@dataclass(frozen=True, kw_only=True)
class Listing(FullCovariance):
    key: ClassVar[str] = "listing"
    router: ClassVar[type[Router]] = ListingRouter

    samples: int = 35
