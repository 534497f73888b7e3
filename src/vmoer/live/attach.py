"""Meeting a live model: attach, detach, record. The only place that touches one.

A router instance's class is replaced by a subclass made on the fly (variational.py). What a forward pass is about (which tokens,
which step) is read by a hook on the decoder; what is collected lives in the `record` object, never on a module.
"""

import dataclasses
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

from torch import Tensor, nn

from vmoer.errors import AttachError, InputError
from vmoer.gates import Gate
from vmoer.live import compiled
from vmoer.live.context import Attachment, Collector
from vmoer.live.following import follow, unfollow
from vmoer.live.installing import NAME, answer, choose, hook, install, prepare, self_check
from vmoer.live.recording import Record
from vmoer.live.signals import Wanted
from vmoer.live.tape import is_compiled
from vmoer.live.variational import VariationalGate
from vmoer.routers import Config, Deterministic


def attach(model: nn.Module, config: Config, *, freeze: bool = True) -> nn.Module:
    """Put a method on the model's routers, in place. With `freeze` nothing else of the model keeps its gradient.

    Every router is probed and checked first: switched off, its output must stay bit-identical, switched on, our forward must
    really be the one that runs. If anything fails, AttachError says what, and the model is as it was.

    Args:
        model: A transformers model with MoE layers, or a PEFT model around one.
        config: The method and its settings, such as `vmoer.FullCovariance(layers=[2, 5])`.
        freeze: Whether everything but the routers stops requiring a gradient; `detach` restores it.

    Returns:
        The model itself.
    """
    if not isinstance(config, Config):
        raise InputError(f"attach takes a method's configuration, such as vmoer.FullCovariance(), not {config!r}")
    if attachment_of(model) is not None:
        raise AttachError("a method is attached already: call vmoer.detach(model) first")
    chosen = choose(model, config)
    prepared = [(found, *prepare(found, config)) for found in chosen]
    attachment = Attachment(
        routers={found.layer: method for found, _, method in prepared},
        required_grad=[p for p in model.parameters() if p.requires_grad],
    )
    try:
        for found, gate, method in prepared:
            before = answer(found, gate)
            install(found, gate, method, attachment)
            self_check(found, gate, attachment, before)
        if freeze:
            for p in model.parameters():
                p.requires_grad_(False)
            for _, _, method in prepared:
                for p in method.parameters():
                    p.requires_grad_(True)
        hook(model, chosen, attachment)
        follow(model, attachment)
    except BaseException:
        detach(model, _attachment=attachment)
        raise
    return model


def detach(model: nn.Module, *, _attachment: Attachment | None = None) -> nn.Module:
    """Take the method off again: outputs, state-dict keys and requires_grad are those of before, bit for bit.

    Args:
        model: With a method attached. It is returned.
    """
    attachment = _attachment or attachment_of(model)
    if attachment is None:
        raise InputError("nothing is attached to this model")
    for handle in attachment.hooks:
        handle.remove()
    unfollow(model)
    for module in list(model.modules()):
        if isinstance(module, VariationalGate):
            ours = set(module.vmoer.parameters())
            del module.vmoer, module.vmoer_gate, module.vmoer_attachment, module.vmoer_layer
            compiled.leave(module)
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
def record(
    model: nn.Module,
    *,
    signals: Wanted = None,
    kl: bool = False,
    step: int | None = None,
    first_row: int = 0,
) -> Iterator[Record]:
    """Collect what the routers say inside the block: signals, experts, the KL; of passes, or of one `model.generate`.

    Args:
        model: With a method attached; the compiled model itself, where it is compiled.
        signals: Names of the signals to compute. By default those that cost next to nothing: all but `mc_logit_variance` of the
            Gaussian methods. "all" takes every signal that the method has.
        kl: Whether `rec.kl()` is wanted outside of training too. In training it always is.
        step: In training, the number of the optimiser step.
        first_row: Where this batch's rows start in the global batch of that step. Noise is keyed by step and row, so that
            accumulation and data parallelism draw what one big batch would.
    """
    attachment = attached(model)
    if isinstance(outer := attachment.asked.record, Record) and outer.made_here():
        raise InputError("this model is being recorded already: end that `with vmoer.record(...)` block first")
    if step is not None:
        _refuse_reentrant(model)
    else:
        follow(model, attachment)
    record = Record(attachment.config, attachment.layers, signals=signals, keeps_kl=kl or step is not None)
    numbers: tuple[int, ...] = ()
    if is_compiled(model) and not record.keeps_kl:
        record.take_tape(attachment)
        numbers = compiled.numbered(attachment.gates)
    with attachment.asking(record=record, step=step, first_row=first_row, numbers=numbers):
        try:
            yield record
        finally:
            record.end()


def recording(model: nn.Module) -> Record | None:
    """The record that passes are told to here and now."""
    record = attached(model).asked.record
    return record if isinstance(record, Record) else None


@contextmanager
def unrecorded(model: nn.Module) -> Iterator[None]:
    """Inside the block no record is told anything; a model with nothing attached will do too."""
    attachment = attachment_of(model)
    with nullcontext() if attachment is None else attachment.asking(record=None, step=None):
        yield


@contextmanager
def switched_off(model: nn.Module) -> Iterator[None]:
    """The model's own routing, bit for bit, inside the block."""
    with attached(model).asking(enabled=False):
        yield


@contextmanager
def sampled(model: nn.Module, passes: Tensor | int) -> Iterator[None]:
    """Inside the block each router draws one sample a token, keyed by its pass number, in place of averaging.

    One number for all, one a row, or one a token, [B, T]; with fewer columns than tokens, the last ones draw and those
    before them average.
    """
    with attached(model).asking(passes=passes):
        yield


@contextmanager
def collected(model: nn.Module, collector: Collector) -> Iterator[None]:
    """Inside the block every attached layer hands its states and the model's own logits to `collector`."""
    with attached(model).asking(collector=collector):
        yield


@contextmanager
def reconfigured(model: nn.Module, **changes: Any) -> Iterator[None]:
    """Inside the block the attached method has other settings, such as `samples`, for everybody who runs the model."""
    routers = attached(model).routers.values()
    before = [router.config for router in routers]
    for router in routers:
        router.configure(dataclasses.replace(router.config, **changes))
    compiled.forget(attached(model).gates)
    try:
        yield
    finally:
        compiled.forget(attached(model).gates)
        for router, config in zip(routers, before, strict=True):
            router.configure(config)


class _Lent(NamedTuple):
    """A model that `ready` has prepared, and how it was before."""

    users: int
    bare: bool
    training: bool


_LENT: "weakref.WeakKeyDictionary[nn.Module, _Lent]" = weakref.WeakKeyDictionary()
_LENDING = threading.RLock()


@contextmanager
def ready(model: Any) -> Iterator[None]:
    """The model in evaluation mode, with its own routing recorded where nothing is attached; afterwards as it was.

    Several threads may be inside at once: the first one in prepares the model, the last one out restores it.
    """
    with _LENDING:
        lent = _LENT.get(model) or _Lent(0, attachment_of(model) is None, model.training)
        if not lent.users:
            if lent.bare:
                attach(model, Deterministic())
            if lent.training:
                model.eval()
        _LENT[model] = lent._replace(users=lent.users + 1)
    try:
        yield
    finally:
        with _LENDING:
            lent = _LENT[model]
            _LENT[model] = lent._replace(users=lent.users - 1)
            if lent.users == 1:
                del _LENT[model]
                if lent.training:
                    model.train()
                if lent.bare:
                    detach(model)


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
