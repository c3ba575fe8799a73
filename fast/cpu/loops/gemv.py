"""One row of inputs times a matrix of codes on a CPU, compiled by Numba: codes become numbers in registers, as they are read.

    y[n] = sum over blocks b of s[n, b] (sum of c x) - s[n, b] z[n, b] (sum of x)   (+ z[n, b] (sum of x) where zero
    points are values)

Codes of a row come in groups that end on a byte (of 4 bits 2, of 3 bits 8), and inputs as planes, the first input of every
group, then the second, ... A few rows go through vector instructions at a time (`fast.cpu.loops.row_sums`). A row's sums do not
depend on which rows are beside it. NaN among codes makes NaN of a row, whatever the input there.

Each kernel (`Row`) is compiled at its first call, a second or more, and
kept on disk by Numba (beside this file, else in the user's cache; NUMBA_CACHE_DIR says where). Each has files of its own, named
by all that went into it: Numba locks nothing, so of kernels that shared an index one could be read as another. Numba lets
Python's lock go while a kernel runs.
"""

from __future__ import annotations

import hashlib
import os
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from math import gcd
from pathlib import Path
from typing import Any

import numpy as np
from numba import config, njit, types
from numba.core.caching import FunctionCache
from numba.core.compiler_lock import global_compiler_lock

from fast.cpu.elements import Decoding
from fast.cpu.loops.decode import LANES, fetch, raw_unit
from fast.cpu.loops.row_sums import ENTRIES, NUMBERS, ROWS, row_sums, scales_of
from fast.user_cache import UntrustedFile, refuse_foreign, warn_once

# Numba's files of compiled kernels are pickles: they are read only where nobody else can have written them.


def is_own_cache(kernel: Callable[..., None]) -> bool:
    """Whether nobody else can have written the files of a kernel; one warning where somebody can.

    A folder beside the source is as trustworthy as the source. Raises what Numba does where it has no place for files.
    """
    folder = Path(FunctionCache(kernel).cache_path)
    if folder.parent == Path(kernel.__code__.co_filename).parent:
        return True
    try:
        refuse_foreign(folder)
        for file in folder.glob(f"*{kernel.__qualname__}*"):
            refuse_foreign(file)
    except UntrustedFile as error:
        warn_once(f"{error}; Numba's compiled kernels there are not used, each process compiles its own")
        return False
    return True


#: Sums may be taken in any order and products contracted; NaN and infinities keep their meaning.
OPTIONS = {"fastmath": {"reassoc", "contract", "nsz"}, "nogil": True, "error_model": "numpy"}
#: What Numba raises where its files can be neither read nor written, are cut off, or have no place.
CACHE_ERRORS = (OSError, EOFError, RuntimeError, ValueError, AttributeError, ImportError, pickle.PickleError)
SOURCES = b"".join(
    Path(__file__).with_name(f"{name}.py").read_bytes() for name in ("gemv", "row_sums", "decode")
)


def compile_once(
    kernel: Callable[..., None], name: str, parts: bytes, signature: types.Type, options: dict[str, Any]
) -> Callable[..., None]:
    """A kernel compiled for its only signature. name, parts: its files have their name of all that goes into it."""
    kernel.__qualname__ = f"{name}_{hashlib.sha256(parts).hexdigest()[:16]}"
    try:
        return njit(signature, cache=is_own_cache(kernel), **options)(kernel)
    except CACHE_ERRORS:
        return njit(signature, **options)(kernel)


def group_of(bits: int) -> tuple[int, int]:
    """Codes and bytes of the smallest group of packed codes that ends on a byte."""
    return 8 // gcd(bits, 8), bits // gcd(bits, 8)


#: The codes of scales that stand for 1: of `NUMBERS`, `E4M3`, `E8M0` and `ENTRIES`.
UNIT_CODES = (0, 0x38, 127, 0)
#: Bytes of codes that are asked for ahead: rows that are read beside each other are no stream that processors follow.
AHEAD = 1 << 13
#: The most steps of a block that are written out one after the other.
UNROLLED = 4


