"""Training runs in processes of their own: `python job.py '{...}'`, started by the tests.

`{"parallel": FOLDER}` runs stage 2 in two gloo processes on whole copies and sharded (FSDP2), and VMoERTrainer under DDP and
FSDP2, each into a folder of its own; anything else are the arguments of `vmoer.training.run.train`.
"""

import json
import os
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
import torch.distributed as dist

import vmoer
from train_workers import world
from vmoer.live.attach import routers_of
from vmoer.live.variational import VariationalGate
from vmoer.saved import store
from vmoer.training.lora import add_lora
from vmoer.training.run import Data, Plan, Running, Stages, Workers, stage2, train

ROWS = 128
CONFIGS = Path(__file__).parents[2] / "examples" / "accelerate"


@torch.no_grad()
def router_logits(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """What each attached router hands its gate in one pass over a batch, [layer, token, expert].

    Processes may gather what the experts answered, so that equal outputs prove nothing; these say whether they route alike.
    """
    seen: list[torch.Tensor] = []
    gates: list[Any] = [module for module in model.modules() if isinstance(module, VariationalGate)]
    hooks = [
        gate.register_forward_hook(lambda gate, _, out: seen.append(gate.vmoer_gate.logits(out))) for gate in gates
    ]
    try:
        model.eval()(**batch)
    finally:
        for hook in hooks:
            hook.remove()
    return torch.stack(seen).clone()


def leave_logits(model: Any, rank: int, folder: str) -> None:
    """The routers' logits on the same prompts in every process, although each trained on rows of its own."""
    prompts = world.examples(6, 3, fillers=0).prompts
    torch.save(router_logits(model, {"input_ids": torch.tensor(prompts)}), Path(folder) / f"logits-{rank}.pt")


def config(key: str = "vglr-fc") -> Any:
    kind: Any = vmoer.methods()[key]
    return kind(layers=[1, 2], beta=0.1)


def loop(rank: int, size: int, folder: str, sharded: bool = False, micro: int | None = None) -> None:
    """30 steps of stage 2; telemetry and routers are left in the folder."""
    model = world.model()
    workers = Workers(rank, size, torch.device("cpu"), sharded)
    plan = Plan(epochs=4, lr=5e-3, micro_batch=micro)  # 4 x 8 steps
    outcome = stage2(
        model,
        world.examples(ROWS, 1),
        world.examples(24, 2),
        config(),
        plan,
        folder=folder,
        running=Running(workers=workers, log_every=5),
    )
    leave_logits(model, rank, folder)
    if rank == 0:
        assert outcome is not None
        torch.save(outcome.last, Path(folder) / "routers.pt")


def start(lora: bool = False) -> Any:
    """A model whose routers are far from their prior, so that the KL is a good part of the loss."""
    model = world.model()
    if lora:
        model = add_lora(model, rank=2)
    model = vmoer.attach(model, config(), freeze=not lora)
    generator = torch.Generator().manual_seed(5)
    for router in routers_of(model).values():
        with torch.no_grad():
            router.heads.weight.copy_(torch.randn(router.heads.weight.shape, generator=generator) * 0.3)
    return model


def trainer(
    rank: int,
    size: int,
    folder: str,
    batch: int,
    accumulate: int,
    resume: bool = False,
    stop: int = 8,
    lora: bool = False,
) -> Any:
    """Eight steps of VMoERTrainer on 16 rows each; the losses go to the folder."""
    import transformers as tf

    from vmoer.training.trainer import VMoERTrainer

    model = start(lora)
    examples = world.examples(ROWS, 1)
    pairs = zip(examples.prompts, examples.answers, strict=True)
    data = [{"input_ids": p, "labels": [-100] * (len(p) - 1) + [3 + a]} for p, a in pairs]
    args = tf.TrainingArguments(
        folder,
        per_device_train_batch_size=batch,
        gradient_accumulation_steps=accumulate,
        max_steps=8,
        learning_rate=1e-3,
        lr_scheduler_type="constant",
        logging_steps=1,
        save_steps=4,
        report_to=[],
        use_cpu=True,
        seed=0,
        disable_tqdm=True,
        ddp_find_unused_parameters=False,
        max_grad_norm=0.0,
    )

    class Stop(tf.TrainerCallback):  # as a kill would: the plan stays eight steps
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            control.should_training_stop = state.global_step >= stop

    def collate(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        width = max(len(r["input_ids"]) for r in rows) + 1

        def pad(key: str, value: int) -> torch.Tensor:
            return torch.tensor([[*r[key], *[value] * (width - len(r[key]))] for r in rows])

        mask = torch.tensor([[1] * len(r["input_ids"]) + [0] * (width - len(r["input_ids"])) for r in rows])
        # the label of a causal loss stands one place later
        labels = pad("labels", -100).roll(1, 1)
        return {"input_ids": pad("input_ids", 0), "attention_mask": mask, "labels": labels}

    run = VMoERTrainer(model=model, args=args, train_dataset=data, data_collator=collate, callbacks=[Stop()])
    run.train(resume_from_checkpoint=resume)
    leave_logits(run.model, rank, folder)
    routers = store.router_tensors(model)  # gathering shards takes every process
    if rank == 0:
        torch.save(routers, Path(folder) / "routers.pt")
        losses = [row["loss"] for row in run.state.log_history if "loss" in row]
        (Path(folder) / "losses.json").write_text(json.dumps(losses))
    return run


def refused(rank: int, size: int, folder: str) -> str:
    """What VMoERTrainer says to FSDP where accelerate would not shard."""
    with mock.patch.dict(os.environ, {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}):
        try:
            trainer(rank, size, folder, batch=4, accumulate=2)
        except vmoer.errors.InputError as error:
            return str(error)
    return ""


@contextmanager
def sharding() -> Iterator[None]:
    """As `accelerate launch --config_file fsdp2.yaml` on GPUs.

    accelerate shards there alone; inside the block its processes on the CPU count as such, so that its own FSDP2 code runs.
    """
    from accelerate import state
    from accelerate.commands.config.config_args import load_config_from_file
    from accelerate.utils import DistributedType

    settings = load_config_from_file(str(CONFIGS / "fsdp2.yaml")).fsdp_config
    asked = {
        name.upper(): str(value).lower() if value in (True, False) else str(value) for name, value in settings.items()
    }
    real = state.AcceleratorState.__init__

    def init(self: Any, *args: Any, fsdp_plugin: Any = None, **kwargs: Any) -> None:
        real(self, *args, fsdp_plugin=fsdp_plugin, **kwargs)
        if fsdp_plugin is not None:
            self.distributed_type, self.fsdp_plugin = DistributedType.FSDP, fsdp_plugin

    state.AcceleratorState._reset_state()
    with mock.patch.dict(os.environ, {"ACCELERATE_USE_FSDP": "true", **asked}):
        with mock.patch.object(state.AcceleratorState, "__init__", init):
            yield
        state.AcceleratorState._reset_state()


def parallel(rank: int, size: int, folder: str) -> None:
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    dist.init_process_group("gloo", init_method=f"file://{folder}/init", rank=rank, world_size=size)
    loop(rank, size, f"{folder}/whole")
    loop(rank, size, f"{folder}/whole-accumulated", micro=4)
    loop(rank, size, f"{folder}/sharded", sharded=True)
    trainer(rank, size, f"{folder}/trainer", batch=4, accumulate=2)
    refusal = refused(rank, size, f"{folder}/refused")
    with sharding():
        run = trainer(rank, size, f"{folder}/trainer-sharded", batch=4, accumulate=2, lora=True)
        within = [p for name, p in run.model.named_parameters() if ".layers." in name]
        assert {type(p).__name__ for p in within} == {"DTensor"}  # else nothing was sharded
        trainer(rank, size, f"{folder}/trainer-cut", batch=4, accumulate=2, lora=True, stop=4)
        trainer(rank, size, f"{folder}/trainer-cut", batch=4, accumulate=2, lora=True, resume=True)
    Path(f"{folder}/refusal-{rank}.txt").write_text(refusal)
    # everything is on disk; gloo's own threads may abort a process that tears its groups down while its peer still does
    dist.barrier()
    sys.stdout.flush()
    time.sleep(1)  # the peer reads the barrier's last message
    os._exit(0)


def run_train(job: dict[str, Any]) -> None:
    """The whole command; `die_at` kills the process with signal 9 once so many optimiser steps were made in it."""
    import signal

    from vmoer.training.steps import Steps

    die_at, made = job.pop("die_at"), 0
    real = Steps.take

    def step(*args: Any, **kwargs: Any) -> Any:
        nonlocal made
        made += 1
        if made == die_at:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*args, **kwargs)

    Steps.take = step  # type: ignore[method-assign]
    method = vmoer.methods()[job.pop("method")](**job.pop("settings"))
    plans: dict[str, Any] = {name: Plan(**job.pop(name)) for name in ("stage1", "stage2")}
    stages, data = Stages(rank=job.pop("rank"), **plans), Data(root=job.pop("data_root"))
    warnings.simplefilter("ignore")
    train(method=method, running=Running(checkpoint_every=3, log_every=2), stages=stages, data=data, **job)


if __name__ == "__main__":
    job = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    if "parallel" in job:
        torch.multiprocessing.spawn(parallel, (2, job["parallel"]), nprocs=2)
    else:
        run_train(job)
