"""Which signals a record computes of what one router said."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from vmoer.errors import InputError, short
from vmoer.numerics import kernels
from vmoer.routers import Call, Posterior, Router, Routing

Wanted = Sequence[str] | Literal["all"] | None
"""Signals that are asked for: by name, all of them, or (None) those that cost next to nothing."""


class Inputs(NamedTuple):
    """Inputs of signals that are computed on first access."""

    method: Router
    u_TD: Tensor
    weight_TN: Tensor


class Rows(Mapping[str, Tensor]):
    """Signals that stand in one tensor, [G, T], a row each: taken apart by whoever reads them."""

    def __init__(self, names: tuple[str, ...], signals_GT: Tensor) -> None:
        self.names, self.signals_GT = names, signals_GT

    def __getitem__(self, name: str) -> Tensor:
        if name not in self.names:
            raise KeyError(name)
        return self.signals_GT[self.names.index(name)]

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)


def gate_entropy(method: Router, weight_TN: Tensor) -> Tensor:
    """Entropy of the experts' scores as a distribution, in nats, [T]."""
    scoring = method.gate.scoring
    if scoring.score == "softmax" and (fused := kernels.entropy(weight_TN)) is not None:
        return fused
    p_TN = scoring.probabilities(weight_TN)
    return torch.special.entr(p_TN).sum(-1)


def names(signals: Any) -> tuple[str, ...]:
    if isinstance(signals, str) or not all(isinstance(name, str) for name in signals):
        raise InputError(f"signals={short(signals)} must be a list of names, or 'all'")
    return tuple(signals)


def token_signals(inputs: Inputs, posterior: Posterior | None, wanted: Wanted = None) -> dict[str, Tensor]:
    """The signals that a record asked for."""
    named = None if wanted is None or wanted == "all" else {*wanted}
    of_posterior = None if named is None else named - {"gate_entropy", "novelty"}
    found: dict[str, Tensor] = {}
    both, pair_T2 = None, None
    if posterior is not None and of_posterior != set() and inputs.method.gate.scoring.score == "softmax":
        both = posterior.signals_and_entropy(inputs.weight_TN)
    if both is None and inputs.method.fitted and (named is None or {"gate_entropy", "novelty"} <= named):
        pair_T2 = _entropy_and_novelty(inputs)
    if pair_T2 is not None:
        found["gate_entropy"] = pair_T2[:, 0]
    elif named is None or "gate_entropy" in named:
        found["gate_entropy"] = gate_entropy(inputs.method, inputs.weight_TN) if both is None else both[1]
    if posterior is not None and of_posterior != set():
        found |= posterior.signals() if both is None else both[0]
        if wanted == "all" or (of_posterior and not of_posterior <= found.keys()):
            found |= posterior.costly_signals()
    if pair_T2 is not None:
        found["novelty"] = pair_T2[:, 1]
    elif inputs.method.fitted and (named is None or "novelty" in named):
        known_T = None if posterior is None else posterior.novelty()
        found["novelty"] = inputs.method.novelty(inputs.u_TD) if known_T is None else known_T
    if named is None:
        return found
    for name in sorted(named - found.keys()):
        raise _no_such(name, inputs.method, posterior)
    return {name: value for name, value in found.items() if name in named}


def _entropy_and_novelty(inputs: Inputs) -> Tensor | None:
    """[T, 2], where one kernel finds both."""
    method, u_TD = inputs.method, inputs.u_TD
    if method.gate.scoring.score != "softmax" or u_TD.dtype != torch.bfloat16 or not kernels.available(u_TD):
        return None
    return kernels.entropy_and_novelty(inputs.weight_TN, u_TD, method.halves())


def columns(signals: Sequence[Tensor | None], u_TD: Tensor) -> Tensor:
    """Side by side, [T, G], in float32; where they are the columns of one tensor already, that one. None is anything."""
    known = [x for x in signals if x is not None]
    whole = known[0]._base if known and not torch.compiler.is_compiling() else None
    if whole is not None and whole.shape == (len(u_TD), len(signals)) and whole.dtype == torch.float32:
        places = [(x.stride(), x.storage_offset(), x._base is whole) for x in known]
        if places == [(whole.stride()[:1], i, True) for i, x in enumerate(signals) if x is not None]:
            return whole
    wide = [u_TD.new_zeros(len(u_TD), dtype=torch.float32) if x is None else x.float() for x in signals]
    return torch.stack(wide, -1) if wide else u_TD.new_empty((len(u_TD), 0), dtype=torch.float32)


def _no_such(name: str, method: Router, posterior: Posterior | None) -> InputError:
    if name == "novelty":
        return InputError("novelty has no reference yet: call vmoer.fit(model, batches) first")
    own = [] if posterior is None else [*posterior.signals(), *posterior.costly_signals()]
    has = ", ".join(["gate_entropy", *own, *(["novelty"] if method.fitted else [])])
    return InputError(f"{method.config.key} has no signal {short(name)} in this pass: it has {has}")


@torch.no_grad()
def tried(router: Router) -> tuple[Router, Tensor, Routing]:
    """What `token_signals` takes, of one token of zeros: to learn which signals there are."""
    device, gate = router.novelty_root_RD.device, router.gate
    u_1D, logits_1N = torch.zeros(1, gate.hidden_size, device=device), torch.zeros(1, gate.num_experts, device=device)
    weight_ND = torch.zeros(gate.num_experts, gate.hidden_size, device=device)
    position_1 = torch.zeros(1, dtype=torch.int64, device=device)
    routing = router(u_1D, logits_1N, Call(router.layer, position_1, position_1), weight_ND)
    return router, u_1D, Routing(logits_1N, logits_1N) if routing is None else routing
