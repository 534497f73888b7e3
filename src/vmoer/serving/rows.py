"""How a token's experts and signals travel: one row a token, [layers, K + lanes], of the integer type that vLLM has for experts.

vLLM carries a token's experts from the worker to the API process, through chunked prefill, the prefix cache and asynchronous
copies, and takes the rows for opaque numbers. Behind each layer's expert ids we put its signals, the bits of their float32
numbers cut into that type. What a layer does not have is NaN, so that rows say by themselves what is in them.

Shapes: T tokens, L layers, K experts, G signals.
"""

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

SIGNALS = ("gate_entropy", "logit_variance", "mc_logit_variance", "novelty")
"""In the order of the lanes."""


class Rows(NamedTuple):
    """What is known about tokens."""

    experts: npt.NDArray[np.int64]
    """[T, L, K]"""
    signals: dict[str, npt.NDArray[np.float32]]
    """[T, attached layers] each; those that the method has."""
    layers: list[int]
    """The attached ones."""


class Kept:
    """The signals of the step under way, [tokens, layers, signals]: one buffer that stays where it is, as CUDA graphs need."""

    def __init__(self, tokens: int, layers: int, device: torch.device) -> None:
        self.signals_TLG = torch.full((tokens, layers, len(SIGNALS)), torch.nan, device=device)

    def of(self, layer: int, tokens: int) -> Tensor:
        """Where the signals of a layer go, [tokens, signals]."""
        return self.signals_TLG[:tokens, layer]


def without_signals(parallel: Any) -> str | None:
    """Why signals would be lost or land at other tokens with these settings of vLLM's; None where they come through."""
    if parallel.pipeline_parallel_size > 1:
        return "signals do not come through pipeline parallelism: use --tensor-parallel-size"
    if parallel.enable_expert_parallel and parallel.tensor_parallel_size > 1 and parallel.data_parallel_size > 1:
        return (
            "signals do not come through expert parallelism over tensor and data parallelism at once, "
            "where each process routes a part of the tokens: give one of --tensor-parallel-size and --data-parallel-size"
        )
    if parallel.enable_dbo or parallel.ubatch_size > 1:
        return "signals do not come through micro-batches: leave out --enable-dbo and --ubatch-size"
    return None


def lanes(itemsize: int) -> int:
    """Numbers of a type of so many bytes that the signals of a layer take."""
    return len(SIGNALS) * 4 // itemsize


def pack(experts_TLK: Tensor, signals_TLG: Tensor) -> Tensor:
    """Rows of experts, in their integer type, and signals, in float32."""
    return torch.cat([experts_TLK, signals_TLG.contiguous().view(experts_TLK.dtype)], -1)


def unpack(rows: npt.NDArray[np.integer]) -> Rows:
    """Rows as vLLM returns them, `CompletionOutput.routed_experts`, taken apart.

    Output token n was chosen at row `prompt tokens - 1 + n`.
    """
    cut = rows.shape[-1] - lanes(rows.dtype.itemsize)
    signals_TLG = np.ascontiguousarray(rows[..., cut:]).view(np.float32)
    has_LG: npt.NDArray[np.bool_] = np.any(~np.isnan(signals_TLG), axis=0)
    layers = np.flatnonzero(has_LG.any(-1))
    signals = {name: signals_TLG[:, layers, place] for place, name in enumerate(SIGNALS) if has_LG[layers, place].any()}
    return Rows(rows[..., :cut].astype(np.int64), signals, layers.tolist())
