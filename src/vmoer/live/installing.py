"""Putting a method onto a model's routers: which ones, whether it can be done, and the hooks that it takes.

Every router is probed and tried before it is left attached. What cannot be attached is said with its reason.
"""

from typing import Any, cast

import torch
from torch import Tensor, nn

from vmoer import gates
from vmoer.errors import AttachError, short
from vmoer.gates import FoundRouter, Gate, plans
from vmoer.live.context import Attachment, Check, positions_and_mask
from vmoer.live.variational import variational
from vmoer.routers import Config, Router

NAME = "vmoer"  # the submodule our parameters live in, under the model's own router


def choose(model: nn.Module, config: Config) -> list[FoundRouter]:
    _refuse_sharded(model)
    found = gates.find(model)
    if not found:
        raise AttachError(
            f"{type(model).__name__} has no MoE router: it is a dense model, or its routers are unknown here"
        )
    by_layer: dict[int, FoundRouter] = {}
    for f in found:
        if f.layer in by_layer:
            raise AttachError(
                f"layer {f.layer} has two routers ({by_layer[f.layer].path}, {f.path}): pass the submodel that holds one"
            )
        by_layer[f.layer] = f
    wanted = sorted(by_layer) if config.layers == "all" else list(config.layers)
    if not wanted or len(set(wanted)) != len(wanted):
        raise AttachError(f"layers must be distinct and not empty, got {short(list(wanted))}")
    for layer in wanted:
        if layer not in by_layer:
            raise AttachError(f"layer {layer} has no MoE router: those that have are {_ranges(sorted(by_layer))}")
        if by_layer[layer].reason:
            raise AttachError(
                f"{by_layer[layer].path} ({by_layer[layer].kind}) cannot be attached: {by_layer[layer].reason}"
            )
    return [by_layer[layer] for layer in sorted(wanted)]


def _ranges(numbers: list[int]) -> str:
    if len(numbers) > 1 and numbers == list(range(numbers[0], numbers[-1] + 1)):
        return f"{numbers[0]} to {numbers[-1]}"
    return ", ".join(map(str, numbers))


def prepare(found: FoundRouter, config: Config) -> tuple[Gate, Router]:
    try:
        with plans.lifted(found.router):
            gate = Gate.probe(found)
    except AttachError as error:
        raise AttachError(f"{found.path} ({found.kind}) cannot be attached: {error}") from None
    weight = gates.router_weight(found.router, gate)
    device = next(found.router.parameters()).device
    method = config.router(config, gate, weight, found.layer, device)
    method.train(found.router.training)
    return gate, method


def answer(found: FoundRouter, gate: Gate) -> tuple[Tensor, ...]:
    args = [gates.rules.lookup(name, found.router, found.block) for name in gate.arguments]
    states = gates.probe_states(found.router, gates.router_weight(found.router, gate))
    with torch.no_grad():
        return gates.call_router(found.router, states, args)


def install(found: FoundRouter, gate: Gate, method: nn.Module, attachment: Attachment) -> None:
    router: Any = found.router
    plans.follow_class(router)
    router.__class__ = variational(type(router))
    router.vmoer = method
    router.vmoer_gate, router.vmoer_attachment, router.vmoer_layer = gate, attachment, found.layer
    attachment.gates.append(router)


def self_check(found: FoundRouter, gate: Gate, attachment: Attachment, before: tuple[Tensor, ...]) -> None:
    def refuse(reason: str) -> AttachError:
        return AttachError(f"{found.path} ({found.kind}) cannot be attached: {reason}")

    check = Check()
    with attachment.asking(check=check, enabled=False):
        off = answer(found, gate)
    if not check.fired:
        raise refuse(
            "its forward is shadowed by an instance attribute (accelerate's hooks set one), so ours never runs"
        )
    for theirs, ours in zip(before, off, strict=True):
        if isinstance(theirs, Tensor) and not theirs.is_meta and not torch.equal(theirs, ours):
            raise refuse("it answers differently twice")
    with attachment.asking(check=Check()):
        on = answer(found, gate)
        for theirs, ours in zip(before, on, strict=True):
            if isinstance(theirs, Tensor) and (theirs.shape, theirs.dtype) != (ours.shape, ours.dtype):
                raise refuse("our answer has another shape or type")
    if "forward" in vars(found.block) and not _reached(found, gate, attachment):
        raise refuse("the block around it has a forward of its own that never calls it")


