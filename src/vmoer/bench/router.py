"""One router by itself: against its floor on a GPU, against the paper's listing on a CPU.

python -m vmoer.bench.router            the CPU's ratio at 2,048 tokens, N = 40, S = 35
"""

import statistics
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig
from transformers.models.granitemoe import modeling_granitemoe

import vmoer
from vmoer.bench.listing import Listing
from vmoer.bench.measure import interleaved
from vmoer.variational import VariationalGate


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
    vmoer.attach(model, config)
    return model.router


def cpu_speedup(
    tokens: int = 2048, experts: int = 40, samples: int = 35, hidden: int = 1536, rounds: int = 3
) -> dict[str, float]:
    """Seconds of the default vglr-fc router and of the listing on this CPU, interleaved, and their ratio."""
    u_TD = torch.randn(tokens, hidden, generator=torch.Generator().manual_seed(1))
    ours = one_router(vmoer.FullCovariance(samples=samples), hidden, experts, 8)
    listing = one_router(Listing(samples=samples), hidden, experts, 8)
    with torch.no_grad():
        times = interleaved({"vglr-fc": lambda: ours(u_TD), "listing": lambda: listing(u_TD)}, "cpu", rounds)
    medians = {name: statistics.median(values) for name, values in times.items()}
    return {**medians, "speedup": medians["listing"] / medians["vglr-fc"]}


def floor(method: str, tokens: int, hidden: int, experts: int, ceilings: dict[str, float]) -> float | None:
    """Seconds below which no router of this kind can go: each stage at the machine's own rate or bandwidth, bfloat16.

    A stage reads its inputs and writes its outputs once; the products and the averaging are stages of their own.
    """
    h, s, rank = hidden // 4, 32, 8
    answer = tokens * experts * 4
    entries = experts * (experts + 1) // 2
    heads = {"vglr-mf": 2 * experts, "vglr-fc": experts + entries, "vglr-lr": experts * (rank + 2), "vtsr": 1}
    macs = {"vglr-mf": s * experts, "vglr-fc": s * entries, "vglr-lr": s * experts * (rank + 1), "vtsr": experts}
    if method not in heads:
        return None

    def stage(count: float, traffic: float) -> float:
        return max(2 * count / ceilings["flops_per_second"], traffic / ceilings["bytes_per_second"])

    products = [(hidden, experts), (hidden, h), (h, heads[method])]
    total = sum(stage(tokens * a * b, 2 * (tokens * (a + b) + a * b)) for a, b in products)
    return total + stage(tokens * macs[method], 2 * tokens * heads[method] + 2 * answer)


def routers(model: nn.Module) -> list[VariationalGate]:
    return [module for module in model.modules() if isinstance(module, VariationalGate)]


if __name__ == "__main__":
    torch.set_num_threads(1)
    print({name: round(value, 4) for name, value in cpu_speedup().items()})
