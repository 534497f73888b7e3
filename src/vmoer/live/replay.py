"""Replaying a choice of experts: what reinforcement learning on MoE models needs.

The engine that samples a text and the model that is trained on it disagree on the experts of many tokens. Inside `replay` every
router takes the experts it is given,

    weight_k = the router's own rule, applied to its logits here and now, at expert k = given,

so that the weights have the gradient of the current logits. Experts come as `rec.experts`, [L, B, T, K], or as the rows that vLLM
returns, [T, L, K] a text. A token without experts chooses for itself: padding, and the last token of a generated text.

A router with a method attached does it itself (variational.py). The others get a forward hook. The hooks stay when the block
ends, and do nothing: gradient checkpointing runs layers again during backward, and must find them.

Shapes: L layers, B rows, T tokens, K selected.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vmoer import gates
from vmoer.errors import AttachError, InputError
from vmoer.gates import FoundRouter, Gate, Scoring, plans
from vmoer.live.attach import attachment_of
from vmoer.live.context import Attachment, documents
from vmoer.live.installing import DecoderHook, layer_of
from vmoer.live.variational import VariationalGate


@contextmanager
def replay(model: nn.Module, experts: Tensor | Sequence[Any], *, layers: Sequence[int] | None = None) -> Iterator[None]:
    """Inside the block the routers take the experts they are given, with weights from their logits here and now.

    Any model whose routers `vmoer.attach` supports will do, with a method attached or without, sharded by FSDP2 or not. Run
    as many passes inside as fit the same experts; backward may run outside.

    Args:
        model: A transformers model with MoE layers.
        experts: `rec.experts`, [layer, batch, token, K], or for each text (each row, or each document packed into one) what
            vLLM returned as `routed_experts`, [token, layer, K]. A row of -1 leaves a token its own choice. The last
            token may be missing, as it is in generated texts.
        layers: The decoder layers that the experts are of. By default those of `rec.experts` on this model, or all.
    """
    found = _routers(model)
    attachment = attachment_of(model)
    chosen = _chosen(experts, layers, found, [] if attachment is None else attachment.layers)
    attachment = attachment or _bare(found)
    for layer in chosen.layers:
        _prepare(model, found[layer], attachment)
    with attachment.asking(replay=chosen):
        yield


def _routers(model: nn.Module) -> dict[int, FoundRouter]:
    found: dict[int, FoundRouter] = {}
    for router in gates.find(model):
        if router.layer in found:
            raise AttachError(
                f"layer {router.layer} has two routers ({found[router.layer].path}, {router.path}): "
                "pass the submodel that holds one"
            )
        found[router.layer] = router
    if not found:
        raise AttachError(
            f"{type(model).__name__} has no MoE router: it is a dense model, or its routers are unknown here"
        )
    return found


_SIGNALS = (4, 8, 16)
"""Numbers of four bytes, of two or of one that vLLM's rows have behind the experts where vmoer's loader put signals."""

# -- experts, aligned with a pass --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Chosen:
    """Experts of layers, -1 where a token chooses."""

    layers: list[int]
    grid_LBTK: Tensor | None
    texts: list[Tensor]
    """[T, L, K] each, where there is no grid."""

    def of(self, positions_BT: Tensor, mask_BT: Tensor | None) -> dict[int, Tensor]:
        placed_LTK = (
            self._from_grid(positions_BT) if self.grid_LBTK is not None else self._from_texts(positions_BT, mask_BT)
        )
        return dict(zip(self.layers, placed_LTK.to(positions_BT.device), strict=True))

    def _from_grid(self, positions_BT: Tensor) -> Tensor:
        grid_LBTK = self.grid_LBTK
        assert grid_LBTK is not None
        (batch, tokens), given = positions_BT.shape, tuple(grid_LBTK.shape[1:3])
        if given not in ((batch, tokens), (batch, tokens - 1)):
            raise InputError(
                f"experts for {given[0]} x {given[1]} tokens were given, and the model runs on {batch} x {tokens}"
            )
        return F.pad(grid_LBTK, (0, 0, 0, tokens - given[1]), value=-1).flatten(1, 2)

    def _from_texts(self, positions_BT: Tensor, mask_BT: Tensor | None) -> Tensor:
        """Each text's rows at its real tokens, text after text."""
        real_BT = torch.ones_like(positions_BT, dtype=torch.bool) if mask_BT is None else mask_BT
        rows_B1 = torch.arange(len(positions_BT), device=positions_BT.device).unsqueeze(1)
        numbers_BT = rows_B1 * positions_BT.shape[1] + documents(positions_BT, mask_BT)
        counts = torch.unique_consecutive(numbers_BT[real_BT], return_counts=True)[1].tolist()
        given = [len(text) for text in self.texts]
        if len(counts) != len(given) or any(n - k not in (0, 1) for n, k in zip(counts, given, strict=True)):
            raise InputError(f"experts for texts of {given} tokens were given, and the model runs on texts of {counts}")
        padded = [
            F.pad(text, (0, 0, 0, 0, 0, n - len(text)), value=-1) for text, n in zip(self.texts, counts, strict=True)
        ]
        rows_TLK = torch.cat(padded)
        placed_LTK = rows_TLK.new_full((len(self.layers), real_BT.numel(), rows_TLK.shape[-1]), -1)
        placed_LTK[:, real_BT.reshape(-1).to(placed_LTK.device)] = rows_TLK.transpose(0, 1)
        return placed_LTK


