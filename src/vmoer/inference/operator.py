"""Routing as one operator, for engines that run models of their own.

    averaged_TN, signals_TG = torch.ops.vmoer.route(u_TD, logits_TN, name)
    averaged_TN = torch.ops.vmoer.route_into(u_TD, logits_TN, name, signals_TG)      the same, with a place for the signals

States and the model's own logits go in; out come the logits to route by in their place, and what is known about each token. An
engine gives each layer's router a name by `host`, calls the operator behind its gate, and goes on with its own Top-K and
kernels. The operator is opaque to torch.compile, is told its shapes by a fake implementation, and waits for no device.

Only routers that choose and weigh by the same logits fit, and only those whose answer depends on the token alone: `unfit` says
why a configuration does not.

Shapes: T tokens, N experts, D model, G signals.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from vmoer.errors import InputError
from vmoer.gates import Gate
from vmoer.gates.rules import Rule, Score, Scoring
from vmoer.live.signals import Inputs, Wanted, columns, token_signals
from vmoer.numerics import kernels
from vmoer.numerics.kernels import TOLD
from vmoer.routers import Call, Config, Router, Routing


class Hosted(NamedTuple):
    """A router that the operator knows by name."""

    router: Router
    weight_ND: Tensor | None
    signals: tuple[str, ...]
    """The columns of the operator's second answer."""
    wanted: Wanted
    left_out: tuple[str, ...] = ()
    """Signals of the method that the engine does not know."""


_HOSTED: dict[str, Hosted] = {}


def unfit(config: Config) -> str | None:
    """Why an engine cannot route by this configuration through one set of logits; None where it can."""
    if config.splits:
        return f"{config.key} chooses experts by sampled logits and weighs them by others, and an engine takes one set of logits"
    if getattr(config, "sampling", "fixed") == "mc":
        return 'sampling="mc" draws fresh noise on every call, so that ranks and cached tokens would not agree'
    return None


def logits_gate(score: Score, experts: int, k: int, hidden_size: int) -> Gate:
    """The gate of an engine that takes logits alone and keeps its own Top-K."""
    rule = Rule(returns="dense")  # nothing but logits is handed on, so no kernel need choose experts
    scoring = Scoring(rule=rule, score=score, k=k, normalise=False, eps=0.0, scale=1.0, groups=None)
    return Gate(scoring, experts, hidden_size, {}, ())


def host(
    name: str,
    router: Router,
    weight_ND: Tensor | None,
    dtype: torch.dtype,
    wanted: Wanted = "all",
    known: Sequence[str] | None = None,
) -> Hosted:
    """Make a router known to the operator, after one try on states of this dtype.

    Args:
        weight_ND: W_r, for methods that need it.
        wanted: The signals to compute; all that the method has, if nothing is said.
        known: The signals that the engine has room for; others are left out. All, if nothing is said.
    """
    router.requires_grad_(False).eval()
    for part in router.modules():
        if isinstance(part, nn.Linear):
            part.to(dtype)  # once: at inference its weights are rounded to the states' dtype on every call
    device = router.novelty_root_RD.device
    u_TD = torch.randn(4, router.gate.hidden_size, generator=torch.Generator().manual_seed(0)).to(device, dtype)
    logits_TN = torch.zeros(4, router.gate.num_experts, device=device, dtype=dtype)
    with torch.no_grad():
        averaged_TN, signals = _answer(router, weight_ND, u_TD, logits_TN, wanted)
    if not all(bool(x.isfinite().all()) for x in (averaged_TN, *signals.values())):
        raise InputError(f"the routing of layer {router.layer} is not finite with these weights")
    left_out = tuple(signal for signal in signals if known is not None and signal not in known)
    if left_out:
        signals = {signal: value for signal, value in signals.items() if signal not in left_out}
        wanted = tuple(signals)
    _HOSTED[name] = hosted = Hosted(router, weight_ND, tuple(signals), wanted, left_out)
    return hosted


def forget() -> None:
    """Let go of every router."""
    _HOSTED.clear()


LANES = TOLD
"""Signals that `route_into` has columns for."""


@torch.library.custom_op("vmoer::route_into", mutates_args=("signals_TG",))
def route_into(u_TD: Tensor, logits_TN: Tensor, name: str, signals_TG: Tensor) -> Tensor:
    """The logits to route by, [T, N], in float32. The signals go into `signals_TG` [T, len(LANES)], in float32: those that the
    router has, each into its column of LANES. Kernels that find all of them on the way write them there themselves."""
    hosted = _HOSTED[name]
    if signals_TG.shape != (len(u_TD), len(LANES)):
        raise InputError(f"the signals of {len(u_TD)} tokens do not fit into {tuple(signals_TG.shape)}")
    with torch.no_grad():
        straight = hosted.signals == LANES and signals_TG.dtype == torch.float32 and signals_TG.stride(1) == 1
        into_TG = signals_TG if straight else None
        averaged_TN, signals = _answer(hosted.router, hosted.weight_ND, u_TD, logits_TN, hosted.wanted, into_TG)
        for signal in hosted.signals:
            column_T = signals_TG[:, LANES.index(signal)]
            if signals[signal].data_ptr() != column_T.data_ptr():
                column_T.copy_(signals[signal])
        return averaged_TN.float()


@route_into.register_fake
def _(u_TD: Tensor, logits_TN: Tensor, name: str, signals_TG: Tensor) -> Tensor:
    return logits_TN.new_empty(logits_TN.shape, dtype=torch.float32)


@torch.library.custom_op("vmoer::route", mutates_args=())
def route(u_TD: Tensor, logits_TN: Tensor, name: str) -> tuple[Tensor, Tensor]:
    """The logits to route by, [T, N], and the signals, [T, G], both in float32: half precision would make ties of near ones."""
    hosted = _HOSTED[name]
    with torch.no_grad():
        averaged_TN, signals = _answer(hosted.router, hosted.weight_ND, u_TD, logits_TN, hosted.wanted)
        return averaged_TN.float(), columns([signals[name] for name in hosted.signals], u_TD)


@route.register_fake
def _(u_TD: Tensor, logits_TN: Tensor, name: str) -> tuple[Tensor, Tensor]:
    signals_TG = u_TD.new_empty((u_TD.shape[0], len(_HOSTED[name].signals)), dtype=torch.float32)
    return logits_TN.new_empty(logits_TN.shape, dtype=torch.float32), signals_TG


def _answer(
    router: Router,
    weight_ND: Tensor | None,
    u_TD: Tensor,
    logits_TN: Tensor,
    wanted: Wanted,
    into_TG: Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    wide_TN = logits_TN if router.reads_narrow and kernels.available(logits_TN) else logits_TN.float()
    row_T = u_TD[:, 0]  # stands for the positions: fixed points do not depend on them
    routing = router(u_TD, wide_TN, Call(router.layer, row_T, row_T, into_TG=into_TG), weight_ND)
    if routing is None:  # the model's own routing; a copy, since an operator's answer is never its input
        return logits_TN.to(torch.float32, copy=True), token_signals(Inputs(router, u_TD, wide_TN), None, wanted)
    assert isinstance(routing, Routing)
    if routing.select_TN is not routing.weight_TN:
        raise InputError(
            f"{router.config.key} chooses experts by other logits than it weighs them by: its configuration `splits`"
        )
    return routing.select_TN, token_signals(Inputs(router, u_TD, routing.weight_TN), routing.posterior, wanted)
