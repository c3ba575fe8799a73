"""Where the rows of each expert stand, from offsets that stay on their device: every buffer's size follows from T and E."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fast.layers.gather import gather_transposed
from reference.training.grouped import padded_rows


@dataclass(frozen=True)
class Layout:
    """T rows sorted by expert; for sums over tokens P rows, where each group is followed by zeros to a multiple of `step`."""

    #: (E,) int32: the row after each group, among T rows and among P.
    offsets: torch.Tensor
    ends: torch.Tensor
    rows: int
    step: int
    #: (P,) int32: the row at each of P places, -1 for zeros. None where step is 1: rows stay where they are.
    source: torch.Tensor | None

    @property
    def experts(self) -> int:
        """How many experts."""
        return int(self.offsets.shape[0])

    def of_rows(self) -> torch.Tensor:
        """(T,) int64: the expert of each row, E for rows of none."""
        return _owners(self.offsets, self.rows, 1)

    def of_chunks(self) -> torch.Tensor:
        """(P / step,) int64: the expert of each `step` of P rows, E beyond the last."""
        return _owners(self.ends, padded_rows(self.rows, self.experts, self.step), self.step)

    def columns(self, x: torch.Tensor) -> torch.Tensor:
        """x (T, C) as (C, P): groups and zeros after each. A view where nothing is padded."""
        return x.t() if self.source is None else gather_transposed(x, self.source)


def layout_of(offsets: torch.Tensor, rows: int, step: int) -> Layout:
    """The layout of `rows` rows in groups that end at `offsets` (E,) int32."""
    if step == 1:
        return Layout(offsets, offsets, rows, step, None)
    starts = torch.cat([offsets.new_zeros(1), offsets[:-1]])
    filled = (offsets - starts + (step - 1)) // step * step
    ends = torch.cumsum(filled, 0, dtype=torch.int32)
    place = torch.arange(padded_rows(rows, offsets.shape[0], step), device=offsets.device, dtype=torch.int32)
    owner = torch.searchsorted(ends, place, right=True)
    inside = owner < offsets.shape[0]
    owner = owner.clamp(max=offsets.shape[0] - 1)
    row = place - (ends - filled)[owner] + starts[owner]
    source = torch.where(inside & (row < offsets[owner]), row, -1)
    return Layout(offsets, ends, rows, step, source)


def _owners(ends: torch.Tensor, rows: int, step: int) -> torch.Tensor:
    places = torch.arange(0, rows, step, device=ends.device, dtype=torch.int32)
    return torch.searchsorted(ends, places, right=True)


__all__ = ["Layout", "layout_of"]