def _chosen(
    experts: Any, asked: Sequence[int] | None, found: dict[int, FoundRouter], attached: Sequence[int]
) -> Chosen:
    """What was given, of the layers that it is of, checked."""
    if asked is not None and (odd := [layer for layer in asked if layer not in found]):
        raise InputError(f"layer {odd[0]} has no MoE router: those that have are {sorted(found)}")
    every = sorted(found)
    if isinstance(experts, Tensor | np.ndarray):
        grid_LBTK = _whole(experts)
        if grid_LBTK.dim() != 4:
            raise InputError(
                f"experts must be [layer, batch, token, K] or a list of [token, layer, K], not {tuple(grid_LBTK.shape)}"
            )
        fits = [list(x) for x in ((attached, every) if asked is None else (asked,)) if len(x) == len(grid_LBTK)]
        if not fits:
            raise InputError(f"experts of {len(grid_LBTK)} layers were given: say by layers= which they are")
        layers, texts = fits[0], []
        _check(grid_LBTK.flatten(1, 2), layers, found)
    else:
        rows, layers = [_whole(text) for text in experts], list(asked or every)
        if not rows or any(text.dim() != 3 for text in rows) or len({text.shape[1:] for text in rows}) != 1:
            raise InputError(
                f"experts must be one [token, layer, K] a text, not {[tuple(text.shape) for text in rows]}"
            )
        k = _scoring(found[layers[0]]).k
        wide, given = rows[0].shape[1:]
        if wide == len(layers):  # these layers alone, and otherwise every layer of the decoder
            places = list(range(wide))
        elif wide == _depth(found):
            places = layers
        else:
            raise InputError(f"experts of {wide} layers were given: say by layers= which they are")
        if given - k in _SIGNALS:
            given = k
        texts, grid_LBTK = [text[:, places, :given] for text in rows], None
        _check(torch.cat(texts).transpose(0, 1), layers, found)
    return Chosen(layers, grid_LBTK, texts)


def _depth(found: dict[int, FoundRouter]) -> int:
    """How many layers the decoder has, those without experts among them: of as many vLLM has rows."""
    decoder: Any = next(iter(found.values())).decoder
    return int(getattr(decoder.config, "num_hidden_layers", max(found) + 1))


def _whole(experts: Any) -> Tensor:
    """As whole numbers; vLLM has them in the narrowest type they fit, which PyTorch may not have."""
    if isinstance(experts, Tensor):
        return experts.detach().long()
    return torch.from_numpy(np.asarray(experts).astype(np.int64))


