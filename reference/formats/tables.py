"""NumPy's fast paths: the same rules on 16 bits instead of 32, through tables that the rules themselves fill.

A float32 rounded to odd to bfloat16 (its upper half, last bit set if the lower half is not zero) decides every rounding to at
most 6 significant bits: two more bits and stickiness are enough (Boldo and Melquiond 2008). So `encode` is one look-up in a
table of 65,536 codes. An OCP MX quantizer needs no more either: maximum, e8m0 scale and the exponent shift all act on the
16-bit image. Work runs in chunks whose temporaries stay in cache, on a few threads (NumPy releases the interpreter lock).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import Any

import numpy as np

from reference.arrays.namespace import Array, namespace_of
from reference.formats.formats import Format
from reference.quantize.power_scales import power_codes
from reference.schemes.schemes import Scheme

# Elements whose temporaries stay in a core's second cache: with shorter chunks two threads wait for the interpreter lock more
# than they work (2^15: 132 ms, 2^18: 57 ms for MXFP8 of 16.8M floats). And what makes a thread worth starting.
CHUNK = 1 << 18
SLAB = 1 << 20
E8M0_BIAS = 127
SMALLEST_NORMAL = 0x0080
# Below this e8m0 code a subnormal input could still reach the element's grid; such tensors take the general path.
LEAST_CODE = 32
SYMMETRIC_ROUNDINGS = ("nearest_even", "nearest_away", "toward_zero")


def fits_table(fmt: Format) -> bool:
    """Whether 8 significant bits, the last one sticky, decide every rounding: at most 6 bits in the format."""
    bits = {"float": fmt.mantissa_bits + 1, "int": fmt.bits - fmt.signed, "scale": 1, "codebook": 8}[fmt.kind]
    return bits <= 6


def odd_halves(bits: Array) -> Array:
    """uint32 patterns as uint16, rounded to odd."""
    lost = bits & np.uint32(0xFFFF)
    lost += np.uint32(0xFFFF)
    lost |= bits
    lost >>= np.uint32(16)
    return lost.astype(np.uint16)


def encode_flat(bits: Array, fmt: Format, rounding: str, overflow: str) -> Array:
    """uint8 codes of flat contiguous patterns: uint32 of float32, or uint16 of bfloat16."""
    table = encode_table(fmt, rounding, overflow)
    codes = np.empty(bits.shape, np.uint8)

    def run(start: int, stop: int) -> None:
        for begin in range(start, stop, CHUNK):
            part = bits[begin : min(begin + CHUNK, stop)]
            index = part if part.dtype == np.uint16 else odd_halves(part)
            np.take(table, index, out=codes[begin : begin + len(part)], mode="clip")

    in_slabs(run, bits.size, SLAB)
    return codes


@lru_cache(maxsize=256)
def encode_table(fmt: Format, rounding: str, overflow: str) -> Any:
    """uint8 code of every 16-bit pattern, where an odd one stands for everything strictly between its neighbours."""
    from reference.formats.encode import encode_bits

    patterns = np.arange(1 << 16, dtype=np.uint32)
    bits = ((patterns << 16) | (patterns & 1)).view(np.int32)
    return encode_bits(namespace_of(bits), bits, fmt, rounding, overflow).astype(np.uint8)


def quantizes_by_table(scheme: Scheme) -> bool:
    """Whether `quantize_blocks` covers the record: e8m0 scales, a float element, house rules for NaN."""
    covered = scheme.scale.power_of_two and scheme.format.kind == "float" and fits_table(scheme.format)
    return (
        covered
        and scheme.nan == "block"
        and scheme.rounding in SYMMETRIC_ROUNDINGS
        and scheme.overflow == "saturate"
    )


def quantize_blocks(split: Array, scheme: Scheme) -> tuple[Array, Array] | None:
    """(uint8 codes, uint8 e8m0 scales (..., blocks, 1)) of contiguous patterns (..., blocks, size), uint32 or uint16.

    None when a block is so small that subnormal inputs matter: the general path computes those.
    """
    size = split.shape[-1]
    rows = split.reshape(-1, size)
    codes, scales = np.empty(rows.shape, np.uint8), np.empty(len(rows), np.uint8)
    step = max(CHUNK // size, 1)

    def run(start: int, stop: int) -> None:
        for begin in range(start, stop, step):
            part = slice(begin, min(begin + step, stop))
            _quantize_chunk(rows[part], codes[part], scales[part], scheme)

    in_slabs(run, len(rows), max(SLAB // size, 1))
    if (scales < LEAST_CODE).any() and _has_small(rows, scales):
        return None
    return codes.reshape(split.shape), scales.reshape((*split.shape[:-1], 1))


def _has_small(rows: Array, scales: Array) -> bool:
    """Whether a block with a tiny scale holds anything but zeros."""
    small = rows[scales < LEAST_CODE]
    return bool((small << 1 & (0xFFFFFFFF if small.dtype == np.uint32 else 0xFFFF)).any())


def _quantize_chunk(rows: Array, codes: Array, scales: Array, scheme: Scheme) -> None:
    index = rows if rows.dtype == np.uint16 else odd_halves(rows)
    magnitude = (index & np.uint16(0x7FFF)).view(np.int16)
    scales[:] = scale_table(scheme)[magnitude.max(axis=1)]
    shift = (scales.astype(np.int16) - np.int16(E8M0_BIAS)) << np.int16(7)
    shifted = magnitude - shift[:, None]
    # Zeros stay zeros, and what falls below the 16-bit normals is far below half the smallest element.
    np.maximum(shifted, 0, out=shifted)
    shifted *= magnitude >= SMALLEST_NORMAL
    shifted.view(np.uint16)[:] |= index & np.uint16(0x8000)
    np.take(
        encode_table(scheme.format, scheme.rounding, scheme.overflow),
        shifted.view(np.uint16),
        out=codes,
        mode="clip",
    )
    poisoned = scales == 255
    if poisoned.any():
        codes[poisoned] = scheme.poison_code


@lru_cache(maxsize=64)
def scale_table(scheme: Scheme) -> Any:
    """e8m0 code of every 16-bit block maximum (odd ones inexact), by the rule of the record."""
    patterns = np.arange(1 << 15, dtype=np.uint32)
    bits = ((patterns << 16) | (patterns & 1)).view(np.int32)
    return power_codes(namespace_of(bits), bits, scheme.scale, scheme.format, True).astype(np.uint8)


def in_slabs(run: Callable[[int, int], None], total: int, slab: int) -> None:
    """run(start, stop) over range(total), on a thread per core when there is more than one slab."""
    workers = min(os.cpu_count() or 1, -(-total // slab))
    if workers <= 1:
        run(0, total)
        return
    edges = [total * part // workers for part in range(workers + 1)]
    with ThreadPoolExecutor(workers) as pool:
        list(pool.map(run, edges[:-1], edges[1:]))
