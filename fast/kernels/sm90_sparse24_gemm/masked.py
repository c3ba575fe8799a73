"""A masked 16-bit weight, or its transpose, as the kernel of `sm90_sparse24_gemm` reads it: kept values and arranged metadata,
one read.

A thread has 8 x 8 elements, as in `fast.kernels.sparsity.transposable`: whole bytes of metadata in both directions, and nothing
moves between threads. A program is one warp, four blocks down and eight across. Of an element 2 bytes and one of the mask, or
a bit, are read, 1.125 are written. Bytes of metadata go one by one: those of a row in a panel are eight of 16, of which the
others are of the row eight below.

Programs cover the metadata with its padding (`arrange`), where nothing is kept.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import triton
import triton.language as tl

from fast.kernels.sm90_sparse24_gemm.arrange import OCTET, shape_of
from fast.kernels.sparsity.groups import bytes_by, kept_halves, split_fours, words_at
from fast.kernels.sparsity.transposable import octet_of, transposed, transposed_columns
from fast.launch.launcher import Call, CompiledLaunch
from reference import Compressed

#: Blocks of 8 x 8 that a program has down and across, and its elements.
DOWN, ACROSS, TILE = 4, 8, 2048
BLOCKS = tl.constexpr(DOWN * ACROSS)
#: Elements of a program of `keep_kernel`.
KEPT_TILE = 2048
#: Length of a block of the kernel, and blocks that 64 rows, and two panels of 64 columns, of the result have.
BLOCK, ROWS, COLUMNS = 8, 8, 16
#: Of a program of `keep_kernel`.
WARPS = 4


@triton.jit(do_not_specialize=["height", "width", "across"])
def masked_kernel(
    w, mask, values, metadata, height, width, across,
    TURNED: tl.constexpr, PADDED: tl.constexpr, DOWN: tl.constexpr, ACROSS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Of w, height x width blocks of 8 x 8: values and metadata of it, or of its transpose. across: blocks with the padding."""
    programs = across // ACROSS
    lane = tl.arange(0, DOWN * ACROSS)
    row = tl.program_id(0) // programs * DOWN + lane // ACROSS
    column = tl.program_id(0) % programs * ACROSS + lane % ACROSS
    inside = (row < height) & (column < width)
    # Octets: where the first row of a block begins.
    at = row.to(tl.int64) * 8 * width + column
    upper, high = _four_rows(words_at(w, 0), mask, at, width, inside, PADDED)
    lower, low = _four_rows(words_at(w, 0), mask, at + 4 * width, width, inside, PADDED)
    if TURNED:
        high, low = transposed(high), transposed(low)
        left, right = bytes_by(high, low, 0x5410), bytes_by(high, low, 0x7632)
        first, second = transposed_columns(upper, lower, 0, 2), transposed_columns(upper, lower, 1, 2)
        panels = (tl.cdiv(height, 16) * 2).to(tl.int64)
        at, bytes_at = column.to(tl.int64) * 8 * height + row, _place(column, row, panels)
        _write_rows(values, metadata, first, _nibbles(left), at, bytes_at, height, inside, 0, PADDED)
        _write_rows(values, metadata, second, _nibbles(right), at, bytes_at, height, inside, 4, PADDED)
    else:
        bytes_at = _place(row, column, (tl.cdiv(width, 16) * 2).to(tl.int64))
        _write_rows(values, metadata, upper, _nibbles(high), at, bytes_at, width, inside, 0, PADDED)
        _write_rows(values, metadata, lower, _nibbles(low), at, bytes_at, width, inside, 4, PADDED)