@dataclass(frozen=True)
class Row:
    """What a kernel is compiled for. scales: what they are (`NUMBERS` to `ENTRIES` of `row_sums`); zero_codes: zero points are
    int8, else float32; run: groups of a step that share a scale, LANES also where a row has one block; few: steps of a block,
    or 0 where they are more than UNROLLED or one block is the row."""

    decoding: Decoding
    packed: bool
    scales: int
    zero_codes: bool = False
    run: int = LANES
    few: int = 0

    @classmethod
    def of(cls, decoding: Decoding, packed: bool, scales: int, long: int, zero_codes: bool) -> Row:
        """That of blocks of so many groups; 0 stands for the whole row."""
        run = gcd(LANES, long)
        few = 1 if run < LANES else long // LANES
        few = few if few <= UNROLLED else 0
        return cls(decoding, packed, scales, zero_codes, run, few)

    @property
    def group(self) -> tuple[int, int]:
        """Codes and bytes of a group."""
        return group_of(self.decoding.bits) if self.packed else (1, 1)

    @property
    def constants(self) -> tuple[int, ...]:
        """Of `Constants`."""
        d, (in_group, size) = self.decoding, self.group
        numbers = (d.kind, d.flip, d.less, int(d.unit != 1), d.mantissa, d.bias, d.special)
        return (d.bits, in_group, size, *numbers, 0, 0, 0, 0, 0, self.run, self.few, 0, int(raw_unit(d) > 0))


@lru_cache(maxsize=256)
def compiled(row: Row) -> Callable[..., None]:
    """`kernel(codes, table, scale, scale_table, zero, is_value, divides, size, x, first, last, y)`, rows first to last.

    All arrays are contiguous. codes: uint8 (N, bytes), whole groups; table: float32 (256,), the numbers of codes; scale: (N or
    1, blocks) float32, or uint8, the codes of entries of scale_table, float32 (256,), those not negative and finite; zero: int8
    or float32 of scale's shape, or of no columns; is_value: zero points are values; divides: sums are divided by the only scale
    of a row; size: codes of a block, whole groups; x: float32 (K,); y: float32 (N,).
    """
    parts = SOURCES + repr(row).encode()
    return compile_once(_kernel(row), "gemv", parts, _signature(row), OPTIONS)


def _signature(row: Row) -> types.Type:
    """The only one of a kernel: operands of another type are an error, not another kernel."""
    vector, number, flag = types.float32[::1], types.intp, types.boolean
    scale = types.float32 if row.scales == NUMBERS else types.uint8
    zero = types.int8 if row.zero_codes else types.float32
    weight = (types.uint8[:, ::1], vector, scale[:, ::1], vector, zero[:, ::1])
    return types.void(*weight, flag, flag, number, vector, number, number, vector)


