"""How scales and zero points are stored: float32 arrays, integers as integers, other formats as their codes.

Inside the quantizer scales are float32 bit patterns in int32. `store` rounds them to the storage format, to nearest even,
as IEEE 754 says where the format has infinities and saturating where it has none; `load` reads back what was stored.
"""

from __future__ import annotations

from reference.arrays.namespace import Array, Namespace, codes_of, int32_of
from reference.arrays.softfloat import is_nan
from reference.arrays.widen import NAN
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
