"""The seam between our logits and the return value of a model's own router.

`Gate.probe` runs a router once to learn its return order, and checks the written rule against the router's own answer.
`Gate.route` puts our choice of experts into the router's own return value.

Shapes: T tokens, N experts, S samples, K selected, D model.
"""

import dataclasses
import inspect
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vmoer.errors import AttachError
from vmoer.gates.finding import FoundRouter
from vmoer.gates.rules import Rule, Scoring, lookup
from vmoer.numerics.gaussians import Gaussian
from vmoer.numerics.integrals import Rule as Integral
from vmoer.numerics.integrals import expected_sigmoid_logit, in_pieces, log_expected_softmax
from vmoer.numerics.kernels import Ask


@dataclass(frozen=True)
class Gate:
    """How one router turns logits into its return value, and how to put ours in their place."""

    scoring: Scoring
    num_experts: int
    hidden_size: int
    places: dict[str, int]
    """Which element of the return value holds the logits, weights, indices (or llama4's dense scores)."""
    arguments: tuple[str, ...]
    """Names of the router's arguments after the hidden states."""
    types: tuple[torch.dtype, ...] | None = None
    """The return value's dtypes where it is exactly (logits W_r u, weights, indices) in some order, else None. Where they are
    known, the router's own forward need not run when our choice replaces its choice."""

    @classmethod
    def probe(cls, found: FoundRouter) -> "Gate":
        """Run the router once on random states, read off its return order, and check the rule against its answer."""
        router, rule = found.router, found.rule
        assert rule is not None
        names = list(inspect.signature(type(router).forward).parameters)[2:]
        scoring = Scoring.of(rule, router, found.block)
        weight = _weight(router, rule)
        states = probe_states(router, weight)
        args = [lookup(name, router, found.block) for name in names]
        with torch.no_grad():
            out = call_router(router, states, args)
        experts, k = _num_experts(router, weight), scoring.k
        places = _places(out, states.shape[-2], experts, k, rule)
        gate = cls(scoring, experts, states.shape[-1], places, tuple(names))
        if states.device.type != "meta":
            gate.check(router, out, args)
            return dataclasses.replace(gate, types=gate.plain(states, weight, out))
        return gate

    def plain(self, states: Tensor, weight: Tensor | None, out: tuple[Tensor, ...]) -> tuple[torch.dtype, ...] | None:
        """See `types`; the logits must equal W_r u bit for bit."""
        if weight is None or self.arguments or self.scoring.ask() is None or weight.dtype != states.dtype:
            return None
        if len(out) != 3 or any(x.dim() != 2 for x in out):
            return None
        theirs = out[self.places["logits"]]
        same = torch.equal(F.linear(states, weight).to(theirs.dtype), theirs)
        return tuple(x.dtype for x in out) if same else None

    def ask(self) -> Ask | None:
        """The rule as a fused kernel takes it, or None. Weights come in the model's own dtype where that is known."""
        ask = self.scoring.ask()
        if ask is None or self.types is None:
            return ask
        return ask._replace(dtype=self.types[self.places["weights"]])

    def check(self, router: nn.Module, out: tuple[Tensor, ...], args: list[Any]) -> None:
        """Raise unless the written rule gives the router's own experts and weights. Near ties are let pass in half precision."""
        logits_TN = self.logits(out)
        bias_N = self.bias(router, args, {})
        chosen_TK = self.scoring.choose(logits_TN, bias_N)
        ours_TN = torch.zeros_like(logits_TN).scatter(1, chosen_TK, self.scoring.weigh(logits_TN, chosen_TK, router))
        theirs_TN = self.dense_weights(out)
        exact = out[self.places["logits"]].dtype == torch.float32 and next(router.parameters()).dtype == torch.float32
        error_T = (ours_TN - theirs_TN).abs().amax(-1) / theirs_TN.abs().amax(-1).clamp_min(1e-6)
        # in half precision a near tie can fall either way, so a few rows may differ
        share = (error_T > (1e-4 if exact else 3e-2)).float().mean().item()
        if share > (0.0 if exact else 0.25):
            raise AttachError(
                f"{type(router).__name__}: the scoring rule in vmoer/gates/table.py does not reproduce this router's own "
                f"weights on {share:.0%} of probe tokens; this version of transformers may have changed it"
            )

    def logits(self, out: tuple[Tensor, ...]) -> Tensor:
        first = out[self.places["logits"]].float().reshape(-1, self.num_experts)
        return first.log() if self.scoring.rule.first == "probabilities" else first

    def dense_weights(self, out: tuple[Tensor, ...]) -> Tensor:
        if self.scoring.rule.returns == "dense":
            return out[self.places["scores"]].float()
        weights = out[self.places["weights"]].float().reshape(-1, self.scoring.k)
        indices = out[self.places["indices"]].reshape(-1, self.scoring.k)
        return torch.zeros(len(weights), self.num_experts, device=weights.device).scatter_add(1, indices, weights)

    def experts(self, out: tuple[Tensor, ...]) -> Tensor:
        """The chosen experts, [T, K]."""
        if self.scoring.rule.returns == "dense":
            return torch.topk(out[self.places["logits"]].float(), self.scoring.k, dim=-1).indices
        return out[self.places["indices"]].reshape(-1, self.scoring.k)

    def bias(self, router: nn.Module, args: Any, kwargs: dict[str, Any]) -> Tensor | None:
        name = self.scoring.rule.bias
        if name is None:
            return None
        given = kwargs.get(name)
        if given is None and name in self.arguments and len(args) > self.arguments.index(name):
            given = args[self.arguments.index(name)]
        found = given if given is not None else lookup(name, router)
        return found.reshape(-1) if isinstance(found, Tensor) else None

    def replay(
        self, router: nn.Module, out: tuple[Tensor, ...], replayed_TK: Tensor, args: Any, kwargs: dict[str, Any]
    ) -> tuple[tuple[Tensor, ...], Tensor]:
        """The router's own answer with experts that are given, weighed by its own logits; see `route`."""
        logits_TN = self.logits(out)
        return self.route(router, out, logits_TN, logits_TN, self.bias(router, args, kwargs), replayed_TK=replayed_TK)

    def expected_logits(self, q: Gaussian, eps: Tensor | None, rule: Integral, logits_TN: Tensor) -> Tensor:
        """The logits whose score is the average score under q. The gate gets them in place of its own.

        For softmax they are log E[softmax(l)] + logsumexp(own logits): some gates depend on the size that this shift keeps.
        """
        if self.scoring.score == "softmax":
            return log_expected_softmax(q, eps, rule) + torch.logsumexp(logits_TN, -1, keepdim=True)
        if self.scoring.score == "sigmoid":
            return expected_sigmoid_logit(q, eps, rule)
        if eps is None:
            raise AttachError(f"sampling='delta' is not written for {self.scoring.score} gates: use sampling='fixed'")
        return in_pieces(q, eps.shape[-2], eps, lambda q, e: self.average(q.samples(cast(Tensor, e)), q.mean_TN))

    def average(self, logits_TSN: Tensor, logits_TN: Tensor) -> Tensor:
        """The same for logits that are sampled already, as weight-space methods do."""
        s = logits_TSN.shape[1]
        if self.scoring.score == "softmax":
            mean = torch.logsumexp(torch.log_softmax(logits_TSN, -1), 1) - torch.log(torch.tensor(float(s)))
            return mean + torch.logsumexp(logits_TN, -1, keepdim=True)
        if self.scoring.score == "sigmoid":
            return torch.logsumexp(F.logsigmoid(logits_TSN), 1) - torch.logsumexp(F.logsigmoid(-logits_TSN), 1)
        square = F.softplus(logits_TSN).sqrt().mean(1).square()
        return square + torch.log(-torch.expm1(-square))

    def route(
        self,
        router: nn.Module,
        out: tuple[Tensor, ...] | None,
        select_TN: Tensor,
        weight_TN: Tensor,
        bias_N: Tensor | None,
        relaxed_TN: Tensor | None = None,
        given: tuple[Tensor, Tensor] | None = None,
        replayed_TK: Tensor | None = None,
    ) -> tuple[tuple[Tensor, ...], Tensor]:
        """The router's return value with our logits in it, and the experts chosen, [T, K].

        A sampled choice is straight-through: the weights are multiplied by 1 + s - stop_gradient(s), s = softmax(relaxed),
        which is 1 in value and carries the gradient of the relaxed choice.

        Args:
            out: the router's own answer; None where its forward did not run, which needs `types`.
            select_TN: the experts are chosen by these logits.
            weight_TN: and weighed by these.
            bias_N: the model's correction bias, added when experts are chosen.
            relaxed_TN: logits of the relaxed choice, where the choice was sampled.
            given: weights and experts, where a kernel has found both already.
            replayed_TK: experts to take in place of a choice; a token whose row has -1 chooses.
        """
        if given is not None and replayed_TK is None:
            weights_TK, chosen_TK = given
        else:
            chosen_TK = self.scoring.choose(select_TN.detach(), bias_N)
            if replayed_TK is not None:  # nothing was sampled, so there is no relaxed choice either
                chosen_TK, relaxed_TN = torch.where(replayed_TK < 0, chosen_TK, replayed_TK), None
            weights_TK = self.scoring.weigh(weight_TN, chosen_TK, router)
        if relaxed_TN is not None and relaxed_TN.requires_grad:
            soft_TK = torch.softmax(relaxed_TN, -1).gather(-1, chosen_TK)
            weights_TK = weights_TK * (1 + soft_TK - soft_TK.detach())
        first = weight_TN
        if self.scoring.rule.first == "probabilities":
            first = self.scoring.scores(weight_TN)
        ours = {"logits": first}
        if self.scoring.rule.returns == "dense":
            ours["scores"] = torch.zeros_like(weight_TN).scatter(1, chosen_TK, weights_TK)
        else:
            ours |= {"weights": weights_TK, "indices": chosen_TK}
        if out is None:
            assert self.types is not None
            order = sorted(ours, key=lambda name: self.places[name])
            return tuple(ours[name].to(kind) for name, kind in zip(order, self.types, strict=True)), chosen_TK
        new = list(out)
        for name, value in ours.items():
            theirs = out[self.places[name]]
            new[self.places[name]] = value.to(theirs.dtype).reshape(theirs.shape)
        return tuple(new), chosen_TK


