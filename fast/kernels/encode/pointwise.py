"""`encode`, `decode`, `pack` and `unpack` for any contiguous tensor, one element or one byte a lane."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from fast.kernels.bits import canonical, widened
from fast.kernels.encode.pack_words import pack_octets, unpack_octets
from fast.kernels.rules.elements import decode as decode_codes
from fast.kernels.rules.elements import encode as encode_values
from fast.kernels.scheme.element_constants import element_of
from fast.launch.call import Call
from fast.launch.launcher import CompiledLaunch, interpreted, same_device
from reference.arrays.errors import choice
from reference.arrays.namespace import namespace_of
from reference.formats.encode import check_overflow, check_random_bits
from reference.formats.formats import Format, format_of
from reference.formats.rounding import check_mode
from reference.formats.storage import packed_shape

CODES = (torch.uint8, torch.uint16)

TILE = 4096
# WIDE of rows whose bits have numbers beyond an int32; True is for elements beyond it.
LONG_ROWS = tl.constexpr(2)


@triton.jit
def encode_kernel(x, words, codes, count, E: tl.constexpr, WIDE: tl.constexpr, TILE: tl.constexpr):
    """codes[i] = code of x[i]."""
    program = tl.program_id(0)
    at = (program.to(tl.int64) if WIDE else program) * TILE + tl.arange(0, TILE)
    v = widened(tl.load(x + at, mask=at < count, other=0.0))
    drawn = None
    if E.rounding == "stochastic":
        drawn = tl.load(words + at, mask=at < count, other=0)
    made = encode_values(v, drawn, E)
    tl.store(codes + at, made.to(codes.dtype.element_ty), mask=at < count)


@triton.jit
def decode_kernel(codes, y, count, E: tl.constexpr, WIDE: tl.constexpr, TILE: tl.constexpr):
    """y[i] = float32 value of codes[i].

    Four neighbours a thread, as a store of 16 bytes takes them: with 16, as a load would, values go through shared memory.
    """
    program = tl.program_id(0)
    four = tl.arange(0, TILE // 4)[:, None] * 4 + tl.arange(0, 4)[None, :]
    at = (program.to(tl.int64) if WIDE else program) * TILE + four
    code = tl.load(codes + at, mask=at < count, other=0).to(tl.int32) & ((1 << E.bits) - 1)
    tl.store(y + at, canonical(decode_codes(code, E)), mask=at < count)


@triton.jit
def pack_kernel(codes, out, count, length, width, BITS: tl.constexpr, WIDE: tl.constexpr, TILE: tl.constexpr):
    """Byte j of a row of `length` codes holds the codes whose bits [i * BITS, (i + 1) * BITS) meet [8 j, 8 j + 8)."""
    program = tl.program_id(0)
    at = (program.to(tl.int64) if WIDE else program) * TILE + tl.arange(0, TILE)
    row, j = at // width, at % width
    if WIDE != LONG_ROWS:
        j = j.to(tl.int32)
    first = (8 * j) // BITS
    byte = tl.zeros((TILE,), tl.int32)
    for step in tl.static_range(8 // BITS + 2):
        i = first + step
        offset = (i * BITS - 8 * j).to(tl.int32)
        exists = (at < count) & (i < length) & (offset < 8)
        code = tl.load(codes + row * length + i, mask=exists, other=0).to(tl.int32) & ((1 << BITS) - 1)
        byte |= tl.where(offset >= 0, code << tl.maximum(offset, 0), code >> tl.maximum(-offset, 0))
    tl.store(out + at, (byte & 0xFF).to(tl.uint8), mask=at < count)


@triton.jit
def unpack_kernel(
    packed, codes, count, length, width, BITS: tl.constexpr, WIDE: tl.constexpr, TILE: tl.constexpr
):
    """Code i of a row from the one or two bytes that hold it."""
    program = tl.program_id(0)
    at = (program.to(tl.int64) if WIDE else program) * TILE + tl.arange(0, TILE)
    row, i = at // length, at % length
    if WIDE != LONG_ROWS:
        i = i.to(tl.int32)
    bit = i * BITS
    byte, shift = bit // 8, (bit % 8).to(tl.int32)
    low = tl.load(packed + row * width + byte, mask=at < count, other=0).to(tl.int32)
    more = (at < count) & (shift + BITS > 8)
    high = tl.load(packed + row * width + byte + 1, mask=more, other=0).to(tl.int32)
    code = ((low | (high << 8)) >> shift) & ((1 << BITS) - 1)
    tl.store(codes + at, code.to(tl.uint8), mask=at < count)


def _wide(count: int) -> bool:
    return count > 2**31 - 2 * TILE


def _programs(count: int) -> int:
    return -(-count // TILE)


def encode(
    x: torch.Tensor, record: str | Format, rounding: str, overflow: str, words: Any, key: Any = None
) -> torch.Tensor | None:
    """`fast.encode`, or None for float64 and empty tensors; arguments are checked as the reference does.

    key: of the call, here and below; see `launch.cache`.
    """
    fmt = format_of(record)
    if x.dtype not in (torch.float32, torch.bfloat16, torch.float16) or x.numel() == 0:
        return None
    check_mode(rounding, words)
    check_overflow(fmt, rounding, overflow)
    check_random_bits(namespace_of(x), x, words)
    if fmt.kind == "codebook":
        choice(rounding, ("nearest_even",), f"rounding of codebook {fmt.name}")
    if not same_device(x, words):
        return None
    call = Call({"x": x, "words": words})
    call.allocate("codes", x.shape, torch.uint8 if fmt.bits <= 8 else torch.uint16)
    element = element_of(fmt, rounding, overflow, hardware=not interpreted(), fours=True)
    count = x.numel()
    launch = CompiledLaunch(encode_kernel, _programs(count), (count, element, _wide(count), TILE), 4)
    call.launch(launch, ("x", "words", "codes"))
    codes: torch.Tensor = call.result("codes", key, record)
    return codes


def decode(codes: torch.Tensor, record: str | Format, key: Any = None) -> torch.Tensor | None:
    """`fast.decode`, or None where the reference has to answer."""
    fmt = format_of(record)
    if codes.dtype not in CODES or codes.numel() == 0:
        return None
    call = Call({"codes": codes})
    call.allocate("y", codes.shape, torch.float32)
    element, count = element_of(fmt, hardware=not interpreted()), codes.numel()
    launch = CompiledLaunch(decode_kernel, _programs(count), (count, element, _wide(count), TILE), 4)
    call.launch(launch, ("codes", "y"))
    y: torch.Tensor = call.result("y", key, record)
    return y


def pack(codes: torch.Tensor, record: str | Format, key: Any = None) -> torch.Tensor | None:
    """`fast.pack` of sub-byte codes, or None where the reference has to answer."""
    fmt = format_of(record)
    if codes.dtype != torch.uint8 or codes.numel() == 0 or fmt.bits >= 8 or codes.dim() == 0:
        return None
    call = Call({"codes": codes})
    add_packing(call, "codes", "packed", fmt)
    packed: torch.Tensor = call.result("packed", key, record)
    return packed


def add_packing(call: Call, source: str, target: str, fmt: Format) -> bool:
    """Pack the codes that a call has under a name into a new tensor of it; whether that is to be done, below 8 bits."""
    if fmt.bits >= 8:
        return False
    codes = call.tensors[source]
    packed = call.allocate(target, packed_shape(tuple(codes.shape), fmt), torch.uint8)
    done = pack_octets(call, (source, target), codes.shape[-1], fmt.bits)
    if done < codes.numel():
        rest, into = _rest(codes, done), _rest(packed, done * fmt.bits // 8)
        lengths = (into.numel(), rest.shape[-1], into.shape[-1])
        _bytewise(pack_kernel, call, {source: rest, target: into}, lengths, fmt.bits, codes.numel())
    return True


def unpack(
    packed: torch.Tensor, record: str | Format, shape: tuple[int, ...], key: Any = None
) -> torch.Tensor | None:
    """`fast.unpack` of sub-byte codes, or None where the reference has to answer."""
    fmt = format_of(record)
    if packed.dtype != torch.uint8 or packed.numel() == 0 or fmt.bits >= 8:
        return None
    if tuple(packed.shape) != packed_shape(shape, fmt):
        return None
    call = Call({"packed": packed})
    add_unpacking(call, "packed", "codes", shape, fmt)
    made: torch.Tensor = call.result("codes", key, record)
    return made


def add_unpacking(call: Call, source: str, target: str, shape: tuple[int, ...], fmt: Format) -> None:
    """Unpack what a call has under a name into a new tensor of this shape, one code a byte."""
    codes, packed = call.allocate(target, shape, torch.uint8), call.tensors[source]
    done = unpack_octets(call, (source, target), shape[-1], fmt.bits)
    if done < codes.numel():
        rest, into = _rest(packed, done * fmt.bits // 8), _rest(codes, done)
        lengths = (into.numel(), into.shape[-1], rest.shape[-1])
        _bytewise(unpack_kernel, call, {source: rest, target: into}, lengths, fmt.bits, codes.numel())


def _bytewise(
    kernel: Any, call: Call, tensors: dict[str, torch.Tensor], lengths: tuple[int, int, int], bits: int, count: int
) -> None:  # fmt: skip
    """Pack or unpack what is left of a call's tensors byte by byte. lengths: elements made, codes and bytes of a row."""
    wide = width_of(count, lengths[1], bits)
    launch = CompiledLaunch(kernel, _programs(lengths[0]), (*lengths, bits, wide, TILE), 8)
    call.launch(launch, tuple(tensors), tensors)


def width_of(count: int, length: int, bits: int) -> int:
    """What `pack_kernel` and `unpack_kernel` take as WIDE, for `count` codes in rows of `length`."""
    # A program looks a few codes beyond the end of a row.
    return LONG_ROWS.value if (length + 16) * bits > 2**31 else _wide(count)


def _rest(tensor: torch.Tensor, start: int) -> torch.Tensor:
    """What follows the first `start` elements as one row; the tensor itself, with its rows, where they are none."""
    return tensor.view(-1)[start:] if start else tensor
