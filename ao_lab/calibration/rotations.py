"""What becomes of one parameter when channels of a model are rotated for good: rounded once, and finished once begun."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

import fast

#: Elements that are rotated at a time.
CHUNK = 1 << 26


@dataclass
class Change:
    """What becomes of one parameter: its axis of inputs by a gain and rotated, its axis of outputs rotated, or a gain gone.

    Sizes of blocks are those of the residual stream's rotation, or an axis' own.
    """

    parameter: nn.Parameter
    reads: int | None = None
    gain: torch.Tensor | None = None
    writes: int | None = None
    #: Of a gain: the value that multiplies by 1.
    neutral: float | None = None
    new: torch.Tensor | None = None
    reads_size: int | None = None
    writes_size: int | None = None
    #: Of the axis of outputs: those that are rotated, None for all.
    part: slice | None = None

    def values(self, block: int, device: torch.device) -> torch.Tensor:
        """The new values, in the parameter's dtype and place."""
        w = self.parameter.data
        if self.neutral is not None:
            return torch.full_like(w, self.neutral)
        new = w.to(device)
        if self.reads is not None:
            gain = None if self.gain is None else self.gain.to(device)
            last = self.writes is None
            new = _along(new, self.reads, gain, self.reads_size or block, w.dtype if last else torch.float64)
        if self.writes is not None:
            new = _along(new, self.writes, None, self.writes_size or block, w.dtype, self.part)
        return new.to(w.device)

    def finish(self, block: int, device: torch.device) -> None:
        """Put the new values in place; once begun, again with the same result."""
        if self.new is None:
            self.new = self.values(block, device)
        self.parameter.data = self.new


def _along(
    w: torch.Tensor, axis: int, gain: torch.Tensor | None, block: int, dtype: torch.dtype, part: slice | None = None
) -> torch.Tensor:  # fmt: skip
    """w, times a gain along an axis, rotated along it (or along a part of it), some rows at a time; rounded once."""
    moved = w.movedim(axis, -1)
    if part is not None:
        result = moved.to(dtype, copy=True)
        result[..., part] = _along(moved[..., part], -1, gain, block, dtype)
        return result.movedim(-1, axis).contiguous()
    rows = moved.reshape(-1, moved.shape[-1])
    result = torch.empty(rows.shape, dtype=dtype, device=w.device)
    step = max(CHUNK // rows.shape[1], 1)
    for start in range(0, len(rows), step):
        some = rows[start : start + step]
        some = some.double() if gain is None else fast.fold_gain(gain, some.double())
        result[start : start + step] = fast.rotate(some, block, dtype=dtype)
    return result.reshape(moved.shape).movedim(-1, axis).contiguous()
