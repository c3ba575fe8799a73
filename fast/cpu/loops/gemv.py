"""One row of inputs times a matrix of codes on a CPU, compiled by Numba: codes become numbers in registers, as they are read.

    y[n] = sum over blocks b of s[n, b] (sum of c x) - s[n, b] z[n, b] (sum of x)   (+ z[n, b] (sum of x) where zero
    points are values)

Codes of a row come in groups that end on a byte (of 4 bits 2, of 3 bits 8). All loops over a row run over its groups from end
to end without a branch, because only such loops are reliably turned into vector instructions: so the scales of a row are
first written out, one for each group, and inputs come as planes, the first input of every group, then the second, ...

Each kernel (a decoding, packed or not, scales as numbers or codes, a run) is compiled at its first call, a second or more, and
kept on disk by Numba (beside this file, else in the user's cache; NUMBA_CACHE_DIR says where). Each has files of its own, named
by all that went into it: Numba locks nothing, so of kernels that shared an index one could be read as another. Numba lets
Python's lock go while a kernel runs.
"""

from __future__ import annotations

import hashlib
import os
import pickle
from collections.abc import Callable
from functools import lru_cache
from math import gcd
from pathlib import Path
from typing import Any

import numpy as np
from llvmlite import ir
from numba import config, njit, types
from numba.core.caching import FunctionCache
from numba.core.compiler_lock import global_compiler_lock
from numba.extending import intrinsic

from fast.cpu.elements import FLOAT, INTEGER, Decoding
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
#: The most equal scales that are written at once.
WIDEST = 16
#: What Numba raises where its files can be neither read nor written, are cut off, or have no place.
CACHE_ERRORS = (OSError, EOFError, RuntimeError, ValueError, AttributeError, ImportError, pickle.PickleError)
SOURCE = Path(__file__).read_bytes()


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


@lru_cache(maxsize=256)
def compiled(decoding: Decoding, packed: bool, scale_codes: bool, run: int) -> Callable[..., None]:
    """`kernel(codes, table, scale, scale_table, zero, is_value, divides, long, x, sums, first, last, y)`, rows first to last.

    All arrays are contiguous. codes: uint8 (N, bytes); table: float32 (256,), of TABLE; scale: (N or 1, blocks) float32, or
    where `scale_codes` uint8, entries of scale_table, float32 (256,); zero: float32 of scale's shape, or of no columns;
    is_value: zero points are values; divides: sums are divided by the only scale of a row; long: groups of a block; x: float32
    (codes of a group, groups); sums: float32, of x over each block; y: float32 (N,). run: a divisor of long, at most WIDEST.
    """
    kernel = _kernel(decoding, packed, scale_codes, run)
    parts = SOURCE + repr((decoding, packed, scale_codes, run)).encode()
    signature = _signature(types.uint8 if scale_codes else types.float32)
    return compile_once(kernel, "gemv", parts, signature, OPTIONS)


def _signature(scale: types.Type) -> types.Type:
    """The only one of a kernel: operands of another type are an error, not another kernel."""
    row, matrix = types.float32[::1], types.float32[:, ::1]
    flags = (types.boolean, types.boolean, types.intp)
    return types.void(
        types.uint8[:, ::1], row, scale[:, ::1], row, matrix, *flags, matrix, row, types.intp, types.intp, row
    )


def _kernel(decoding: Decoding, packed: bool, scale_codes: bool, run: int) -> Callable[..., None]:
    """All that a kernel closes over are numbers: they tell Numba's files on disk apart, and become constants."""
    bits, kind = decoding.bits, decoding.kind
    flip, less, unit = decoding.flip, decoding.less, np.float32(decoding.unit)
    mantissa, bias, special = decoding.mantissa, decoding.bias, decoding.special
    in_group, size = group_of(bits) if packed else (1, 1)
    mask = (1 << bits) - 1

    def kernel(codes, table, scale, scale_table, zero, is_value, divides, long, x, sums, first, last, y):  # type: ignore[no-untyped-def]
        groups, blocks = x.shape[1], scale.shape[1]
        scales = np.ones(max(groups, blocks * long), np.float32)
        address = scales.ctypes.data
        for n in range(first, last):
            row = n if scale.shape[0] > 1 else 0
            total = np.float32(0)
            for b in range(blocks):
                s = scale_table[scale[row, b]] if scale_codes else scale[row, b]
                if zero.shape[1]:
                    total += (zero[row, b] if is_value else -zero[row, b] * s) * sums[b]
                if blocks > 1:
                    for j in range(b * long, b * long + long, run):
                        splat(address + 4 * j, s, run)
            product = np.float32(0)
            for j in range(groups):
                part = np.float32(0)
                for place in range(in_group):
                    byte, shift = (place * bits) >> 3, (place * bits) & 7
                    code = np.int32(codes[n, j * size + byte]) >> shift
                    if shift + bits > 8:
                        code = code | (np.int32(codes[n, j * size + byte + 1]) << (8 - shift))
                    code = np.int32(code & mask)
                    if kind == INTEGER:
                        number = np.float32(np.int32((code ^ flip) - less))
                        if unit != 1:
                            number *= unit
                    elif kind == FLOAT:
                        number = _float(code, bits, mantissa, bias, special)
                    else:
                        number = table[code]
                    part += number * x[place, j]
                product += part * scales[j]
            if blocks == 1:
                s = scale_table[scale[row, 0]] if scale_codes else scale[row, 0]
                product = product / s if divides else product * s
            y[n] = product + total

    return kernel


@njit(**OPTIONS)
def _float(code, bits, mantissa, bias, special):  # type: ignore[no-untyped-def]
    """`Decoding.numbers` of FLOAT: subnormals by a product, so that no float32 on the way is one."""
    magnitude = np.int32(code & ((1 << (bits - 1)) - 1))
    pattern = np.int32((magnitude << (23 - mantissa)) + ((127 - bias) << 23))
    if magnitude >= special:
        pattern = np.int32(pattern | 0x7F800000)
    if magnitude >> mantissa == 0:
        pattern = np.float32(np.float32(magnitude) * np.float32(2.0 ** (1 - bias - mantissa))).view(np.int32)
    return np.int32(pattern | np.int32((code >> (bits - 1)) << 31)).view(np.float32)


@intrinsic(prefer_literal=True)
def splat(typing_context, address, number, count):  # type: ignore[no-untyped-def]
    """Store a float32 `count` (a constant) times from an address on, as one vector: Numba alone writes them singly."""
    size = count.literal_value

    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        vector = ir.Constant(ir.VectorType(ir.FloatType(), size), ir.Undefined)
        for place in range(size):
            vector = builder.insert_element(vector, arguments[1], ir.Constant(ir.IntType(32), place))
        builder.store(vector, builder.inttoptr(arguments[0], vector.type.as_pointer()), align=4)
        return context.get_dummy_value()

    return types.void(types.uintp, types.float32, count), generate


if hasattr(os, "register_at_fork"):
    # A process that is forked while another thread compiles would wait for that thread, which it does not have.
    os.register_at_fork(
        before=global_compiler_lock.acquire,
        after_in_parent=global_compiler_lock.release,
        after_in_child=global_compiler_lock.release,
    )


__all__ = ["WIDEST", "compiled", "config", "group_of", "is_own_cache", "splat"]
