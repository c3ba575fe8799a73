"""`pack` and `unpack` of codes below 8 bits where rows are whole bytes: one stream of words of eight codes, an octet each.

Codes move inside their word until they touch. Neighbouring lanes store neighbouring words: of 2 or 4 bits 4 or 8 bytes, of
other widths words of 32 codes (see `pack_32`), of codes 8 or 16 bytes.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from fast.kernels.sm90.fp4 import side_by_side
from fast.kernels.sm90.pack_32 import load_quads, store_quads
from fast.launch.call import Call
from fast.launch.launcher import ALIGNMENT, CompiledLaunch

# Codes of these widths are packed in groups of 32, as words; of 2 and 4 bits eight are a word or half of one.
GROUPED = (3, 5, 6, 7)


@triton.jit
def pack_bits(octets, BITS: tl.constexpr):
    """Eight codes in the low bits of the bytes of an int64, whatever lies above them, as 8 * BITS bits."""
    x = _merged(octets, octets >> (8 - BITS), ((1 << BITS) - 1) * 0x0001000100010001)
    x = _merged(x, x >> (16 - 2 * BITS), ((1 << (2 * BITS)) - 1) * 0x0000000100000001)
    x = _merged(x, x >> (32 - 4 * BITS), (1 << (4 * BITS)) - 1)
    return x & ((1 << (8 * BITS)) - 1)


@triton.jit
def unpack_bits(bits, BITS: tl.constexpr):
    """The inverse of `pack_bits`, whatever lies above the 8 * BITS bits."""
    x = _merged(bits, bits << (32 - 4 * BITS), 0x00000000FFFFFFFF)
    x = _merged(x, x << (16 - 2 * BITS), 0x0000FFFF0000FFFF)
    x = _merged(x, x << (8 - BITS), 0x00FF00FF00FF00FF)
    return x & (((1 << BITS) - 1) * 0x0101010101010101)


@triton.jit
def _merged(x, y, MASK: tl.constexpr):
    """The bits of x where MASK has ones, those of y elsewhere. What a move leaves in the gaps is masked once, at the end."""
    return (x & MASK) | (y & ~MASK)


@triton.jit
def _groups(count, WIDE: tl.constexpr, P: tl.constexpr):
    """(P, 1) indices of a program's groups, and which of them exist."""
    program = tl.program_id(0)
    group = ((program.to(tl.int64) if WIDE else program) * P + tl.arange(0, P))[:, None]
    return group, group < count


@triton.jit
def _of(pointer, dtype: tl.constexpr):
    """The same address as a pointer to words."""
    return pointer.to(tl.pointer_type(dtype), bitcast=True)


