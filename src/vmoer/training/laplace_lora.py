"""Laplace-LoRA (Yang et al. 2024): a Gaussian posterior over a trained adapter's A and B, and answers of the linearised model.

    H = sum_n J_n' (diag p_n - p_n p_n') J_n + lambda I   ~   (sum a a') x (sum g g') / T + lambda I        for each A and B
    f ~ N(f_MAP(x), J(x) H^-1 J(x)'),    p(y | x) = (1/M) sum_m softmax(f_m)

a are a matrix's inputs, g its outputs' gradients, over all T tokens (K-FAC, its "expand" form). The prior precision lambda is the
one with the largest evidence, so that no validation question is used. Answers are those of the linearised model: a sample of the
weights themselves leaves the region where the Gaussian means anything, and the paper linearises too. C letters take C backward
passes; then M points, fixed by the seed, stand for the Gaussian over the C logits, so that M costs nothing.

The matrices are those of the attention's adapters, as in the paper. Those of experts are left at their MAP values: each token
goes through a few of them, and where they are stacked in one tensor neither a nor g can be seen.

Shapes: B questions, T tokens of a batch, C letters, M samples, I inputs and O outputs of a matrix.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from scipy.optimize import minimize_scalar
from torch import Tensor, nn

from vmoer.errors import InputError
from vmoer.inference.averaging import sample_logits_by
from vmoer.live.inputs import context_length
from vmoer.models import Opened, open_model
from vmoer.numerics.noise import sobol_normal
from vmoer.tasks import Question
from vmoer.tasks.batches import by_length
from vmoer.training.data import Examples, collate, encode_questions
from vmoer.training.lora import folded_quickly
from vmoer.training.objective import answer_log_probs

KEY = "laplace-lora"
BATCH_TOKENS = 2048
"""Of a batch: its passes are kept for the backward passes, as in training."""
BOUNDS = (1e-4, 1e8)
"""Between which the prior precision is looked for."""


def open_fitted(
    run: Path,
    questions: Sequence[Question],
    *,
    seed: int = 0,
    device: str | torch.device | None = None,
    dtype: torch.dtype | str | None = None,
) -> Opened:
    """A run of `map` whose answers, averaged by "full", are those of the posterior over its adapter.

    Args:
        run: With a LoRA adapter.
        questions: Those that stage 1 was trained on.
        seed: Of the points that stand for the Gaussian.
        device: As of `open_model`.
        dtype: As of `open_model`.
    """
    opened = open_model(run, device=device, dtype=dtype)
    merge_others(opened.model)
    with folded_quickly(opened.model):
        examples = encode_questions(opened.tokenizer, questions, context_length(opened.model))
        sample_logits_by(opened.model, fit(opened.model, examples, seed=seed).sample)
    return opened


class Seen(NamedTuple):
    """What a backward pass tells of a matrix."""

    a_BTI: Tensor
    g_CBTO: Tensor
    """The gradient of each letter's logit."""


def matrices(model: nn.Module) -> dict[str, nn.Linear]:
    """A and B of every adapter of an attention projection, by path."""
    found = {
        path: module
        for path, module in model.named_modules()
        if path.rpartition(".")[0].rpartition(".")[2] in ("lora_A", "lora_B")
        and isinstance(module, nn.Linear)
        and "experts" not in path
    }
    if not found:
        raise InputError("this model has no LoRA adapter on its attention: there is nothing to put a posterior on")
    return found


def merge_others(model: nn.Module) -> None:
    """Add the adapters of experts to their weights: they have no posterior, and need not be added in every pass."""
    own = tuple(matrices(model))
    for path, module in model.named_modules():
        if hasattr(module, "lora_A") and not any(name.startswith(f"{path}.lora_") for name in own):
            module.merge()  # type: ignore[operator]


@contextmanager
def _watched(layers: Mapping[str, nn.Linear]) -> Iterator[dict[str, tuple[Tensor, Tensor]]]:
    """Inside the block the input and the output of each matrix, as its last pass had them."""
    found: dict[str, tuple[Tensor, Tensor]] = {}

    def note(path: str) -> Callable[..., Tensor]:
        def hook(module: nn.Module, args: tuple[Tensor, ...], out: Tensor) -> Tensor:
            out = out if out.requires_grad else out.requires_grad_()  # of the first layers nothing needs a gradient
            found[path] = args[0].detach(), out
            return out

        return hook

    handles = [layer.register_forward_hook(note(path)) for path, layer in layers.items()]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def jacobians(layers: Mapping[str, nn.Linear], forward: Callable[[], Tensor]) -> tuple[Tensor, dict[str, Seen]]:
    """The logits [B, C] that `forward` gives, and what is known of their derivatives: one backward pass for each letter."""
    with torch.enable_grad(), _watched(layers) as found:
        logits_BC = forward()
        outs = [out for _, out in found.values()]
        letters = range(logits_BC.shape[1])
        grads = [torch.autograd.grad(logits_BC[:, c].sum(), outs, retain_graph=c + 1 < len(letters)) for c in letters]
    seen = {path: Seen(a, torch.stack([g[i] for g in grads])) for i, (path, (a, _)) in enumerate(found.items())}
    return logits_BC.detach(), seen


