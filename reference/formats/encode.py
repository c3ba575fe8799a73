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

NumPy inputs go through a table of 65,536 codes (`reference.formats.tables`) where the format has at most 6 significant bits:
float32 rounded to odd to 16 bits loses nothing that such a format could see. The rule fills the table, so there is one
definition.
"""

from __future__ import annotations

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
from reference.arrays.torch_bridge import bridged
from reference.arrays.widen import float32_bits
from reference.formats.encode_bits import encode_bits, encode_codebook_float64
from reference.formats.formats import Format, format_of
from reference.formats.rounding import OVERFLOWS, check_mode
from reference.formats.tables import encode_flat, fits_table


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


__all__ = ["check_overflow", "check_random_bits", "decode", "encode"]
