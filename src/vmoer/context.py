"""Which tokens a forward pass is about: their positions, rows and mask, and what the attached routers share."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from vmoer.errors import InputError
from vmoer.routers import Config, Router, Routing

if TYPE_CHECKING:
    from vmoer.recording import Record

DOCUMENT = 2**20  # rows that a document packed behind others in one row counts as: no batch has as many


@dataclass
class Pass:
    """One run of the decoder. Tokens are numbered as they are routed: row by row."""

    positions_T: Tensor
    rows_T: Tensor
    mask_BT: Tensor | None
    shape: tuple[int, int]
    step: int | None = None
    passes_T: Tensor | None = None
    record: "Record | None" = None
    seen: set[int] = field(default_factory=set)
    drawn: dict[Any, Tensor] = field(default_factory=dict)
    parts: tuple["Pass", ...] = ()
    """Columns that are routed apart from each other, in their order: those that average, and those that draw."""

    def split(self, x: Tensor) -> list[Tensor]:
        """What each part is given of the tokens' states, [B T, D] or [B, T, D]."""
        columns = x.view(*self.shape, -1).split([part.shape[1] for part in self.parts], 1)
        return [own.flatten(0, 1) if x.dim() == 2 else own.contiguous() for own in columns]

    def join(self, given: tuple[Tensor, ...]) -> Tensor:
        """What the parts answered, in the tokens' order."""
        columns = [x.reshape(*part.shape, -1) for part, x in zip(self.parts, given, strict=True)]
        whole = torch.cat(columns, 1)
        return whole.flatten(0, 1) if given[0].dim() == 2 else whole

    def hand_over(self, layer: int, method: Router, u_TD: Tensor, routing: Routing, chosen_TK: Tensor) -> None:
        """Give the record what a layer routed; once, though checkpointing may run the layer again."""
        if self.record is not None and layer not in self.seen:
            self.seen.add(layer)
            self.record.add(self, layer, method, u_TD, routing, chosen_TK)


@dataclass
class Attachment:
    """What the attached routers of one model share."""

    config: Config
    layers: list[int]
    enabled: bool = True
    checking: bool = False
    fired: bool = False
    record: "Record | None" = None
    step: int | None = None
    first_row: int = 0
    passes: Tensor | int | None = None
    collector: Any = None
    shares_prompts: bool | None = None
    """Whether answers can be averaged in one pass (vmoer/averaging.py); not known yet."""
    now: Pass | None = None
    required_grad: list[nn.Parameter] = field(default_factory=list)
    hooks: list[Any] = field(default_factory=list)

    def begin(self, positions_BT: Tensor, mask_BT: Tensor | None) -> None:
        """A decoder begins to run on these tokens."""
        drawn = self.passes.shape[1] if isinstance(self.passes, Tensor) and self.passes.dim() == 2 else None
        if drawn is None or drawn == positions_BT.shape[1]:
            self.now = self._pass(positions_BT, mask_BT, self.passes)
            return
        before, behind = slice(None, -drawn), slice(-drawn, None)
        masks = (None, None) if mask_BT is None else (mask_BT[:, before], mask_BT[:, behind])
        parts = (
            self._pass(positions_BT[:, before], masks[0], None),
            self._pass(positions_BT[:, behind], masks[1], self.passes),
        )
        shape = (positions_BT.shape[0], positions_BT.shape[1])
        self.now = Pass(positions_BT.reshape(-1), positions_BT.new_empty(0), mask_BT, shape, parts=parts)

    def _pass(self, positions_BT: Tensor, mask_BT: Tensor | None, passes: Tensor | int | None) -> Pass:
        batch, tokens = positions_BT.shape
        device = positions_BT.device
        rows_T = (self.first_row + torch.arange(batch, device=device)).repeat_interleave(tokens)
        if self.step is not None:
            rows_T = rows_T + DOCUMENT * documents(positions_BT, mask_BT).reshape(-1)
        passes_T = None
        if passes is not None:
            given = torch.as_tensor(passes, device=device)
            passes_T = given.reshape(-1) if given.dim() == 2 else given.expand(batch).repeat_interleave(tokens)
        begun = Pass(
            positions_T=positions_BT.reshape(-1),
            rows_T=rows_T,
            mask_BT=mask_BT,
            shape=(batch, tokens),
            step=self.step,
            passes_T=passes_T,
            record=self.record,
        )
        if self.record is not None:
            self.record.begin(begun)
        return begun

    def current(self, u_TD: Tensor) -> Pass:
        """The pass these states belong to. A router run by itself counts its tokens as one row."""
        if self.now is not None and len(self.now.positions_T) == len(u_TD):
            return self.now
        arange = torch.arange(len(u_TD), device=u_TD.device)
        return Pass(arange, torch.zeros_like(arange), None, (1, len(u_TD)), step=self.step)

    def __getstate__(self) -> dict[str, Any]:
        """A copy of the model starts outside any pass or record."""
        return {**self.__dict__, "record": None, "now": None, "collector": None, "step": None, "passes": None}


def documents(positions_BT: Tensor, mask_BT: Tensor | None) -> Tensor:
    """Which of the documents packed into its row a token belongs to, [B, T], from 0: one starts where positions do again.

    Training noise is keyed by it beside the row, so that documents in one row draw apart and a row draws the same in any batch.
    """
    starts_BT = (positions_BT[:, 1:] < positions_BT[:, :-1]) | (positions_BT[:, 1:] == 0)
    if mask_BT is not None:
        starts_BT = starts_BT & mask_BT[:, 1:] & mask_BT[:, :-1]
    return torch.nn.functional.pad(starts_BT.long().cumsum(-1), (1, 0))


def positions_and_mask(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, Tensor | None]:
    """Each token's position in its own sequence without padding, [B, T], and the mask, [B, T], from a decoder's arguments."""
    states = kwargs.get("input_ids")
    if states is None:
        states = kwargs.get("inputs_embeds")
    if states is None:
        states = args[0]
    batch, tokens = states.shape[:2]
    mask = kwargs.get("attention_mask")
    if mask is None and len(args) > 1 and isinstance(args[1], Tensor):
        mask = args[1]
    mask_BT = None
    if isinstance(mask, Tensor) and mask.dim() == 2 and mask.shape[1] >= tokens:
        mask_BT = mask[:, -tokens:].bool()
    position_ids = kwargs.get("position_ids")
    if isinstance(position_ids, Tensor):
        position_ids = position_ids[0] if position_ids.dim() == 3 else position_ids
        return position_ids.expand(batch, tokens), mask_BT
    if any(kwargs.get(name) is not None for name in ("cu_seq_lens_q", "seq_idx")):
        raise InputError("packed rows need position_ids that restart with every document: noise is keyed by them")
    if mask_BT is not None:
        return (mask.long().cumsum(-1) - 1).clamp_min(0)[:, -tokens:], mask_BT  # type: ignore[union-attr]
    past = kwargs.get("past_key_values")
    seen = past.get_seq_length() if past is not None and hasattr(past, "get_seq_length") else 0
    return (torch.arange(tokens, device=states.device) + seen).expand(batch, tokens), mask_BT
