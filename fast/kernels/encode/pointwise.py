"""`encode`, `decode`, `pack` and `unpack` for any contiguous tensor, one element or one byte a lane."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from fast.kernels.encode.pack_words import pack_octets, unpack_octets
from fast.kernels.launch.launcher import Fixed, interpreted
from fast.kernels.launch.replay import Recording, picked
from fast.kernels.rules.bits import canonical, widened
from fast.kernels.rules.elements import decode as decode_codes
from fast.kernels.rules.elements import encode as encode_values
from fast.kernels.scheme.constants import element_of
from reference.arrays.errors import choice
from reference.arrays.namespace import namespace_of
from reference.formats.encode import check_overflow, check_random_bits
from reference.formats.formats import Format, format_of
from reference.formats.pack import packed_shape
from reference.formats.rounding import check_mode

CODES = (torch.uint8, torch.uint16)

TILE = 4096


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
    row, j = at // width, (at % width).to(tl.int32)
    first = (8 * j) // BITS
    byte = tl.zeros((TILE,), tl.int32)
    for step in tl.static_range(8 // BITS + 2):
        i = first + step
        offset = i * BITS - 8 * j
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
    row, i = at // length, (at % length).to(tl.int32)
    bit = i * BITS
    byte, shift = bit // 8, bit % 8
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
    x: torch.Tensor, asked_format: str | Format, rounding: str, overflow: str, words: Any, key: Any = None
) -> torch.Tensor | None:
    """`fast.encode`, or None for float64 and empty tensors; arguments are checked as the reference does.

    key: of the call, here and below; see `ready`.
    """
    fmt = format_of(asked_format)
    if x.dtype not in (torch.float32, torch.bfloat16, torch.float16) or x.numel() == 0:
        return None
    check_mode(rounding, words)
    check_overflow(fmt, rounding, overflow)
    check_random_bits(namespace_of(x), x, words)
    if fmt.kind == "codebook":
        choice(rounding, ("nearest_even",), f"rounding of codebook {fmt.name}")
    call = Recording({"x": x, "words": words})
    codes = call.empty("codes", x.shape, torch.uint8 if fmt.bits <= 8 else torch.uint16)
    element = element_of(fmt, rounding, overflow, hardware=not interpreted(), fours=True)
    count = x.numel()
    kernel = Fixed(encode_kernel, _programs(count), (count, element, _wide(count), TILE), 4)
    call.launch(kernel, ("x", "words", "codes"))
    call.remember(key, asked_format, picked("codes"))
    return codes


def decode(codes: torch.Tensor, asked_format: str | Format, key: Any = None) -> torch.Tensor | None:
    """`fast.decode`, or None where the reference has to answer."""
    fmt = format_of(asked_format)
    if codes.dtype not in CODES or codes.numel() == 0:
        return None
    call = Recording({"codes": codes})
    y = call.empty("y", codes.shape, torch.float32)
    element, count = element_of(fmt, hardware=not interpreted()), codes.numel()
    kernel = Fixed(decode_kernel, _programs(count), (count, element, _wide(count), TILE), 4)
    call.launch(kernel, ("codes", "y"))
    call.remember(key, asked_format, picked("y"))
    return y


def pack(codes: torch.Tensor, asked_format: str | Format, key: Any = None) -> torch.Tensor | None:
    """`fast.pack` of sub-byte codes, or None where the reference has to answer."""
    fmt = format_of(asked_format)
    if codes.dtype != torch.uint8 or codes.numel() == 0 or fmt.bits >= 8 or codes.dim() == 0:
        return None
    call = Recording({"codes": codes})
    out = call.empty("packed", packed_shape(tuple(codes.shape), fmt), torch.uint8)
    done = pack_octets(call, codes.shape[-1], fmt.bits)
    if done < codes.numel():
        source, target = _rest(call.tensors["codes"], done), _rest(out, done * fmt.bits // 8)
        lengths = (target.numel(), source.shape[-1], target.shape[-1])
        _bytewise(
            pack_kernel, call, {"codes": source, "packed": target}, lengths, fmt.bits, _wide(codes.numel())
        )
    call.remember(key, asked_format, picked("packed"))
    return out


def unpack(
    packed: torch.Tensor, asked_format: str | Format, shape: tuple[int, ...], key: Any = None
) -> torch.Tensor | None:
    """`fast.unpack` of sub-byte codes, or None where the reference has to answer."""
    fmt = format_of(asked_format)
    if packed.dtype != torch.uint8 or packed.numel() == 0 or fmt.bits >= 8:
        return None
    if tuple(packed.shape) != packed_shape(shape, fmt):
        return None
    call = Recording({"packed": packed})
    codes = call.empty("codes", shape, torch.uint8)
    done = unpack_octets(call, shape[-1], fmt.bits)
    if done < codes.numel():
        source, target = _rest(call.tensors["packed"], done * fmt.bits // 8), _rest(codes, done)
        lengths = (target.numel(), target.shape[-1], source.shape[-1])
        _bytewise(
            unpack_kernel, call, {"packed": source, "codes": target}, lengths, fmt.bits, _wide(codes.numel())
        )
    call.remember(key, asked_format, picked("codes"))
    return codes


def _bytewise(
    kernel: Any, call: Recording, tensors: dict[str, torch.Tensor], lengths: tuple[int, int, int], bits: int, wide: bool
) -> None:  # fmt: skip
    """Pack or unpack what is left of a call's tensors byte by byte. lengths: elements made, codes and bytes of a row."""
    call.launch(
        Fixed(kernel, _programs(lengths[0]), (*lengths, bits, wide, TILE), 8), tuple(tensors), tensors
    )


def _rest(tensor: torch.Tensor, start: int) -> torch.Tensor:
    """What follows the first `start` elements as one row; the tensor itself, with its rows, where they are none."""
    return tensor.view(-1)[start:] if start else tensor