def _kernel(row: Row) -> Callable[..., None]:
    """All that a kernel closes over are numbers: they tell Numba's files on disk apart, and become constants."""
    (in_group, size_of_group), unit, block_rows = row.group, np.float32(row.decoding.unit), ROWS
    run, step, shares = row.run, LANES * size_of_group, LANES // row.run
    is_codes, by_fields, unit_code = row.scales != NUMBERS, row.scales % ENTRIES, UNIT_CODES[row.scales]
    bits, _, _, kind, flip, less, has_unit, mantissa, bias, special, *_, few, _, raw = row.constants
    one, factor = int(run == LANES), np.float32(raw_unit(row.decoding) or 1)

    def kernel(codes, table, scale, scale_table, zero, is_value, divides, size, x, first, last, y):  # type: ignore[no-untyped-def]
        stored, blocks = codes.shape[1], scale.shape[1]
        steps, groups = stored // step, size // in_group
        each = (groups // LANES if blocks > 1 else steps) if one else 1
        whole, repeats = steps // each if each else 0, 1 if one else groups // run
        planes = in_planes(x, in_group, (steps + 1) * LANES, factor)
        plane = 4 * planes.shape[1]
        sums = block_sums(x, size, blocks if zero.shape[1] else 0)
        # Scales that lie as they are read are read there, but for those of a row's last step.
        lies = blocks > 1 and repeats == 1 and not is_codes
        width = shares if lies else max(blocks * repeats, (steps + 1) * shares)
        scales, rest = np.ones((block_rows, width), np.float32), np.zeros((block_rows, step), np.uint8)
        parts, products = np.empty(block_rows, np.float32), np.empty(block_rows, np.float32)
        for begin in range(first, last, block_rows):
            count = min(block_rows, last - begin)
            source, inputs = codes.ctypes.data + begin * stored, planes.ctypes.data
            scales_at, scales_stride = scales.ctypes.data, 4 * width
            if lies:
                scales_at, scales_stride = scale.ctypes.data + 4 * begin * blocks, 4 * blocks
            elif blocks > 1:
                for r in range(count):
                    done = 0
                    if by_fields and repeats == 1 and blocks >= LANES:
                        done = blocks // LANES * LANES
                        at = scale.ctypes.data + (begin + r) * blocks
                        scales_of(at, scales_at + r * scales_stride, done, scale_table[unit_code], by_fields)
                    for b in range(done, blocks):
                        s = scale_table[scale[begin + r, b]] if is_codes else scale[begin + r, b]
                        for at in range(b * repeats, (b + 1) * repeats):
                            scales[r, at] = s
            products[:] = 0
            ahead, end = source + AHEAD, codes.ctypes.data + last * stored
            if ahead < end:
                fetch(ahead, min(ahead + count * stored, end))
            if whole:
                row_sums(
                    source, stored, count, inputs, plane, scales_at, scales_stride, whole, each,
                    parts.ctypes.data, table.ctypes.data, unit,
                    (bits, in_group, size_of_group, kind, flip, less, has_unit, mantissa, bias, special,
                     0, 0, 0, 0, 0, run, few, 0, raw),
                )  # fmt: skip
                products[:] = parts
            for at in range(whole * each, -(-stored // step)):
                block = at // each if each else 0
                place, stride, scale_at = source + at * step, stored, scales_at + 4 * shares * block
                if at == steps:
                    # Codes and scales that the row does not have would be read.
                    for r in range(count):
                        rest[r, : stored - steps * step] = codes[begin + r, steps * step :]
                        if lies:
                            some = scale[begin + r, block * shares : block * shares + shares]
                            scales[r, : len(some)] = some
                    place, stride = rest.ctypes.data, step
                    if lies:
                        scale_at, scales_stride = scales.ctypes.data, 4 * width
                row_sums(
                    place, stride, count, inputs + 4 * LANES * at, plane, scale_at, scales_stride, 1, 1,
                    parts.ctypes.data, table.ctypes.data, unit,
                    (bits, in_group, size_of_group, kind, flip, less, has_unit, mantissa, bias, special,
                     0, 0, 0, 0, 0, run, 1, 0, raw),
                )  # fmt: skip
                products += parts
            for r in range(count):
                product, total = products[r], np.float32(0)
                row = begin + r if scale.shape[0] > 1 else 0
                if blocks == 1:
                    s = scale_table[scale[row, 0]] if is_codes else scale[row, 0]
                    product = product / s if divides else product * s
                for b in range(len(sums)):
                    s = scale_table[scale[row, b]] if is_codes else scale[row, b]
                    z = np.float32(zero[row, b])
                    total += (z if is_value else -z * s) * sums[b]
                y[begin + r] = product + total

    return kernel


@njit(**OPTIONS)
def in_planes(x, in_group, width, factor):  # type: ignore[no-untyped-def]
    """Inputs times a factor, (in_group, width): the first of every group, the second, ..., zeros behind them."""
    planes = np.zeros((in_group, width), np.float32)
    for at in range(len(x)):
        planes[at % in_group, at // in_group] = x[at] * factor
    return planes


@njit(**OPTIONS)
def block_sums(x, size, count):  # type: ignore[no-untyped-def]
    """The sums of inputs over each of the first blocks.

    Each in a register: LLVM adds in memory one by one where it cannot tell that sums and inputs lie apart, and decides that by
    their addresses, so that the last bits of a call would be those of the place of its memory.
    """
    sums = np.empty(count, np.float32)
    for b in range(count):
        total = np.float32(0)
        for at in range(b * size, min(b * size + size, len(x))):
            total += x[at]
        sums[b] = total
    return sums


if hasattr(os, "register_at_fork"):
    # A process that is forked while another thread compiles would wait for that thread, which it does not have.
    os.register_at_fork(
        before=global_compiler_lock.acquire,
        after_in_parent=global_compiler_lock.release,
        after_in_child=global_compiler_lock.release,
    )


__all__ = ["Row", "compiled", "config", "group_of", "is_own_cache"]
