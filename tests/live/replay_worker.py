"""What the tests of replay share, and the two processes of one of them: `python replay_worker.py FOLDER`."""

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import tiny
import torch
import torch.distributed as dist
import torch.multiprocessing as processes
from test_contract import prepare
from torch import Tensor
from torch.overrides import TorchFunctionMode

import vmoer
from vmoer import gates
from vmoer.gates import FoundRouter, Scoring

CASES = [*((name, None) for name in tiny.ARCHITECTURES), ("granitemoe", "vglr-mf")]


def scoring(found: FoundRouter) -> Scoring:
    assert found.rule is not None
    return Scoring.of(found.rule, found.router, found.block)


def drawn(model: Any, batch: dict[str, Tensor], seed: int = 0) -> Tensor:
    """Random experts for every layer and token, [L, B, T, K]; of one group where the model has groups."""
    routers, generator = gates.find(model), torch.Generator().manual_seed(seed)
    shape = batch["input_ids"].shape
    layers = []
    for found in routers:
        rule, count = scoring(found), gates.expert_count(found)
        size = count // rule.groups[0] if rule.groups else count
        within = torch.rand(*shape, size, generator=generator).topk(rule.k, -1).indices
        layers.append(within + size * torch.randint(count // size, (*shape, 1), generator=generator))
    return torch.stack(layers)


class TopK(TorchFunctionMode):
    """Inside the block each router's own Top-K answers the experts it is told, layer after layer, and so does its choice of
    groups: the model's own code does the rest."""

    def __init__(self, model: Any, experts_LBTK: Tensor) -> None:
        super().__init__()
        self.experts_LTK, self.answered = experts_LBTK.flatten(1, 2), 0
        found = gates.find(model)[0]
        self.rule, self.count = scoring(found), gates.expert_count(found)

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if getattr(function, "__name__", "") == "topk" and args[0].dim() == 2:
            k = kwargs.get("k", args[1] if len(args) > 1 else None)
            columns = args[0].shape[1]
            told_TK = self.experts_LTK[min(self.answered, len(self.experts_LTK) - 1)]
            if columns == self.count and k == self.rule.k:
                self.answered += 1
                return torch.return_types.topk((args[0].gather(1, told_TK), told_TK))
            if self.rule.groups and (columns, k) == self.rule.groups:
                group_T1 = told_TK[:, :1] // (self.count // columns)
                return torch.return_types.topk((args[0].gather(1, group_T1), group_T1))
        return function(*args, **kwargs)


def loss_of(model: Any, batch: dict[str, Tensor]) -> Tensor:
    """The mean log-probability of a token at every real place, to be moved."""
    logits = model(**batch).logits
    return torch.log_softmax(logits.float(), -1)[..., 7][batch["attention_mask"].bool()].mean()


def gradients(model: Any) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def two_batches() -> list[dict[str, Tensor]]:
    return [tiny.batch(), tiny.batch((8, 11, 5), seed=1)]


def model_of(name: str, key: str | None) -> Any:
    """A model by itself, or with a method attached."""
    return (tiny.model(name) if key is None else prepare(name, key)).train()


def passed(model: Any, key: str | None, number: int) -> Tensor:
    """The loss of a batch whose experts are replayed."""
    batch = two_batches()[number]
    with vmoer.replay(model, drawn(model, batch, seed=number)):
        if key is None:
            return loss_of(model, batch)
        with vmoer.record(model, step=3, first_row=number * 3):
            return loss_of(model, batch)


def sharded(rank: int, folder: str) -> None:
    """Two batches in two processes, layers recomputed in backward."""
    from torch.distributed.fsdp import fully_shard

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    mesh = dist.device_mesh.init_device_mesh("cpu", (2,))
    for name, key in CASES:
        model = model_of(name, key)
        model.gradient_checkpointing_enable({"use_reentrant": False})
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        assert sum(type(p.data).__name__ == "DTensor" for p in model.parameters()) > 10
        passed(model, key, rank).backward()
        whole = {n: p.grad.full_tensor() for n, p in model.named_parameters() if p.grad is not None}
        if rank == 0:
            torch.save(whole, f"{folder}/{name}.{key}.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    processes.start_processes(sharded, (sys.argv[1],), nprocs=2, start_method="fork")  # one import for both
