"""MAP: the model's own router, bit for bit. Attached so that its routing can be recorded like any other's."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from vmoer.routers._base import Call, Config, Router, Trained


class DeterministicRouter(Router):
    silent = True

    @property
    def replaces(self) -> bool:
        return False

    @property
    def repeats(self) -> bool:
        return True

    def forward(self, u_TD: Tensor, logits_TN: Tensor, call: Call, weight_ND: Tensor | None) -> None:
        return None


@dataclass(frozen=True, kw_only=True)
class Deterministic(Config):
    """The model's own router (MAP), recorded and otherwise left alone.

    Args:
        layers: Indices of the decoder layers to attach to, or "all".
        seed: Decides the method's noise and, where it has a network, its initial weights.
    """

    key: ClassVar[str] = "map"
    about: ClassVar[str] = "the model after stage 1, with its own router"
    router: ClassVar[type[Router]] = DeterministicRouter
    tempered: ClassVar[bool] = True

    @property
    def trains(self) -> Trained:
        return None

    @property
    def draws(self) -> bool:
        return False
