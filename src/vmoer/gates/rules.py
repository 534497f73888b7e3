"""How a model's own router turns logits into K experts and their weights: one rule with fields for all of them.

    score_n  = softmax(l)_n, sigmoid(l)_n or sqrt(softplus(l_n))
    chosen   = Top-K of (score + bias), limited to the best groups of experts where the model has groups
    weight_k = scale * score_k / sum of the chosen scores        (the division where the model normalises)

Top-K followed by a softmax over the chosen (Granite, gpt-oss) is the same rule: softmax, Top-K, normalised. A field that
holds a string names the attribute of the router, or of the block around it, that has the value. So a new architecture is
one row in `table.py`. Selection and weighting take separate logits: Sample-K selects by perturbed logits and weights by
unperturbed ones.

Shapes: T tokens, N experts, K selected, G groups.
"""

from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from vmoer.numerics.kernels import Ask

Score = Literal["softmax", "sigmoid", "sqrtsoftplus"]
_SCORES: dict[str, Score] = {"Softmax": "softmax", "Sigmoid": "sigmoid", "SqrtSoftplusActivation": "sqrtsoftplus"}


@dataclass(frozen=True)
class Rule:
    score: str = "softmax"
    """A Score, or the name of the attribute that says which."""
    top_k: str = "top_k"
    choose: Literal["score", "logit"] = "score"
    """What the bias is added to when experts are chosen."""
    bias: str | None = None
    groups: Literal["max", "top2"] | None = None
    """How a group of experts is scored: by its best expert or its best two."""
    group_fill: float = float("-inf")
    normalise: bool | str = False
    eps: float | str = 0.0
    scale: float | str = 1.0
    per_expert_scale: str | None = None
    returns: Literal["topk", "dense"] = "topk"
    """(logits, weights, indices) in any order, or llama4's (scores [T, N], logits)."""
    first: Literal["logits", "probabilities"] = "logits"
    """What the router returns in the logits' place."""
    weight: str | None = "weight"
    """Where W_r is, if the logits are linear in the router's input."""
    mixer: bool = False
    """Phi's sparsemixer: see `sparse_mixer`."""


def lookup(name: str, *owners: Any) -> Any:
    """The attribute of the first owner that has it, dots allowed in the name; None where no owner has it."""
    for owner in owners:
        value = owner
        for part in name.split("."):
            value = getattr(value, part, None)
        if value is not None:
            return value
    return None