def _weight(router: nn.Module, rule: Rule) -> Tensor | None:
    weight = lookup(rule.weight, router) if rule.weight else None
    return weight if isinstance(weight, Tensor) else None


def router_weight(router: nn.Module, gate: Gate) -> Tensor | None:
    """W_r [N, D] where the logits are linear in the router's input, else None."""
    return _weight(router, gate.scoring.rule)


def expert_count(found: FoundRouter) -> int:
    """How many experts a router chooses from, also where its weights are spread over processes."""
    assert found.rule is not None
    return _num_experts(found.router, _weight(found.router, found.rule))


def _num_experts(router: nn.Module, weight: Tensor | None) -> int:
    if weight is not None:
        return weight.shape[0]
    for name in ("num_experts", "config.num_experts", "n_routed_experts"):
        if (count := lookup(name, router)) is not None:
            return int(count)
    return next(p.shape[0] for p in router.parameters() if p.dim() == 2)


def probe_states(router: nn.Module, weight: Tensor | None, tokens: int = 61) -> Tensor:
    """Random router inputs of size about one, the same on every call."""
    parameter = weight if weight is not None else next(p for p in router.parameters() if p.dim() == 2)
    hidden = parameter.shape[1]
    states = torch.randn(tokens, hidden, generator=torch.Generator().manual_seed(0))
    return states.to(device=parameter.device, dtype=parameter.dtype if parameter.is_floating_point() else None)


