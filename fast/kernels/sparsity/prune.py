"""Masks of N of every M: of 2:4 by octets as `compress` does it, of others element by element.

Floor of a mask: the scores and one byte an element. Of other patterns a thread has an element, and reads the M scores of its
group from the first-level cache, which had them from the memory once: M loads and three operations each.
"""

import triton
import triton.language as tl

from fast.kernels.bits import MAGNITUDE, bits_of, widened
from fast.kernels.sparsity.groups import bytes_by
from fast.kernels.sparsity.marks import marks_of_bytes, marks_of_halves, marks_of_words
from fast.kernels.sparsity.octets import read_fours, read_group, read_pairs, words_at, write_pairs

#: Elements of a program of other patterns.
TILE = 2048
NAN_KEY = tl.constexpr(0x7F800001)


@triton.jit
def mask_kernel(
    scores, mask, count,
    KIND: tl.constexpr, NAN_KEY: tl.constexpr, BYTES: tl.constexpr, MASKED: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """The mask of 2:4 of `count` octets, a byte an element."""
    OCTETS: tl.constexpr = TILE // 8
    first = tl.program_id(0).to(tl.int64) * OCTETS
    left = tl.minimum(count - first, OCTETS).to(tl.int32)
    w, mask = words_at(scores, first * 2 * BYTES), words_at(mask, first * 2)
    if BYTES == 1:
        a, b = read_pairs(w, left, 2, MASKED, OCTETS)
        k0, k1, k2, k3, a, b = marks_of_bytes(a, b, a, b, "largest", KIND, False)
        even, odd = _bytes_of_marks(k0, k1, k2, k3)
        write_pairs(mask, even, odd, left, 2, MASKED, OCTETS)
    elif BYTES == 2:
        a0, a1, b0, b1 = read_fours(w, left, MASKED, OCTETS)
        k0, k1, k2, k3, a0, a1, b0, b1 = marks_of_halves(a0, a1, b0, b1, a0, b0, "largest", False, NAN_KEY)
        even, odd = _bytes_of_marks(k0, k1, k2, k3)
        write_pairs(mask, even, odd, left, 1, MASKED, OCTETS)
    else:
        even = _mask_of_group(w, left, 0, NAN_KEY, MASKED, OCTETS)
        write_pairs(mask, even, _mask_of_group(w, left, 1, NAN_KEY, MASKED, OCTETS), left, 1, MASKED, OCTETS)


@triton.jit
def _bytes_of_marks(k0, k1, k2, k3):
    """Two words of four bytes 0 or 1, of the even and the odd group, from marks of two lanes."""
    low, high = bytes_by(k0, k1, 0x7351), bytes_by(k2, k3, 0x7351)
    even, odd = bytes_by(low, high, 0x5410), bytes_by(low, high, 0x7632)
    return (even >> 7) & 0x01010101, (odd >> 7) & 0x01010101


@triton.jit
def _mask_of_group(
    w, left, GROUP: tl.constexpr, NAN_KEY: tl.constexpr, MASKED: tl.constexpr, OCTETS: tl.constexpr
):
    """A word of four bytes 0 or 1 for a group of 32-bit elements."""
    x0, x1, x2, x3 = read_group(w, left, GROUP, MASKED, OCTETS)
    k0, k1, k2, k3, x0, x1, x2, x3 = marks_of_words(x0, x1, x2, x3, x0, "largest", False, NAN_KEY)
    made = ((k0 >> 31) & 0x01) | ((k1 >> 23) & 0x0100)
    return made | ((k2 >> 15) & 0x010000) | ((k3 >> 7) & 0x01000000)


@triton.jit
def ranks_kernel(scores, mask, count, KEPT: tl.constexpr, GROUP: tl.constexpr, TILE: tl.constexpr):
    """mask[i]: whether less than KEPT of the GROUP scores beside scores[i] come before it."""
    first = tl.program_id(0).to(tl.int64) * TILE
    at = first + tl.arange(0, TILE)
    inside = at < count
    place = (at % GROUP).to(tl.int32)
    own, start, before = _key(scores + at, inside), at - place, tl.zeros((TILE,), tl.int32)
    for other in tl.static_range(GROUP):
        key = _key(scores + start + other, inside)
        before += ((key > own) | ((key == own) & (other < place))).to(tl.int32)
    tl.store(mask.to(tl.pointer_type(tl.int8), bitcast=True) + at, (before < KEPT).to(tl.int8), mask=inside)


@triton.jit
def _key(pointers, inside):
    """int32 that sorts as the magnitude does, NaN on top; as `reference.sparsity.prune.magnitude_key`."""
    v = tl.load(pointers, mask=inside, other=0)
    if v.dtype.is_floating():
        return tl.minimum(bits_of(widened(v)) & MAGNITUDE, NAN_KEY)
    else:
        wide = v.to(tl.int32)
        # |v| - 1, because |-2**31| does not fit.
        return tl.where(wide > 0, wide - 1, ~wide)


__all__ = ["TILE", "mask_kernel", "ranks_kernel"]
