"""Whether training moved the routers: what `run.json` says under `stage2`, `moved`.

kept_epoch       of the state that is kept; 0 is the untrained one
parameters       sqrt(mean (theta - theta_0)^2) over all that was trained; 0 where the routers are as they began
beta_kl          what the loss adds for the KL, on validation prompts, at first and in the kept state
logit_variance   the trace of the covariance, a mean over tokens and layers, likewise; null for methods without one
"""

from typing import Any

import torch
from torch import Tensor, nn

from vmoer.live.attach import record
from vmoer.tasks.batches import by_length
from vmoer.training.data import Examples, collate
from vmoer.training.workers import Workers

MEASURED = 64  # validation questions


class Moved:
    """Taken before training; `after` says what became of it."""

    def __init__(self, model: nn.Module, valid: Examples, workers: Workers) -> None:
        self.model, self.valid, self.workers = model, valid, workers
        self.start = {name: p.detach().to("cpu", copy=True) for name, p in self._trainable()}
        self.before = self._posterior()

    def _trainable(self) -> list[tuple[str, Tensor]]:
        return [(name, p) for name, p in self.model.named_parameters() if p.requires_grad]

    def after(self, kept_epoch: int) -> dict[str, Any]:
        """Of the state that the model is in now."""
        squares = [(p.detach().cpu() - self.start[name]).double().square() for name, p in self._trainable()]
        total = sum(float(square.sum()) for square in squares)
        now = self._posterior()
        pairs = {
            name: [self.before[name], now[name]] if name in now else None for name in ("beta_kl", "logit_variance")
        }
        return {"kept_epoch": kept_epoch, "parameters": (total / sum(x.numel() for x in squares)) ** 0.5, **pairs}

    @torch.no_grad()
    def _posterior(self) -> dict[str, float]:
        """Means over the tokens of the first validation questions."""
        examples, rows = self.valid, range(min(MEASURED, len(self.valid)))
        sums: dict[str, float] = {}
        tokens = sum(len(examples.prompts[row]) for row in rows)
        devices = [self.workers.device] if self.workers.device.type == "cuda" else []
        training = self.model.training
        self.model.eval()
        with torch.random.fork_rng(devices):
            for batch in by_length([len(examples.prompts[row]) for row in rows], 4096):
                with record(self.model, kl=True) as rec:
                    self.model(**collate(examples, batch, self.workers.device).inputs, use_cache=False)
                found = {"beta_kl": rec.kl(tokens=tokens)}
                if "logit_variance" in rec.signals:
                    variance = rec.signals["logit_variance"]
                    found["logit_variance"] = torch.where(rec.mask, variance, 0).mean(0).sum() / tokens
                for name, value in found.items():
                    sums[name] = sums.get(name, 0.0) + float(value)
        self.model.train(training)
        return sums
