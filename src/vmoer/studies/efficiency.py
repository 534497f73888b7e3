"""Table 4: what variational routing costs, from the modules themselves at the true geometry, on the meta device.

parameters   of the attached modules; for weight-space methods the S - 1 further copies of W_r held at once
MACs         multiply-accumulates a token by PyTorch's counter over one forward of the router, over 2; the paper prints
             these under the name GFLOPs. Products of a triangle are counted as dense ones, which is what is computed
percentages  against the paper's denominators (800M active parameters, 0.897 G) and against this geometry's own
time         of a pass over the study's own model and prompts, against the same pass with the method switched off

Time is measured, so it is the one number of the studies that differs from run to run.
"""

import statistics
import time
from functools import partial
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from vmoer.attach import attach, attachment_of, detach, routers_of, switched_off
from vmoer.fitting import fit
from vmoer.models import open_model
from vmoer.routers import Call, methods
from vmoer.studies._grid import Cell, Row, row
from vmoer.studies._variants import Study, batches

STUDY = "efficiency"
GRANITE = dict(
    hidden_size=1536, num_local_experts=40, num_experts_per_tok=8, num_hidden_layers=32, intermediate_size=512
)
GRANITE |= dict(num_attention_heads=24, num_key_value_heads=8, vocab_size=49155)
PAPER_PARAMETERS, PAPER_MACS = 800e6, 0.897e9
METHODS = ("mcdr", "swag", "vglr-mf", "vglr-fc", "vglr-lr", "vtsr", "laplace")
LAYERS, SAMPLES, TOKENS = 10, 35, 64
PROMPTS, ROUNDS = 64, 15


def cells(study: Study) -> list[Cell]:
    counted = [Cell(STUDY, {"method": key}, partial(cost, key)) for key in METHODS]
    key = {"model": study.model, "task": study.task, "measured": "time"}
    return [*counted, Cell(STUDY, key, partial(measured, study))]


def granite(layers: int = LAYERS) -> Any:
    from transformers import GraniteMoeConfig, GraniteMoeForCausalLM

    with torch.device("meta"):
        return GraniteMoeForCausalLM(GraniteMoeConfig(**(GRANITE | {"num_hidden_layers": layers})))


def cost(key: str) -> list[Row]:
    kind: Any = methods()[key]
    settings = {"samples": SAMPLES} if "samples" in kind.__dataclass_fields__ else {}
    model = granite()
    attach(model, kind(**settings))
    routers = routers_of(model)
    router: Any = routers[0]
    weight: Any = model.model.layers[0].block_sparse_moe.router.weight
    parameters = sum(p.numel() for r in routers.values() for p in r.parameters())
    if key in ("mcdr", "swag"):
        parameters = LAYERS * (SAMPLES - 1) * weight.numel()
    if key == "laplace":  # a basis of all D directions, and the experts' factor
        parameters = LAYERS * (weight.shape[1] ** 2 + weight.shape[0] ** 2)
    macs = LAYERS * router_macs(router, weight, key)
    active, own_macs = base_cost()
    common = {"model": "granite-3b", "method": key}
    return [
        row(STUDY, "parameters", parameters, **common),
        row(STUDY, "parameters_percent_of_paper", 100 * parameters / PAPER_PARAMETERS, **common),
        row(STUDY, "parameters_percent", 100 * parameters / active, **common),
        row(STUDY, "macs", macs, **common),
        row(STUDY, "flops", 2 * macs, **common),
        row(STUDY, "macs_percent_of_paper", 100 * macs / PAPER_MACS, **common),
        row(STUDY, "macs_percent", 100 * macs / own_macs, **common),
    ]


@torch.no_grad()
def measured(study: Study) -> list[Row]:
    """A pass over one batch, each method on all layers, on and off by turns: the median and quartiles of the ratio."""
    opened = open_model(study.model, device=study.device, dtype=study.dtype)
    model: Any = opened.model
    batch = batches(study, opened, study.questions(study.task, "test")[:PROMPTS], size=PROMPTS)[0]
    tokens = int(batch["attention_mask"].sum())
    common = {"model": study.model, "phase": "prefill", "tokens": tokens, "batch": len(batch["attention_mask"])}

    def seconds() -> float:
        _wait(model.device)
        start = time.perf_counter()
        model(**batch, use_cache=False)
        _wait(model.device)
        return time.perf_counter() - start

    rows = []
    for key in METHODS:
        if attachment_of(model) is not None:
            detach(model)
        attach(model, methods()[key]())
        if any(router.needs_fit for router in routers_of(model).values()):
            fit(model, [batch])
        ratios = []
        for _ in range(ROUNDS + 1):
            with switched_off(model):
                plain = seconds()
            ratios.append(seconds() / plain)
        low, middle, high = statistics.quantiles(ratios[1:], n=4, method="inclusive")  # the first pass warms up
        rows.append(row(STUDY, "time_ratio", middle, method=key, **common) | {"low": low, "high": high})
    return rows


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def router_macs(router: Any, weight: torch.Tensor, key: str) -> float:
    """Multiply-accumulates of one router for one token, the frozen logits left out."""
    u = torch.empty(TOKENS, weight.shape[1], device="meta")
    logits = torch.empty(TOKENS, weight.shape[0], device="meta")
    positions = torch.zeros(TOKENS, dtype=torch.long, device="meta")
    if key == "laplace":
        router.novelty_root_RD = torch.empty(weight.shape[1], weight.shape[1], device="meta")
    if key == "swag":
        router.requires_grad_(False)
        router.fixed_weights()  # drawn once, not for every token: they are kept where nothing trains
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        router(u, logits, Call(0, positions, positions), weight)
    return counter.get_total_flops() / 2 / TOKENS


def base_cost() -> tuple[float, float]:
    """Active parameters and MACs a token of the whole model at this geometry, embeddings left out, head counted."""
    d, k, ffn = GRANITE["hidden_size"], GRANITE["num_experts_per_tok"], GRANITE["intermediate_size"]
    heads = d + 2 * d * GRANITE["num_key_value_heads"] // GRANITE["num_attention_heads"]
    layer = d * heads + d * d + d * GRANITE["num_local_experts"] + k * 3 * d * ffn
    total = GRANITE["num_hidden_layers"] * layer + d * GRANITE["vocab_size"]
    return float(total), float(total)


def formula(key: str, d: int = 1536, n: int = 40, s: int = SAMPLES, layers: int = LAYERS) -> float:
    """The paper's complexities written out, in MACs, for comparison with the counter."""
    h = d // 4
    each = {
        "vglr-mf": d * h + 2 * h * n + s * n,
        "vglr-fc": d * h + h * n + h * n * (n + 1) // 2 + s * n * (n + 1) // 2,
        "vtsr": d * h + h,
        "mcdr": s * d * n,
        "swag": s * d * n,
    }[key]
    return float(layers * each)
