"""Masks of N of every M: of 2:4 by octets as `compress` does it, of others by counting in bits.

Floor of a mask: the scores and one byte an element, so of bfloat16 time for ten integer operations an element.

M of 4, 8 and 16: a thread has whole groups, two of 8 and 16 bits at a time, an element of each in a lane. A subtraction tells
of both which of two elements comes first, in the lane's top bit; full adders on words, two instructions each, count how many
come before an element, one digit a word; and N is compared digit by digit. Of 4:8 that is seven instructions an element.

Other M, and scores of 16 and 32 bits that are integers: a thread has an element, and reads the M scores of its group from the
first-level cache, some ten instructions each.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fast.kernels.bits import MAGNITUDE, bits_of, widened
from fast.kernels.sparsity.groups import (
    ONE,
    TWO,
    bytes_by,
    half_key,
    joined_fours,
    magnitude_lanes,
    majority,
    marks_of_bytes,
    marks_of_halves,
    marks_of_words,
    read_fours,
    read_group,
    read_pairs,
    split_fours,
    word_key,
    words_at,
    write_ones,
    write_pairs,
)

#: Elements of a program of other patterns.
MASK_TILE = 2048
NAN_KEY = tl.constexpr(0x7F800001)


@triton.jit
def mask_kernel(
    scores, mask, count,
    KIND: tl.constexpr, NAN_KEY: tl.constexpr, BYTES: tl.constexpr, MASKED: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """The mask of 2:4 of `count` octets, a byte an element of a bool mask, a bit of uint8."""
    OCTETS: tl.constexpr = TILE // 8
    first = tl.program_id(0).to(tl.int64) * OCTETS
    left = tl.minimum(count - first, OCTETS).to(tl.int32)
    w = words_at(scores, first * 2 * BYTES)
    if BYTES == 1:
        a, b = read_pairs(w, left, 2, MASKED, OCTETS)
        k0, k1, k2, k3, a, b = marks_of_bytes(a, b, a, b, "largest", KIND, False)
        even, odd = _bytes_of_marks(k0, k1, k2, k3)
        _write_mask(mask, first, even, odd, left, 2, MASKED, OCTETS)
    elif BYTES == 2:
        a0, a1, b0, b1 = read_fours(w, left, MASKED, OCTETS)
        k0, k1, k2, k3, a0, a1, b0, b1 = marks_of_halves(a0, a1, b0, b1, a0, b0, "largest", False, NAN_KEY)
        even, odd = _bytes_of_marks(k0, k1, k2, k3)
        _write_mask(mask, first, even, odd, left, 1, MASKED, OCTETS)
    else:
        even = _mask_of_group(w, left, 0, NAN_KEY, MASKED, OCTETS)
        odd = _mask_of_group(w, left, 1, NAN_KEY, MASKED, OCTETS)
        _write_mask(mask, first, even, odd, left, 1, MASKED, OCTETS)


@triton.jit
def _write_mask(
    mask, first, even, odd, left, NEIGHBOURS: tl.constexpr, MASKED: tl.constexpr, OCTETS: tl.constexpr
):  # fmt: skip
    """Octets from `first` on, of two words of bytes 0 or 1 each."""
    if mask.dtype.element_ty == tl.uint8:
        # The top byte of the product is the sum of 8, 4, 2 and 1 times the four bytes.
        byte = (((even * 0x08040201) >> 20) & 0xF0) | (((odd * 0x08040201) >> 24) & 0x0F)
        write_ones(mask + first, byte.to(tl.uint8), left, NEIGHBOURS, MASKED, OCTETS)
    else:
        write_pairs(words_at(mask, first * 2), even, odd, left, NEIGHBOURS, MASKED, OCTETS)


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
    return _byte_of_marks(k0, k1, k2, k3)


@triton.jit
def _byte_of_marks(k0, k1, k2, k3):
    """A word of four bytes 0 or 1 from marks of one lane."""
    result = ((k0 >> 31) & 0x01) | ((k1 >> 23) & 0x0100)
    return result | ((k2 >> 15) & 0x010000) | ((k3 >> 7) & 0x01000000)


@triton.jit
def groups_kernel(
    scores, mask, count,
    KEPT: tl.constexpr, GROUP: tl.constexpr, KIND: tl.constexpr, NAN_KEY: tl.constexpr, BYTES: tl.constexpr,
    MASKED: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """The mask of `count` units, which are pairs of groups, or groups of 32-bit scores."""
    ELEMENTS: tl.constexpr = GROUP if BYTES == 4 else 2 * GROUP
    UNITS: tl.constexpr = TILE // ELEMENTS
    first = tl.program_id(0).to(tl.int64) * UNITS
    left = tl.minimum(count - first, UNITS).to(tl.int32)
    words = _read_unit(
        words_at(scores, first * (ELEMENTS * BYTES // 4)), left, ELEMENTS * BYTES // 4, MASKED, UNITS
    )
    keys = _keys(words, GROUP, KIND, NAN_KEY, BYTES)
    marks = _kept(keys, KEPT, GROUP, ONE if BYTES == 4 else TWO)
    mask = words_at(mask, first * (ELEMENTS // 4))
    _write_unit(mask, _mask_words(marks, GROUP, BYTES), left, ELEMENTS // 4, MASKED, UNITS)


@triton.jit
def _read_unit(pointer, left, COUNT: tl.constexpr, MASKED: tl.constexpr, UNITS: tl.constexpr):
    """The COUNT words of each unit: two, or fours."""
    unit = tl.arange(0, UNITS)[:, None]
    WIDE: tl.constexpr = min(COUNT, 4)
    words = ()
    for part in tl.static_range(COUNT // WIDE):
        at = unit * COUNT + 4 * part + tl.arange(0, WIDE)[None, :]
        w = tl.load(pointer + at, mask=unit < left, other=0) if MASKED else tl.load(pointer + at)
        words += tl.split(w) if WIDE == 2 else split_fours(w, UNITS)
    return words


@triton.jit
def _keys(words, GROUP: tl.constexpr, KIND: tl.constexpr, NAN_KEY: tl.constexpr, BYTES: tl.constexpr):
    """A word of keys for each element of a group: one lane of 32-bit scores, else one of each of two groups."""
    HALF: tl.constexpr = GROUP * BYTES // 4
    keys = ()
    if BYTES == 4:
        for i in tl.static_range(GROUP):
            keys += (word_key(words[i], NAN_KEY),)
    elif BYTES == 2:
        for i in tl.static_range(HALF):
            even, odd = (
                bytes_by(words[i], words[HALF + i], 0x5410),
                bytes_by(words[i], words[HALF + i], 0x7632),
            )
            keys += (half_key(even, NAN_KEY), half_key(odd, NAN_KEY))
    else:
        for i in tl.static_range(HALF):
            keys += magnitude_lanes(words[i], words[HALF + i], KIND)
    return keys


@triton.jit
def _kept(keys, KEPT: tl.constexpr, GROUP: tl.constexpr, TOP: tl.constexpr):
    """Marks of elements that less than KEPT others come before; of equal ones the first does. See `groups.two_largest`."""
    marks = ()
    for own in tl.static_range(GROUP):
        before = ()
        for other in tl.static_range(GROUP):
            if other < own:
                before += ((keys[other] | TOP) - keys[own],)
            elif other > own:
                before += (~((keys[own] | TOP) - keys[other]),)
        if GROUP == 4:
            digits = _three(before[0], before[1], before[2])
        elif GROUP == 8:
            digits = _seven(before)
        else:
            digits = _fifteen(before)
        marks += (_below(digits, KEPT, GROUP),)
    return marks


@triton.jit
def _three(a, b, c):
    """Two binary digits of how many of three have each bit, the lower first."""
    return a ^ b ^ c, majority(a, b, c)


@triton.jit
def _seven(v):
    """Three digits for seven."""
    low, twos = _three(v[0], v[1], v[2])
    next_low, next_twos = _three(v[3], v[4], v[5])
    ones, last_twos = _three(low, next_low, v[6])
    second, third = _three(twos, next_twos, last_twos)
    return ones, second, third


@triton.jit
def _fifteen(v):
    """Four digits for fifteen."""
    a, b = _seven(v[0:7]), _seven(v[7:14])
    ones, carry = _three(a[0], b[0], v[14])
    second, carry = _three(a[1], b[1], carry)
    third, fourth = _three(a[2], b[2], carry)
    return ones, second, third, fourth


@triton.jit
def _below(digits, KEPT: tl.constexpr, GROUP: tl.constexpr):
    """Where a number of binary digits is below KEPT, which is GROUP at most: then all are."""
    below = tl.full(digits[0].shape, -1 if KEPT == GROUP else 0, tl.int32)
    DIGITS: tl.constexpr = 2 if GROUP == 4 else 3 if GROUP == 8 else 4
    for place in tl.static_range(DIGITS if KEPT < GROUP else 0):
        if KEPT >> place & 1:
            below = below | ~digits[place]
        else:
            below = below & ~digits[place]
    return below


@triton.jit
def _mask_words(marks, GROUP: tl.constexpr, BYTES: tl.constexpr):
    """Words of bytes 0 or 1: those of the first group, then of the second."""
    first, second = (), ()
    for i in tl.static_range(GROUP // 4):
        k0, k1, k2, k3 = marks[4 * i], marks[4 * i + 1], marks[4 * i + 2], marks[4 * i + 3]
        if BYTES == 4:
            first += (_byte_of_marks(k0, k1, k2, k3),)
        else:
            even, odd = _bytes_of_marks(k0, k1, k2, k3)
            first += (even,)
            second += (odd,)
    return first + second


@triton.jit
def _write_unit(pointer, words, left, COUNT: tl.constexpr, MASKED: tl.constexpr, UNITS: tl.constexpr):
    """The COUNT words of each unit: one, two, or fours."""
    if COUNT == 1:
        write_ones(pointer, words[0], left, 1, MASKED, UNITS)
    elif COUNT == 2:
        write_pairs(pointer, words[0], words[1], left, 1, MASKED, UNITS)
    else:
        unit = tl.arange(0, UNITS)[:, None]
        for part in tl.static_range(COUNT // 4):
            at = unit * COUNT + 4 * part + tl.arange(0, 4)[None, :]
            a, b, c, d = words[4 * part], words[4 * part + 1], words[4 * part + 2], words[4 * part + 3]
            if MASKED:
                tl.store(pointer + at, joined_fours(a, b, c, d, UNITS), mask=unit < left)
            else:
                tl.store(pointer + at, joined_fours(a, b, c, d, UNITS))


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


__all__ = ["MASK_TILE", "groups_kernel", "mask_kernel", "ranks_kernel"]
