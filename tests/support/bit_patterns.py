"""Hypothesis strategies for float bit patterns near what matters to a format: its values, ties and limits."""

from __future__ import annotations

import struct
from fractions import Fraction
from functools import lru_cache
from itertools import pairwise

import numpy as np
from hypothesis import strategies as st

from reference.formats.formats import Format
from tests.support.oracles import magnitudes


@lru_cache(maxsize=64)
def landmarks(fmt: Format) -> tuple[float, ...]:
    """Values, midpoints of neighbours and the first number out of range, all exact in float64."""
    if fmt.kind == "codebook":
        grid = [Fraction(float(np.float32(value))) for value in fmt.table]
    else:
        grid = list(magnitudes(fmt))[: 1 << fmt.bits]
        # The 16-bit formats have too many values: both ends and every 397th.
        grid = grid if len(grid) < 1000 else [*grid[:40], *grid[40:-40:397], *grid[-40:]]
    middles = [(a + b) / 2 for a, b in pairwise(grid)]
    return tuple(float(value) for value in (*grid, *middles))


def _float32_near(fmt: Format) -> st.SearchStrategy[int]:
    def move(value: float, ulps: int, negative: bool) -> int:
        with np.errstate(all="ignore"):
            near = int(np.float32(value).view(np.uint32))
        return min(max((near & 0x7FFFFFFF) + ulps, 0), 0x7FFFFFFF) | (negative << 31)

    return st.builds(move, st.sampled_from(landmarks(fmt)), st.integers(-2, 2), st.booleans())


def float32_patterns(fmt: Format) -> st.SearchStrategy[int]:
    """float32 bit patterns: any, subnormal, special, and within two units of a value or a tie of the format."""
    special = st.sampled_from(
        [0x00000000, 0x00000001, 0x007FFFFF, 0x00800000, 0x7F7FFFFF, 0x7F800000, 0x7F800001]
    )
    signed = st.builds(lambda bits, negative: bits | negative << 31, special, st.booleans())
    subnormal = st.builds(
        lambda bits, negative: bits | negative << 31, st.integers(0, 0x800000), st.booleans()
    )
    return st.one_of(_float32_near(fmt), st.integers(0, 0xFFFFFFFF), signed, subnormal)


def float64_patterns(fmt: Format) -> st.SearchStrategy[int]:
    """float64 bit patterns: around values and ties by units of float64, any float32 with a long tail, and any at all."""

    def move(value: float, units: int, negative: bool) -> int:
        near = int(np.float64(value).view(np.uint64))
        return min(max((near & 0x7FFFFFFFFFFFFFFF) + units, 0), 0x7FFFFFFFFFFFFFFF) | (negative << 63)

    units = st.one_of(
        st.integers(-2, 2), st.sampled_from([1 << 28, -(1 << 28), (1 << 29) + 1, -(1 << 29) - 1])
    )
    near = st.builds(move, st.sampled_from(landmarks(fmt)), units, st.booleans())
    tail = st.builds(_widened, st.integers(0, 0xFFFFFFFF), st.integers(0, (1 << 29) - 1))
    return st.one_of(
        near, tail, st.integers(0, 0xFFFFFFFFFFFFFFFF), st.floats(allow_nan=True).map(_pattern64)
    )


def _widened(bits: int, tail: int) -> int:
    wide = float(np.uint32(bits).view(np.float32))
    return _pattern64(wide) | (tail if abs(wide) < float("inf") else 0)


def _pattern64(value: float) -> int:
    packed: int = struct.unpack("<Q", struct.pack("<d", value))[0]
    return packed
