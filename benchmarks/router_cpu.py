"""One router by itself on a CPU, against the paper's listing: the ratio at 2,048 tokens, N = 40, S = 35."""

import statistics
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig
from transformers.models.granitemoe import modeling_granitemoe

from vmoer.bench.listing import Listing
from vmoer.bench.measure import interleaved
from vmoer.live.attach import attach
from vmoer.routers import FullCovariance


class _Layer(nn.Module):
    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block_sparse_moe = block


class OneRouter(nn.Module):
    """A decoder of one layer that is nothing but a router: what `attach` needs to find it."""

    def __init__(self, hidden: int, experts: int, k: int, dtype: torch.dtype) -> None:
        super().__init__()
        config = AutoConfig.for_model(
            "granitemoe", hidden_size=hidden, num_local_experts=experts, num_experts_per_tok=k
        )
        block: Any = nn.Module()
        block.router = modeling_granitemoe.GraniteMoeTopKRouter(config)
        nn.init.normal_(block.router.weight, std=hidden**-0.5)
        block.experts = nn.Identity()
        self.layers = nn.ModuleList([_Layer(block)])
        self.to(dtype)

    @property
    def router(self) -> nn.Module:
        router: nn.Module = self.layers[0].block_sparse_moe.router  # type: ignore[assignment, union-attr]
        return router


def one_router(config: Any, hidden: int, experts: int, k: int, dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    model = OneRouter(hidden, experts, k, dtype).eval()
    attach(model, config)
    return model.router


def cpu_speedup(
    tokens: int = 2048, experts: int = 40, samples: int = 35, hidden: int = 1536, rounds: int = 3
) -> dict[str, float]:
    """Seconds of the default vglr-fc router and of the listing on this CPU, interleaved, and their ratio."""
    u_TD = torch.randn(tokens, hidden, generator=torch.Generator().manual_seed(1))
    ours = one_router(FullCovariance(samples=samples), hidden, experts, 8)
    listing = one_router(Listing(samples=samples), hidden, experts, 8)
    with torch.no_grad():
        times = interleaved({"vglr-fc": lambda: ours(u_TD), "listing": lambda: listing(u_TD)}, "cpu", rounds)
    medians = {name: statistics.median(values) for name, values in times.items()}
    return {**medians, "speedup": medians["listing"] / medians["vglr-fc"]}


if __name__ == "__main__":
    torch.set_num_threads(1)
    print({name: round(value, 4) for name, value in cpu_speedup().items()})
