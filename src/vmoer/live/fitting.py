"""What needs data but no gradient: how far a token's state lies from those the router was trained on.

    A = damping I + sum of u u' over the training prompts' tokens,    novelty(u) = u' A^-1 u

One Cholesky factor a layer, A = L L', so that novelty is |L^-1 u|^2. It is read as |Q L^-1 u|^2 with `rank` random orthogonal
rows Q, in each layer others: right in the mean, with a relative error of sqrt(2 / rank) in a layer, less in the mean over
layers. Leading eigenvectors would not do: what makes a state new lies in the directions that they leave out, and
|u|^2 less what lies along them is a difference of large numbers. Laplace takes its covariance from the same A; every other
method carries novelty as a signal.
"""

import math
from collections.abc import Iterable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn

from vmoer.errors import InputError, short
from vmoer.live import compiled
from vmoer.live.attach import attached, collected, ready, routers_of
from vmoer.live.inputs import keeps_logits, last_positions

RANK = 128  # of novelty where it is a signal alone
COLUMNS = 512  # of the second moments that are summed at a time


class _Sums:
    """Second moments of the router inputs over the tokens asked for; what lies above their diagonal need not be right."""

    def __init__(self) -> None:
        self.outer_DD: dict[int, Tensor] = {}
        self.count = 0
        self.kept: Tensor | None = None
        """The tokens that count, by number; None for all."""

    def __call__(self, layer: int, u_TD: Tensor, logits_TN: Tensor) -> None:
        u = u_TD if self.kept is None else u_TD[self.kept.to(u_TD.device)]
        # In float64: states share a direction, and in float32 the rounding of their sum there is more than the damping elsewhere.
        u, dim = u.double(), u.shape[-1]
        if layer not in self.outer_DD:
            self.outer_DD[layer] = torch.zeros(dim, dim, dtype=torch.float64, device=u.device)
        for first in range(0, dim, COLUMNS):  # the matrix is symmetric
            self.outer_DD[layer][first:, first : first + COLUMNS].addmm_(u[:, first:].mT, u[:, first : first + COLUMNS])


@torch.no_grad()
def fit(
    model: nn.Module,
    batches: Iterable[Mapping[str, Tensor]],
    *,
    tokens: Literal["all", "last"] = "all",
    damping: float = 1.0,
    rank: int | Literal["full"] | None = None,
) -> nn.Module:
    """Run the batches through the model once and set every attached router's novelty statistics.

    The method routes, as it will when novelty is asked for: the states behind a router that averages are not those behind the
    model's own, and measured against those every prompt would be new. Laplace, which cannot route before this, starts from the
    model's own routing.

    Args:
        model: With a method attached. It is returned.
        batches: Of training prompts: `input_ids` and `attention_mask`.
        tokens: Which tokens count: "all", or each prompt's "last" alone, the sharper reference where signals are read there.
        damping: Added to the diagonal of the second moments.
        rank: Random directions that novelty is read along, or "full" for all. By default 128; all for Laplace, which routes
            by it.
    """
    if rank is not None and rank != "full" and (not isinstance(rank, int) or rank < 1):
        raise InputError(f"rank={short(rank)} must be a whole number of at least 1, or 'full'")
    if not 0 < damping < math.inf:
        raise InputError(f"damping={damping} must be positive and finite")
    attached(model)
    sums = _Sums()
    device = next(model.parameters()).device
    last = {"logits_to_keep": 1} if keeps_logits(model) else {}  # none are wanted
    with ready(model), collected(model, sums):
        for batch in batches:
            inputs = {k: v.to(device) for k, v in batch.items() if k != "labels"}
            keep_BT = inputs.get("attention_mask", torch.ones_like(inputs["input_ids"])).bool()
            if tokens == "last":
                keep_BT = torch.zeros_like(keep_BT).scatter(1, last_positions(inputs).unsqueeze(1), True)
            kept = keep_BT.reshape(-1).nonzero().squeeze(1)
            sums.kept = None if len(kept) == keep_BT.numel() else kept
            sums.count += len(kept)
            with torch.random.fork_rng([device] if device.type == "cuda" else []):  # for methods that draw fresh noise
                torch.manual_seed(0)
                # with a cache transformers would not keep packed documents apart
                model(**inputs, **last, use_cache=False)
    if sums.count == 0:
        raise InputError("vmoer.fit was given no batches")
    for layer, outer_DD in sums.outer_DD.items():
        if not bool(torch.isfinite(outer_DD).all()):
            raise InputError(f"vmoer.fit: the states at layer {layer} are not finite numbers; nothing was fitted")
    for layer, router in routers_of(model).items():
        _set(router, sums.outer_DD[layer], damping, rank)
    compiled.forget(attached(model).gates)
    return model


def _set(router: Any, outer_DD: Tensor, damping: float, rank: int | Literal["full"] | None) -> None:
    dim = len(outer_DD)
    if rank is None:
        rank = "full" if router.needs_fit else RANK
    one_DD = torch.eye(dim, dtype=outer_DD.dtype, device=outer_DD.device)
    rows_RD = one_DD if rank == "full" or rank >= dim else _directions(rank, dim, router.layer).to(one_DD)
    lower_DD = torch.linalg.cholesky(outer_DD + damping * one_DD)  # A = L L', so |L^-1 u|^2 = u' A^-1 u
    root_RD = torch.linalg.solve_triangular(lower_DD, rows_RD, upper=False, left=False)
    router.novelty_root_RD = root_RD.float().contiguous()


def _directions(rank: int, dim: int, seed: int) -> Tensor:
    """Orthogonal rows drawn at random, the same every time, of a length that keeps squared norms in the mean."""
    drawn_DR = torch.randn(dim, rank, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return torch.linalg.qr(drawn_DR).Q.mT * (dim / rank) ** 0.5
