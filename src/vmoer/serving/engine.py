"""In vLLM's workers: a model loader that attaches saved routers, routing behind the gate, signals beside the experts.

`register` is the entry point `vllm.general_plugins`, called in every process. Nothing changes until the loader is asked for:

    vllm serve MODEL --load-format vmoer --model-loader-extra-config '{"router": "RUN"}' --enable-return-routed-experts

`vmoer serve` writes that line. The routers are attached when the weights are there and before anything is profiled, compiled or
captured. A runner of experts takes on a subclass of its class, as a router does in transformers, and hands averaged logits on:
vLLM's own Top-K, load balancing, parallelism and kernels stay as they are. Where the Transformers backend leaves the choice of
experts to the model's own router, that router takes on the subclass.
"""

import dataclasses
import logging
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from vllm.distributed.aux_output_connector import worker
from vllm.model_executor.layers.fused_moe.router.base_router import BaseRouter
from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner
from vllm.model_executor.model_loader import get_model_loader, register_model_loader
from vllm.model_executor.model_loader.base_loader import BaseModelLoader

from vmoer import gates
from vmoer.errors import AttachError, InputError
from vmoer.gates import Gate
from vmoer.gates.rules import Score
from vmoer.inference import operator
from vmoer.routers import Router
from vmoer.saved import merged
from vmoer.saved.fetch import locate
from vmoer.saved.store import Saved, fill, read_folder
from vmoer.saved.weights import router_hash
from vmoer.serving.rows import SIGNALS, Kept, lanes, pack, without_signals

FORMAT = "vmoer"
_log = logging.getLogger("vllm.vmoer")  # below vLLM's own, whose handlers and level it takes


_kept: Kept | None = None  # of the one model that a worker process runs


def register() -> None:
    """Make the loader and the wider rows known to vLLM; any number of times."""
    if worker.RoutedExpertsCapturer is not Capturer:
        register_model_loader(FORMAT)(Loader)
        worker.RoutedExpertsCapturer = Capturer


class Loader(BaseModelLoader):  # type: ignore[misc]
    """Whatever loader there would be without it, then the routers."""

    def __init__(self, load_config: Any) -> None:
        super().__init__(load_config)
        extra = dict(load_config.model_loader_extra_config)
        if "router" not in extra:
            raise InputError('the load format vmoer needs a run: --model-loader-extra-config \'{"router": "RUN"}\'')
        self.saved = read_folder(locate(extra.pop("router")))  # before the weights
        if reason := operator.unfit(self.saved.config):
            raise InputError(f"{self.saved.folder} cannot be served: {reason}")
        inner = {"load_format": extra.pop("load_format", "auto"), "model_loader_extra_config": extra}
        self.inner = get_model_loader(dataclasses.replace(load_config, **inner))
        self.weights: dict[int, Tensor] = {}
        self._load, self.inner.load_weights = self.inner.load_weights, self.load_weights

    def download_model(self, model_config: Any) -> None:
        self.inner.download_model(model_config)

    def load_weights(self, model: nn.Module, model_config: Any) -> None:
        """The inner loader's; then, before vLLM packs them for its kernels, a copy of the router weights."""
        self._load(model, model_config)
        self.weights = router_weights(model)

    def load_model(self, vllm_config: Any, model_config: Any, prefix: str = "") -> nn.Module:
        if model_config is vllm_config.model_config:
            if reason := without_signals(vllm_config.parallel_config):
                raise InputError(reason)
            adapters = merged.held(model_config.hf_config, model_config.model)
            merged.check(self.saved.description, adapters, self.saved.folder, model_config.model)
        model = self.inner.load_model(vllm_config=vllm_config, model_config=model_config, prefix=prefix)
        if model_config is vllm_config.model_config:  # and not a draft of speculative decoding
            attach(model, self.saved, self.weights or router_weights(model), vllm_config)
        return cast(nn.Module, model)


def router_weights(model: nn.Module) -> dict[int, Tensor]:
    """W_r [N, D] by layer: the one matrix of a block with a row an expert that is not inside the experts."""
    modules, out = dict(model.named_modules()), {}
    for path, runner in runners_of(model).values():
        inside = {id(p) for p in runner.routed_experts.parameters()}
        rows = runner.router.global_num_experts
        block = modules[path.rpartition(".")[0]]
        found = {id(p): p for p in block.parameters() if p.dim() == 2 and len(p) == rows and id(p) not in inside}
        if len(found) == 1:
            out[int(runner.layer_id)] = next(iter(found.values())).detach().clone()
    return out


def runners_of(model: nn.Module) -> dict[int, tuple[str, Any]]:
    """vLLM's experts by layer, with their names."""
    return {m.layer_id: (name, m) for name, m in model.named_modules() if isinstance(m, MoERunner)}


