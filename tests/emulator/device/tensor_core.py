"""`wgmma.mma_async` with its first operand in registers or shared memory, and `wgmma.mma_async.sp`: written from the PTX ISA
(9.7.15.5, 9.7.15.6) and not from the kernel.

Descriptor: bits 0-13 the address / 16, 32-45 the bytes from eight rows to the next eight / 16, 62-63 the swizzle (1: 128 bytes,
2: 64). Rows of the swizzle's width lie behind each other; bits 4 to 6 (5) of an address are those plus (xor) bits 7 to 9 (8).

Metadata: a thread's 32 bits are eight groups' nibbles, lowest first. In warp w, lane l, t = l % 4:
8-bit elements, K 64: row 16 w + l / 4 + 8 (t % 2), groups of k = 32 (t / 2) ... + 31.
16-bit, K 32, selector 0: threads t = 0, 1; low half row 16 w + l / 4, high half row 8 below, groups of k = 16 t ... + 15.
Sums: register i of a thread is row 16 w + l / 4 + 8 (i / 2 % 2), column 8 (i / 4) + 2 t + i % 2.
"""

from __future__ import annotations

import re
from functools import cache
from typing import Any

import ml_dtypes
import numpy as np

ELEMENTS = {
    "e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2, "bf16": ml_dtypes.bfloat16, "f16": np.float16, "s8":
    np.int8,
}  # fmt: skip
SHAPE = re.compile(r"m64n(\d+)k(\d+)\.(f32|s32)\.(\w+)\.(\w+)")
WIDTHS = {1: 128, 2: 64}
#: Nibbles that the instruction defines.
VALID = (0b0100, 0b1000, 0b1001, 0b1100, 0b1101, 0b1110)


def swizzled(address: Any, width: int) -> Any:
    """Where the byte of an address lies in a layout of rows of `width` bytes."""
    return address ^ ((address >> 7 & (width // 16 - 1)) << 4)


def operand(memory: np.ndarray, descriptor: int, rows: int, length: int) -> np.ndarray:
    """Bytes (rows, length) that a descriptor names."""
    start, stride, mode = (descriptor & 0x3FFF) << 4, (descriptor >> 32 & 0x3FFF) << 4, descriptor >> 62
    width = WIDTHS[mode]
    if descriptor >> 49 & 7 or (start % width) + length > width:
        raise ValueError(f"descriptor {descriptor:#x} leaves its rows of {width} bytes")
    row, byte = np.arange(rows)[:, None], np.arange(length)
    return memory[swizzled(start + row // 8 * stride + row % 8 * width + byte, width)]


def groups_of(words: np.ndarray, bits: int) -> np.ndarray:
    """Nibbles (64, groups) of the metadata registers of 128 threads."""
    nibble = (words[:, None] >> (4 * np.arange(8))) & 15
    made = np.full((64, 16 if bits == 8 else 8), -1)
    for thread in range(128):
        warp, quad, t = thread // 32, thread % 32 // 4, thread % 4
        if bits == 8:
            made[16 * warp + quad + 8 * (t % 2), 8 * (t // 2) : 8 * (t // 2) + 8] = nibble[thread]
        elif t < 2:
            made[16 * warp + quad, 4 * t : 4 * t + 4] = nibble[thread, :4]
            made[16 * warp + quad + 8, 4 * t : 4 * t + 4] = nibble[thread, 4:]
    if not np.isin(made, VALID).all():
        raise ValueError("metadata that the instruction does not define")
    return made


def product(memory: np.ndarray, opcode: str, a: int, b: int, words: np.ndarray) -> np.ndarray:
    """The sums (64, N) of one instruction in float64 or int64. Selector 0."""
    found = SHAPE.search(opcode)
    if found is None:
        raise NotImplementedError(opcode)
    n, k, first, second = int(found[1]), int(found[2]), ELEMENTS[found[4]], ELEMENTS[found[5]]
    size = np.dtype(first).itemsize
    if k * size != 64:
        raise ValueError(f"{opcode}: no such shape")
    values = operand(memory, a, 64, 32).copy().view(first).reshape(64, -1, 2)
    tokens = operand(memory, b, n, 64).copy().view(second)
    groups, wide = groups_of(words, 8 * size), np.int64 if found[3] == "s32" else np.float64
    dense = np.zeros((64, k // 4, 4), wide)
    row, group = np.indices(groups.shape)
    dense[row, group, groups & 3] = values[..., 0].astype(wide)
    dense[row, group, groups >> 2] = values[..., 1].astype(wide)
    return dense.reshape(64, k) @ tokens.astype(wide).T


def fragment_product(memory: np.ndarray, opcode: str, words: np.ndarray, b: int) -> np.ndarray:
    """The sums (64, N) of an instruction without metadata, its first operand the registers (128, 4) of the threads.

    Register i is row 16 w + l / 4 + 8 (i % 2), columns 2 t + 8 (i / 2) and the next, the first in the low half; of 8-bit
    elements columns 4 t + 16 (i / 2) and the next three.
    """
    found = SHAPE.search(opcode)
    k, each = (int(found[2]), 32 // int(found[2])) if found is not None else (0, 0)
    if found is None or k * np.dtype(ELEMENTS[found[4]]).itemsize != 32:
        raise NotImplementedError(opcode)
    n, first, second = int(found[1]), ELEMENTS[found[4]], ELEMENTS[found[5]]
    kind, many = (np.uint16, 2) if each == 2 else (np.uint8, 4)
    parts = words.astype(np.uint32).view(kind).reshape(*words.shape, many).view(first).astype(np.float64)
    thread, i, part = np.indices(parts.shape)
    weight = np.zeros((64, k))
    row = thread // 32 * 16 + thread % 32 // 4 + 8 * (i % 2)
    weight[row, many * (thread % 4) + k // 2 * (i // 2) + part] = parts
    return weight @ operand(memory, b, n, 32).copy().view(second).astype(np.float64).T


def dense_product(memory: np.ndarray, opcode: str, a: int, b: int) -> np.ndarray:
    """The sums (64, N) of an instruction without metadata, both operands 32 bytes of rows in shared memory."""
    found = SHAPE.search(opcode)
    if found is None or int(found[2]) * np.dtype(ELEMENTS[found[4]]).itemsize != 32:
        raise NotImplementedError(opcode)
    wide = np.int64 if found[3] == "s32" else np.float64
    first = operand(memory, a, 64, 32).copy().view(ELEMENTS[found[4]]).astype(wide)
    return first @ operand(memory, b, int(found[1]), 32).copy().view(ELEMENTS[found[5]]).astype(wide).T


@cache
def places(sums: int) -> tuple[np.ndarray, np.ndarray]:
    """(row, column) of register i of a thread: (128, sums) each."""
    thread, i = np.arange(128)[:, None], np.arange(sums)
    return thread // 32 * 16 + thread % 32 // 4 + 8 * (i // 2 % 2), 8 * (i // 4) + 2 * (thread % 4) + i % 2


__all__ = ["dense_product", "fragment_product", "operand", "places", "product", "swizzled"]
