"""Table 4: what variational routing costs, from the modules themselves at the true geometry, on the meta device.

parameters   that the method holds besides the model's own; for weight-space methods the S - 1 further copies of W_r
MACs         multiply-accumulates a token by PyTorch's counter over one forward of the router, over 2; the paper prints
             these under the name GFLOPs. Products of a triangle are counted as dense ones, which is what is computed
percentages  against the paper's denominators (800M active parameters, 0.897 G) and against this geometry's own
time         of a pass over the study's own model and prompts, against the same pass with the method switched off

Time is measured, so it is the one number of the studies that differs from run to run.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import GraniteMoeConfig, GraniteMoeForCausalLM

from vmoer.bench.measure import between, ratio
from vmoer.evaluation.scores import Row
from vmoer.live.attach import attach, attachment_of, detach, routers_of, switched_off
from vmoer.live.fitting import fit
from vmoer.models import open_model
from vmoer.routers import Call, Config, Router, method, methods
from vmoer.studies._grid import Cell, row
from vmoer.studies._variants import Study, batches

STUDY = "efficiency"
GRANITE = dict(
    hidden_size=1536, num_local_experts=40, num_experts_per_tok=8, num_hidden_layers=32, intermediate_size=512
)
GRANITE |= dict(num_attention_heads=24, num_key_value_heads=8, vocab_size=49155)
PAPER_PARAMETERS, PAPER_MACS = 800e6, 0.897e9
LAYERS, SAMPLES, TOKENS = 10, 35, 64
PROMPTS, ROUNDS = 64, 15


def kinds() -> dict[str, type[Config]]:
    """Methods that hold numbers of their own: trained or fitted."""
    return {key: kind for key, kind in methods().items() if kind().trains or kind.router.needs_fit}


def cells(study: Study) -> list[Cell]:
    key = {"model": study.model, "task": study.task, "measured": "time"}
    return [*counted(list(kinds())), Cell(STUDY, key, partial(measured, study))]


def counted(methods: Sequence[str]) -> list[Cell]:
    """What needs no model: parameters and arithmetic."""
    return [Cell(STUDY, {"method": key}, partial(cost, key)) for key in methods]


def granite(layers: int = LAYERS) -> Any:
    with torch.device("meta"):
        return GraniteMoeForCausalLM(GraniteMoeConfig(**(GRANITE | {"num_hidden_layers": layers})))


def cost(key: str) -> list[Row]:
    kind: Any = method(key)
    settings = {"samples": SAMPLES} if "samples" in kind.__dataclass_fields__ else {}
    model = granite()
    attach(model, kind(**settings))
    routers = routers_of(model)
    weight: Any = model.model.layers[0].block_sparse_moe.router.weight
    parameters = sum(router.held() for router in routers.values())
    macs = LAYERS * router_macs(routers[0], weight)
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
    """A pass over one batch, each method on all layers, between two passes with it switched off: the median and
    quartiles of the ratio."""
    opened = open_model(study.model, device=study.device, dtype=study.dtype)
    model: Any = opened.model
    batch = batches(study, opened, study.questions(study.task, "test")[:PROMPTS], size=PROMPTS)[0]
    tokens = int(batch["attention_mask"].sum())
    common = {"model": study.model, "phase": "prefill", "tokens": tokens, "batch": len(batch["attention_mask"])}

    def run() -> None:
        model(**batch, use_cache=False)

    def plain() -> None:
        with switched_off(model):
            run()

    rows = []
    for key, kind in kinds().items():
        if attachment_of(model) is not None:
            detach(model)
        attach(model, kind())
        if any(router.needs_fit for router in routers_of(model).values()):
            fit(model, [batch])
        pairs = between({key: run}, plain, model.device.type, ROUNDS)[key]
        middle, low, high = ratio(*zip(*pairs, strict=True))
        rows.append(row(STUDY, "time_ratio", middle, method=key, **common) | {"low": low, "high": high})
    return rows


def router_macs(router: Router, weight: torch.Tensor) -> float:
    """Multiply-accumulates of one router for one token, the frozen logits left out."""
    u = torch.empty(TOKENS, weight.shape[1], device="meta")
    logits = torch.empty(TOKENS, weight.shape[0], device="meta")
    positions = torch.zeros(TOKENS, dtype=torch.long, device="meta")
    router.settle()
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
