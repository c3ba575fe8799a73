"""`encode`, `decode`, `pack` and `unpack` for any contiguous tensor, one element or one byte a lane."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from fast.kernels.bits import canonical, widened
from fast.kernels.elements import decode as decode_codes
from fast.kernels.elements import encode as encode_values
from fast.kernels.launch import interpreted
from fast.kernels.octets import pack_octets, unpack_octets
from fast.kernels.rule import element_of
from reference.arrays import namespace_of
from reference.encode import check_overflow, check_random_bits
from reference.errors import choice
from reference.formats import Format, format_of
from reference.pack import packed_shape
from reference.rounding import check_mode

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


def _grid(count: int) -> tuple[int]:
    return (-(-count // TILE),)


def encode(
    x: torch.Tensor, fmt: str | Format, rounding: str, overflow: str, words: Any
) -> torch.Tensor | None:
    """`fast.encode`, or None for float64 and empty tensors; arguments are checked as the reference does."""
    fmt = format_of(fmt)
    if x.dtype not in (torch.float32, torch.bfloat16, torch.float16) or x.numel() == 0:
        return None
    check_mode(rounding, words)
    check_overflow(fmt, rounding, overflow)
    check_random_bits(namespace_of(x), x, words)
    if fmt.kind == "codebook":
        choice(rounding, ("nearest_even",), f"rounding of codebook {fmt.name}")
    codes = torch.empty(x.shape, dtype=torch.uint8 if fmt.bits <= 8 else torch.uint16, device=x.device)
    element = element_of(fmt, rounding, overflow, hardware=not interpreted(), fours=True)
    count = x.numel()
    encode_kernel[_grid(count)](
        x.contiguous(), words, codes, count, element, _wide(count), TILE, num_warps=4, enable_fp_fusion=False
    )
    return codes


def decode(codes: torch.Tensor, fmt: str | Format) -> torch.Tensor | None:
    """`fast.decode`, or None where the reference has to answer."""
    fmt = format_of(fmt)
    if codes.dtype not in CODES or codes.numel() == 0:
        return None
    y = torch.empty(codes.shape, dtype=torch.float32, device=codes.device)
    element, count = element_of(fmt, hardware=not interpreted()), codes.numel()
    decode_kernel[_grid(count)](codes.contiguous(), y, count, element, _wide(count), TILE, num_warps=4)
    return y


def pack(codes: torch.Tensor, fmt: str | Format) -> torch.Tensor | None:
    """`fast.pack` of sub-byte codes, or None where the reference has to answer."""
    fmt = format_of(fmt)
    if codes.dtype != torch.uint8 or codes.numel() == 0 or fmt.bits >= 8 or codes.dim() == 0:
        return None
    codes = codes.contiguous()
    out = torch.empty(packed_shape(tuple(codes.shape), fmt), dtype=torch.uint8, device=codes.device)
    done = pack_octets(codes, out, codes.shape[-1], fmt.bits)
    if done < codes.numel():
        source, target = _rest(codes, done), _rest(out, done * fmt.bits // 8)
        count = target.numel()
        pack_kernel[_grid(count)](
            source, target, count, source.shape[-1], target.shape[-1], fmt.bits, _wide(codes.numel()), TILE, num_warps=8
        )  # fmt: skip
    return out


def unpack(packed: torch.Tensor, fmt: str | Format, shape: tuple[int, ...]) -> torch.Tensor | None:
    """`fast.unpack` of sub-byte codes, or None where the reference has to answer."""
    fmt = format_of(fmt)
    if packed.dtype != torch.uint8 or packed.numel() == 0 or fmt.bits >= 8:
        return None
    if tuple(packed.shape) != packed_shape(shape, fmt):
        return None
    packed = packed.contiguous()
    codes = torch.empty(shape, dtype=torch.uint8, device=packed.device)
    done = unpack_octets(packed, codes, shape[-1], fmt.bits)
    if done < codes.numel():
        source, target = _rest(packed, done * fmt.bits // 8), _rest(codes, done)
        count = target.numel()
        unpack_kernel[_grid(count)](
            source, target, count, target.shape[-1], source.shape[-1], fmt.bits, _wide(codes.numel()), TILE, num_warps=8
        )  # fmt: skip
    return codes


def _rest(tensor: torch.Tensor, start: int) -> torch.Tensor:
    """What follows the first `start` elements as one row; the tensor itself, with its rows, where they are none."""
    return tensor.view(-1)[start:] if start else tensor
