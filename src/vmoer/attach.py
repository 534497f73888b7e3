"""Meeting a live model: attach, detach, record. The only place that touches one.

A router instance's class is replaced by a subclass made on the fly (variational.py). What a forward pass is about (which tokens,
which step) is read by a hook on the decoder; what is collected lives in the `record` object, never on a module.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from vmoer import gates
from vmoer.context import Attachment, positions_and_mask
from vmoer.errors import AttachError, InputError
from vmoer.following import followed
from vmoer.gates import Found, Gate, plans
from vmoer.recording import Record
from vmoer.routers import Config
from vmoer.variational import VariationalGate, variational

NAME = "vmoer"  # the submodule our parameters live in, under the model's own router


def attach(model: nn.Module, config: Config, *, freeze: bool = True) -> nn.Module:
    """Put a method on the model's routers, in place. With `freeze` nothing else of the model keeps its gradient.

    Every router is probed and checked first: switched off, its output must stay bit-identical, switched on, our forward must
    really be the one that runs. If anything fails, AttachError says what, and the model is as it was.
    """
    if not isinstance(config, Config):
        raise InputError(f"attach takes a method's configuration, such as vmoer.FullCovariance(), not {config!r}")
    if attachment_of(model) is not None:
        raise AttachError("a method is attached already: call vmoer.detach(model) first")
    chosen = _choose(model, config)
    prepared = [(found, *_prepare(found, config)) for found in chosen]
    attachment = Attachment(config=config, layers=[found.layer for found in chosen])
    attachment.required_grad = [p for p in model.parameters() if p.requires_grad]
    try:
        for found, gate, method in prepared:
            before = _answer(found, gate)
            _install(found, gate, method, attachment)
            _self_check(found, gate, attachment, before)
        if freeze:
            for p in model.parameters():
                p.requires_grad_(False)
            for _, _, method in prepared:
                for p in method.parameters():
                    p.requires_grad_(True)
        _hook(model, chosen, attachment)
    except BaseException:
        detach(model, _attachment=attachment)
        raise
    return model


def detach(model: nn.Module, *, _attachment: Attachment | None = None) -> nn.Module:
    """Take the method off again: outputs, state-dict keys and requires_grad are those of before, bit for bit."""
    attachment = _attachment or attachment_of(model)
    if attachment is None:
        raise InputError("nothing is attached to this model")
    for handle in attachment.hooks:
        handle.remove()
    for module in list(model.modules()):
        if isinstance(module, VariationalGate):
            ours = set(module.vmoer.parameters())
            del module.vmoer, module.vmoer_gate, module.vmoer_attachment, module.vmoer_layer
            module.__class__ = type(module).__mro__[2]
            for p in ours:
                p.requires_grad_(False)
        ignored = getattr(module, "_keys_to_ignore_on_save", None)
        if ignored and any(f".{NAME}." in key for key in ignored):
            module._keys_to_ignore_on_save = type(ignored)(key for key in ignored if f".{NAME}." not in key)
    for p in attachment.required_grad:
        p.requires_grad_(True)
    return model


def attachment_of(model: nn.Module) -> Attachment | None:
    """What is attached to a model, seen through PEFT, DDP and compiled wrappers."""
    return next((m.vmoer_attachment for m in model.modules() if isinstance(m, VariationalGate)), None)


def routers_of(model: nn.Module) -> dict[int, Any]:
    """The attached methods by layer."""
    return {m.vmoer_layer: m.vmoer for m in model.modules() if isinstance(m, VariationalGate)}


def gates_of(model: nn.Module) -> list[Gate]:
    """What is known of the routers that a method is attached to."""
    return [m.vmoer_gate for m in model.modules() if isinstance(m, VariationalGate)]


def attached(model: nn.Module) -> Attachment:
    attachment = attachment_of(model)
    if attachment is None:
        raise InputError("no method is attached to this model: call vmoer.attach(model, ...) first")
    return attachment


@contextmanager
def record(model: nn.Module, *, step: int | None = None, first_row: int = 0) -> Iterator[Record]:
    """Collect what the routers say inside the block: signals, experts, the KL; of passes, or of one `model.generate`.

    In training pass `step`, the number of the optimiser step, and `first_row`, where this batch's rows start in the global
    batch of that step: noise is keyed by both, so that accumulation and data parallelism draw what one big batch would.
    """
    attachment = attached(model)
    if step is not None:
        _refuse_reentrant(model)
    record = Record(attachment.config, attachment.layers)
    previous = attachment.record, attachment.step, attachment.first_row
    attachment.record, attachment.step, attachment.first_row = record, step, first_row
    try:
        with followed(model, record) if step is None else nullcontext():
            yield record
    finally:
        attachment.record, attachment.step, attachment.first_row = previous


@contextmanager
def switched_off(model: nn.Module) -> Iterator[None]:
    """The model's own routing, bit for bit, inside the block."""
    attachment = attached(model)
    before, attachment.enabled = attachment.enabled, False
    try:
        yield
    finally:
        attachment.enabled = before


@contextmanager
def sampled(model: nn.Module, passes: Tensor | int) -> Iterator[None]:
    """Inside the block each router draws one sample a token, keyed by its pass number, in place of averaging.

    One number for all, one a row, or one a token, [B, T]; with fewer columns than tokens, the last ones draw and those
    before them average.
    """
    attachment = attached(model)
    before, attachment.passes = attachment.passes, passes
    try:
        yield
    finally:
        attachment.passes = before


# -- attaching ---------------------------------------------------------------------------------------------------------


