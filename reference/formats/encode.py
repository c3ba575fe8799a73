"""`encode` and `decode`: values to codes and back, for every format and rounding mode.

Codes are computed on bit patterns, by the rule of `reference.formats.encode_bits`. Edge cases:

* NaN: the format's NaN (`Format.nan_code`, sign and payload dropped); 0 where the format has none.
* Beyond the largest finite value: ``saturate`` gives that value, infinities included (as Hopper's satfinite casts);
  ``nonfinite`` gives the format's infinity, or its NaN where it has no infinity (``inf`` and ``nan`` name one of them).
  Rounding comes first: 464 is a tie for e4m3fn and becomes 448 in nearest_even, NaN in nearest_away. As in IEEE 754 section
  7.4, finite values in toward_zero, to_odd, and in up and down on their inner side, stop at the largest finite value.
* -0: stays -0 where the format has it, else 0. Negative values in unsigned integers: 0. Integers have only ``saturate``.
* float8_e8m0fnu has no zero and no sign: positive values below 2**-127 become 2**-127, so does 0 in ``saturate``; 0 is NaN
  in ``nonfinite``, negative values always. It has one significand bit, always 1, so a tie in nearest_even goes up, as in
  ml_dtypes and torch.
* Codebooks take the nearest value, ties to the lower index, and no other rounding mode.

NumPy inputs go through a table of 65,536 codes where the format has at most 6 significant bits: a float32 rounded to odd to
bfloat16 (its upper half, last bit set if the lower half is not zero) decides every rounding to so few bits, as two more bits
and stickiness are enough (Boldo and Melquiond, IEEE Trans. Computers 57(4), 2008). The rule fills the table, so there is one
definition. Work runs in chunks whose temporaries stay in cache, on a few threads (NumPy releases the interpreter lock).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import Any

import numpy as np

from reference.arrays.errors import choice
from reference.arrays.namespace import (
    Array,
    Namespace,
    code_input,
    codes_of,
    float_input,
    int32_of,
    namespace_of,
)
from reference.arrays.softfloat import float32_bits
from reference.arrays.torch_bridge import bridged
from reference.formats.encode_bits import encode_bits, encode_codebook_float64
from reference.formats.formats import Format, format_of
from reference.formats.rounding import OVERFLOWS, check_mode


@bridged
def encode(
    x: Any,
    fmt: str | Format,
    *,
    rounding: str = "nearest_even",
    overflow: str = "saturate",
    random_bits: Any = None,
) -> Array:
    """Codes of x in a format.

    x: float32, bfloat16, float16 or float64, any shape, NumPy, JAX or torch (float64 is rounded once, correctly).
    fmt: a name of `FORMATS` or a record. rounding, overflow: see above. random_bits: uint32 of x's shape, for stochastic.
    Returns uint8 (uint16 for 16-bit formats) of x's shape in the same library, the code in the low bits.
    Raises TypeError for integer or complex x, ValueError for an unknown name or an overflow that the format cannot express.
    """
    fmt = format_of(fmt)
    ns, x, name = float_input(x, "encode")
    check_mode(rounding, random_bits)
    check_overflow(fmt, rounding, overflow)
    random_bits = check_random_bits(ns, x, random_bits)
    if ns.name == "numpy" and rounding != "stochastic" and fits_table(fmt):
        return _encode_by_table(x, name, fmt, rounding, overflow)
    if fmt.kind == "codebook" and name == "float64":
        return codes_of(ns, encode_codebook_float64(ns, x, fmt, rounding), fmt.bits)
    bits = float32_bits(ns, x, name, to_odd=True)
    return codes_of(ns, encode_bits(ns, bits, fmt, rounding, overflow, random_bits), fmt.bits)


@bridged
def decode(codes: Any, fmt: str | Format) -> Array:
    """float32 value of every code, exact; shape and library of `codes` (uint8 or uint16), bits above the format's ignored.

    Raises TypeError for codes of another dtype, ValueError for an unknown name.
    """
    fmt = format_of(fmt)
    ns, codes = code_input(codes, "decode")
    index = int32_of(ns, codes) & ((1 << fmt.bits) - 1)
    # Tables hold bit patterns, so that no library can flush a subnormal on the way.
    table = ns.constant(fmt.values.view(np.int32), index)
    return ns.bitcast(ns.take(table, index), "float32")


def _encode_by_table(x: Array, name: str, fmt: Format, rounding: str, overflow: str) -> Array:
    ns = namespace_of(x)
    bits = (
        ns.bitcast(x, "uint16")
        if name == "bfloat16"
        else ns.bitcast(float32_bits(ns, x, name, to_odd=True), "uint32")
    )
    return encode_flat(bits.reshape(-1), fmt, rounding, overflow).reshape(x.shape)


def check_overflow(fmt: Format, rounding: str, overflow: str) -> None:
    """ValueError for an overflow policy that does not exist, or that needs a code the format does not have."""
    choice(overflow, OVERFLOWS, "overflow")
    code = {"inf": fmt.infinity_code, "nan": fmt.nan_code, "nonfinite": fmt.nan_code, "saturate": 0}[overflow]
    if code is None or (fmt.kind == "int" and overflow != "saturate"):
        raise ValueError(
            f"overflow {overflow!r} needs a code that {fmt.name} does not have; use overflow='saturate'"
        )


def check_random_bits(ns: Namespace, x: Array, random_bits: Any) -> Array | None:
    """`random_bits` unchanged, or None; ValueError unless they are uint32 of x's shape in x's library."""
    if random_bits is None:
        return None
    array = hasattr(random_bits, "dtype") and namespace_of(random_bits) is ns
    given = ns.dtype_name(random_bits) if array else type(random_bits).__name__
    if given != "uint32" or ns.shape(random_bits) != ns.shape(x):
        raise ValueError(
            f"random_bits is one uint32 per element of x in the same library, shape {ns.shape(x)}; "
            f"got {given} {tuple(getattr(random_bits, 'shape', ()))}"
        )
    return random_bits


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


__all__ = ["check_overflow", "check_random_bits", "decode", "encode"]
