"""How scales and zero points are stored: float32 arrays, integers as integers, other formats as their codes.

Inside the quantizer scales are float32 bit patterns in int32. `store` rounds them to the storage format, to nearest even,
as IEEE 754 says where the format has infinities and saturating where it has none; `load` reads back what was stored.
`times_power_of_two` changes stored scales without rounding.
"""

from __future__ import annotations

from typing import Any

from reference.arrays.namespace import Array, Namespace, as_array, codes_of, int32_of, namespace_of
from reference.arrays.softfloat import is_nan, normalized
from reference.arrays.torch_bridge import bridged
from reference.arrays.widen import INFINITY, MAGNITUDE, NAN, SIGN
from reference.formats.encode_bits import encode_bits
from reference.formats.formats import FORMATS


def storage_dtype(storage: str) -> str:
    """dtype of the stored array: float32, int8, uint8 or uint16."""
    if storage == "float32":
        return "float32"
    fmt = FORMATS[storage]
    if fmt.kind == "int" and fmt.signed:
        return "int8"
    return "uint8" if fmt.bits <= 8 else "uint16"


def store(ns: Namespace, bits: Array, storage: str) -> Array:
    """float32 bit patterns rounded into the storage format."""
    if storage == "float32":
        return ns.bitcast(bits, "float32")
    overflow = "nonfinite" if FORMATS[storage].specials == "ieee" else "saturate"
    return store_codes(ns, encode_bits(ns, bits, FORMATS[storage], "nearest_even", overflow), storage)


def store_codes(ns: Namespace, codes: Array, storage: str) -> Array:
    """int32 codes as the stored array."""
    stored = codes_of(ns, codes, FORMATS[storage].bits)
    return ns.bitcast(stored, "int8") if storage_dtype(storage) == "int8" else stored


def load_codes(ns: Namespace, stored: Array, storage: str) -> Array:
    """int32 codes of a stored array."""
    return int32_of(ns, ns.bitcast(stored, "uint8") if storage_dtype(storage) == "int8" else stored)


def load(ns: Namespace, stored: Array, storage: str) -> Array:
    """float32 bit patterns of a stored array."""
    if storage == "float32":
        bits = ns.bitcast(stored, "int32")
        return ns.where(is_nan(bits), NAN, bits)
    fmt = FORMATS[storage]
    table = ns.constant(fmt.values.view("int32"), stored)
    return ns.take(table, load_codes(ns, stored, storage) & ((1 << fmt.bits) - 1))


#: Storages whose values times a power of two are values of theirs.
SCALED = ("float32", "bfloat16", "float16", "float8_e8m0fnu")


@bridged
def times_power_of_two(stored: Any, storage: str, exponent: int) -> tuple[Array, Array]:
    """Stored scales times 2**exponent, of the same shape and dtype, and where that is exact: bool of this shape.

    stored: of `storage_dtype(storage)`, any shape, NumPy, JAX or torch; storage: one of `SCALED`. Nothing is rounded: zeros,
    infinities and NaN stay, and where a product is no normal number of the storage the second array is False and the first says
    nothing. Code 0 of float8_e8m0fnu, 2**-127, counts as no normal number. Raises ValueError for another storage.
    """
    if storage not in SCALED:
        raise ValueError(
            f"scales stored as {storage} times a power of two are not exact; {', '.join(SCALED)} are"
        )
    stored = as_array(stored)
    ns, fmt = namespace_of(stored), FORMATS.get(storage)
    bits = load(ns, stored, storage)
    old, significand = normalized(ns, bits & MAGNITUDE)
    # Beyond 2**12 nothing is exact either way.
    new = old + max(min(exponent, 1 << 12), -(1 << 12))
    lowest, highest = (-126, 127) if fmt is None else (max(fmt.emin, -126), fmt.emax)
    special = ((bits & MAGNITUDE) >= INFINITY) | ((bits & MAGNITUDE) == 0)
    exact = special | ((new >= lowest) & (new <= highest))
    pattern = ((ns.minimum(ns.maximum(new, lowest), highest) + 127) << 23) | (significand & 0x007FFFFF)
    return store(ns, ns.where(special, bits, pattern | (bits & SIGN)), storage), exact
