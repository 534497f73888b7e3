"""MAP: the model's own router, bit for bit. Attached so that its routing can be recorded like any other's."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from vmoer.routers._base import Call, Config, Router


class DeterministicRouter(Router):
    @property
    def replaces(self) -> bool:
        return False

    def forward(self, u_TD: Tensor, logits_TN: Tensor, call: Call, weight_ND: Tensor | None) -> None:
        return None


@dataclass(frozen=True, kw_only=True)
class Deterministic(Config):
    key: ClassVar[str] = "map"
    router: ClassVar[type[Router]] = DeterministicRouter