def _check(experts_LTK: Tensor, layers: Sequence[int], found: dict[int, FoundRouter]) -> None:
    """Refuse routers that take nothing, and experts that are too many, too few, out of range or given twice to a token."""
    ordered_LTK = experts_LTK.sort(-1).values
    most = int(ordered_LTK.max())
    for layer in layers:
        if found[layer].reason:
            raise AttachError(f"{found[layer].path} ({found[layer].kind}) cannot be replayed: {found[layer].reason}")
        if (k := _scoring(found[layer]).k) != experts_LTK.shape[-1]:
            raise InputError(f"layer {layer} chooses {k} experts a token, and {experts_LTK.shape[-1]} were given")
        if most >= (count := gates.expert_count(found[layer])):
            raise InputError(f"expert {most} was given, and {found[layer].path} has {count}, from 0")
    twice_LT = ((ordered_LTK[..., 1:] == ordered_LTK[..., :-1]) & (ordered_LTK[..., :-1] >= 0)).any(-1)
    if bool(twice_LT.any()):
        place, token = (int(x) for x in twice_LT.nonzero()[0])
        raise InputError(f"layer {layers[place]}, token {token}: an expert is given twice")
    mixed_LT = (ordered_LTK[..., 0] < 0) & (ordered_LTK[..., -1] >= 0)
    if bool(mixed_LT.any()) or int(ordered_LTK.min()) < -1:
        raise InputError("a token's experts must all be given, or all be -1")


def _scoring(found: FoundRouter) -> Scoring:
    assert found.rule is not None
    return Scoring.of(found.rule, found.router, found.block)


# -- hooks on routers that nothing is attached to ----------------------------------------------------------------------


class BareHook(DecoderHook):
    """Stands for the method where none is attached: notes the pass under way, while experts are replayed."""

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self.attachment.asked.replay is not None or self.attachment.now is not None:
            super().__call__(module, args, kwargs)


def _bare(found: dict[int, FoundRouter]) -> Attachment:
    decoder = next(iter(found.values())).decoder
    for hook in decoder._forward_pre_hooks.values():
        if isinstance(hook, BareHook):
            return hook.attachment
    attachment = Attachment(routers={})
    attachment.hooks.append(decoder.register_forward_pre_hook(BareHook(attachment), with_kwargs=True))
    return attachment


def _prepare(model: nn.Module, found: FoundRouter, attachment: Attachment) -> None:
    """Let a router take what it is given, and see that it can."""
    hooks = found.router._forward_hooks.values()
    if isinstance(found.router, VariationalGate) or any(
        isinstance(hook, RouterHook) and hook.attachment is attachment for hook in hooks
    ):
        return
    hook = RouterHook(attachment, found)
    if not any(type(p.data).__name__ == "DTensor" for p in found.router.parameters()):
        hook.probe()
    attachment.decoder_layers.append(layer_of(model, found))
    attachment.hooks.append(found.router.register_forward_hook(hook, with_kwargs=True))


class RouterHook:
    """Behind a router: its answer with the experts that the pass under way is to take, if any."""

    def __init__(self, attachment: Attachment, found: FoundRouter) -> None:
        self.attachment, self.found = attachment, found
        self.gate: Gate | None = None

    def probe(self) -> Gate:
        """Learn the router's return value, out of sight of other hooks. Weights that are spread over processes are whole only
        while a pass runs."""
        router = self.found.router
        hooks, router._forward_hooks = router._forward_hooks, type(router._forward_hooks)()
        try:
            with plans.lifted(router), torch.no_grad():
                self.gate = Gate.probe(self.found)
        except AttachError as error:
            raise AttachError(f"{self.found.path} ({self.found.kind}) cannot be replayed: {error}") from None
        finally:
            router._forward_hooks = hooks
        return self.gate

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> Any:
        attachment, layer = self.attachment, self.found.layer
        if attachment.now is None and attachment.asked.replay is None:
            return None
        states = args[0] if args else next(iter(kwargs.values()))
        tokens = states.numel() // states.shape[-1]
        replayed_TK = attachment.replayed(layer, tokens, states.device)
        if replayed_TK is None:
            return None
        gate = self.gate or self.probe()
        return gate.replay(module, out, replayed_TK, args[1:], kwargs)[0]