def overflowing(model: nn.Module, attachment: Attachment) -> str | None:
    """The path of a router whose method answers the probing states with what is no finite number; None where none does."""
    for found in gates.find(model):
        if found.layer in attachment.layers:
            with attachment.asking(check=Check()):
                answers = answer(found, cast(Any, found.router).vmoer_gate)
            if not all(bool(x.isfinite().all()) for x in answers if isinstance(x, Tensor) and not x.is_meta):
                return found.path
    return None


def _reached(found: FoundRouter, gate: Gate, attachment: Attachment) -> bool:
    """Whether a block whose forward was replaced (fused kernels do that) calls its router; True where nothing can be told."""
    states = gates.probe_states(found.router, gates.router_weight(found.router, gate), tokens=1).unsqueeze(0)
    check = Check()
    with attachment.asking(check=check), torch.no_grad():
        try:
            found.block(states)
        except (TypeError, RuntimeError, ValueError, IndexError):
            return True  # it takes more than hidden states
    return check.fired


def hook(model: nn.Module, chosen: list[FoundRouter], attachment: Attachment) -> None:
    """Hooks that say which tokens a forward pass is about, and the names that `save_pretrained` is to leave out."""
    decoder = chosen[0].decoder
    attachment.hooks.append(decoder.register_forward_pre_hook(DecoderHook(attachment), with_kwargs=True))
    attachment.decoder_layers += [layer_of(model, found) for found in chosen]
    module: Any
    for module in model.modules():
        if hasattr(module, "_keys_to_ignore_on_save") and hasattr(module, "save_pretrained"):
            ours = {key for key in module.state_dict() if f".{NAME}." in key}
            if ours:
                module._keys_to_ignore_on_save = {*(module._keys_to_ignore_on_save or ()), *ours}


def layer_of(model: nn.Module, found: FoundRouter) -> nn.Module:
    """The decoder layer that a router is in."""
    return model.get_submodule(found.path[: found.path.index(f".{found.layer}.") + len(f".{found.layer}")])


class DecoderHook:
    """Before the decoder runs: note its tokens' positions and mask. In training the layers are hooked too; not before, since
    compiled code compares every hook again on every pass."""

    def __init__(self, attachment: Attachment) -> None:
        self.attachment = attachment

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        positions_BT, mask_BT = positions_and_mask(args, kwargs)
        self.attachment.begin(positions_BT, mask_BT)
        if torch.compiler.is_compiling() or not (module.training and torch.is_grad_enabled()):
            return
        for layer in self.attachment.decoder_layers:
            hooks: Any = layer._forward_pre_hooks
            own = [number for number, hook in hooks.items() if getattr(hook, "attachment", None) is self.attachment]
            if not own:
                handle = layer.register_forward_pre_hook(LayerHook(self.attachment), with_kwargs=True)
                self.attachment.hooks.append(handle)
                own = [handle.id]
            hooks.move_to_end(own[0], last=False)  # FSDP2's hooks hand on copies, and may have come later


class LayerHook:
    """Before a decoder layer runs: find the pass its input belongs to.

    Gradient checkpointing runs a layer again during backward, when another pass may have begun. The layer's input is the same
    tensor object both times, so the pass is remembered on it.
    """

    def __init__(self, attachment: Attachment) -> None:
        self.attachment = attachment

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not (module.training and torch.is_grad_enabled()):
            return
        states = args[0] if args else kwargs.get("hidden_states")
        remembered = getattr(states, "_vmoer_pass", None)
        if remembered is None:
            states._vmoer_pass = self.attachment.now  # type: ignore[union-attr]
        else:
            self.attachment.resume(remembered)


def _refuse_sharded(model: nn.Module) -> None:
    """Experts spread over processes are no matter; but FSDP2 reduces only the gradients of what it was given, and PEFT adds
    whole updates to what is a share."""
    if any(base.__name__ == "FSDPModule" for module in model.modules() for base in type(module).__mro__):
        raise AttachError("this model is sharded already: attach before fully_shard, or its gradients stay unreduced")
    spread = any(type(p.data).__name__ == "DTensor" for p in model.parameters())
    if spread and any(".lora_" in name for name, _ in model.named_parameters()):
        raise AttachError(
            "an adapter does not fit on experts that are spread over processes: merge it first (vmoer merge RUN --out DIR)"
        )
