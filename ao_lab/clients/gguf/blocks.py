"""Blocks of GGUF: which stored weights they hold bit for bit, and back.

A block is 32 elements of a row with a float16 scale d (and a float16 minimum m):

    Q8_0: d, 32 signed bytes                           value d * q
    Q4_0: d, 16 bytes; Q5_0: d, 4 bytes of fifth bits   value d * (q - 2^(b-1))
    Q4_1, Q5_1: d, m, ...                               value d * q + m
    MXFP4: an e8m0 byte, 16 bytes of E2M1

Byte j of 4-bit codes holds element j in its low half and element j + 16 in its high half. A scheme with larger blocks has its
scale repeated, integers of fewer bits stand in the next wider block; both keep every value. What keeps none is refused:
float32 scales that float16 does not hold, zero points whose minimum float16 does not hold, second-level scales. K-quants have
scales and minima of 6 bits under a float16 of 256 elements, which no scheme here has; they are read as values.

Source: ggml-common.h and ggml-quants.c of llama.cpp; `gguf.quants` has the same in NumPy, and checks every tensor here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

import reference
from ao_lab.clients.integers import by_block
from ao_lab.config.recipe import integer_scheme
from reference import Quantized, Scheme, Zero
from reference.quantize.quantize import unpacked
from reference.schemes.conventions import hqq_scheme

Array = NDArray[Any]
SIZE = 32
#: What a message advises.
WAY_OUT = (
    "GGUF holds integers with float16 scales (int4_g32_f16 as Q4_0, int5_g32_f16 as Q5_0, int8_g32_f16 as Q8_0, or "
    "IntxWeightOnlyConfig with scale_dtype=torch.float16) and mxfp4"
)


class Blocks(NamedTuple):
    """A matrix as GGUF stores it: the name of its type, and bytes (rows, bytes of a row)."""

    type: str
    data: Array


@dataclass(frozen=True)
class Parts:
    """What all integer blocks are made of. codes: uint8 (blocks, 32), counted from 0; scale, minimum: float16 (blocks, 1)."""

    codes: Array
    scale: Array
    minimum: Array | None


def to_blocks(q: Quantized) -> Blocks:
    """The blocks of a stored matrix (N, K), blocks along K; NumPy arrays or torch tensors on the CPU.

    ValueError, with the scheme and what GGUF does hold, where no type has the values that `dequantize` gives, bit for bit.
    """
    q = _in_numpy(q)
    if len(q.shape) != 2 or q.axis % 2 != 1 or q.shape[1] % SIZE:
        raise ValueError(
            f"{q.scheme.name} of shape {q.shape} along axis {q.axis}: blocks of GGUF are {SIZE} elements of a matrix's row"
        )
    is_mxfp4 = (q.scheme.element, q.scheme.scale.storage) == ("float4_e2m1fn", "float8_e8m0fnu")
    blocks = _mxfp4(q) if is_mxfp4 else _integers(q)
    if not same_values(values_of(blocks), reference.dequantize(q)):
        raise ValueError(
            f"{q.scheme.name}: {blocks.type} would hold other values (NaN or extreme scales); {WAY_OUT}"
        )
    return blocks


def values_of(blocks: Blocks) -> Array:
    """The float32 values of blocks (rows, K), as the package `gguf` reads them."""
    from ao_lab.install.extras import needed

    gguf = needed("gguf")
    kind = gguf.GGMLQuantizationType[blocks.type]
    with np.errstate(all="ignore"):
        values: Array = gguf.quants.dequantize(np.ascontiguousarray(blocks.data), kind)
    return values


def same_values(a: Array, b: Array) -> bool:
    """Whether two float32 arrays are equal, zeros of either sign alike; a NaN equals none."""
    return a.shape == b.shape and bool((a == b).all())


def _in_numpy(q: Quantized) -> Quantized:
    parts = {name: getattr(q, name) for name in ("codes", "scale", "outer", "zero")}
    arrays: dict[str, Any] = {
        name: part if part is None or isinstance(part, np.ndarray) else part.numpy()
        for name, part in parts.items()
    }
    return unpacked(replace(q, **arrays))


def _mxfp4(q: Quantized) -> Blocks:
    scale = _by_block(q, q.scale)
    codes = _halves(q.codes.reshape(-1, SIZE))
    return Blocks("MXFP4", _rows(q, [scale.astype(np.uint8), codes]))


def _integers(q: Quantized) -> Blocks:
    """Integers by their scales in float16, and where they have zero points by minima."""
    scheme, fmt = q.scheme, q.scheme.format
    if fmt.kind != "int" or fmt.fraction_bits or q.outer is not None or scheme.scale.stored != "decode":
        raise ValueError(f"{scheme.name} is in no block of GGUF; {WAY_OUT}")
    scale = _by_block(q, _floats(q.scale, scheme.scale.storage))
    half = _half(
        scale, f"{scheme.name}: its scales ({scheme.scale.storage}) are no float16 values; {WAY_OUT}"
    )
    bits = 8 if fmt.bits > 5 else max(fmt.bits, 4)
    offset = -int(fmt.integer_range[0])
    counted = (q.codes.astype(np.int16) + offset) & (2**fmt.bits - 1)
    if scheme.zero is None and offset:
        # In a wider block zero lies higher.
        codes = counted + (2 ** (bits - 1) - offset)
        return _typed(q, bits, Parts(codes.astype(np.uint8).reshape(-1, SIZE), half, None))
    if bits == 8:
        raise ValueError(
            f"{scheme.name}: GGUF has no 8-bit block with a minimum; take symmetric integers (int8_g32_f16)"
        )
    least = _half(
        _minimum(q, scale, offset),
        f"{scheme.name}: the minimum of a block, -zero point * scale, is no float16 value; symmetric integers have none",
    )
    return _typed(q, bits, Parts(counted.astype(np.uint8).reshape(-1, SIZE), half, least))


def _minimum(q: Quantized, scale: Array, offset: int) -> Array:
    """The value of the smallest code of each block, float32: exact, or else seen to differ."""
    zero, rule = q.scheme.zero, "" if q.scheme.zero is None else q.scheme.zero.rule
    if zero is None:
        return np.zeros_like(scale)
    if rule == "code":
        steps: Array = _by_block(q, q.zero.astype(np.float32)) + offset
        return -steps * scale
    low, high = q.scheme.format.integer_range
    middle = np.float32((low + high + 1) // 2)
    least: Array = _by_block(q, _floats(q.zero, zero.storage)) - middle * scale
    return least


def _typed(q: Quantized, bits: int, parts: Parts) -> Blocks:
    name = f"Q{bits}_{0 if parts.minimum is None else 1}"
    return Blocks(name, _rows(q, WRITERS[bits](parts)))


def _heads(parts: Parts) -> list[Array]:
    return [one.astype("<f2").view(np.uint8) for one in (parts.scale, parts.minimum) if one is not None]


def _write_8(parts: Parts) -> list[Array]:
    return [*_heads(parts), parts.codes ^ 0x80]


def _write_5(parts: Parts) -> list[Array]:
    fifth = np.packbits(parts.codes >> 4, axis=-1, bitorder="little")
    return [*_heads(parts), fifth, _halves(parts.codes & 15)]


def _write_4(parts: Parts) -> list[Array]:
    return [*_heads(parts), _halves(parts.codes)]


WRITERS: dict[int, Callable[[Parts], list[Array]]] = {8: _write_8, 5: _write_5, 4: _write_4}


def _halves(codes: Array) -> Array:
    """Codes (blocks, 32) below 16 as bytes (blocks, 16): the first half low."""
    packed: Array = codes[:, : SIZE // 2] | (codes[:, SIZE // 2 :] << 4)
    return packed.astype(np.uint8)


def _rows(q: Quantized, parts: list[Array]) -> Array:
    data: Array = np.concatenate(parts, axis=1).reshape(q.shape[0], -1)
    return data


def _floats(stored: Array, storage: str) -> Array:
    values: Array = stored if storage == "float32" else reference.decode(stored, storage)
    return values


def _half(values: Array, message: str) -> Array:
    with np.errstate(over="ignore"):
        half = values.astype(np.float16)
    if not same_values(half.astype(np.float32), values):
        raise ValueError(message)
    return half


def _by_block(q: Quantized, values: Array) -> Array:
    """Scales or zero points of a matrix, one for each 32 elements of a row: (N * K / 32, 1)."""
    block = q.scheme.scale.block
    wide = block[1] if isinstance(block, tuple) else block
    if isinstance(wide, int) and wide != -1 and wide % SIZE:
        raise ValueError(
            f"{q.scheme.name}: its blocks are no multiples of {SIZE} elements of a row; {WAY_OUT}"
        )
    grid: Array = by_block(q, torch.tensor(values), SIZE).numpy()
    return grid.reshape(-1, 1)


#: Bits and minima of the integer types.
TYPES = {"Q8_0": (8, False), "Q5_0": (5, False), "Q4_0": (4, False), "Q5_1": (5, True), "Q4_1": (4, True)}


def scheme_of_type(name: str) -> Scheme | None:
    """The scheme of the weights that a GGUF type holds; None for types that are read as values.

    Q4_1 and Q5_1: integers from 0 with a float value in the middle of their range, in float32: m + d * 2^(b-1).
    """
    if name == "MXFP4":
        return reference.SCHEMES["mxfp4"]
    if name not in TYPES:
        return None
    bits, minimum = TYPES[name]
    if not minimum:
        return integer_scheme(bits, SIZE, asymmetric=False, storage="float16")
    base = hqq_scheme(bits, SIZE, "float16")
    return replace(base, name=f"gguf.q{bits}_1", zero=Zero(rule="value", storage="float32"))


def from_blocks(blocks: Blocks) -> Quantized | None:
    """The stored matrix of blocks, NumPy arrays, codes packed; None where no scheme has all their values bit for bit."""
    scheme = scheme_of_type(blocks.type)
    if scheme is None:
        return None
    rows = blocks.data.shape[0]
    split = np.ascontiguousarray(blocks.data).reshape(-1, _bytes_of(blocks.type))
    q = (
        _read_mxfp4(split, scheme, rows)
        if blocks.type == "MXFP4"
        else _read_integers(split, blocks.type, scheme, rows)
    )
    packed = scheme.format.bits < 8
    if packed:
        q = replace(q, codes=reference.pack(q.codes, scheme.format), packed=True)
    return q if same_values(reference.dequantize(q), values_of(blocks)) else None


def _bytes_of(name: str) -> int:
    if name == "MXFP4":
        return 1 + SIZE // 2
    bits, minimum = TYPES[name]
    return 2 * (1 + minimum) + SIZE * bits // 8


def _read_mxfp4(split: Array, scheme: Scheme, rows: int) -> Quantized:
    codes = _whole(split[:, 1:]).reshape(rows, -1)
    return Quantized(codes, split[:, 0].reshape(rows, -1), None, None, codes.shape, 1, scheme)


def _read_integers(split: Array, name: str, scheme: Scheme, rows: int) -> Quantized:
    bits, minimum = TYPES[name]
    heads = 2 * (1 + minimum)
    scale = np.ascontiguousarray(split[:, :2]).view(np.uint16)
    body = split[:, heads:]
    codes = body if bits == 8 else _whole(body[:, -SIZE // 2 :])
    if bits == 5:
        fifth = np.unpackbits(body[:, :4], axis=-1, bitorder="little")
        codes = codes | (fifth << 4)
    zero = None
    if minimum:
        least = np.ascontiguousarray(split[:, 2:4]).view("<f2").astype(np.float32)
        with np.errstate(all="ignore"):
            zero = (least + np.float32(2 ** (bits - 1)) * scale.view("<f2").astype(np.float32)).reshape(
                rows, -1
            )
    elif bits < 8:
        codes = (codes - 2 ** (bits - 1)) & (2**bits - 1)
    codes = codes.astype(np.uint8).reshape(rows, -1)
    return Quantized(codes, scale.reshape(rows, -1), None, zero, codes.shape, 1, scheme)


def _whole(halves: Array) -> Array:
    """The inverse of `_halves`."""
    return np.concatenate([halves & 15, halves >> 4], axis=1)


__all__ = ["Blocks", "from_blocks", "same_values", "scheme_of_type", "to_blocks", "values_of"]
