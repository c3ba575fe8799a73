"""`dequantize` of CPU tensors by torch operations and compiled loops, with the bits of `reference.dequantize`.

Every number is one exact look-up (`elements`), at most one exact subtraction of a zero point, and one float32 product with its
scale, which the processor rounds as the reference does; 16-bit dtypes round once more (records that round every operation to
the output's dtype: each time). Rows go tile by tile, so that what lies between stays in cache; of large tensors in float32 and
bfloat16 a compiled loop writes them (`decoder`). What this does not cover (`scales`) gives None, and the reference runs.
"""

from __future__ import annotations

from math import prod

import torch

from fast.cpu.decoder import Decoder
from fast.cpu.elements import Element, is_exact, numbers
from fast.cpu.scales import DTYPES, BlockScales
from reference import Quantized
from reference.quantize.quantize import check_quantized

#: float32 numbers of a tile: 4 MiB, so that tiles stay in the last cache and calls of torch cost little beside them.
TILE = 1 << 20
#: Elements of the smallest tensor for which a loop is compiled.
LARGE = 1 << 20
NAMES = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPES}


def dequantize(q: Quantized, name: str) -> torch.Tensor | None:
    """What a tensor of the CPU stands for, in the dtype of a name; None where the reference has to say. Errors as there."""
    dtype = NAMES.get(name)
    if dtype is None:
        return None
    check_quantized(q)
    # Parts elsewhere are for the reference to refuse, and nothing here reads them first.
    if any(part is not None and part.device.type != "cpu" for part in (q.scale, q.outer, q.zero)):
        return None
    scales = BlockScales.of(q, dtype)
    if scales is None:
        return None
    length = q.shape[-1]
    rows = prod(q.shape[:-1])
    decoder = Decoder.of(q, dtype) if rows * length >= LARGE else None
    made = torch.empty((rows, length), dtype=dtype, device="cpu")
    if decoder is not None and decoder.width == length:
        decoder.write(0, rows, made)
    else:
        _by_tiles(q, scales, made)
    # Bits of a NaN that arithmetic makes are the CPU's affair, those of the reference are stated.
    return None if _has_nan(made) else made.view(q.shape)


def _has_nan(made: torch.Tensor) -> bool:
    """Whether a number is NaN. A sum is found much faster, and is NaN if one is (or if infinities cancel)."""
    return bool(made.sum().isnan()) and bool(made.isnan().any())


def _by_tiles(q: Quantized, scales: BlockScales, made: torch.Tensor) -> None:
    """Into made (rows, K), by torch operations."""
    (rows, length), dtype = made.shape, made.dtype
    tiles = Tiles(q, scales, dtype)
    step = tiles.step
    tile = None
    if dtype != torch.float32:
        tile = torch.empty((min(step, rows), length), dtype=torch.float32, device="cpu")
    for first in range(0, rows, step):
        last = min(first + step, rows)
        out = made[first:last] if tile is None else tile[: last - first]
        tiles.write(first, last, out)
        if tile is not None:
            made[first:last] = out


class Tiles:
    """Rows of a stored tensor, as float32 numbers of a dtype, a few at a time."""

    def __init__(self, q: Quantized, scales: BlockScales, dtype: torch.dtype) -> None:
        self.scales, self.length = scales, q.shape[-1]
        self.codes = q.codes.detach().reshape(-1, q.codes.shape[-1]).contiguous()
        self.element, self.packed = Element.of(q.scheme), q.packed
        self.unit = dtype if q.scheme.dequantize == "target" else torch.float32
        self.exact = is_exact(self.element, self.unit)
        self.adds = q.scheme.zero is not None and q.scheme.zero.rule == "value"
        self.step = max(1, TILE // max(self.length, 1))

    def write(self, first: int, last: int, out: torch.Tensor) -> None:
        """Rows `first` to `last` into out (rows, K), contiguous float32."""
        numbers(self.codes[first:last], self.element, self.packed, out)
        if not self.exact:
            self._round(out)
        scale, zero = self.scales.part(first, last)
        blocked, scale, zero = self._blocked(out, scale, zero)
        if zero is not None and not self.adds:
            blocked.sub_(zero)
            self._round(blocked)
        if self.scales.divides:
            blocked.div_(scale)
        else:
            blocked.mul_(scale)
        self._round(blocked)
        if zero is not None and self.adds:
            blocked.add_(zero)
            self._round(blocked)

    def _round(self, x: torch.Tensor) -> None:
        if self.unit != torch.float32:
            x.copy_(x.to(self.unit))

    def _blocked(
        self, out: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Out, scales and zero points in shapes that broadcast: blocks of equal length, or every element its own."""
        size, length = self.scales.size, self.length
        if scale.shape[1] == 1:
            return out, scale, zero
        if length % size == 0:
            parts = (None if x is None else x[:, :, None] for x in (scale, zero))
            return out.view(len(out), -1, size), *parts  # type: ignore[return-value]
        wide = [
            None if x is None else x.repeat_interleave(size, 1)[:, :length].contiguous()
            for x in (scale, zero)
        ]
        return out, *wide  # type: ignore[return-value]


__all__ = ["TILE", "Tiles", "dequantize"]