@dataclass
class Kronecker:
    """The curvature of one matrix, a b' / T: sums first, then eigenvalues and eigenvectors."""

    a_II: Tensor
    g_OO: Tensor

    def add(self, a_NI: Tensor, g_CBTO: Tensor, hessian_BCC: Tensor) -> None:
        self.a_II += a_NI.mT @ a_NI
        weighted_CBTO = torch.einsum("bcd,dbto->cbto", hessian_BCC, g_CBTO)
        self.g_OO += weighted_CBTO.flatten(0, 2).mT @ g_CBTO.flatten(0, 2)


class Eigen(NamedTuple):
    """The same in its eigenbasis."""

    a_II: Tensor
    g_OO: Tensor
    values_OI: Tensor


@dataclass(frozen=True)
class Posterior:
    """The Gaussian over the matrices."""

    layers: dict[str, nn.Linear]
    eigen: dict[str, Eigen]
    precision: float
    """The prior's, lambda."""
    seed: int = 0

    def covariance(self, seen: Mapping[str, Seen]) -> Tensor:
        """J H^-1 J', [B, C, C]."""
        total: Any = 0.0
        for path, (a_BTI, g_CBTO) in seen.items():
            eigen = self.eigen[path]
            jacobian_CBOI = torch.einsum("cbto,bti->cboi", g_CBTO @ eigen.g_OO, a_BTI @ eigen.a_II)
            scaled_CBOI = jacobian_CBOI / (eigen.values_OI + self.precision)
            total = total + torch.einsum("cboi,dboi->bcd", scaled_CBOI, jacobian_CBOI)
        found: Tensor = total
        return found

    def sample(self, forward: Callable[[], Tensor], passes: int) -> Tensor:
        """Logits of M samples of the linearised model, [M, B, C]."""
        logits_BC, seen = jacobians(self.layers, forward)
        # the symmetric root, since another one is not continuous: answers would depend on the batch by more than rounding
        values_BC, vectors_BCC = torch.linalg.eigh(self.covariance(seen).double())
        root_BCC = vectors_BCC * values_BC.clamp_min(0).sqrt().unsqueeze(-2) @ vectors_BCC.mT
        points_MC = sobol_normal(passes, logits_BC.shape[1], self.seed).to(root_BCC)
        return logits_BC.double() + torch.einsum("bcd,md->mbc", root_BCC, points_MC)


def fit(model: Any, examples: Examples, *, seed: int = 0, batch_tokens: int = BATCH_TOKENS) -> Posterior:
    """The posterior at the model's adapter, given the questions that it was trained on."""
    layers, device = matrices(model), next(model.parameters()).device
    sums = {
        path: Kronecker(
            *(
                torch.zeros(n, n, device=device, dtype=layer.weight.dtype)
                for n in (layer.in_features, layer.out_features)
            )
        )
        for path, layer in layers.items()
    }
    tokens = 0
    for rows in by_length(examples.lengths, batch_tokens):
        batch = collate(examples, rows, device)
        real_BT = batch.inputs["attention_mask"].bool()
        log_p_BC, seen = jacobians(layers, lambda batch=batch: answer_log_probs(model, batch))  # type: ignore[misc]
        p_BC = log_p_BC.exp()
        hessian_BCC = torch.diag_embed(p_BC) - p_BC.unsqueeze(-1) * p_BC.unsqueeze(-2)
        for path, (a_BTI, g_CBTO) in seen.items():
            sums[path].add(a_BTI[real_BT], g_CBTO, hessian_BCC.to(g_CBTO.dtype))
        tokens += int(real_BT.sum())
    return posterior(layers, sums, tokens, seed)


def posterior(layers: dict[str, nn.Linear], sums: Mapping[str, Kronecker], tokens: int, seed: int = 0) -> Posterior:
    """From the sums over so many tokens."""
    eigen = {}
    for path, (own, layer) in {path: (sums[path], layers[path]) for path in layers}.items():
        (a_I, a_II), (g_O, g_OO) = (torch.linalg.eigh(x.double()) for x in (own.a_II, own.g_OO))
        values_OI = torch.outer(g_O.clamp_min(0), a_I.clamp_min(0)) / tokens
        eigen[path] = Eigen(*(x.to(layer.weight.dtype) for x in (a_II, g_OO, values_OI)))
    square = sum(float(layer.weight.detach().double().square().sum()) for layer in layers.values())
    precision = best_precision([own.values_OI for own in eigen.values()], square)
    return Posterior(layers, eigen, precision, seed)


def log_evidence(values: Sequence[Tensor], square: float, precision: float) -> float:
    """The part of the log evidence that the prior precision decides: P/2 log lambda - lambda |w|^2 / 2 - 1/2 log det H."""
    parts = [torch.log1p(value.double() / precision).sum() for value in values]
    return -0.5 * (precision * square + float(torch.stack(parts).sum()))


def best_precision(values: Sequence[Tensor], square: float) -> float:
    """The prior precision with the largest evidence."""

    def cost(log: float) -> float:
        return -log_evidence(values, square, math.exp(log))

    low, high = (math.log(bound) for bound in BOUNDS)
    return math.exp(minimize_scalar(cost, bounds=(low, high), method="bounded", options={"xatol": 1e-4}).x)
