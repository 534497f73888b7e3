"""The log of a run: a line for each step in RUN/telemetry.jsonl (and in TensorBoard), and warnings.

A step leaves small tensors on the device. Every `every` steps they are read back, written and checked. A gradient that is not
finite stops the run, or is counted where such steps are to be skipped. Routing that diverges or collapses gives one warning,
which names a remedy.
"""

import importlib.util
import json
import math
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vmoer.errors import RunError
from vmoer.files import write_text
from vmoer.training.workers import Workers

SHARES = ("loss", "nll", "kl")  # of the step's total; all else is a mean


class TrainingWarning(UserWarning):
    """The run goes on, but its result is likely not what was wanted; the message says what to change."""


class Telemetry:
    def __init__(
        self,
        folder: Path,
        stage: int,
        workers: Workers,
        *,
        layers: list[int],
        groups: list[str],
        experts: int | None = None,
        bounds: tuple[float, float] | None = None,
        skip: bool = False,
        every: int = 20,
        tensorboard: bool = False,
        told: Callable[[str, dict[str, Any]], object] | None = None,
    ) -> None:
        """`layers` are those attached, `groups` what gradients are grouped by, `bounds` the temperature's."""
        self.path, self.stage, self.workers = folder / "telemetry.jsonl", stage, workers
        self.layers, self.groups, self.experts, self.bounds = layers, groups, experts, bounds
        self.skip, self.every, self.told = skip, every, told
        self.pending: list[tuple[dict[str, Any], Tensor]] = []
        self.names: list[tuple[str, int]] = []
        self.start: dict[str, float] = {}
        self.warned: list[str] = []
        self.skipped = 0
        self.board: Any = None
        if tensorboard and workers.main and importlib.util.find_spec("tensorboard"):
            from torch.utils.tensorboard import SummaryWriter

            self.board = SummaryWriter(str(folder / "tensorboard"))

    # -- state that a resumed run needs --------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        return {"start": self.start, "warned": self.warned, "skipped": self.skipped}

    def rewind(self, step: int, state: dict[str, Any]) -> None:
        """Forget the lines of this stage after a step, and any that a kill cut short."""
        self.start, self.warned = state.get("start", {}), state.get("warned", [])
        self.skipped = state.get("skipped", 0)
        if not self.workers.main or not self.path.exists():
            return
        kept = []
        for line in self.path.read_text(errors="replace").splitlines():
            try:
                row = json.loads(line)
                if row["stage"] < self.stage or (row["stage"] == self.stage and row["step"] <= step):
                    kept.append(line + "\n")
            except (ValueError, TypeError, KeyError, RecursionError):
                continue
        write_text(self.path, "".join(kept))

    # -- a step --------------------------------------------------------------------------------------------------------

    def add(self, step: int, epoch: int, lr: float, values: dict[str, Tensor]) -> None:
        """Keep a step's tensors for later. `grad_square_G` are squared gradient norms by group."""
        flat = {name: value.float().reshape(-1) for name, value in values.items()}
        self.names = [(name, len(value)) for name, value in flat.items()]
        self.pending.append(
            ({"stage": self.stage, "step": step, "epoch": epoch, "lr": lr}, torch.cat([*flat.values()]))
        )

    @property
    def due(self) -> bool:
        return len(self.pending) >= self.every

    def flush(self) -> list[float]:
        """Read back, write, check; returns the steps' answer losses, without those that were skipped."""
        if not self.pending:
            return []
        heads = [head for head, _ in self.pending]
        table = self.workers.sum_(torch.stack([values for _, values in self.pending])).tolist()
        self.pending = []
        lines, nll = [], []
        for head, values in zip(heads, table, strict=True):
            row = self._row(head, values)
            lines.append(row)
            if row["skipped"]:
                self.skipped += 1
            else:
                nll.append(float(row["nll"]))
        self.write(*lines)
        self.tell(lines[-1])
        for row in lines:
            self._check(row)
        return nll

    def tell(self, row: dict[str, Any]) -> None:
        """Give a row to whoever watches the run."""
        if self.told and self.workers.main:
            self.told(f"stage {self.stage}", row)

    def _row(self, head: dict[str, Any], values: list[float]) -> dict[str, Any]:
        row, place = dict(head), 0
        for name, length in self.names:
            cell = values[place : place + length]
            place += length
            if name not in SHARES:
                cell = [value / self.workers.size for value in cell]
            row[name] = cell if name.endswith(("_L", "_G")) else cell[0]
        entropy_L, square_G = row.pop("gate_entropy_L", []), row.pop("grad_square_G")
        if entropy_L:
            row["gate_entropy"] = sum(entropy_L) / len(entropy_L)
        total = sum(square_G)
        row["grad_norm"] = math.sqrt(total) if math.isfinite(total) else total
        row["skipped"] = not math.isfinite(total)
        if row["skipped"]:
            forward = [self.layers[i] for i, value in enumerate(entropy_L) if not math.isfinite(value)]
            backward = [self.groups[i] for i, value in enumerate(square_G) if not math.isfinite(value)]
            # forward it spreads upwards from where it arose, backward downwards
            row["where"] = f"the routing of layer {forward[0]}" if forward else f"the gradient of {backward[-1]}"
        return row

    # -- writing -------------------------------------------------------------------------------------------------------

    def write(self, *rows: dict[str, Any]) -> None:
        if not self.workers.main:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        finite = [
            {k: v if not isinstance(v, float) or math.isfinite(v) else None for k, v in row.items()} for row in rows
        ]
        with self.path.open("a") as file:
            file.writelines(json.dumps(row, allow_nan=False) + "\n" for row in finite)
            file.flush()
            os.fsync(file.fileno())
        for row in finite if self.board is not None else []:
            for name, value in row.items():
                if isinstance(value, float):
                    self.board.add_scalar(f"stage{self.stage}/{name}", value, row["step"])

    # -- looking through -----------------------------------------------------------------------------------------------

    def _check(self, row: dict[str, Any]) -> None:
        if row["skipped"]:
            if self.skip:
                return
            raise RunError(
                f"stage {self.stage}, step {row['step']}: not finite in {row['where']}; the parameters and the last "
                "checkpoint are those of before (a lower learning rate may help; skip_nonfinite passes over such steps)"
            )
        self.start = self.start or {k: v for k, v in row.items() if isinstance(v, float)}
        self._check_temperature(row)
        self._check_entropy(row)
        self._check_variance(row)

    def _check_temperature(self, row: dict[str, Any]) -> None:
        if "temperature_q50" not in row:
            return
        low, middle, high = (row[f"temperature_{q}"] for q in ("q05", "q50", "q95"))
        t_min, t_max = self.bounds or (0.0, math.inf)
        remedy = "take regulariser='lognormal' (neg_log_t has no lower bound) or a smaller beta"
        if middle > 3 or high > 0.95 * t_max:
            self.warn("hot", row, f"temperatures diverge: median {middle:.2g}, 95% quantile {high:.2g}; {remedy}")
        if middle < self.start.get("temperature_q50", 1.0) / 3 or low < 1.05 * t_min:
            self.warn(
                "cold", row, f"temperatures collapse: median {middle:.2g}, 5% quantile {low:.2g}; take a larger beta"
            )

    def _check_entropy(self, row: dict[str, Any]) -> None:
        """Against the start: a router may have been nearly uniform, or nearly one-hot, before anything was trained."""
        if "gate_entropy" not in row or self.experts is None or not self.start.get("gate_entropy"):
            return
        now, then, most = row["gate_entropy"], self.start["gate_entropy"], math.log(self.experts)
        if most - now < 0.1 * (most - then):
            message = f"routing has become random: entropy {now:.3f} of at most {most:.3f} nats (at first {then:.3f})"
            self.warn("random", row, f"{message}; take a smaller beta")
        if now < 0.1 * then:
            message = f"routing has collapsed onto few experts: entropy {now:.3f} nats (at first {then:.3f})"
            self.warn("one-hot", row, f"{message}; take a larger beta or a lower learning rate")

    def _check_variance(self, row: dict[str, Any]) -> None:
        now, then = row.get("logit_variance"), self.start.get("logit_variance")
        if now is None or not then:
            return
        if now > 10 * then:
            self.warn("wide", row, f"the logit variance diverges: {now:.3g}, at first {then:.3g}; take a larger beta")
        if now < 0.01 * then:
            message = f"the posterior has collapsed to a point: logit variance {now:.3g}, at first {then:.3g}"
            self.warn("narrow", row, f"{message}; take a larger beta")

    def check_memorised(self, row: dict[str, Any]) -> None:
        """After an epoch of stage 2: a model that knows its training answers has nothing to learn calibration from."""
        train, valid = row["train_nll"], row["validation_nll"]
        if train is not None and train < 0.5 * valid and valid - train > 0.1:
            message = f"the training loss ({train:.3f}) is far below the validation loss ({valid:.3f})"
            remedy = "the model has memorised these answers: train stage 2 on stage2_data='permuted' or 'held-out:0.2'"
            self.warn("memorised", row, f"{message}; {remedy}")

    def warn(self, name: str, row: dict[str, Any], message: str) -> None:
        if name in self.warned:
            return
        self.warned.append(name)
        self.write({"stage": self.stage, "step": row["step"], "epoch": row["epoch"], "warning": message})
        if self.workers.main:
            warnings.warn(f"stage {self.stage}, step {row['step']}: {message}", TrainingWarning, stacklevel=2)
