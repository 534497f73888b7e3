"""The processes that train together: `accelerate launch` or torchrun starts them, accelerate says who is who.

Every process holds a share of each step's rows. The losses are shares of the one loss over the whole batch, so gradients are
*summed*: with whole copies of the model by one all-reduce of what is trained (routers or LoRA: little), with FSDP2 by its own
reduction, which averages, so that the loss is multiplied by the number of processes.
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from accelerate import PartialState
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor

from vmoer import gates
from vmoer.errors import InputError

NO_FSDP1 = "FSDP1 flattens parameters and cannot train routers alone: launch with --fsdp_version 2"


def sharding_asked() -> bool:
    """Whether the launcher was told to shard (`distributed_type: FSDP`, `--use_fsdp`)."""
    return os.environ.get("ACCELERATE_USE_FSDP", "false").lower() in ("true", "1")


@dataclass(frozen=True)
class Workers:
    rank: int = 0
    size: int = 1
    device: torch.device = torch.device("cpu")
    sharded: bool = False
    """FSDP2: parameters are spread over the processes."""

    @classmethod
    def launched(cls, device: str | None = None) -> "Workers":
        """Those that accelerate launched; one process without it. `accelerate launch --use_fsdp --fsdp_version 2` shards.

        Args:
            device: where a single process trains; several have one each from their launcher.
        """
        # without cpu= several CPU processes each take themselves for one
        state = PartialState(cpu=not torch.accelerator.is_available())
        if sharding_asked() and os.environ.get("FSDP_VERSION", "2") != "2":
            raise InputError(NO_FSDP1)
        sharded = sharding_asked() and state.num_processes > 1
        if device is not None and state.num_processes > 1:
            raise InputError(f"device={device!r}: {state.num_processes} processes were launched, and each has its own")
        place = state.device if device is None else torch.device(device)
        return cls(state.process_index, state.num_processes, place, sharded)

    @property
    def main(self) -> bool:
        return self.rank == 0

    def share(self, rows: Sequence[int], micro: int | None) -> list[tuple[int, Sequence[int]]]:
        """This process's rows of a global batch in pieces of `micro` rows, each with its place in that batch."""
        own, left = divmod(len(rows), self.size)
        micro = micro or own
        if left or own % micro:
            raise InputError(f"a batch of {len(rows)} does not divide into {self.size} process(es) x {micro} rows")
        first = self.rank * own
        return [(start, rows[start : start + micro]) for start in range(first, first + own, micro)]

    def sum_(self, tensor: Tensor) -> Tensor:
        if self.size > 1:
            dist.all_reduce(tensor)
        return tensor

    def wait(self) -> None:
        if self.size > 1:
            dist.barrier()

    def prepare(self, model: nn.Module) -> nn.Module:
        """Shard the model where sharding is asked for: layer by layer, then the rest. Routers are attached by now."""
        if not self.sharded:
            return model
        mesh = init_device_mesh(self.device.type, (self.size,))
        decoder: Any = gates.find(model)[0].decoder
        for layer in decoder.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        return model

    def scaled(self, loss: Tensor) -> Tensor:
        """The loss to call backward on: FSDP2 will divide its gradient by the number of processes."""
        return loss * self.size if self.sharded else loss

    def sum_gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        if self.size == 1 or self.sharded:
            return
        for p in parameters:
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        flat = torch.cat([p.grad.reshape(-1) for p in parameters])  # type: ignore[union-attr]
        dist.all_reduce(flat)
        for p, piece in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True):
            p.grad = piece.view_as(p)


@dataclass(frozen=True, kw_only=True)
class Running:
    """How a stage runs, without changing its result.

    Args:
        workers: the processes that train together.
        checkpoint_every: steps after which the state is written.
        checkpoint_seconds: the state is written at most this often. A short run then writes nothing before its end, and a killed
            one repeats at most these seconds.
        log_every: steps after which the log is read back from the device and written.
        skip_nonfinite: pass over steps whose gradient is not finite and count them, in place of stopping at the first.
        recompute: run the layers of stage 1 again in the backward pass (gradient checkpointing). That is one more forward pass,
            and saves the experts' adapted weights, 30 GB for a model of 16B parameters.
        tensorboard: write the log for TensorBoard too, where it is installed.
        progress: called after a step with the stage, the step, and how many there are.
        told: called with the stage and each row of the log: of a step, and of a validation (`validation_nll`).
    """

    workers: Workers = field(default_factory=Workers)
    checkpoint_every: int = 200
    checkpoint_seconds: float = 0.0
    log_every: int = 20
    skip_nonfinite: bool = False
    recompute: bool = False
    tensorboard: bool = False
    progress: Callable[[str, int, int], object] | None = None
    told: Callable[[str, dict[str, Any]], object] | None = None


def local(tensor: Tensor) -> Tensor:
    """This process's part of a sharded tensor; the tensor itself where it is whole."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def whole(tensor: Tensor) -> Tensor:
    """A copy of the whole tensor on the CPU; collective where it is sharded."""
    tensor = tensor.detach()
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).to("cpu", copy=True).contiguous()


@torch.no_grad()
def assign(target: Tensor, value: Tensor) -> None:
    """Write a whole tensor into one that may be sharded; never into one of another shape, which torch would fill by repeating."""
    if value.shape != target.shape:
        raise InputError(f"a tensor of shape {tuple(value.shape)} does not fit {tuple(target.shape)}")
    value = value.to(device=local(target).device, dtype=target.dtype)
    if hasattr(target, "device_mesh"):
        value = distribute_tensor(value, target.device_mesh, target.placements)  # type: ignore[attr-defined]
    target.detach().copy_(value)