def attach(model: nn.Module, saved: Saved, weights: dict[int, Tensor], vllm_config: Any) -> None:
    """Put saved routers onto a model of vLLM's whose router weights are these."""
    global _kept
    runners = runners_of(model)
    if not runners:
        raise AttachError(f"{type(model).__name__} has no MoE router: it is a dense model, or vLLM runs it differently")
    routers: dict[int, Router] = {}
    seams: dict[int, Seam] = {}
    for layer in map(int, saved.config.layers):
        if layer not in runners:
            raise AttachError(f"{saved.folder} has a router for layer {layer}, which has none in this model")
        if layer not in weights:
            raise AttachError(f"layer {layer} has no router weight [experts, hidden] that could be found")
        _check(saved, layer, weights[layer])
        seams[layer] = seam = _seam(model, layer, *runners[layer])
        gate = operator.logits_gate(seam.score, *seam.experts, weights[layer].shape[1])
        routers[layer] = saved.config.router(saved.config, gate, weights[layer], layer, weights[layer].device)
    fill(routers, saved.tensors, saved.folder)
    device = next(iter(routers.values())).novelty_root_RD.device
    tokens = vllm_config.scheduler_config.max_num_batched_tokens
    _kept = Kept(tokens, vllm_config.model_config.get_total_num_hidden_layers(), device)
    operator.forget()
    left_out: set[str] = set()
    for layer, router in routers.items():
        name, (module, _, _, own) = f"vllm.{layer}", seams[layer]
        hosted = operator.host(name, router, weights[layer], vllm_config.model_config.dtype, known=SIGNALS)
        left_out |= set(hosted.left_out)
        # not submodules: weight loaders, reloads and quantisation never see them
        object.__setattr__(module, "vmoer", Attached(name, layer, router.gate.hidden_size, own))
        module.__class__ = _variational(type(module))
    if left_out:
        _log.warning("vmoer: answers leave out %s, which rows have no room for", ", ".join(sorted(left_out)))
    _log.info("vmoer: %s on layers %s of %s", saved.config.key, list(routers), type(model).__name__)


class Seam(NamedTuple):
    """Where a layer's logits are averaged."""

    module: nn.Module
    """A runner of vLLM's, or the model's own router."""
    score: Score
    experts: tuple[int, int]
    """How many there are, and how many a token takes."""
    gate: Gate | None
    """Of the model's own router."""


def _seam(model: nn.Module, layer: int, path: str, runner: Any) -> Seam:
    theirs = runner.router
    if hasattr(runner, "_moe_state"):  # of the Transformers backend: experts come in that the model's own router chose
        found = next((x for x in gates.find(model) if path.startswith(f"{x.path.rpartition('.')[0]}.")), None)
        if found is None or found.reason:
            reason = f"{found.path} ({found.kind}): {found.reason}" if found else f"no router is known beside {path}"
            raise AttachError(f"layer {layer} of the Transformers backend cannot be attached, {reason}")
        gate = Gate.probe(found)
        return Seam(found.router, gate.scoring.score, (gate.num_experts, gate.scoring.k), gate)
    if not isinstance(theirs, BaseRouter) or getattr(theirs, "custom_routing_function", None) is not None:
        raise AttachError(
            f"layer {layer} routes by a function of its own ({type(theirs).__name__}), "
            "and only known scores of logits can be averaged"
        )
    score = cast(Score, getattr(theirs, "scoring_func", "softmax"))
    return Seam(runner, score, (theirs.global_num_experts, theirs.top_k), None)


def _check(saved: Saved, layer: int, weight_ND: Tensor) -> None:
    """Refuse another base model."""
    if saved.description["router_hashes"].get(str(layer)) != router_hash(weight_ND):
        raise InputError(f"{saved.folder} was trained on another base model: its router weights differ from this one's")


class Attached(NamedTuple):
    """What a module knows of the router that is attached to it."""

    name: str
    layer: int
    hidden_size: int
    gate: Gate | None


def _routed(attached: Attached, states_TD: Tensor, logits_TN: Tensor) -> Tensor:
    """Averaged logits; the signals are kept."""
    assert _kept is not None
    own_TD, into_TG = states_TD[:, : attached.hidden_size], _kept.of(attached.layer, len(states_TD))
    return cast(Tensor, torch.ops.vmoer.route_into(own_TD, logits_TN, attached.name, into_TG))


_CLASSES: dict[type, type] = {}


def _variational(base: Any) -> Any:
    """The subclass of a runner's or a router's class, made once."""
    if base in _CLASSES:
        return _CLASSES[base]

    def _maybe_dispatch(self: Any, hidden_states: Tensor, router_logits: Tensor) -> tuple[Tensor, Tensor]:
        """After the gate and before tokens go to other ranks: each rank averages for its own."""
        averaged_TN = _routed(self.vmoer, hidden_states, router_logits)
        return cast(tuple[Tensor, Tensor], base._maybe_dispatch(self, hidden_states, averaged_TN))

    def forward(self: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """The router's own answer, with averaged logits and what follows from them in it."""
        out, gate = base.forward(self, hidden_states, *args, **kwargs), self.vmoer.gate
        averaged_TN = _routed(self.vmoer, hidden_states.reshape(-1, gate.hidden_size), gate.logits(out))
        return gate.route(self, out, averaged_TN, averaged_TN, gate.bias(self, args, kwargs))[0]

    own = {"_maybe_dispatch": _maybe_dispatch} if issubclass(base, MoERunner) else {"forward": forward}
    _CLASSES[base] = type(base.__name__, (base,), own | {"__module__": base.__module__})
    return _CLASSES[base]


class Capturer(worker.RoutedExpertsCapturer):  # type: ignore[misc]
    """vLLM's own, with the signals behind the experts where routers are attached."""

    def __init__(self, max_num_batched_tokens: int, vllm_config: Any) -> None:
        super().__init__(max_num_batched_tokens=max_num_batched_tokens, vllm_config=vllm_config)
        if _kept is not None:
            layers, k = cast(Any, self).shape_per_token
            self.shape_per_token: Any = (layers, k + lanes(self.output_dtype.itemsize))

    def snapshot_routing_data(self, num_tokens: int) -> Tensor:
        experts_TLK: Tensor = super().snapshot_routing_data(num_tokens)
        return experts_TLK if _kept is None else pack(experts_TLK, _kept.signals_TLG[:num_tokens])
