"""Where LoRA goes: the query, key and value projections and the experts (paper, appendix D.2), found in the model itself."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any

import torch
from torch import nn

from vmoer import gates
from vmoer.errors import InputError
from vmoer.saved.adapter import peft

_ATTENTION = re.compile(r"^(q|k|v|qkv|kv|query|key|value|query_key_value|Wqkv)(_(a_|b_)?proj(_with_mqa)?)?$")


def lora_targets(model: nn.Module) -> tuple[list[str], list[str]]:
    """The names PEFT takes: modules by suffix, and parameters by suffix for experts that are stacked in one tensor."""
    found = gates.find(model)
    if not found:
        raise InputError(f"{type(model).__name__} has no MoE router")
    prefix = found[0].path.split(".layers.")[0]
    modules = {
        path.rpartition(".")[2]
        for path, module in model.named_modules()
        if path.startswith(prefix) and isinstance(module, nn.Linear) and _ATTENTION.match(path.rpartition(".")[2])
    }
    parameters: set[str] = set()
    for f in found:
        for name, p in f.block.named_parameters():
            if p.dim() == 3 and "shared" not in name and not name.startswith(f"{f.path.rpartition('.')[2]}."):
                parameters.add(name)
        for path, module in f.block.named_modules():
            if isinstance(module, nn.Linear) and re.search(r"(^|\.)experts\.\d+\.", path):
                modules.add(path.rpartition(".")[2])
    if not modules:
        raise InputError(f"{type(model).__name__}: no query, key or value projection was found for LoRA")
    return sorted(modules), sorted(parameters)


def add_lora(model: Any, *, rank: int = 16, alpha: int | None = None, seed: int = 0) -> Any:
    """Wrap the model; adapters start at zero and are float32 whatever the model's dtype."""
    library = peft()
    modules, parameters = lora_targets(model)
    config = library.LoraConfig(
        r=rank,
        lora_alpha=2 * rank if alpha is None else alpha,
        lora_dropout=0.0,
        target_modules=modules,
        target_parameters=parameters or None,
        task_type="CAUSAL_LM",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return library.get_peft_model(model, config)


@contextmanager
def folded_quickly(model: nn.Module) -> Iterator[None]:
    """Inside the block PEFT's adapters on stacked experts cost what their arithmetic costs.

    PEFT registers a parametrisation in every forward pass of every layer and removes it again, which makes a class each
    time and takes as long as the whole model's own pass. Putting the same sum in the parameter's place does the same.
    """
    wrappers = fold_quickly(model)
    try:
        yield
    finally:
        for wrapper in wrappers:
            del wrapper._activate_lora


def fold_quickly(model: nn.Module) -> list[Any]:
    """The same from now on; returns the adapters that it is done to."""
    wrappers: list[Any] = [m for m in model.modules() if type(m).__name__ == "ParamWrapper"]
    wrappers = [m for m in wrappers if hasattr(m, "_activate_lora") and hasattr(m, "get_delta_weight")]
    for wrapper in wrappers:
        wrapper._activate_lora = MethodType(_fold, wrapper)
    return wrappers


@contextmanager
def _fold(self: Any, active_adapters: list[str]) -> Iterator[None]:
    """W + delta where the layer looks for W; what PEFT's own `_activate_lora` puts there, by its own arithmetic."""
    layer, name = self.get_base_layer(), self.parameter_name
    adapters = [adapter for adapter in active_adapters if adapter in self.lora_A]
    parameter = layer._parameters[name]
    sum_ = parameter
    for adapter in adapters:
        if self.num_experts > 1 and parameter.dtype.itemsize > 1 and hasattr(self, "get_delta_factors"):
            left, right, scaling = self.get_delta_factors(adapter)
            sum_ = torch.baddbmm(sum_, left, right, alpha=scaling)
        else:
            sum_ = sum_ + self.get_delta_weight(adapter)
    del layer._parameters[name]
    layer.__dict__[name] = sum_
    try:
        yield
    finally:
        del layer.__dict__[name]
        layer._parameters[name] = parameter
