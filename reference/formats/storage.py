"""How codes are stored, packed into bytes, and how scales and zero points are.

`pack` and `unpack`: every row along the last axis is one little-endian bit stream: code i occupies bits [i * b, (i + 1) * b),
counted from the low bit of the first byte. So of two 4-bit codes the even index is in the low nibble (as MXFP4 and NVFP4
tensors are stored), four 2-bit codes share a byte, eight 3-bit codes three bytes and four 6-bit codes three bytes. A row ends
on a byte: missing codes count as 0. Codes of 8 and 16 bits are their own storage.

Scales and zero points are stored as float32 arrays, integers as integers, other formats as their codes. Inside the quantizer
scales are float32 bit patterns in int32. `store` rounds them to the storage format, to nearest even, as IEEE 754 says where
the format has infinities and saturating where it has none; `load` reads back what was stored. `times_power_of_two` changes
stored scales without rounding.
"""

from __future__ import annotations

from math import gcd
from typing import Any

from reference.arrays.bridges import bridged
from reference.arrays.namespace import (
    Array,
    Namespace,
    as_array,
    code_input,
    codes_of,
    int32_of,
    namespace_of,
)
from reference.arrays.softfloat import INFINITY, MAGNITUDE, NAN, SIGN, is_nan, normalized
from reference.formats.encode import encode_bits
from reference.formats.formats import FORMATS, Format, format_of


def _group(bits: int) -> tuple[int, int]:
    """(codes, bytes) of the smallest group that ends on a byte."""
    count = 8 // gcd(bits, 8)
    return count, count * bits // 8


def packed_shape(shape: tuple[int, ...], fmt: str | Format) -> tuple[int, ...]:
    """Shape of the packed array of codes of `shape`: the last axis becomes ceil(K * bits / 8) bytes."""
    bits = format_of(fmt).bits
    if bits >= 8:
        return shape
    if not shape:
        raise ValueError("pack needs at least one axis, got a 0-d array; reshape it to (1,)")
    return (*shape[:-1], -(-shape[-1] * bits // 8))


@bridged
def pack(codes: Any, fmt: str | Format) -> Array:
    """Pack codes below 8 bits into bytes along the last axis, the even index in the low bits.

    codes: uint8 of any shape with at least one axis, in the low bits (higher bits are ignored). Returns uint8 of shape
    `packed_shape(codes.shape, fmt)`. 8- and 16-bit formats return the codes. Raises TypeError for other dtypes.
    """
    fmt = format_of(fmt)
    ns, codes = code_input(codes, "pack")
    shape = packed_shape(ns.shape(codes), fmt)
    if fmt.bits >= 8:
        return codes
    count, size = _group(fmt.bits)
    values = int32_of(ns, codes) & ((1 << fmt.bits) - 1)
    length = ns.shape(values)[-1]
    values = _lengthen(ns, values, -length % count).reshape((*shape[:-1], -(-length // count), count))
    parts = [_byte(values, index, fmt.bits, count) for index in range(size)]
    packed = codes_of(ns, ns.stack(parts, -1), 8).reshape((*shape[:-1], -(-length // count) * size))
    return packed[..., : shape[-1]]


def _byte(values: Array, index: int, bits: int, count: int) -> Array:
    """Byte `index` of every group: the codes that overlap it, shifted into place."""
    total = None
    for code in range(count):
        offset = code * bits - 8 * index
        if -bits < offset < 8:
            moved = values[..., code] << offset if offset >= 0 else values[..., code] >> -offset
            total = moved if total is None else total | moved
    return total & 0xFF if total is not None else values[..., 0] * 0


@bridged
def unpack(packed: Any, fmt: str | Format, shape: tuple[int, ...]) -> Array:
    """Unpack codes (uint8) of shape `shape` from the bytes of `pack`. Raises ValueError where the shapes do not fit."""
    fmt = format_of(fmt)
    ns, packed = code_input(packed, "unpack")
    shape = tuple(shape)
    wanted = packed_shape(shape, fmt)
    if ns.shape(packed) != wanted:
        raise ValueError(
            f"codes of {fmt.name} with shape {shape} are packed into shape {wanted}, got {ns.shape(packed)}"
        )
    if fmt.bits >= 8:
        return packed
    count, size = _group(fmt.bits)
    data = _lengthen(ns, int32_of(ns, packed), -wanted[-1] % size)
    groups = ns.shape(data)[-1] // size
    data = data.reshape((*wanted[:-1], groups, size))
    parts = [_code(data, index, fmt.bits, size) for index in range(count)]
    codes = ns.stack(parts, -1).reshape((*wanted[:-1], groups * count))[..., : shape[-1]]
    return codes_of(ns, codes, 8)


def _code(data: Array, index: int, bits: int, size: int) -> Array:
    """Code `index` of every group, from the one or two bytes that hold it."""
    first, offset = divmod(index * bits, 8)
    value = data[..., first] >> offset
    if offset + bits > 8 and first + 1 < size:
        value = value | (data[..., first + 1] << (8 - offset))
    return value & ((1 << bits) - 1)


def _lengthen(ns: Namespace, values: Array, missing: int) -> Array:
    if not missing:
        return values
    shape = (*ns.shape(values)[:-1], missing)
    return ns.concatenate([values, ns.full(shape, 0, "int32", values)], -1)


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
