"""`dequantize` of CPU tensors by torch operations and compiled loops, with the bits of `reference.dequantize`.

Every number is one exact look-up (`elements`), at most one exact subtraction of a zero point, and one float32 product with its
scale, which the processor rounds as the reference does; 16-bit dtypes round once more (records that round every operation to
the output's dtype: each time). Rows go tile by tile, so that what lies between stays in cache; of large tensors in float32 and
bfloat16 a compiled loop writes them (`Decoder`). What this does not cover (`scales`) gives None, and the reference runs.

`Decoder`: a stored matrix as a loop decodes it, which Numba compiles: rows written out, or multiplied by rows of inputs on the
way. Numbers have the bits of `reference.dequantize` in float32 or bfloat16. What the loop leaves (`BlockScales.of` gives None,
or there is no Numba) is for torch operations (`Tiles`) and the reference.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod
from typing import Any

import torch

from fast.cpu.elements import Decoding, Element, is_exact, numbers, single_table
from fast.cpu.scales import DTYPES, BlockScales
from fast.cpu.threads import in_parts
from reference import Quantized
from reference.quantize.quantize import check_quantized
from reference.schemes.schemes import Scheme

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
    result = torch.empty((rows, length), dtype=dtype, device="cpu")
    if decoder is not None and decoder.width == length:
        decoder.write(0, rows, result)
    else:
        _by_tiles(q, scales, result)
    # Bits of a NaN that arithmetic makes are the CPU's affair, those of the reference are stated.
    return None if _has_nan(result) else result.view(q.shape)


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


#: What a broken or half-installed Numba raises when it is imported.
IMPORT_ERRORS = (ImportError, AttributeError, OSError, RuntimeError, SystemError, ValueError, TypeError)
#: Rows of inputs whose products take about as long as decoding the weight.
ROWS_OF_A_DECODING = 8


@lru_cache(maxsize=1)
def numba_missing() -> str | None:
    """Why loops cannot be compiled: what importing Numba says; None if it can be imported and compiles."""
    try:
        from fast.cpu.loops import gemv
    except IMPORT_ERRORS as error:
        return f"{type(error).__name__}: {error}"
    return "NUMBA_DISABLE_JIT is set" if gemv.config.DISABLE_JIT else None


@lru_cache(maxsize=1)
def multiplies_bfloat16() -> bool:
    """Whether the loop multiplies bfloat16; Numba is there."""
    from fast.cpu.loops.decode import BFLOAT16

    return BFLOAT16


@dataclass(frozen=True)
class Decoder:
    """rows, length: of the matrix; width: numbers of a row that kernels write or read, at least length; dtype: of the numbers,
    float32 or bfloat16; operands: the arrays of kernels (`loops.gemm.compiled`) and the codes of a block; loop: what they are
    compiled for, but whether they multiply; scales: what they read."""

    loop: Any
    operands: tuple[Any, ...]
    rows: int
    length: int
    width: int
    dtype: torch.dtype
    scales: BlockScales

    @classmethod
    def of(cls, w: Quantized, dtype: torch.dtype) -> Decoder | None:
        """That of a tensor (..., K), its rows one after the other; None where the loop does not have the reference's bits."""
        if dtype not in (torch.float32, torch.bfloat16) or numba_missing() is not None:
            return None
        scales = BlockScales.of(w, dtype)
        if scales is None:
            return None
        rows, length = prod(w.shape[:-1]), w.shape[-1]
        codes = w.codes.detach().reshape(-1, w.codes.shape[-1])
        _check_parts(w, codes, scales, rows)
        loop = loop_of(w.scheme, w.packed, scales.divides, dtype)
        width = loop.width(length)
        size = width if scales.scale.shape[1] == 1 else scales.size
        parts = (
            codes,
            table_of(w.scheme, loop.rounds),
            scales.scale,
            no_zero_points() if scales.zero is None else scales.zero,
        )
        operands = (*map(as_array, parts), size)
        return cls(loop.of_blocks(size), operands, rows, length, width, dtype, scales)

    def write(self, first: int, last: int, out: torch.Tensor) -> None:
        """Rows first to last into out (last - first, width), contiguous, in `dtype`; behind K it is any."""
        kernel, result = self._kernel(multiplies=False), _bits(out)

        def work(begin: int, end: int) -> None:
            kernel(*self.operands, result, result[begin:end], first + begin, first + end)

        in_parts(work, last - first, (last - first) * self.length)

    def multiply(self, x: torch.Tensor) -> torch.Tensor:
        """x (M, K) in `dtype`, two rows or more, times the transpose of the matrix: float32 (M, rows). A row of it does not
        depend on the others. Numbers of bfloat16 below 2**-126 count as 0."""
        count = len(x)
        y = torch.empty((count + count % 2, self.rows), dtype=torch.float32, device="cpu")
        kernel, inputs, out = self._kernel(multiplies=True), _bits(self._padded(x)), y.numpy()

        def work(first: int, last: int) -> None:
            kernel(*self.operands, inputs, out, first, last)

        in_parts(work, self.rows, self.rows * self.length * (1 + count // ROWS_OF_A_DECODING))
        return y if len(y) == count else y[:count].clone()

    def _kernel(self, multiplies: bool) -> Callable[..., None]:
        from fast.cpu.loops.gemm import compiled

        return compiled(replace(self.loop, multiplies=multiplies))

    def _padded(self, x: torch.Tensor) -> torch.Tensor:
        """Inputs with zeros up to an even number of rows of `width`."""
        x = x.detach().resolve_neg()
        count, length = x.shape
        if count % 2 == 0 and length == self.width:
            return x.contiguous()
        padded = torch.zeros((count + count % 2, self.width), dtype=self.dtype, device="cpu")
        padded[:count, :length] = x
        return padded


def _check_parts(w: Quantized, codes: torch.Tensor, scales: BlockScales, rows: int) -> None:
    """ValueError where parts do not belong to one tensor: the loop looks at no lengths."""
    bits = Element.of(w.scheme).bits
    stored = -(-w.shape[-1] * bits // 8) if w.packed else w.shape[-1]
    same = scales.zero is None or scales.zero.shape == scales.scale.shape
    wanted = 1 if w.scheme.scale.block == "tensor" else rows
    if same and codes.shape == (rows, stored) and len(scales.scale) == wanted:
        return
    check_quantized(w)
    raise ValueError(f"codes and scales of {w.scheme.name} do not have the {rows} rows of {tuple(w.shape)}")


@lru_cache(maxsize=256)
def loop_of(scheme: Scheme, packed: bool, divides: bool, dtype: torch.dtype) -> Any:
    """What kernels for a scheme are compiled for, but for its blocks."""
    from fast.cpu.loops.decode import CODE_ZERO, NO_ZERO, VALUE_ZERO
    from fast.cpu.loops.gemm import Loop

    element, half = Element.of(scheme), dtype == torch.bfloat16
    zero = NO_ZERO
    if scheme.zero is not None:
        zero = VALUE_ZERO if scheme.zero.rule == "value" else CODE_ZERO
    rounds = half and scheme.dequantize == "target"
    return Loop(Decoding.of(element), packed and element.bits < 8, zero, divides, rounds, half, False)


def table_of(scheme: Scheme, rounds: bool) -> torch.Tensor:
    """The numbers of codes; where every operation rounds, of what bfloat16 holds."""
    table = single_table(Element.of(scheme))
    return table.to(torch.bfloat16).to(torch.float32) if rounds else table


@lru_cache(maxsize=1)
def no_zero_points() -> torch.Tensor:
    """What stands for zero points where there are none."""
    return torch.zeros((1, 1), dtype=torch.float32, device="cpu")


def as_array(x: torch.Tensor) -> Any:
    """The array that a kernel's signature asks for: without gaps, at a multiple of its element's size."""
    x = x.detach().resolve_neg().contiguous()
    return (x.clone() if x.data_ptr() % x.element_size() else x).numpy()


def _bits(x: torch.Tensor) -> Any:
    """A contiguous float32 tensor as an array, one of bfloat16 as its bits."""
    return as_array(x.view(torch.uint16) if x.dtype == torch.bfloat16 else x)


__all__ = [
    "TILE", "Decoder", "Tiles", "as_array", "dequantize", "loop_of", "multiplies_bfloat16", "no_zero_points", "numba_missing",
    "table_of",
]  # fmt: skip
