"""Several rows of inputs times a matrix of codes on a CPU, compiled by Numba: a few rows of the weight are decoded at a time,
into the first cache, and multiplied there by all rows of inputs. The same loop writes decoded rows out.

Decoded numbers have the bits of `reference.dequantize`: code, zero point and scale in its order, a rounding after each, in
float32 or in bfloat16. Steps are vector instructions (`fast.cpu.loops.vectors`). Kernels are compiled, kept and named as those
of `fast.cpu.loops.gemv` are.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from math import gcd
from pathlib import Path

import numpy as np
from numba import njit, types

from fast.cpu.loops.decoding import Decoding
from fast.cpu.loops.gemv import CACHE_ERRORS, _splat, group_of
from fast.cpu.loops.vectors import BFLOAT16, COLUMNS, LANES, PIECE, ROWS, decode, dots

OPTIONS = {"nogil": True, "error_model": "numpy"}
SOURCES = b"".join(
    Path(__file__).with_name(f"{name}.py").read_bytes() for name in ("gemm", "gemv", "vectors")
)


@dataclass(frozen=True)
class Loop:
    """What a kernel is compiled for. zero: NO_ZERO, CODE_ZERO or VALUE_ZERO; divides: by scales; rounds: every operation to
    bfloat16; half: decoded numbers are bfloat16, else float32; run: a divisor of a block's length, at most LANES."""

    decoding: Decoding
    packed: bool
    zero: int
    divides: bool
    rounds: bool
    half: bool
    run: int

    @property
    def group(self) -> tuple[int, int]:
        """Codes and bytes of a group."""
        return group_of(self.decoding.bits) if self.packed else (1, 1)

    def width(self, length: int) -> int:
        """Numbers of a decoded row of so many codes: whole steps, and whole pieces of a dot product."""
        step = max(LANES * self.group[0], PIECE)
        return -(-length // step) * step


@lru_cache(maxsize=256)
def compiled(loop: Loop) -> Callable[..., None]:
    """`kernel(codes, table, scale, zero, size, x, out, y, first, last)`, rows first to last of a weight (N, K).

    All arrays are contiguous. codes: uint8 (N, bytes); table: float32 (256,); scale, zero: float32 (N or 1, blocks), zero of no
    columns where there is none; size: codes of a block. With x (an even number of rows, `width`), y (rows, N) float32 is
    written: the dot products with decoded rows; without rows, the decoded rows: out (last - first, `width`). x and out are
    uint16, the bits of bfloat16, where `half`, else float32; x is 0 from K on.
    """
    kernel = _kernel(loop)
    kernel.__qualname__ = f"gemm_{hashlib.sha256(SOURCES + repr(loop).encode()).hexdigest()[:16]}"
    try:
        return njit(_signature(loop.half), cache=True, **OPTIONS)(kernel)
    except CACHE_ERRORS:
        return njit(_signature(loop.half), **OPTIONS)(kernel)


def _signature(half: bool) -> types.Type:
    single = types.float32[:, ::1]
    wide = types.uint16[:, ::1] if half else single
    numbers = (types.intp, types.intp)
    return types.void(
        types.uint8[:, ::1], types.float32[::1], single, single, types.intp, wide, wide, single, *numbers
    )


def _kernel(loop: Loop) -> Callable[..., None]:
    """All that a kernel closes over are numbers: they tell Numba's files on disk apart, and become constants."""
    d, (in_group, nbytes), half, run = loop.decoding, loop.group, int(loop.half), loop.run
    has_zero, unit, item = int(loop.zero != 0), np.float32(d.unit), 2 if loop.half else 4
    bits, kind, flip, less, has_unit = d.bits, d.kind, d.flip, d.less, int(d.unit != 1)
    mantissa, bias, special = d.mantissa, d.bias, d.special
    enters, divides, rounds = loop.zero, int(loop.divides), int(loop.rounds)
    step, made = LANES * nbytes, LANES * in_group
    rows_, columns = ROWS, COLUMNS

    def kernel(codes, table, scale, zero, size, x, out, y, first, last):  # type: ignore[no-untyped-def]
        stored, blocks, few = codes.shape[1], scale.shape[1], x.shape[0]
        width = x.shape[1] if few else out.shape[1]
        steps, whole = -(-stored // step), stored // step
        kept = np.zeros((rows_, width), x.dtype)
        filled = max(width, blocks * size) + LANES
        scales, zeros = np.ones(filled, np.float32), np.zeros(filled, np.float32)
        rest, sums = np.zeros(step, np.uint8), np.empty(rows_ * columns, np.float32)
        for begin in range(first, last, rows_):
            count = min(rows_, last - begin)
            for r in range(count):
                n = begin + r
                row = n if scale.shape[0] > 1 else 0
                if n == first or scale.shape[0] > 1:
                    for b in range(blocks):
                        for j in range(b * size, b * size + size, run):
                            _splat(scales.ctypes.data + 4 * j, scale[row, b], run)
                            if has_zero:
                                _splat(zeros.ctypes.data + 4 * j, zero[row, b], run)
                target = kept.ctypes.data + r * width * item
                if few == 0:
                    target = out.ctypes.data + (n - first) * width * item
                source = codes.ctypes.data + n * stored
                done = 0
                while done < steps:
                    now = whole - done
                    if now <= 0:
                        now = 1
                        rest[: stored - done * step] = codes[n, done * step :]
                        source = rest.ctypes.data - done * step
                    decode(
                        source + done * step, target + done * made * item, now, unit, table.ctypes.data,
                        scales.ctypes.data + 4 * done * made, zeros.ctypes.data + 4 * done * made,
                        (bits, in_group, nbytes), (kind, flip, less, has_unit, mantissa, bias, special),
                        (enters, divides, rounds, half),
                    )  # fmt: skip
                    done += now
            m = 0
            while m < few:
                if m + columns <= few:
                    dots(
                        kept.ctypes.data, width * item, x.ctypes.data + m * width * item, width * item, width * item,
                        sums.ctypes.data, rows_, columns, half,
                    )  # fmt: skip
                    for r in range(count):
                        for c in range(columns):
                            y[m + c, begin + r] = sums[r * columns + c]
                    m += columns
                else:
                    dots(
                        kept.ctypes.data, width * item, x.ctypes.data + m * width * item, width * item, width * item,
                        sums.ctypes.data, rows_, 2, half,
                    )  # fmt: skip
                    for r in range(count):
                        for c in range(2):
                            y[m + c, begin + r] = sums[r * 2 + c]
                    m += 2

    return kernel


def run_of(size: int) -> int:
    """The most equal scales that are written at once, of blocks of `size`."""
    return gcd(size, LANES)


__all__ = ["BFLOAT16", "Loop", "compiled", "run_of"]
