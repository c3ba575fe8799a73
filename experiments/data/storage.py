"""Stored bytes of a quantized tensor: elements packed to their bits, scales and zero points."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from reference import Quantized


@dataclass(frozen=True)
class Stored:
    """Bytes of a tensor by part."""

    elements: int
    scales: int = 0
    outer: int = 0
    zeros: int = 0

    @property
    def total(self) -> int:
        """The sum of all parts."""
        return self.elements + self.scales + self.outer + self.zeros

    def __add__(self, other: Stored) -> Stored:
        return Stored(
            self.elements + other.elements,
            self.scales + other.scales,
            self.outer + other.outer,
            self.zeros + other.zeros,
        )


def stored(q: Quantized) -> Stored:
    """Bytes of a quantized tensor. Elements count by the bits of their format, packed over the whole tensor; scales and zero
    points count as the arrays of the quantizer (an int8 zero point takes a byte even where four bits would do)."""
    return Stored(
        elements=math.ceil(math.prod(q.shape) * q.scheme.format.bits / 8),
        scales=_bytes(q.scale),
        outer=_bytes(q.outer),
        zeros=_bytes(q.zero),
    )


def stored_plain(tensor: Tensor) -> Stored:
    """Bytes of a tensor that is not quantized."""
    return Stored(elements=_bytes(tensor))


def _bytes(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.nbytes
