"""The order in which `fast.kernels.layers.column_sums` adds, in NumPy, and its bound."""

from __future__ import annotations

from math import ceil, log2
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
#: Rows of a step, which are added as a tree, and what float32 rounds a sum by.
STEP, UNIT = 8, 2.0**-24


def model(g: Array, parts: int, chunk: int) -> Array:
    """Sums (N) in float32 of g (M, N), by chunks of rows in steps of STEP, then by pairs of neighbours."""
    rows, length = g.shape
    padded = np.zeros((parts * chunk, length), np.float32)
    padded[:rows] = g
    steps = tree(np.moveaxis(padded.reshape(parts, chunk // STEP, STEP, length), 2, 0))
    totals = np.zeros((parts, length), np.float32)
    for at in range(chunk // STEP):
        totals += steps[:, at]
    more = (1 << (parts - 1).bit_length()) - parts
    return tree(np.concatenate([totals, np.zeros((more, length), np.float32)]))


def tree(v: Array) -> Array:
    """Sums along the first axis, a power of two: neighbours first."""
    while len(v) > 1:
        v = v[::2] + v[1::2]
    return v[0]


def bound(g: Array, parts: int, chunk: int) -> Array:
    """How far sums in float32 may be from exact ones: each of the additions on the longest way is off by UNIT of its result."""
    additions = (log2(STEP) + ceil(chunk / STEP) + ceil(log2(parts))) * UNIT
    most: Array = additions / (1 - additions) * np.abs(g.astype(np.float64)).sum(0)
    return most


__all__ = ["bound", "model"]