@triton.jit
def pack_octets_kernel(
    codes, out, count, BITS: tl.constexpr, WIDE: tl.constexpr, SIZE: tl.constexpr, P: tl.constexpr
):
    """Groups of SIZE codes of 2 or 4 bits, packed."""
    group, inside = _groups(count, WIDE, P)
    word = group * (SIZE // 8) + tl.arange(0, SIZE // 8)[None, :]
    bits = pack_bits(tl.load(_of(codes, tl.int64) + word, mask=inside, other=0), BITS)
    part: tl.constexpr = tl.uint32 if BITS == 4 else tl.uint16
    tl.store(_of(out, part) + word, bits.to(part), mask=inside)


@triton.jit
def unpack_octets_kernel(
    packed, codes, count, BITS: tl.constexpr, WIDE: tl.constexpr, SIZE: tl.constexpr, P: tl.constexpr
):
    """The inverse of `pack_octets_kernel`."""
    group, inside = _groups(count, WIDE, P)
    word = group * (SIZE // 8) + tl.arange(0, SIZE // 8)[None, :]
    part: tl.constexpr = tl.uint32 if BITS == 4 else tl.uint16
    bits = tl.load(_of(packed, part) + word, mask=inside, other=0).to(tl.int64)
    tl.store(_of(codes, tl.int64) + word, unpack_bits(bits, BITS), mask=inside)


@triton.jit
def pack_groups_kernel(
    codes, out, count, BITS: tl.constexpr, WIDE: tl.constexpr, SIZE: tl.constexpr, P: tl.constexpr
):
    """Groups of 32 codes of any width below 8 bits, packed into as many words; see `pack_32`."""
    group, inside = _groups(count, WIDE, P)
    source = _of(codes, tl.int32) + group * 8 + tl.arange(0, 4)[None, :]
    first, second = tl.load(source, mask=inside, other=0), tl.load(source + 4, mask=inside, other=0)
    quads = side_by_side(_pack_four(first, BITS), _pack_four(second, BITS))
    store_quads(out, quads, group, inside, BITS)


@triton.jit
def _pack_four(word, BITS: tl.constexpr):
    """Four codes in the low bits of the bytes of an int32, whatever lies above them, as 4 * BITS bits."""
    x = _merged(word, word >> (8 - BITS), ((1 << BITS) - 1) * 0x00010001)
    return _merged(x, x >> (16 - 2 * BITS), (1 << (2 * BITS)) - 1) & ((1 << (4 * BITS)) - 1)


@triton.jit
def unpack_groups_kernel(
    packed, codes, count, BITS: tl.constexpr, WIDE: tl.constexpr, SIZE: tl.constexpr, P: tl.constexpr
):
    """The inverse of `pack_groups_kernel`."""
    group, inside = _groups(count, WIDE, P)
    quads = load_quads(packed, group, inside, SIZE, BITS)
    x = _merged(quads, quads << (16 - 2 * BITS), 0x0000FFFF)
    x = _merged(x, x << (8 - BITS), 0x00FF00FF) & (((1 << BITS) - 1) * 0x01010101)
    # A thread has made two words.
    at = tl.max_contiguous(group * 8 + tl.arange(0, 8)[None, :], [1, 2])
    tl.store(_of(codes, tl.int32) + at, x, mask=inside)


@triton.jit
def unpack_sixes_kernel(
    packed, codes, count, BITS: tl.constexpr, WIDE: tl.constexpr, SIZE: tl.constexpr, P: tl.constexpr
):
    """Groups of 16 codes of 6 bits, from three words of 4 bytes."""
    group, inside = _groups(count, WIDE, P)
    source = _of(packed, tl.uint32) + group * 3
    a = tl.load(source, mask=inside, other=0).to(tl.int64)
    b = tl.load(source + 1, mask=inside, other=0).to(tl.int64)
    c = tl.load(source + 2, mask=inside, other=0).to(tl.int64)
    bits = tl.join(a | ((b & 0xFFFF) << 32), (b >> 16) | (c << 16))
    target = _of(codes, tl.int64) + group * 2 + tl.arange(0, 2)[None, :]
    tl.store(target, unpack_bits(tl.reshape(bits, (P, 2)), 6), mask=inside)


def _launch(
    kernel: Any, call: Call, pointers: tuple[str, str], codes: int, bits: int, size: int, p: int, warps: int = 4
) -> int:  # fmt: skip
    """Run on whole groups of `size` codes, p a program; returns how many codes they are."""
    count = codes // size
    if count:
        # No word holds fewer than four codes, so none has a larger index.
        wide = codes // 4 > 2**31 - p * size
        call.launch(CompiledLaunch(kernel, -(-count // p), (count, bits, wide, size, p), warps), pointers)
    return count * size


def covers(source: torch.Tensor, target: torch.Tensor, length: int, codes: int, bits: int) -> bool:
    """Whether `codes` codes in rows of `length` are one stream of words: no bits between rows, and aligned addresses.

    Single bits are left to the kernels that take a byte at a time.
    """
    return (
        bits > 1
        and (length * bits % 8 == 0 or length == codes)
        and (source.data_ptr() | target.data_ptr()) % ALIGNMENT == 0
    )


def pack_octets(call: Call, names: tuple[str, str], length: int, bits: int) -> int:
    """Pack codes, the first of these tensors of a call, for as long as they fill groups; returns how many they are."""
    codes, packed = (call.tensors[name] for name in names)
    count = codes.numel()
    if not covers(codes, packed, length, count, bits):
        return 0
    if bits in GROUPED:
        return _launch(pack_groups_kernel, call, names, count, bits, 32, 64, 1)
    return _launch(pack_octets_kernel, call, names, count, bits, 64 // bits, 1024 * bits // 8)


def unpack_octets(call: Call, names: tuple[str, str], length: int, bits: int) -> int:
    """The inverse of `pack_octets`: names of the packed codes and of the codes."""
    packed, codes = (call.tensors[name] for name in names)
    count = codes.numel()
    if not covers(packed, codes, length, count, bits):
        return 0
    if bits == 6:
        return _launch(unpack_sixes_kernel, call, names, count, bits, 16, 512)
    if bits in GROUPED:
        return _launch(unpack_groups_kernel, call, names, count, bits, 32, 256)
    return _launch(unpack_octets_kernel, call, names, count, bits, 16, 512)
