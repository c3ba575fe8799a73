"""What a scale is computed from: maxima and minima of blocks, exactly, on bit patterns; and sums in a stated order.

The absolute value of a float32 orders like its bit pattern as an integer, and a NaN is larger than infinity there, so an
integer maximum is exact, preserves subnormals and reports NaN. Minima and maxima with sign use an order-preserving key.
"""

from __future__ import annotations

from typing import NamedTuple

from reference.arrays.namespace import Array, Namespace
from reference.arrays.softfloat import (
    INFINITY,
    MAGNITUDE,
    NAN,
    SIGN,
    add,
    bits_of,
    divide,
    order_key,
    subtract,
)


class Range(NamedTuple):
    """float32 bit patterns (int32) of shape (..., blocks, 1): largest magnitude, least and greatest value of each block."""

    absmax: Array
    low: Array
    high: Array


def absmax(ns: Namespace, blocks: Array, *, finite_only: bool = False) -> Array:
    """Largest magnitude of each block; with finite_only NaN and infinity count as 0."""
    magnitude = blocks & MAGNITUDE
    if finite_only:
        magnitude = ns.where(magnitude < INFINITY, magnitude, 0)
    return ns.reduce_max(magnitude, -1)


def value_range(ns: Namespace, blocks: Array) -> Range:
    """Magnitude, minimum and maximum; a NaN in the block shows in `absmax` and both others are NaN then."""
    largest = absmax(ns, blocks)
    keys = order_key(ns, blocks)
    nan = largest > INFINITY
    low = ns.where(nan, NAN, order_key(ns, ns.reduce_min(keys, -1)))
    high = ns.where(nan, NAN, order_key(ns, ns.reduce_max(keys, -1)))
    return Range(largest, low, high)


def with_zero(ns: Namespace, span: Range) -> Range:
    """The range widened to hold zero (as +0); NaN stays."""
    nan = span.absmax > INFINITY
    low = ns.where(nan, NAN, ns.where(span.low < 0, span.low, 0))
    high = ns.where(nan, NAN, ns.where(span.high < 0, 0, span.high))
    # A lone -0 is no minimum below zero.
    return Range(span.absmax, ns.where(low == SIGN, 0, low), high)


def mean(ns: Namespace, values: Array, *, finite_only: bool) -> Array:
    """Mean of non-negative float32 bit patterns (n,), as shape (1,).

    The order of addition is part of the rule: adjacent pairs are averaged, in a binary tree over n filled up with zeros to
    a power of two p; averaging cannot overflow. The average times p / n is the mean, rounded once.
    """
    if finite_only:
        values = ns.where((values & MAGNITUDE) < INFINITY, values, 0)
    count = ns.shape(values)[0]
    filled = 1
    while filled < count:
        filled *= 2
    if filled > count:
        values = ns.concatenate([values, ns.full((filled - count,), 0, "int32", values)], 0)
    values = ns.combine_pairs(values, lambda a, b: add(ns, _half(ns, a), _half(ns, b)))
    return divide(ns, values, _constant(ns, count / filled, values))


def _half(ns: Namespace, values: Array) -> Array:
    """values / 2 of non-negative float32 bit patterns, rounded to nearest even; infinity and NaN stay."""
    # Below 2**-125 a bit pattern counts units of 2**-149, and so does its half.
    subnormal = (values + ((values >> 1) & 1)) >> 1
    normal = ns.where(values < INFINITY, values - 0x00800000, values)
    return ns.where(values < 0x01000000, subnormal, normal)


def _constant(ns: Namespace, value: float, like: Array) -> Array:
    return ns.full((1,), bits_of(value), "int32", like)


def centered(ns: Namespace, values: Array, center: Array) -> Array:
    """values - center."""
    return subtract(ns, values, center)


def tree_sum(ns: Namespace, bits: Array) -> Array:
    """Sum over the last axis (keepdims) of float32 patterns: adjacent pairs, in a tree filled up with zeros."""
    length = ns.shape(bits)[-1]
    size = 1
    while size < length:
        size *= 2
    if size > length:
        filler = ns.full((*ns.shape(bits)[:-1], size - length), 0, "int32", bits)
        bits = ns.concatenate([bits, filler], -1)
    while size > 1:
        bits = add(ns, bits[..., 0::2], bits[..., 1::2])
        size //= 2
    return bits