@dataclass(frozen=True)
class Scoring:
    """A Rule with the values of one router filled in."""

    rule: Rule
    score: Score
    k: int
    normalise: bool
    eps: float
    scale: float
    groups: tuple[int, int] | None

    @classmethod
    def of(cls, rule: Rule, router: Any, block: Any) -> "Scoring":
        def value(field: Any, default: Any) -> Any:
            if not isinstance(field, str):
                return field
            found = lookup(field.removeprefix("1/"), router, block)
            if found is None:
                return default
            return 1 / found if field.startswith("1/") else found

        score = rule.score if rule.score in _SCORES.values() else value(rule.score, "softmax")
        score = score if isinstance(score, str) else _SCORES[type(score).__name__]
        groups = None
        if rule.groups and getattr(router, "topk_method", "group") != "greedy":
            count, kept = value("num_group", None) or value("n_group", None), value("topk_group", None)
            groups = (int(count), int(kept)) if count and kept and count > 1 else None
        return cls(
            rule=rule,
            score=cast(Score, score),
            k=int(value(rule.top_k, 0)),
            normalise=bool(value(rule.normalise, False)),
            eps=float(value(rule.eps, 0.0)),
            scale=float(value(rule.scale, 1.0)),
            groups=groups,
        )

    def ask(self) -> Ask | None:
        """The rule as a fused kernel takes it; None where it is more than softmax, Top-K, normalise."""
        rule = self.rule
        more = rule.bias or self.groups or rule.per_expert_scale or rule.mixer or rule.returns != "topk"
        if more or self.score != "softmax" or self.eps > 1e-12 or self.k > 16:
            return None
        return Ask(self.k, self.normalise, self.scale)

    def scores(self, logits_TN: Tensor) -> Tensor:
        if self.score == "softmax":
            return torch.softmax(logits_TN, -1)
        if self.score == "sigmoid":
            return torch.sigmoid(logits_TN)
        return F.softplus(logits_TN).sqrt()

    def probabilities(self, logits_TN: Tensor) -> Tensor:
        """Scores as a distribution over experts, for gate entropy."""
        scores = self.scores(logits_TN)
        return scores if self.score == "softmax" else scores / scores.sum(-1, keepdim=True).clamp_min(1e-20)

    def choose(self, logits_TN: Tensor, bias_N: Tensor | None) -> Tensor:
        """The experts' indices, [T, K]."""
        plain = bias_N is None and self.groups is None
        if plain and (self.rule.choose == "logit" or self.score == "softmax"):
            return torch.topk(logits_TN, self.k, dim=-1).indices  # a softmax keeps the order; a sigmoid may saturate
        by_TN = logits_TN if self.rule.choose == "logit" else self.scores(logits_TN)
        if bias_N is not None:
            by_TN = by_TN + bias_N.float()
        if self.groups is not None:
            count, kept = self.groups
            grouped_TGn = by_TN.view(by_TN.shape[0], count, -1)
            best = 1 if self.rule.groups == "max" else 2
            group_TG = grouped_TGn.topk(best, dim=-1).values.sum(-1)
            keep_TG = torch.zeros_like(group_TG, dtype=torch.bool)
            keep_TG = keep_TG.scatter(1, group_TG.topk(kept, dim=-1).indices, True)
            by_TN = grouped_TGn.masked_fill(~keep_TG.unsqueeze(-1), self.rule.group_fill).view_as(by_TN)
        return torch.topk(by_TN, self.k, dim=-1).indices

    def weigh(self, logits_TN: Tensor, chosen_TK: Tensor, router: Any) -> Tensor:
        """The chosen experts' weights, [T, K]."""
        if self.rule.mixer:
            return sparse_mixer(logits_TN, chosen_TK, router.router_jitter_noise)
        weights_TK = self.scores(logits_TN).gather(-1, chosen_TK)
        if self.normalise:
            weights_TK = weights_TK / (weights_TK.sum(-1, keepdim=True) + self.eps)
        if self.rule.per_expert_scale is not None:
            weights_TK = weights_TK * lookup(self.rule.per_expert_scale, router)[chosen_TK]
        return weights_TK * self.scale


def sparse_mixer(logits_TN: Tensor, chosen_TK: Tensor, jitter: float) -> Tensor:
    """Phi's weights. The k-th expert's weight is its share of a softmax over the experts that are left and near the best of them.

    "Near" is relative to the logits' size, so the rule is not invariant to a shift. This is its evaluation form: in training the
    model adds noise, and ours takes that noise's place. An expert alone in its softmax has weight 1 whatever its logit, so
    the gradient is taken from the softmax over all experts that are left (straight-through).
    """
    weights = []
    left_TN = logits_TN
    for k in range(chosen_TK.shape[-1]):
        best_T1 = left_TN.max(-1, keepdim=True).values.detach()
        far_TN = (best_T1 - logits_TN) / logits_TN.abs().clamp(min=best_T1).detach() > 2 * jitter
        expert_T1 = chosen_TK[:, k : k + 1]
        far_TN = far_TN.scatter(-1, expert_T1, False)  # a sampled expert counts even where it is not near
        weight_T1 = torch.softmax(left_TN.masked_fill(far_TN, float("-inf")), -1).gather(-1, expert_T1)
        if logits_TN.requires_grad:
            soft_T1 = torch.softmax(left_TN, -1).gather(-1, expert_T1)
            weight_T1 = weight_T1.detach() + soft_T1 - soft_T1.detach()
        weights.append(weight_T1)
        left_TN = left_TN.scatter(-1, expert_T1, float("-inf"))
    return torch.cat(weights, -1)