def _choose(model: nn.Module, config: Config) -> list[Found]:
    _refuse_sharded(model)
    found = gates.find(model)
    if not found:
        raise AttachError(
            f"{type(model).__name__} has no MoE router: it is a dense model, or its routers are unknown here"
        )
    by_layer: dict[int, Found] = {}
    for f in found:
        if f.layer in by_layer:
            raise AttachError(
                f"layer {f.layer} has two routers ({by_layer[f.layer].path}, {f.path}): pass the submodel that holds one"
            )
        by_layer[f.layer] = f
    wanted = sorted(by_layer) if config.layers == "all" else list(config.layers)
    if not wanted or len(set(wanted)) != len(wanted):
        raise AttachError(f"layers must be distinct and not empty, got {list(wanted)}")
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


def _prepare(found: Found, config: Config) -> tuple[Gate, nn.Module]:
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


def _answer(found: Found, gate: Gate) -> tuple[Tensor, ...]:
    args = [gates.rules.lookup(name, found.router, found.block) for name in gate.arguments]
    states = gates.probe_states(found.router, gates.router_weight(found.router, gate))
    with torch.no_grad():
        return gates.call_router(found.router, states, args)


def _install(found: Found, gate: Gate, method: nn.Module, attachment: Attachment) -> None:
    router: Any = found.router
    plans.follow_class(router)
    router.__class__ = variational(type(router))
    router.vmoer = method
    router.vmoer_gate, router.vmoer_attachment, router.vmoer_layer = gate, attachment, found.layer


def _self_check(found: Found, gate: Gate, attachment: Attachment, before: tuple[Tensor, ...]) -> None:
    attachment.checking = True
    try:
        attachment.enabled, attachment.fired = False, False
        off = _answer(found, gate)
        if not attachment.fired:
            shadow = "an instance attribute (accelerate's hooks set one)"
            raise AttachError(
                f"{found.path} ({found.kind}) cannot be attached: its forward is shadowed by {shadow}, so ours never runs"
            )
        for theirs, ours in zip(before, off, strict=True):
            if isinstance(theirs, Tensor) and not theirs.is_meta and not torch.equal(theirs, ours):
                raise AttachError(f"{found.path} ({found.kind}) cannot be attached: it answers differently twice")
        attachment.enabled = True
        on = _answer(found, gate)
        for theirs, ours in zip(before, on, strict=True):
            if isinstance(theirs, Tensor) and (theirs.shape, theirs.dtype) != (ours.shape, ours.dtype):
                raise AttachError(
                    f"{found.path} ({found.kind}) cannot be attached: our answer has another shape or type"
                )
        if "forward" in vars(found.block):
            _check_block(found, gate, attachment)
    finally:
        attachment.enabled, attachment.checking = True, False


def _check_block(found: Found, gate: Gate, attachment: Attachment) -> None:
    """A block whose forward was replaced (fused kernels do that) may never call its router."""
    states = gates.probe_states(found.router, gates.router_weight(found.router, gate), tokens=1).unsqueeze(0)
    attachment.fired = False
    try:
        with torch.no_grad():
            found.block(states)
    except (TypeError, RuntimeError, ValueError, IndexError):
        return  # it takes more than hidden states: nothing can be told
    if not attachment.fired:
        raise AttachError(
            f"{found.path} ({found.kind}) cannot be attached: the block around it has a forward of its own that never calls it"
        )


def _hook(model: nn.Module, chosen: list[Found], attachment: Attachment) -> None:
    """Hooks that say which tokens a forward pass is about, and the names that `save_pretrained` is to leave out."""
    decoder = chosen[0].decoder
    attachment.hooks.append(decoder.register_forward_pre_hook(DecoderHook(attachment), with_kwargs=True))
    modules = dict(model.named_modules())
    for found in chosen:
        layer = modules[found.path[: found.path.index(f".{found.layer}.") + len(f".{found.layer}")]]
        attachment.hooks.append(layer.register_forward_pre_hook(LayerHook(attachment), with_kwargs=True))
    module: Any
    for module in model.modules():
        if hasattr(module, "_keys_to_ignore_on_save") and hasattr(module, "save_pretrained"):
            ours = {key for key in module.state_dict() if f".{NAME}." in key}
            if ours:
                module._keys_to_ignore_on_save = {*(module._keys_to_ignore_on_save or ()), *ours}


class DecoderHook:
    """Before the decoder runs: note its tokens' positions and mask."""

    def __init__(self, attachment: Attachment) -> None:
        self.attachment = attachment

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        positions_BT, mask_BT = positions_and_mask(args, kwargs)
        self.attachment.begin(positions_BT, mask_BT)


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
            self.attachment.now = remembered


def _refuse_sharded(model: nn.Module) -> None:
    """Experts spread over processes are no matter; but FSDP2 reduces only the gradients of what it was given, and PEFT adds
    whole updates to what is a share."""
    if any(base.__name__ == "FSDPModule" for module in model.modules() for base in type(module).__mro__):
        raise AttachError("this model is sharded already: attach before fully_shard, or its gradients stay unreduced")
    spread = any(type(p.data).__name__ == "DTensor" for p in model.parameters())
    if spread and any(".lora_" in name for name, _ in model.named_parameters()):
        raise AttachError(
            "an adapter does not fit on experts that are spread over processes: merge it first "
            "(examples/accelerate/merge.py)"
        )


def _refuse_reentrant(model: nn.Module) -> None:
    for module in model.modules():
        function = getattr(module, "_gradient_checkpointing_func", None)
        if getattr(module, "gradient_checkpointing", False) and getattr(function, "keywords", {}).get(
            "use_reentrant", False
        ):
            raise InputError(
                "reentrant gradient checkpointing loses the KL's gradient: call "
                "model.gradient_checkpointing_enable({'use_reentrant': False})"
            )
