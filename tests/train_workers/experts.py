"""Expert-parallel passes in processes of their own: `accelerate launch ... experts.py FOLDER`, started by the tests.

Each case is a model of FOLDER, spread by one of transformers' plans, with a method on its routers. What a process saw goes to
FOLDER/<case>-<rank>.pt. Without a launcher the same cases run whole, in one process.
"""

import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "accelerate"))

import expert_parallel
import tiny
import torch
import transformers as tf
from transformers.distributed import DistributedConfig

import vmoer
from train_workers.job import router_logits
from vmoer.live.attach import routers_of

MASKED = {"model.layers.*.mlp.gate": "ep_router", "model.layers.*.mlp.experts": "moe_tp_experts"}
PLANS = "ep_size" in DistributedConfig.__dataclass_fields__  # before 5.19 a model's one plan is all there is
GRANITE = bool(getattr(tf.GraniteMoeConfig, "base_model_ep_plan", None))  # from 5.21 on


@dataclass(frozen=True)
class Case:
    model: str
    method: str
    plan: str = "experts"
    sampling: str = "fixed"

    @property
    def name(self) -> str:
        return "-".join((self.model, self.method, self.plan, self.sampling))

    def spread(self, processes: int) -> DistributedConfig | None:
        if processes == 1:
            return None
        if self.plan == "dense too":
            return DistributedConfig(tp_size=processes, ep_size=processes)
        if self.plan == "masked" and PLANS:
            return DistributedConfig(tp_size=processes, ep_size=processes, tp_plan={}, ep_plan=MASKED)
        return expert_parallel.spread_experts(processes)


CASES = [Case("qwen3_moe", method, "masked") for method in ("vglr-fc", "vtsr", "mcdr")]
CASES += [Case("qwen3_moe", "vglr-fc", "dense too")] if PLANS else []
CASES += [Case("granitemoe", method) for method in ("vglr-fc", "vtsr", "mcdr", "temp-scale")] if GRANITE else []
FRESH = [Case("granitemoe" if GRANITE else "qwen3_moe", "vglr-fc", sampling="mc")]
MODELS = sorted({case.model for case in (*CASES, *FRESH)})


def build(case: Case, folder: Path, processes: int) -> Any:
    """The model with routers far from their prior, as they would come from training."""
    load = tf.AutoModelForCausalLM.from_pretrained
    model = load(folder / case.model, dtype=torch.float32, distributed_config=case.spread(processes)).eval()
    settings: dict[str, Any] = {} if case.sampling == "fixed" else {"sampling": case.sampling}
    vmoer.attach(model, vmoer.methods()[case.method](**settings))
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for router in routers_of(model).values():
            for p in router.parameters():
                p.add_(torch.randn(p.shape, generator=generator) * 0.2)
    return model


def measure(case: Case, folder: Path, processes: int, rank: int) -> dict[str, Any]:
    """Outputs, router logits, experts and signals of one pass; the routers' gradients of a training pass where they have any."""
    model, batch = build(case, folder, processes), tiny.batch()
    torch.manual_seed(rank)  # what fresh noise is drawn from
    logits = router_logits(model, batch)
    with vmoer.record(model) as rec, torch.no_grad():
        torch.manual_seed(rank)
        out = model(**batch).logits
    seen = {"router_logits": logits, "outputs": out, "experts": rec.experts, **rec.signals}
    if any(p.requires_grad for p in model.parameters()) and case.sampling == "fixed":
        labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
        with vmoer.record(model, step=3) as rec:
            (model(**batch, labels=labels).loss + rec.kl()).backward()
        grads = [p.grad.reshape(-1) for r in routers_of(model).values() for p in r.parameters() if p.grad is not None]
        seen["gradients"] = torch.cat(grads)
    return seen


def main(folder: Path) -> None:
    from accelerate import PartialState

    torch.set_num_threads(1)
    tf.logging.disable_progress_bar()
    processes = PartialState(cpu=True)
    for case in (*CASES, *FRESH):
        seen = measure(case, folder, processes.num_processes, processes.process_index)
        torch.save(seen, folder / f"{case.name}-{processes.process_index}.pt")
    processes.wait_for_everyone()
    time.sleep(
        1
    )  # the peer reads the barrier's last message; gloo may abort a process that tears its groups down first
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
