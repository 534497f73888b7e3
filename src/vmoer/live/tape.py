"""What compiled code records on: memory that stays where it is, written through a cursor that lives on the device.

A record in eager code is a Python object that grows with every pass. Compiled code would be compiled again each time, and a CUDA
graph runs no Python at all and answers into memory that its next replay overwrites. So where a compiled model is recorded, all
layers of a pass write here in place, at the cursor, and move it on; the record takes a copy when its block ends. Tapes belong
to a thread and are used again by its next record, so that nothing is compiled for a record alone.

Shapes: L layers, G signals, C columns of the tape, K experts a token, P passes, B rows and T columns of a pass.
"""

import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

COLUMNS = 2**15
"""Tokens that a tape has room for, at least."""
TENSORS = ("signals_LGC", "experts_LCK", "mask_C", "passes_P2", "cursor", "count")


class TapedPass(NamedTuple):
    """One pass as it was written."""

    shape: tuple[int, int]
    mask_BT: Tensor
    signals_LGT: Tensor
    experts_LTK: Tensor


@dataclass(eq=False)
class Tape:
    names: tuple[str, ...]
    layers: tuple[int, ...]
    signals_LGC: Tensor
    experts_LCK: Tensor
    mask_C: Tensor
    passes_P2: Tensor
    """Rows and columns of each pass."""
    cursor: Tensor
    count: Tensor
    of: Any = None
    """The attached model it is for: a weak reference, since tapes are kept by it; on a copy that was taken the model itself."""
    asks: Any = None
    """What its routers are asked."""

    @classmethod
    def blank(cls, names: Sequence[str], layers: Sequence[int], k: int, columns: int, device: torch.device) -> "Tape":
        """An empty one. Its tensors are marked as staying where they are, which lets a CUDA graph write into them."""
        shape = len(layers), columns
        tape = cls(
            tuple(names),
            tuple(layers),
            torch.zeros(shape[0], len(names), columns, device=device),
            torch.zeros(*shape, k, dtype=torch.int16, device=device),
            torch.zeros(columns, dtype=torch.bool, device=device),
            torch.zeros(columns, 2, dtype=torch.int64, device=device),
            torch.zeros(1, dtype=torch.int64, device=device),
            torch.zeros(1, dtype=torch.int64, device=device),
        )
        for tensor in tape.tensors():
            torch._dynamo.mark_static_address(tensor)
        return tape

    def tensors(self) -> list[Tensor]:
        return [getattr(self, name) for name in TENSORS]

    @property
    def columns(self) -> int:
        return len(self.mask_C)

    def rewind(self) -> None:
        self.cursor.zero_()
        self.count.zero_()

    def write(
        self,
        shape: tuple[int, int],
        mask_BT: Tensor | None,
        signals: Sequence[Tensor],
        columns: Sequence[int],
        experts: Sequence[Tensor],
    ) -> None:
        """One pass, every layer's signals [T, ...] of which these columns are wanted, and experts [T, K], in order, at the
        cursor. Beyond the tape's end nothing is kept apart, and `taken` says so."""
        tokens, device = shape[0] * shape[1], self.cursor.device
        place_T = (self.cursor + torch.arange(tokens, device=device)).clamp_max(self.columns - 1)
        if self.names:
            found_LTG = _stacked([x.to(device) for x in signals])
            self.signals_LGC.index_copy_(2, place_T, torch.stack([found_LTG[:, :, g] for g in columns], 1))
        self.experts_LCK.index_copy_(1, place_T, _stacked([x.to(device, torch.int16) for x in experts]))
        mask_T = (
            torch.ones(tokens, dtype=torch.bool, device=device) if mask_BT is None else mask_BT.reshape(-1).to(device)
        )
        self.mask_C.index_copy_(0, place_T, mask_T)
        here = self.count.clamp_max(self.columns - 1)
        rows_columns = torch.stack([torch.full((1,), n, dtype=torch.int64, device=device) for n in shape], 1)
        self.passes_P2.index_copy_(0, here, rows_columns)
        self.cursor.add_(tokens)
        self.count.add_(1)

    def taken(self) -> "Tape":
        """A copy of what is on it, without waiting for the device."""
        copies: dict[str, Any] = {name: getattr(self, name).clone() for name in TENSORS}
        return replace(self, of=self.of(), **copies)

    def passes(self) -> list[TapedPass] | None:
        """What was written, pass by pass; None where there was no room for all of it."""
        used, count = int(self.cursor), int(self.count)
        if used > self.columns or count > len(self.passes_P2):
            return None
        found, start = [], 0
        for rows, columns in self.passes_P2[:count].tolist():
            stop = start + rows * columns
            mask_BT = self.mask_C[start:stop].view(rows, columns)
            parts = self.signals_LGC[:, :, start:stop], self.experts_LCK[:, start:stop]
            found.append(TapedPass((rows, columns), mask_BT, *parts))
            start = stop
        return found


def _stacked(tensors: Sequence[Tensor]) -> Tensor:
    """The compiler makes one kernel of at most eight tensors' copies; of more it makes a kernel each."""
    return torch.cat([torch.stack(tuple(tensors[i : i + 8])) for i in range(0, len(tensors), 8)])


class _Local(threading.local):
    def __init__(self) -> None:
        self.tapes: weakref.WeakKeyDictionary[Any, Tape] = weakref.WeakKeyDictionary()


_LOCAL = _Local()


def tape_for(
    attachment: Any,
    asks: Any,
    name: Callable[[], Sequence[str]],
    *,
    layers: Sequence[int],
    k: int,
    columns: int,
    device: torch.device,
) -> Tape:
    """This thread's tape for an attached model, rewound: the former one where it will do.

    Args:
        asks: what is asked of the routers; where it is as before, so are the signals.
        name: says which signals there will be.
        columns: tokens that there must be room for.
    """
    tape = _LOCAL.tapes.get(attachment)
    if (
        tape is None
        or (tape.asks, tape.layers, tape.cursor.device) != (asks, tuple(layers), device)
        or tape.columns < columns
    ):
        tape = _LOCAL.tapes[attachment] = Tape.blank(name(), layers, k, max(columns, COLUMNS), device)
        tape.of, tape.asks = weakref.ref(attachment), asks
    tape.rewind()
    return tape


def is_compiled(model: Any) -> bool:
    """Whether this is a compiled model, or one that `model.compile()` was called on."""
    return hasattr(model, "_orig_mod") or getattr(model, "_compiled_call_impl", None) is not None
