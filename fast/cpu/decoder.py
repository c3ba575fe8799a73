"""A stored matrix as a loop decodes it, which Numba compiles: rows written out, or multiplied by rows of inputs on the way.

Numbers have the bits of `reference.dequantize` in float32 or bfloat16. What the loop leaves (`BlockScales.of` gives None, or
there is no Numba) is for torch operations (`dequantize.Tiles`) and the reference.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod
from typing import Any

import torch

from fast.cpu.elements import Element, single_table
from fast.cpu.loops.decoding import Decoding
from fast.cpu.scales import BlockScales
from fast.cpu.threads import in_parts
from reference import Quantized
from reference.quantize.quantize import check_quantized
from reference.schemes.schemes import Scheme

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
    from fast.cpu.loops.vectors import BFLOAT16

    return BFLOAT16


@dataclass(frozen=True)
class Decoder:
    """rows, length: of the matrix; width: numbers of a row that kernels write or read, at least length; dtype: of the numbers,
    float32 or bfloat16; operands: the arrays of kernels (`loops.gemm.compiled`) and the codes of a block; loop: what they are
    compiled for, but whether they multiply."""

    loop: Any
    operands: tuple[Any, ...]
    rows: int
    length: int
    width: int
    dtype: torch.dtype

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
        loop = _loop_of(w.scheme, w.packed, scales.divides, dtype)
        width = loop.width(length)
        size = width if scales.scale.shape[1] == 1 else scales.size
        parts = (
            codes,
            _table(w.scheme, loop.rounds),
            scales.scale,
            _nothing() if scales.zero is None else scales.zero,
        )
        operands = (*map(as_array, parts), size)
        return cls(loop.of_blocks(size), operands, rows, length, width, dtype)

    def write(self, first: int, last: int, out: torch.Tensor) -> None:
        """Rows first to last into out (last - first, width), contiguous, in `dtype`; behind K it is any."""
        kernel, made = self._kernel(multiplies=False), _bits(out)

        def work(begin: int, end: int) -> None:
            kernel(*self.operands, made, made[begin:end], first + begin, first + end)

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
        return y[:count]

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
def _loop_of(scheme: Scheme, packed: bool, divides: bool, dtype: torch.dtype) -> Any:
    """What kernels for a scheme are compiled for, but for its blocks."""
    from fast.cpu.loops.decode import CODE_ZERO, NO_ZERO, VALUE_ZERO
    from fast.cpu.loops.gemm import Loop

    element, half = Element.of(scheme), dtype == torch.bfloat16
    zero = NO_ZERO
    if scheme.zero is not None:
        zero = VALUE_ZERO if scheme.zero.rule == "value" else CODE_ZERO
    rounds = half and scheme.dequantize == "target"
    return Loop(Decoding.of(element), packed and element.bits < 8, zero, divides, rounds, half, False)


def _table(scheme: Scheme, rounds: bool) -> torch.Tensor:
    """The numbers of codes; where every operation rounds, of what bfloat16 holds."""
    table = single_table(Element.of(scheme))
    return table.to(torch.bfloat16).to(torch.float32) if rounds else table


@lru_cache(maxsize=1)
def _nothing() -> torch.Tensor:
    """What stands for zero points where there are none."""
    return torch.zeros((1, 1), dtype=torch.float32, device="cpu")


def as_array(x: torch.Tensor) -> Any:
    """The array that a kernel's signature asks for: without gaps, at a multiple of its element's size."""
    x = x.detach().resolve_neg().contiguous()
    return (x.clone() if x.data_ptr() % x.element_size() else x).numpy()


def _bits(x: torch.Tensor) -> Any:
    """A contiguous float32 tensor as an array, one of bfloat16 as its bits."""
    return as_array(x.view(torch.uint16) if x.dtype == torch.bfloat16 else x)


__all__ = ["Decoder", "as_array", "multiplies_bfloat16", "numba_missing"]
