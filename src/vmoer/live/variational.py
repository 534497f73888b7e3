"""The class that a router instance takes on while a method is attached.

A subclass of the router's own class, made on the fly, so that state-dict keys, isinstance checks, output capture and FSDP keep
working. It runs the model's own forward, hands its logits to the method, and puts the method's answer into the same return
value; at inference it leaves the model's own Top-K out where the logits are plainly W_r u.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vmoer import gates
from vmoer.errors import InputError, RunError
from vmoer.gates import Gate
from vmoer.live import capturing, compiled, context
from vmoer.live.context import Asked, Attachment, Pass, Recorder
from vmoer.numerics import kernels
from vmoer.routers import Call, Routing


class VariationalGate(nn.Module):
    """Mixed into a router's class: runs the model's own forward, then ours."""

    vmoer: Any
    vmoer_gate: Gate
    vmoer_attachment: Attachment
    vmoer_layer: int
    vmoer_number: int = compiled.ALONE

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() and not (args or kwargs):
            out = self._compiled(hidden_states)
            if out is not None:
                return out
        attachment = self.vmoer_attachment
        now = attachment.now
        if now is not None and now.parts and now.asked.enabled:
            return self._in_parts(now, hidden_states, *args, **kwargs)
        flat = hidden_states.ndim == 2
        u_TD = hidden_states if flat else hidden_states.reshape(-1, self.vmoer_gate.hidden_size)
        if now is None or now.positions_T.shape[0] != u_TD.shape[0]:
            now = attachment.alone(u_TD)
        if now.repeats:  # on every token of a generation, so it is to be short
            method = self.vmoer
            if method.silent and now.asked.record is None:
                return super().forward(hidden_states, *args, **kwargs)  # type: ignore[misc]
            if flat and self.vmoer_gate.types is not None and not (args or kwargs):
                found = capturing.captured(self, method, u_TD, now)
                if found is not None:
                    return found
        return self._routed(now, hidden_states, u_TD, args, kwargs)

    def _compiled(self, u_TD: Tensor) -> Any:
        """The answer in compiled code by an operator (vmoer/live/compiled.py), where `numbers` says that it may be; else None.
        What is read here is compared again on every pass, so it is to be little."""
        number, now = self.vmoer_number, context.under_way()
        if number == compiled.ALONE or now is None or not now.repeats or number not in now.asked.numbers:
            return None
        if self.training or u_TD.dim() != 2 or torch.is_grad_enabled() or torch.is_autocast_enabled(u_TD.device.type):
            return None
        record: Any = now.asked.record
        if record is not None and record.tape is None:
            return None
        names = "" if record is None else ",".join(record.tape.names)
        if not compiled.silent(number):
            *out, signals_TG = torch.ops.vmoer.answer(u_TD, now.positions_T, number, names)
        else:
            out = super().forward(u_TD)  # type: ignore[misc]
            if record is not None:
                signals_TG = torch.ops.vmoer.signals(u_TD, out[compiled.place(number, "logits")], number, names)
        if record is not None:
            record.put_on_tape(now, signals_TG, compiled.lanes(names), out[compiled.place(number, "indices")])
        else:
            now.seen.add(number)
            if len(now.seen) == len(now.asked.numbers):
                context.over()
        return tuple(out)

    def _in_parts(self, now: Pass, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        outs = []
        for part, states in zip(now.parts, now.split(hidden_states), strict=True):
            with self.vmoer_attachment.within(part):
                outs.append(VariationalGate.forward(self, states, *args, **kwargs))
        return tuple(now.join(tensors) for tensors in zip(*outs, strict=True))

    def _routed(
        self, current: Pass, hidden_states: Tensor, u_TD: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        replayed_TK = None
        if current.asked.check is not None:
            current.asked.check.fired = True
        else:
            replayed_TK = self.vmoer_attachment.replayed(self.vmoer_layer, len(u_TD), u_TD.device)
        told = current.asked.record is not None or current.asked.collector is not None
        out, u_TD, routing, chosen_TK = self._answered(hidden_states, current, told, args, kwargs, replayed_TK)
        if routing is not None:
            current.hand_over(self.vmoer_layer, self.vmoer, u_TD, routing, chosen_TK)
        return out

    def _described(self, hidden_states: Tensor, current: Pass, record: Recorder | None) -> capturing.Answer:
        """The answer and what that record asks of it, by nothing but kernels."""
        out, u_TD, routing, chosen_TK = self._answered(hidden_states, current, record is not None, (), {})
        signals = {} if record is None or routing is None else record.describe(self.vmoer, u_TD, routing)
        if not signals:
            return capturing.Answer(out, chosen_TK)
        return capturing.Answer(out, chosen_TK, tuple(signals), torch.stack([x.float() for x in signals.values()]))

    def _answered(
        self,
        hidden_states: Tensor,
        current: Pass,
        told: bool,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        replayed_TK: Tensor | None = None,
    ) -> tuple[Any, Tensor, Routing | None, Tensor]:
        """What the router answers; and the states, the routing and the experts, where they may be `told`."""
        gate, method, asked = self.vmoer_gate, self.vmoer, current.asked
        out = None
        if self._replaces(hidden_states, asked):
            u_TD = hidden_states
            logits_TN = F.linear(u_TD, gates.router_weight(self, gate))  # type: ignore[arg-type]
            if not (method.reads_narrow and kernels.available(logits_TN)):
                logits_TN = logits_TN.float()
        else:
            out = super().forward(hidden_states, *args, **kwargs)  # type: ignore[misc]
            if not asked.enabled or (method.silent and not told):
                out = out if replayed_TK is None else gate.replay(self, out, replayed_TK, args, kwargs)[0]
                return out, hidden_states, None, hidden_states
            u_TD = hidden_states.reshape(-1, gate.hidden_size)
            logits_TN = gate.logits(out)
        if asked.collector is not None:
            asked.collector(self.vmoer_layer, u_TD, logits_TN)
            if method.needs_fit:  # it cannot route yet; what it takes its covariance from is the model's own routing
                return out, u_TD, None, u_TD
        if method.needs_fit and not method.fitted and asked.check is None:
            raise RunError(f"{method.config.key} has seen no data yet: call vmoer.fit(model, batches) first")
        routing = method(u_TD, logits_TN, self._call(current), gates.router_weight(self, gate))
        if routing is None:
            assert out is not None
            chosen_TK = gate.experts(out)
            if replayed_TK is not None:
                out, chosen_TK = gate.replay(self, out, replayed_TK, args, kwargs)
            return out, u_TD, Routing(logits_TN, logits_TN), chosen_TK
        bias_N = gate.bias(self, args, kwargs)
        logits = routing.select_TN, routing.weight_TN
        out, chosen_TK = gate.route(self, out, *logits, bias_N, routing.relaxed_TN, routing.given, replayed_TK)
        return out, u_TD, routing, chosen_TK

    def _replaces(self, hidden_states: Tensor, asked: Asked) -> bool:
        """Whether the model's own choice of experts need not be made: at inference, where its logits are W_r u and no more."""
        if self.training or torch.is_grad_enabled() or hidden_states.dim() != 2 or self.vmoer_gate.types is None:
            return False
        return asked.enabled and asked.collector is None and bool(self.vmoer.replaces)

    def _call(self, current: Pass) -> Call:
        asked = current.asked
        training = (self.training and torch.is_grad_enabled()) or asked.step is not None
        if self.training and training and asked.step is None and asked.check is None:
            raise InputError(
                "a forward pass in training mode needs `with vmoer.record(model, step=step)`: noise is a function of the step"
            )
        about = current.positions_T, current.rows_T, asked.step, current.passes_T
        return Call(self.vmoer_layer, *about, self.vmoer_attachment.layers, current.drawn)

    def __reduce__(self) -> Any:
        # a copy is another router, so it has not this one's number
        state = {name: value for name, value in self.__dict__.items() if name != "vmoer_number"}
        return _rebuild, (type(self).__mro__[2],), state


_CLASSES: dict[type[nn.Module], type[nn.Module]] = {}


def variational(base: type[nn.Module]) -> type[nn.Module]:
    """The subclass of a router class, made once. It keeps the name, which output capture and reports go by."""
    if base in _CLASSES:
        return _CLASSES[base]
    names = {"__module__": base.__module__, "__qualname__": base.__qualname__, "__doc__": base.__doc__}
    _CLASSES[base] = type(base.__name__, (VariationalGate, base), names)
    return _CLASSES[base]


def _rebuild(base: type[nn.Module]) -> nn.Module:
    cls = variational(base)
    return cls.__new__(cls)
