"""`encode`, `decode`, `pack` and `unpack` for any contiguous tensor, one element or one byte a lane.

Codes below 8 bits whose rows are whole bytes are one stream of words of eight codes, an octet each. Codes move inside their
word until they touch. Neighbouring lanes store neighbouring words: of 2 or 4 bits 4 or 8 bytes, of other widths words of 32
codes (see `sm90.integers`), of codes 8 or 16 bytes.
"""

from __future__ import annotations

from math import prod
from typing import Any

import torch
import triton
import triton.language as tl

from fast.kernels.bits import canonical, widened
from fast.kernels.rules.elements import decode as decode_codes
from fast.kernels.rules.elements import encode as encode_values
from fast.kernels.scheme.constants import element_of
from fast.kernels.sm90.fp4_fp6 import side_by_side
from fast.kernels.sm90.integers import load_quads, store_quads
from fast.launch.launcher import ALIGNMENT, Call, CompiledLaunch, interpreted, same_device
from reference.arrays.namespace import choice, namespace_of
from reference.formats.encode import check_mode, check_overflow, check_random_bits
from reference.formats.formats import Format, format_of
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
    result = encode_values(v, drawn, E)
    tl.store(codes + at, result.to(codes.dtype.element_ty), mask=at < count)


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

    key: of the call, here and below; see `dispatch`.
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
    element = element_of(fmt, rounding, overflow, hardware=not interpreted(), fp4=True)
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
    result: torch.Tensor = call.result("codes", key, record)
    return result


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
    """Groups of 32 codes of any width below 8 bits, packed into as many words; see `sm90.integers`."""
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


# `random_words`: the words of `reference.random_bits`, drawn where they are used.

#: Counters of a program; each gives four words.
RANDOM_TILE, WARPS = 512, 4


@triton.jit(do_not_specialize=["seed_low", "seed_high", "stream"])
def random_words_kernel(out, count, seed_low, seed_high, stream, TILE: tl.constexpr):
    """Words 4 i to 4 i + 3 are those of counter (low half of i, high half, stream, 0)."""
    i = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    seed = seed_low.to(tl.uint64) | (seed_high.to(tl.uint64) << 32)
    zero = (i * 0).to(tl.uint32)
    low, high = (i & 0xFFFFFFFF).to(tl.uint32), (i >> 32).to(tl.uint32)
    a, b, c, d = tl.philox(seed, low, high, zero + stream.to(tl.uint32), zero)
    words = tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), (TILE, 4))
    at = i[:, None] * 4 + tl.arange(0, 4)[None, :]
    tl.store(out + at, words, mask=at < count)


def random_words(shape: tuple[int, ...], seed: int, stream: int, device: torch.device) -> torch.Tensor:
    """uint32 words of a shape on a device. seed: 0 to 2**64 - 1; stream: 0 to 2**32 - 1."""
    out = torch.empty(shape, dtype=torch.uint32, device=device)
    count = prod(shape)
    if count:
        options = {} if interpreted() else {"num_warps": WARPS}
        grid = (-(-count // (4 * RANDOM_TILE)),)
        with torch.cuda.device(out.get_device()):
            random_words_kernel[grid](
                out, count, seed & 0xFFFFFFFF, seed >> 32, stream, TILE=RANDOM_TILE, **options
            )
    return out
