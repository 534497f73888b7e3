"""VMoERTrainer: a transformers.Trainer for a model with a method attached. Its loss adds the routers' beta * KL.

    model = vmoer.attach(model, vmoer.FullCovariance(layers=[...]))
    VMoERTrainer(model=model, args=TrainingArguments(...), train_dataset=..., ...).train()

Noise is keyed by the optimiser step and by the row's place in the step's whole batch, over accumulation steps and processes.
Trainer scales losses by what they are of (it divides by accumulation steps, DDP divides by processes, and for a loss over
`num_items_in_batch` it undoes either); the KL is a mean over the unmasked tokens of the whole batch, and comes out as that,
neither multiplied by the number of processes nor divided by the number of accumulation steps. Checkpoints hold the adapter and
the routers, not the base model, under FSDP2 too, where every process takes part in writing them.
"""

import os
import tempfile
from collections import deque
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import save_fsdp_optimizer
from torch import Tensor, nn
from transformers import Trainer

from vmoer.errors import InputError
from vmoer.live.attach import attached, record, routers_of
from vmoer.saved import store
from vmoer.training.steps import refuse_inference_only
from vmoer.training.workers import NO_FSDP1, assign, sharding_asked


class VMoERTrainer(Trainer):  # type: ignore[misc]
    """A `transformers.Trainer` whose loss adds the routers' beta * KL. Attach a method to the model first.

    Args:
        *args: As of `Trainer`.
        **kwargs: As of `Trainer`.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        attached(self.model)
        refuse_inference_only(self.model)
        if self.args.n_gpu > 1:
            raise InputError("nn.DataParallel copies modules without their hooks: start with `accelerate launch`")
        if self.is_fsdp_enabled and self.accelerator.state.fsdp_plugin.fsdp_version != 2:
            raise InputError(NO_FSDP1)
        if (sharding_asked() or self.args.fsdp) and not self.is_fsdp_enabled and self.accelerator.num_processes > 1:
            raise InputError("accelerate shards on GPUs alone and would train whole copies here: launch without FSDP")
        self._first_rows: deque[int] = deque()
        self._tokens = 1

    # -- the loss ------------------------------------------------------------------------------------------------------

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: torch.device) -> tuple[list[Any], Any]:
        """Count, besides the labels, the rows and unmasked tokens of the step, over all its micro-batches and processes."""
        samples, items = super().get_batch_samples(epoch_iterator, num_batches, device)
        sizes = [(len(batch["input_ids"]), int(_mask(batch).sum())) for batch in samples]
        sizes_RA2 = self.accelerator.gather(torch.tensor([sizes], device=self.accelerator.device).view(1, -1, 2))
        rows_AR = sizes_RA2[..., 0].mT
        # micro-batch a of process r is the (a R + r)-th the data loader dealt out
        first_AR = (rows_AR.reshape(-1).cumsum(0) - rows_AR.reshape(-1)).view_as(rows_AR)
        self._first_rows = deque(first_AR[:, self.accelerator.process_index].tolist())
        self._tokens = max(1, int(sizes_RA2[..., 1].sum()))
        return samples, items

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        if not (model.training and torch.is_grad_enabled()):
            # a fused optimiser changes parameters without saying so, and what a router derives of them may be cached
            torch.autograd.graph.increment_version([p for p in model.parameters() if p.requires_grad])
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        with record(model, step=self.state.global_step, first_row=self._first_rows.popleft()) as rec:
            loss, outputs = super().compute_loss(model, inputs, True, num_items_in_batch)
        # this micro-batch's share of the step's KL, times what will be divided out of it again
        loss = loss + rec.kl(tokens=self._tokens) * self._divided_by(num_items_in_batch)
        return (loss, outputs) if return_outputs else loss

    def _divided_by(self, num_items_in_batch: Tensor | int | None) -> int:
        """DDP and FSDP average over processes; `training_step` divides by accumulation steps unless the loss is scaled."""
        scaled = getattr(self, "loss_is_scaled_for_ga", None)
        if scaled is None:
            by_items = self.model_accepts_loss_kwargs and num_items_in_batch is not None
            scaled = by_items or self.compute_loss_func is not None
        return self.accelerator.num_processes * (1 if scaled else self.current_gradient_accumulation_steps)

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        if not self.is_fsdp_enabled:
            super().save_model(output_dir, _internal_call)
        elif self.args.should_save:
            self._save(output_dir)
        else:  # gathering shards takes every process
            with tempfile.TemporaryDirectory() as nowhere:
                store.save(self.accelerator.unwrap_model(self.model), nowhere)

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        """The adapter and the routers: a folder that `vmoer.load` reads."""
        folder = output_dir or self.args.output_dir
        store.save(self.accelerator.unwrap_model(self.model), folder)
        if self.processing_class is not None:
            self.processing_class.save_pretrained(folder)
        torch.save(self.args, os.path.join(folder, "training_args.bin"))

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """With FSDP2 Trainer would write the shards of the whole model beside them."""
        if not self.is_fsdp_enabled:
            super()._save_optimizer_and_scheduler(output_dir)
            return
        plugin = self.accelerator.state.fsdp_plugin
        save_fsdp_optimizer(plugin, self.accelerator, self.optimizer, self.model, output_dir)
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), os.path.join(output_dir, "scheduler.pt"))

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        load_state(self.accelerator.unwrap_model(self.model if model is None else model), resume_from_checkpoint)

    def _load_best_model(self) -> None:
        load_state(self.accelerator.unwrap_model(self.model), self.state.best_model_checkpoint)


def load_state(model: Any, folder: str | Path) -> None:
    """Fill an attached model from a folder written by `vmoer.save`: routers, and the adapter where there is one."""
    folder = Path(folder)
    saved = store.read_folder(folder)
    if store.fingerprint(model) != saved.description["base"]:
        raise InputError(f"{folder} was trained on another base model: its router weights differ from this one's")
    routers, tensors = routers_of(model), saved.tensors
    if {f"{layer}.{name}" for layer, router in routers.items() for name in router.state_dict()} != set(tensors):
        raise InputError(f"{folder} holds the routers of another method or of other layers")
    if saved.adapter is not None:
        from peft import get_peft_model_state_dict

        ours, theirs = get_peft_model_state_dict(model), saved.adapter.tensors
        if {name: value.shape for name, value in ours.items()} != {name: x.shape for name, x in theirs.items()}:
            raise InputError(f"{folder} holds an adapter of another shape than this model's")
        for name, value in ours.items():
            assign(value, theirs[name])
    for layer, router in routers.items():
        for name, value in router.state_dict(keep_vars=True).items():
            found = tensors[f"{layer}.{name}"]
            if name.startswith("novelty_"):  # sized by the data they were fitted on
                setattr(router, name, found.to(value.device))
            else:
                assign(value, found)


def _mask(batch: dict[str, Any]) -> Tensor:
    mask = batch.get("attention_mask")
    return torch.ones_like(batch["input_ids"]) if mask is None else mask
