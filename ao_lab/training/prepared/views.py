"""How each product reads the codes and scales of its operands, so that casts write them so.

An operand a (M, K) or b (N, K) of a @ b.T is stored row after row, K innermost, with one float32 scale for each row or in all.
`torch._scaled_mm` reads 8-bit floats, b as (K, N) and its scales as (1, N); `fast.linear_of_codes` bytes as they are stored.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from ao_lab.training.scaled_mm import FLOAT8, is_one_scale
from reference import Scheme
from reference.training.recipe import Operand

if TYPE_CHECKING:  # which imports triton
    from fast.kernels.launch.call import Size

    #: Of codes and of scales.
    View = tuple[Size, Size]

#: Names of `ao_lab.training.products.PRODUCTS`.
SCALED_MM, CODES = "scaled_mm", "codes"


@dataclass(frozen=True)
class Side:
    """An operand of a product: its scheme, its rows and the sum's length."""

    scheme: Scheme
    rows: int
    length: int

    @property
    def has_row_scales(self) -> bool:
        """Whether each row has a scale."""
        return self.scheme.scale.block == -1

    @property
    def scale_shape(self) -> tuple[int, ...]:
        """The shape of its scales as they are stored."""
        return (self.rows, 1) if self.has_row_scales else ()


def side_of(operand: Operand, rows: int, length: int) -> Side | None:
    """The operand where prepared steps serve it: 8-bit floats with one scale for each row or tensor, made of the tensor itself,
    nothing mixed or drawn."""
    scheme = operand.scheme
    if scheme is None or operand.hadamard or operand.is_stochastic or operand.source != "tensor":
        return None
    plain = scheme.element in FLOAT8 and is_one_scale(scheme)
    return Side(scheme, rows, length) if plain else None


def views_of(product: str, a: Side, b: Side) -> tuple[View, View] | None:
    """Views of codes and of scales of both operands; None for other products, and for `torch._scaled_mm` where one has a scale
    for each row and the other one in all, which would have to be repeated."""
    if product == CODES:
        return _stored(a), _stored(b)
    if product != SCALED_MM or a.has_row_scales != b.has_row_scales:
        return None
    first = (a.rows, a.length), (a.length, 1), FLOAT8[a.scheme.element]
    second = (b.length, b.rows), (1, b.length), FLOAT8[b.scheme.element]
    return (first, _stored(a)[1]), (second, _scales(b, (1, b.rows), (b.rows, 1)))


def _stored(side: Side) -> View:
    return ((side.rows, side.length), (side.length, 1), torch.uint8), _scales(side, (side.rows, 1), (1, 1))


def _scales(side: Side, shape: tuple[int, int], strides: tuple[int, int]) -> Size:
    return (shape, strides, torch.float32) if side.has_row_scales else ((), (), torch.float32)


__all__ = ["CODES", "SCALED_MM", "Side", "View", "side_of", "views_of"]