@triton.jit
def _place(row, byte, panels):
    """Where `arrange` has the canonical byte `byte` of row 8 `row`; the next seven rows are 16 bytes apart."""
    block = (row // 8 * panels + byte // 8) * 512
    return block + row % 8 // 2 * 128 + byte // 2 % 2 * 8 + byte // 4 % 2 * 4 + row % 2 * 2 + byte % 2


@triton.jit
def _nibbles(masks):
    """The four bits of metadata in place of each row of two masks (`tiles`) that keep at most two of four.

    Unused places name the first of 2, 3 that is free, as `index_bits` of `groups` fills them.
    """
    e0, e1, e2 = masks >> 3, masks >> 2, masks >> 1
    early, both = e0 | e1, e0 & e1
    first = (~e0 & e1 & 0x11111111) | ((~early & 0x11111111) << 1)
    second = both | ~(early & (e2 | ~masks))
    return first | ((second & 0x11111111) << 2) | ((~both & 0x11111111) << 3)


@triton.jit
def _row(w, mask, octet, inside, PADDED: tl.constexpr):
    """An octet of each block: its four words with zeros where the mask drops, and the four bits of both groups."""
    words = w + (octet * 4)[:, None] + tl.arange(0, 4)[None, :]
    if PADDED:
        a, b, c, d = split_fours(tl.load(words, mask=inside[:, None], other=0), BLOCKS)
    else:
        a, b, c, d = split_fours(tl.load(words), BLOCKS)
    left, right, bits = _marks(mask, octet, inside, PADDED)
    left, right = left * 255, right * 255
    a, b = a & bytes_by(left, left, 0x1100), b & bytes_by(left, left, 0x3322)
    return (a, b, c & bytes_by(right, right, 0x1100), d & bytes_by(right, right, 0x3322)), bits


@triton.jit
def _marks(mask, octet, inside, PADDED: tl.constexpr):
    """Of an octet of each block two words of bytes 0 or 1, and both groups' bits; of a bool mask, or of bits in uint8."""
    if mask.dtype.element_ty == tl.uint8:
        byte = tl.load(mask + octet, mask=inside, other=0) if PADDED else tl.load(mask + octet)
        high, low = byte.to(tl.int32) >> 4, byte.to(tl.int32) & 15
        # The four bits, the highest first, at the bottom of a byte each.
        left, right = ((high * 0x08040201) >> 3) & 0x01010101, ((low * 0x08040201) >> 3) & 0x01010101
        return left, right, high | (low << 16)
    else:
        marks = words_at(mask, 0) + (octet * 2)[:, None] + tl.arange(0, 2)[None, :]
        if PADDED:
            left, right = tl.split(tl.load(marks, mask=inside[:, None], other=0))
        else:
            left, right = tl.split(tl.load(marks))
        # Four bytes 0 or 1: the top byte of the product is the sum of 8, 4, 2 and 1 times them.
        return left, right, ((left * 0x08040201) >> 24) & 15 | ((((right * 0x08040201) >> 24) & 15) << 16)


@triton.jit
def _four_rows(w, mask, at, width, inside, PADDED: tl.constexpr):
    """Four rows of words, and the two masks of their tiles as `tiles` has them: the left one in the low half."""
    a, m0 = _row(w, mask, at, inside, PADDED)
    b, m1 = _row(w, mask, at + width, inside, PADDED)
    c, m2 = _row(w, mask, at + 2 * width, inside, PADDED)
    d, m3 = _row(w, mask, at + 3 * width, inside, PADDED)
    return (a, b, c, d), (m0 << 12) | (m1 << 8) | (m2 << 4) | m3


@triton.jit
def _write_rows(
    values, metadata, rows, nibbles, at, bytes_at, stride, inside, FIRST: tl.constexpr, PADDED: tl.constexpr
):  # fmt: skip
    """Values and metadata of rows FIRST to FIRST + 3 of blocks."""
    for row in tl.static_range(4):
        byte = octet_of(nibbles, row)
        x = rows[row]
        kept = tl.join(kept_halves(x[0], x[1], byte), kept_halves(x[2], x[3], byte >> 4))
        octet = at + (FIRST + row) * stride
        pointers = words_at(values, 0) + (octet * 2)[:, None] + tl.arange(0, 2)[None, :]
        if PADDED:
            tl.store(pointers, kept, mask=inside[:, None])
        else:
            tl.store(pointers, kept)
        tl.store(metadata + bytes_at + (FIRST + row) * 16, byte.to(tl.uint8))


@triton.jit
def keep_kernel(w, bits, out, count, BYTES: tl.constexpr, PADDED: tl.constexpr, TILE: tl.constexpr):
    """Of `count` octets of elements of 2 or 4 bytes what bits keep, +0 elsewhere; out may be w."""
    OCTETS: tl.constexpr = TILE // 8
    octet = tl.program_id(0).to(tl.int64) * OCTETS + tl.arange(0, OCTETS)
    at, place = octet[:, None] * 8 + tl.arange(0, 8)[None, :], 7 - tl.arange(0, 8)[None, :]
    if BYTES == 2:
        w, out = (
            w.to(tl.pointer_type(tl.int16), bitcast=True),
            out.to(tl.pointer_type(tl.int16), bitcast=True),
        )
    else:
        w, out = (
            w.to(tl.pointer_type(tl.int32), bitcast=True),
            out.to(tl.pointer_type(tl.int32), bitcast=True),
        )
    if PADDED:
        inside = (octet < count)[:, None]
        kept = tl.load(bits + octet, mask=octet < count, other=0).to(tl.int32)[:, None] >> place & 1
        tl.store(out + at, tl.where(kept != 0, tl.load(w + at, mask=inside, other=0), 0), mask=inside)
    else:
        kept = tl.load(bits + octet).to(tl.int32)[:, None] >> place & 1
        tl.store(out + at, tl.where(kept != 0, tl.load(w + at), 0))


def compress_masked(w: torch.Tensor, mask: torch.Tensor, transposed: bool, key: Any = None) -> Compressed:
    """Values and arranged metadata of a matrix of 16-bit elements, lengths in multiples of 8, or of its transpose."""
    call = Call({"w": w, "mask": mask}, words=("w",) if mask.dtype == torch.uint8 else ("w", "mask"))
    rows, columns = reversed(w.shape) if transposed else w.shape
    call.allocate("values", (rows, columns // 2), w.dtype)
    call.allocate("metadata", shape_of(rows, columns // BLOCK, 16), torch.uint8)
    call.launch(_launch(w, transposed), ("w", "mask", "values", "metadata"))
    return cast("Compressed", call.result(("values", "metadata"), key, None, _pair))


def _pair(made: tuple[torch.Tensor, torch.Tensor]) -> Compressed:
    return Compressed(*made)


def _launch(w: torch.Tensor, transposed: bool) -> CompiledLaunch:
    """The kernel over whole blocks of 64 rows and pairs of panels of the result."""
    height, width = w.shape[0] // BLOCK, w.shape[1] // BLOCK
    down, across = (COLUMNS, ROWS) if transposed else (ROWS, COLUMNS)
    down, across = -(-height // down) * down, -(-width // across) * across
    tail = (height, width, across, transposed, (down, across) != (height, width), DOWN, ACROSS, TILE)
    return CompiledLaunch(masked_kernel, down // DOWN * (across // ACROSS), tail, 1)


def keep(w: torch.Tensor, bits: torch.Tensor, out: torch.Tensor | None, key: Any = None) -> torch.Tensor:
    """w, rows of whole octets, where bits are set, +0 elsewhere. out: contiguous, perhaps w; by default a new tensor."""
    call = Call({"w": w, "bits": bits, "out": out})
    if out is None:
        call.allocate("out", w.shape, w.dtype)
    octets, size = w.numel() // OCTET, w.dtype.itemsize
    tail = (octets, size, w.numel() % KEPT_TILE != 0, KEPT_TILE)
    call.launch(CompiledLaunch(keep_kernel, -(-w.numel() // KEPT_TILE), tail, WARPS), ("w", "bits", "out"))
    result: torch.Tensor = call.result("out", key)
    return result


__all__ = ["compress_masked", "keep"]