def call_router(router: nn.Module, states_TD: Tensor, args: list[Any]) -> tuple[Tensor, ...]:
    """The router's answer in evaluation mode. Some classes take [tokens, D], others [batch, tokens, D]."""
    training = router.training
    router.eval()
    try:
        try:
            out = router(states_TD.clone(), *args)
        except (ValueError, RuntimeError, IndexError):
            out = router(states_TD.clone().unsqueeze(0), *args)
    finally:
        router.train(training)
    if not isinstance(out, tuple):
        raise AttachError(f"{type(router).__name__} returns {type(out).__name__}, not a tuple")
    return out


def _places(out: tuple[Tensor, ...], tokens: int, experts: int, k: int, rule: Rule) -> dict[str, int]:
    """Which element of the return value is what, told by shapes and dtypes."""
    shapes = {i: (tuple(t.shape[-1:]), t) for i, t in enumerate(out) if isinstance(t, Tensor) and t.numel() >= tokens}
    floats = [i for i, (_, t) in shapes.items() if t.is_floating_point()]
    if rule.returns == "dense":
        wide = [i for i in floats if shapes[i][0] == (experts,)]
        if len(wide) != 2:
            raise AttachError(f"expected dense scores and logits from this router, found {len(wide)} such tensors")
        zero = [i for i in wide if k < experts and bool((out[i] == 0).any())] if out[0].device.type != "meta" else []
        scores = zero[0] if zero else wide[0]
        return {"scores": scores, "logits": next(i for i in wide if i != scores)}
    indices = [i for i, (shape, t) in shapes.items() if not t.is_floating_point() and shape == (k,)]
    weights = [i for i in floats if shapes[i][0] == (k,)]
    logits = [i for i in floats if shapes[i][0] == (experts,)]
    if k == experts and len(logits) == 2:  # every expert is chosen: the weights are those that look like weights
        sums = [out[i].float().sum(-1) for i in logits]
        weights = [logits[0] if (sums[0] - sums[0][0]).abs().max() < (sums[1] - sums[1][0]).abs().max() else logits[1]]
        logits = [i for i in logits if i != weights[0]]
    if len(indices) != 1 or not weights or not logits:
        shown = ", ".join(str(tuple(t.shape)) for t in out if isinstance(t, Tensor))
        raise AttachError(f"cannot tell logits, weights and indices apart in a return value of shapes {shown}")
    return {"logits": logits[0], "weights": weights[0], "indices": indices[0]}
