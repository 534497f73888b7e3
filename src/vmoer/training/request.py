"""What a run is asked to do, with the preset's choices filled in, and how `run.json` says it."""

import dataclasses
import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch

from vmoer.errors import InputError
from vmoer.live.adapters import AdapterNoise
from vmoer.live.brittleness import parse_layers
from vmoer.routers import Config
from vmoer.training.objective import Objective
from vmoer.training.plan import Plan, held_out_share
from vmoer.training.presets import STAGE1, Preset


@dataclass(frozen=True, kw_only=True)
class Stages:
    """How both stages train.

    Args:
        stage1: a plan of no epochs leaves stage 1 out.
        stage2: the preset's plan by default.
        rank: of the LoRA adapter of stage 1.
        objective: what stage 2 minimises; `passes` are those of the predictive objective.
        noisy_stage1: whether the method's noise, untrained, is on in stage 1 already.
        adapter: what the adapter is drawn by in stage 1 (training.blob, training.lora_dropout); a plain one by default.
        search: whether validation chooses a setting of the method (`Config.search`).
        from_map: a run whose stage 1 is taken, so that methods share it; `map_state` says which of its states.
    """

    stage1: Plan = STAGE1
    stage2: Plan | None = None
    rank: int = 16
    objective: Objective = "elbo"
    passes: int = 4
    noisy_stage1: bool = False
    adapter: AdapterNoise | None = None
    search: bool = False
    from_map: str | Path | None = None
    map_state: Literal["map", "map-early"] = "map"


@dataclass(frozen=True, kw_only=True)
class Data:
    """Which questions are trained on.

    Args:
        root: the folder of local data sets.
        seed: of the splits.
        recut: whether train and validation are cut anew by the seed (tasks.load).
        limit: at most this many training questions.
        stage1_orders: options of stage 1's questions in new orders every epoch; the preset's by default.
        stage2: `train`, `permuted`, `held-out:0.2` or `split:NAME`; the preset's by default. `permuted` are stage 1's own
            questions, their options in new orders every epoch.
        system_prompt: in place of our own, in every prompt of the run and of whatever opens it.
        half_validation: whether stopping and choosing see one half of validation (training.data.halves), so that runs can be
            compared on the other.
        skip_long: whether questions longer than the model's context are left out, and counted in a warning.
    """

    root: str | Path | None = None
    seed: int = 0
    recut: bool = False
    limit: int | None = None
    stage1_orders: bool | None = None
    stage2: str | None = None
    system_prompt: str | None = None
    half_validation: bool = False
    skip_long: bool = False


@dataclass(frozen=True)
class Request:
    """The arguments of `train`, and what follows from them."""

    model: str
    task: str
    method: str | Config
    out: Path
    preset: Preset
    layers: str | None
    """None where the configuration says which."""
    stages: Stages
    data: Data
    seed: int
    dtype: torch.dtype | str | None

    def __post_init__(self) -> None:
        if self.layers is not None:
            parse_layers(self.layers)  # said now, not after stage 1
        if (Path(self.model) / "run.json").exists():
            raise InputError(
                f"{self.model} is a run folder: name its base model, and give the run as from_map to share its stage 1"
            )
        if self.stages.noisy_stage1 and self.stages.from_map is not None:
            raise InputError("from_map takes a finished stage 1, noisy_stage1 asks for another: give one of them")
        if self.stages.adapter is not None and self.stages.from_map is not None:
            raise InputError("from_map takes a finished stage 1, adapter asks for another: give one of them")

    @cached_property
    def config(self) -> Config:
        config = self.preset.config(self.method) if isinstance(self.method, str) else self.method
        return dataclasses.replace(config, seed=self.seed)

    @property
    def plan(self) -> Plan:
        """Of stage 2."""
        return self.stages.stage2 or self.preset.stage2

    @property
    def stage2_data(self) -> str:
        return self.data.stage2 or self.preset.stage2_data

    @property
    def stage1_orders(self) -> bool:
        return self.preset.stage1_orders if self.data.stage1_orders is None else self.data.stage1_orders

    @property
    def source(self) -> Path:
        """The run that stage 1 is taken from."""
        return self.out if self.stages.from_map is None else Path(self.stages.from_map)

    def about_data(self) -> dict[str, Any]:
        return {
            "task": str(self.task),
            "data_seed": self.data.seed,
            "recut": self.data.recut or None,  # older files do not name it; so below
            "limit": self.data.limit,
            "paper_splits": self.preset.paper_splits,
            "held_out": held_out_share(self.stage2_data),
            "stage1_orders": self.stage1_orders or None,
            "system_prompt": self.data.system_prompt,
        } | ({"skip_long": True} if self.data.skip_long else {})

    def prompt(self) -> dict[str, str]:
        """The system prompt that later questions must have too, where the run was trained with one of its own."""
        return {} if self.data.system_prompt is None else {"system_prompt": self.data.system_prompt}

    def about_stage1(self) -> dict[str, Any]:
        noise = self.config.to_dict() | {"layers": self.layers or self.config.layers}
        return {
            "plan": self.stages.stage1.described(),
            "rank": self.stages.rank,
            "seed": self.seed,
            **self.about_data(),
            "noise": noise if self.stages.noisy_stage1 else None,
        } | ({} if self.stages.adapter is None else {"adapter": self.stages.adapter.described()})

    def about_stage2(self) -> dict[str, Any]:
        stages = self.stages
        return {
            "plan": self.plan.described(),
            "objective": stages.objective,
            "search": stages.search,
            "passes": stages.passes if stages.objective == "predictive" else 1,
            "map_state": stages.map_state,
            "layers": self.layers,
            "data": self.stage2_data,
            "from_map": None if stages.from_map is None else str(stages.from_map),
        } | ({"half": True} if self.data.half_validation else {})

    def settings(self) -> dict[str, Any]:
        """All that decides the result. A folder that was begun with others is refused."""
        found = {"model": self.model, "method": self.config.to_dict()}
        return as_json(found | {"stage1": self.about_stage1(), "stage2": self.about_stage2()})


def as_json(value: Any) -> Any:
    """As it reads back from a file, so that settings compare equal."""
    return json.loads(json.dumps(value))
