"""`search_scales` of CPU tensors by a compiled loop: candidates' scales are the reference's, so are values, element by element.

Taken by records of plain float32 arithmetic (`reference.calibration.nearest`) whose blocks lie along rows and divide them, for
errors that are squares or cubes weighted by column. Errors are summed in another order than NumPy's: another candidate than the
reference's may be taken where two are equal up to that order.

Elements are rounded by the float32 operations of `reference.calibration.nearest`, each rounded once; errors are float64, their
sums in any order. Kernels are compiled, kept and named as those of `fast.cpu.loops.gemv` are.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numba import types

from fast.cpu.loops.gemv import compile_once
from fast.cpu.threads import in_parts
from reference import Scales, Scheme
from reference.arrays.namespace import namespace_of
from reference.arrays.softfloat import float32_bits
from reference.calibration.nearest import Nearest, checked_weights, value_table
from reference.calibration.search import Search, is_double
from reference.quantize.blocks import Blocks
from reference.quantize.scales import check_scales, choose
from reference.schemes.schemes import scheme_of

OPTIONS = {"fastmath": {"reassoc"}, "nogil": True, "error_model": "numpy"}
SOURCE = Path(__file__).read_bytes()


class Rule(NamedTuple):
    """What a kernel holds as constants. low, high: of integers, None for float elements, which a table rounds. unit: of an
    integer. has_zero: zero points are codes. divides, encodes: whether elements, and values, are divided by their factor.
    cubes: whether errors are |d|^3, not d^2."""

    low: float | None
    high: float
    unit: float
    has_zero: bool
    divides: bool
    encodes: bool
    cubes: bool


@lru_cache(maxsize=64)
def compiled(rule: Rule) -> Callable[..., None]:
    """`kernel(x, weights, factor, scale, zero, table, number, least, index, first, last)`, rows first to last.

    All arrays are contiguous. x: float32 (N, blocks, block); weights: float64 (blocks, block); factor, scale: float32
    (N, blocks); zero: the same, or of no rows; table: float32 (65536,), the values of float elements by their upper half
    rounded to odd, or of no entries; least: float64 (N, blocks), index: int32 of its shape: both are replaced, index by
    `number`, where this candidate's error is smaller.
    """
    plane, row = types.float32[:, ::1], types.float32[::1]
    signature = types.void(
        types.float32[:, :, ::1], types.float64[:, ::1], plane, plane, plane, row, types.int32, types.float64[:, ::1],
        types.int32[:, ::1], types.int64, types.int64,
    )  # fmt: skip
    return compile_once(_kernel(rule), "search", SOURCE + repr(rule).encode(), signature, OPTIONS)


def _kernel(rule: Rule) -> Callable[..., None]:
    is_integer, has_zero, cubes = rule.low is not None, rule.has_zero, rule.cubes
    divides, encodes, has_unit = rule.divides, rule.encodes, rule.unit != 1.0
    low, high = np.float32(rule.low or 0.0), np.float32(rule.high)
    unit, inverse = np.float32(rule.unit), np.float32(1.0 / rule.unit)

    def kernel(x, weights, factor, scale, zero, table, number, least, index, first, last):  # type: ignore[no-untyped-def]
        for n in range(first, last):
            for b in range(x.shape[1]):
                f, s = factor[n, b], scale[n, b]
                z = zero[n, b] if has_zero else np.float32(0)
                total = 0.0
                for j in range(x.shape[2]):
                    scaled = np.float32(x[n, b, j] / f) if divides else np.float32(x[n, b, j] * f)
                    if is_integer:
                        if has_unit:
                            scaled = np.float32(scaled * inverse)
                        value = np.float32(np.rint(scaled))
                        if has_zero:
                            value = np.float32(value + z)
                        value = value if value > low else low
                        value = value if value < high else high
                        if has_zero:
                            value = np.float32(value - z)
                        if has_unit:
                            value = np.float32(value * unit)
                    else:
                        bits = np.float32(scaled).view(np.uint32)
                        odd = (bits | ((bits & np.uint32(0xFFFF)) + np.uint32(0xFFFF))) >> np.uint32(16)
                        value = table[odd]
                    value = np.float32(value / s) if encodes else np.float32(value * s)
                    off = abs(np.float64(value) - np.float64(x[n, b, j]))
                    total += (off * off * off if cubes else off * off) * weights[b, j]
                if total < least[n, b]:
                    least[n, b], index[n, b] = total, number

    return kernel


def searched(
    w: Any, scheme: str | Scheme, *, weights: Any = None, candidates: Any = None, norm: float = 2.0, outer: Any = None
) -> Scales | None:  # fmt: skip
    """`reference.search_scales` of NumPy arrays; None for what the loop does not take. Raises as the reference."""
    record = scheme_of(scheme)
    w, name, _ = checked_weights(w, record, "search_scales")
    ns, blocks = namespace_of(w), Blocks.of(w.shape, record.scale, -1)
    search = Search.of(record, name, weights, candidates, norm, blocks)
    size = blocks.block if isinstance(blocks.block, int) else 0
    size = w.shape[1] if size == -1 else size
    if size < 1 or w.shape[1] % size or is_double(record) or norm not in (2, 3) or search.weights.ndim != 1:
        return None
    split = blocks.split(ns, float32_bits(ns, w, name))
    fixed = None if outer is None else check_scales(ns, Scales(outer=outer), record, blocks)
    if record.outer is not None and fixed is None:
        fixed = Scales(outer=choose(ns, split, blocks, record, name, None).stored.outer)
    return _Loop(search, np.ascontiguousarray(split), blocks).run(fixed)


class _Loop:
    """One matrix."""

    def __init__(self, search: Search, split: Any, blocks: Blocks) -> None:
        self.search, self.split, self.blocks = search, split, blocks
        self.ns = namespace_of(split)
        rows, count, size = split.shape
        self.x = split.view(np.float32)
        self.weights = np.ascontiguousarray(search.weights.reshape(count, size))
        self.least = np.full((rows, count), np.inf)
        self.index = np.zeros((rows, count), np.int32)

    def run(self, fixed: Scales | None) -> Scales | None:
        """The scales of the least error; None where a candidate's are beyond plain arithmetic."""
        tried: list[Scales] = []
        for scales in self.search._scales(self.ns, self.split, self.blocks, fixed):
            rule = Nearest.of(self.ns, scales, self.blocks, self.search.scheme, self.search.dtype)
            if rule.factor is None or rule.scale is None:
                return None
            self.compare(rule, len(tried))
            tried.append(scales)
        return self.taken(tried) if tried else None

    def compare(self, rule: Nearest, number: int) -> None:
        """Note where a candidate has the least error so far."""
        fmt, is_float = rule.scheme.format, rule.scheme.format.kind == "float"
        shape = self.least.shape
        factor, scale = (self._plane(part, shape) for part in (rule.factor, rule.scale))
        zero = np.zeros((0, 0), np.float32) if rule.zero is None else self._plane(rule.zero, shape)
        table = value_table(fmt) if is_float else np.zeros(0, np.float32)
        kernel = self.kernel(rule)

        def part(first: int, last: int) -> None:
            kernel(
                self.x, self.weights, factor, scale, zero, table, np.int32(number), self.least, self.index, first, last
            )  # fmt: skip

        in_parts(part, shape[0], self.x.size)

    def kernel(self, rule: Nearest) -> Any:
        """The loop of a record."""

        scheme, fmt = rule.scheme, rule.scheme.format
        low, high = fmt.integer_range if fmt.kind == "int" else (None, 0.0)
        constants = Rule(
            low, float(high), 2.0**-fmt.fraction_bits if fmt.kind == "int" else 1.0, rule.zero is not None,
            scheme.apply == "divide", scheme.scale.stored == "encode", self.search.norm == 3,
        )  # fmt: skip
        return compiled(constants)

    @staticmethod
    def _plane(part: Any, shape: tuple[int, int]) -> Any:
        return np.array(np.broadcast_to(part[..., 0], shape), np.float32, order="C")

    def taken(self, tried: list[Scales]) -> Scales:
        """The stored scales by the index of each block."""

        def of(name: str) -> Any:
            parts = [getattr(one, name) for one in tried]
            if parts[0] is None:
                return None
            stack = np.stack(
                [
                    np.broadcast_to(self.blocks.accept(part, self.ns)[..., 0], self.index.shape)
                    for part in parts
                ]
            )
            chosen = np.take_along_axis(stack, self.index[None], 0)[0]
            return self.blocks.expose(chosen[..., None], self.ns)

        return Scales(of("scale"), tried[0].outer, None if self.search.scheme.zero is None else of("zero"))


__all__ = ["Rule", "compiled", "searched"]
