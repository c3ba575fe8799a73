"""`quantize` of OCP MX schemes for NumPy on 16-bit images, through tables that the general rules fill.

Block maximum, e8m0 scale and the shift of the exponent all act on float32 rounded to odd to bfloat16, which decides every
rounding to at most 6 significant bits (`reference.formats.tables`). Blocks so small that subnormal inputs matter are left to
the general path.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

from reference.arrays.namespace import Array, namespace_of
from reference.formats.tables import CHUNK, SLAB, encode_table, fits_table, odd_halves, run_in_slabs
from reference.quantize.power_scales import power_codes
from reference.schemes.schemes import Scheme

E8M0_BIAS = 127
SMALLEST_NORMAL = 0x0080
# Below this e8m0 code a subnormal input could still reach the element's grid; such tensors take the general path.
LEAST_CODE = 32
SYMMETRIC_ROUNDINGS = ("nearest_even", "nearest_away", "toward_zero")


def quantizes_by_table(scheme: Scheme) -> bool:
    """Whether `quantize_blocks` covers the record: e8m0 scales, a float element, a NaN makes its block NaN."""
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

    run_in_slabs(run, len(rows), max(SLAB // size, 1))
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
