"""`pack` and `unpack`: codes of fewer than 8 bits as bytes.

Every row along the last axis is one little-endian bit stream: code i occupies bits [i * b, (i + 1) * b), counted from the
low bit of the first byte. So of two 4-bit codes the even index is in the low nibble (as MXFP4 and NVFP4 tensors are stored),
four 2-bit codes share a byte, eight 3-bit codes three bytes and four 6-bit codes three bytes. A row ends on a byte: missing
codes count as 0. Codes of 8 and 16 bits are their own storage.
"""

from __future__ import annotations

from math import gcd
from typing import Any

from reference.arrays.namespace import Array, Namespace, code_input, codes_of, int32_of
from reference.arrays.torch_bridge import bridged
from reference.formats.formats import Format, format_of


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
    """Bytes of codes, packed along the last axis.

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
    """Codes (uint8) of shape `shape` from bytes packed by `pack`. Raises ValueError where the shapes do not fit."""
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
