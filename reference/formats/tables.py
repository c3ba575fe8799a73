"""`encode` for NumPy by a table: one look-up in 65,536 codes for formats of at most 6 significant bits.

A float32 rounded to odd to bfloat16 (its upper half, last bit set if the lower half is not zero) decides every rounding to at
most 6 significant bits: two more bits and stickiness are enough (Boldo and Melquiond, IEEE Trans. Computers 57(4), 2008).
Work runs in chunks whose temporaries stay in cache, on a few threads (NumPy releases the interpreter lock).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import Any

import numpy as np

from reference.arrays.namespace import Array, namespace_of
from reference.formats.encode_bits import encode_bits
from reference.formats.formats import Format

# Elements whose temporaries stay in a core's second cache: with shorter chunks two threads wait for the interpreter lock more
# than they work (2^15: 132 ms, 2^18: 57 ms for MXFP8 of 16.8M floats). And what makes a thread worth starting.
CHUNK = 1 << 18
SLAB = 1 << 20


def fits_table(fmt: Format) -> bool:
    """Whether 8 significant bits, the last one sticky, decide every rounding: at most 6 bits in the format; and codes are
    bytes.
    """
    bits = {"float": fmt.mantissa_bits + 1, "int": fmt.bits - fmt.signed, "scale": 1, "codebook": 8}[fmt.kind]
    return bits <= 6 and fmt.bits <= 8


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

    run_in_slabs(run, bits.size, SLAB)
    return codes


@lru_cache(maxsize=256)
def encode_table(fmt: Format, rounding: str, overflow: str) -> Any:
    """uint8 code of every 16-bit pattern, where an odd one stands for everything strictly between its neighbours."""
    patterns = np.arange(1 << 16, dtype=np.uint32)
    bits = ((patterns << 16) | (patterns & 1)).view(np.int32)
    return encode_bits(namespace_of(bits), bits, fmt, rounding, overflow).astype(np.uint8)


def run_in_slabs(run: Callable[[int, int], None], total: int, slab: int) -> None:
    """run(start, stop) over range(total), on a thread per core when there is more than one slab."""
    workers = min(os.cpu_count() or 1, -(-total // slab))
    if workers <= 1:
        run(0, total)
        return
    edges = [total * part // workers for part in range(workers + 1)]
    with ThreadPoolExecutor(workers) as pool:
        list(pool.map(run, edges[:-1], edges[1:]))
