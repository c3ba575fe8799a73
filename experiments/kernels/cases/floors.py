"""The fewest bytes that a case moves: every tensor that it needs read once, every result written once.

A kernel's *fraction* is its rate on these bytes over the rate of a plain copy, measured in the same run, of a tensor as large
as the case's input. A kernel that has to read twice (a scale over the whole tensor comes before the first code) has a floor
that says so.
"""

from __future__ import annotations

from math import prod

from reference import FORMATS, SCHEMES, Scheme

#: Bytes of a bfloat16, in which all inputs of quantizers come.
WIDE = 2
Shape = tuple[int, int]


def storage_bytes(name: str) -> float:
    """Bytes of one scale or zero point as stored: float32, or a whole number of bytes of a format."""
    return 4.0 if name == "float32" else float(-(-FORMATS[name].bits // 8))


def code_bytes(scheme: Scheme, packed: bool) -> float:
    """Bytes of one code: its bits where packed, else a whole number of bytes."""
    bits = scheme.format.bits
    return bits / 8 if packed else float(-(-bits // 8))


def block_count(block: int | tuple[int, int] | str, shape: Shape, axis: int = -1) -> int:
    """How many blocks a record's `block` makes of a matrix, short ones counted."""
    along, across = (shape[1], shape[0]) if axis in (-1, 1) else shape
    if block == "tensor":
        return 1
    if isinstance(block, str):
        return -(-prod(shape) // int(block.partition(":")[2]))
    if isinstance(block, tuple):
        return -(-across // block[0]) * -(-along // block[1])
    return across * (1 if block == -1 else -(-along // block))


def scale_bytes(scheme: Scheme, shape: Shape, axis: int = -1) -> float:
    """Bytes of all scales and zero points of a matrix."""
    blocks = block_count(scheme.scale.block, shape, axis)
    total = blocks * storage_bytes(scheme.scale.storage)
    if scheme.zero is not None:
        total += blocks * storage_bytes(scheme.zero.storage)
    if scheme.outer is not None:
        over_elements = scheme.outer.statistic == "absmax_elements"
        outer = 1 if over_elements else block_count(scheme.outer.block, (1, blocks))
        total += outer * storage_bytes(scheme.outer.storage)
    return total


def stored_bytes(scheme: str | Scheme, shape: Shape, *, packed: bool = False, axis: int = -1) -> float:
    """Bytes of a quantized matrix: codes, scales, zero points."""
    record = SCHEMES[scheme] if isinstance(scheme, str) else scheme
    return prod(shape) * code_bytes(record, packed) + scale_bytes(record, shape, axis)


def wide_bytes(shape: Shape) -> float:
    """Bytes of a bfloat16 matrix."""
    return float(WIDE * prod(shape))


def fraction(moved: float, seconds: float, copy_rate: float) -> float:
    """Rate over the copy's rate (both in bytes a second)."""
    return moved / seconds / copy_rate
