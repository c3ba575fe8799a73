"""Where the rows of each expert stand, from offsets that stay on their device: every buffer's size follows from T and E."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fast.device import has_kernels, is_traced, is_transformed
from fast.layers.gather import gather_transposed
from reference.training.grouped import padded_rows

#: Places that have one owner: every step beyond 1 is a multiple of it, in recipes.
GRAIN = 16


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
    #: (P / 16,) int32: the group of each 16 places, E beyond the last. None where step is no multiple of 16.
    owners: torch.Tensor | None = None

    @property
    def experts(self) -> int:
        """How many experts."""
        return int(self.offsets.shape[0])

    @property
    def places(self) -> int:
        """P."""
        return padded_rows(self.rows, self.experts, self.step)

    def of_rows(self) -> torch.Tensor:
        """(T,) int64: the expert of each row, E for rows of none."""
        return _owners(self.offsets, self.rows, 1)

    def of_chunks(self) -> torch.Tensor:
        """(P / step,) int64: the expert of each `step` of P rows, E beyond the last."""
        return _owners(self.ends, self.places, self.step)

    def columns(self, x: torch.Tensor) -> torch.Tensor:
        """x (T, C) as (C, P): groups and zeros after each. A view where nothing is padded."""
        return x.t() if self.source is None else gather_transposed(x, self.source)


def layout_of(offsets: torch.Tensor, rows: int, step: int) -> Layout:
    """The layout of `rows` rows in groups that end at `offsets` (E,) int32."""
    if step == 1:
        return Layout(offsets, offsets, rows, step, None)
    if step % GRAIN:
        ends, source = _tables(offsets, rows, step)
        return Layout(offsets, ends, rows, step, source)
    traced = is_traced(offsets) or is_transformed()
    ends, source, owners = (_layout_op if traced else _layout)(offsets, rows, step)
    return Layout(offsets, ends, rows, step, source, owners)


def _layout(offsets: torch.Tensor, rows: int, step: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """ends, source and owners: by a kernel, or by torch operations."""
    places = padded_rows(rows, offsets.shape[0], step)
    if has_kernels(offsets) and places:
        from fast.kernels.grouped import layout

        if offsets.shape[0] <= layout.MOST_EXPERTS:
            return layout.group_layout(offsets.contiguous(), rows, places, step)
    ends, source = _tables(offsets, rows, step)
    return ends, source, _owners(ends, places, GRAIN).to(torch.int32)


@torch.library.custom_op("ao_lab::group_layout", mutates_args=())
def _layout_op(offsets: torch.Tensor, rows: int, step: int) -> list[torch.Tensor]:
    return list(_layout(offsets, rows, step))


@_layout_op.register_fake
def _layout_fake(offsets: torch.Tensor, rows: int, step: int) -> list[torch.Tensor]:
    places = padded_rows(rows, offsets.shape[0], step)
    sizes = offsets.shape[0], places, places // GRAIN
    return [offsets.new_empty((size,), dtype=torch.int32) for size in sizes]


def _tables(offsets: torch.Tensor, rows: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """ends and source, by torch operations."""
    starts = torch.cat([offsets.new_zeros(1), offsets[:-1]])
    filled = (offsets - starts + (step - 1)) // step * step
    ends = torch.cumsum(filled, 0, dtype=torch.int32)
    place = torch.arange(padded_rows(rows, offsets.shape[0], step), device=offsets.device, dtype=torch.int32)
    owner = torch.searchsorted(ends, place, right=True)
    inside = owner < offsets.shape[0]
    owner = owner.clamp(max=offsets.shape[0] - 1)
    row = place - (ends - filled)[owner] + starts[owner]
    return ends, torch.where(inside & (row < offsets[owner]), row, -1)


def _owners(ends: torch.Tensor, rows: int, step: int) -> torch.Tensor:
    places = torch.arange(0, rows, step, device=ends.device, dtype=torch.int32)
    return torch.searchsorted(ends, places, right=True)


__all__ = ["Layout", "layout_of"]
