"""An optimizer step of a CPU parameter in one pass, compiled by Numba: moments are read, moved and stored again by blocks.

Every step is the float32 operation that `reference.optim` names, rounded once, so results have the reference's bits. Kernels
are compiled, kept and named as those of `fast.cpu.loops.gemv` are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from math import sqrt
from pathlib import Path
from typing import Any

import numpy as np
from numba import njit, types
from numba.extending import intrinsic

from fast.cpu.loops.gemv import compile_once
from reference.formats.encode import MULTIPLIER, ROUNDS, WEYL, midpoint_floors
from reference.optim.states import TOGETHER, State
from reference.quantize.scales import floor_value

OPTIONS = {"nogil": True, "error_model": "numpy"}
SOURCE = Path(__file__).read_bytes()
#: Kinds of elements.
FLOAT32, FLOAT, INTEGER, CODEBOOK = 0, 1, 2, 3
#: What a moment that is not there is.
ABSENT = -1


@dataclass(frozen=True)
class Moment:
    """How a moment is stored, as constants of a loop; see `Scale` and `Format` for the fields. kind: of element, or ABSENT."""

    kind: int
    bits: int = 32
    mantissa: int = 0
    emin: int = 0
    signed: bool = True
    low: int = 0
    high: int = 0
    nan_code: int = 0
    stochastic: bool = False
    least: int = 0
    root: bool = False
    power: bool = False
    divides: bool = False
    target: float = 1.0
    before: float = 0.0
    after: float = 0.0
    fraction: int = 0


def moment_of(state: State | None) -> Moment:
    """The constants of a state that `fast.kernels.optim.records.covers`; None: of a moment that is not there."""
    if state is None:
        return Moment(ABSENT)
    scheme = state.scheme
    if scheme is None:
        return Moment(FLOAT32)
    fmt, scale = scheme.format, scheme.scale
    kinds = {"float": FLOAT, "int": INTEGER, "codebook": CODEBOOK}
    floor, value = scale.floor or ("stored", 0.0)
    low, high = fmt.integer_range if fmt.kind == "int" else (0, fmt.max_code)
    return Moment(
        kinds[fmt.kind], fmt.bits, fmt.mantissa_bits, fmt.emin if fmt.kind == "float" else 0, fmt.signed, low, high,
        scheme.poison_code, scheme.rounding == "stochastic", state.least, state.transform == "sqrt",
        scale.rule == "ratio_pow2", scheme.apply == "divide", scale.target,
        floor_value(value, "float32") if floor == "statistic" else 0.0,
        floor_value(value, "float32") if floor == "stored" else 0.0, state.fraction,
    )  # fmt: skip


@dataclass(frozen=True)
class Rule:
    """What a loop is compiled for. half: p is bfloat16; g_half: g is; master: bits of its error, or 0."""

    kind: str
    first: Moment
    second: Moment
    half: bool
    g_half: bool
    rounds: bool
    master: int
    size: int


@lru_cache(maxsize=64)
def compiled(rule: Rule) -> Callable[..., None]:
    """`kernel(p, g, m, m_scale, v, v_scale, error, numbers, tables, key, length, first, last)`, rows first to last.

    All arrays are contiguous. p, g: uint16 or int32 (rows, length), the bits of numbers; m, v: uint8 (rows, bytes), or float32
    (rows, length); scales: float32 (rows, blocks); error: int8 or int16 (rows, length); what is absent has no rows. numbers:
    float32 (9,), as `Numbers`; tables: float32 (2, 2, 256), of each moment values of codes and thresholds; key: uint64 (5,),
    low and high half of the seed, parameter, step, first block.
    """
    word = {True: types.uint16, False: types.int32}
    moments = [types.float32 if m.kind == FLOAT32 else types.uint8 for m in (rule.first, rule.second)]
    error = types.int16 if rule.master == 16 else types.int8
    signature = types.void(
        word[rule.half][:, ::1], word[rule.g_half][:, ::1], moments[0][:, ::1], types.float32[:, ::1], moments[1][:, ::1],
        types.float32[:, ::1], error[:, ::1], types.float32[::1], types.float32[:, :, ::1], types.uint64[::1],
        types.intp, types.intp, types.intp,
    )  # fmt: skip
    return compile_once(_kernel(rule), "optim", SOURCE + repr(rule).encode(), signature, OPTIONS)


def thresholds_of(state: State) -> np.ndarray:
    """float32 (2, 256): values of codes, and of a codebook `midpoint_floors`."""
    result = np.zeros((2, 256), np.float32)
    if state.scheme is not None:
        fmt = state.scheme.format
        result[0, : 1 << fmt.bits] = fmt.values
        if fmt.kind == "codebook":
            result[1] = np.inf
            result[1, : len(fmt.values) - 1] = midpoint_floors(fmt)
    return result


@njit(inline="always", **OPTIONS)
def _bits(value):  # type: ignore[no-untyped-def]
    return np.float32(value).view(np.int32)


@njit(inline="always", **OPTIONS)
def _float(bits):  # type: ignore[no-untyped-def]
    return np.int32(bits).view(np.float32)


@intrinsic
def _fused(typing_context, a, b, c):  # type: ignore[no-untyped-def]
    """float32 a b + c, rounded once."""
    signature = types.float32(types.float32, types.float32, types.float32)

    def generated(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        return builder.fma(*arguments)

    return signature, generated


@njit(inline="always", **OPTIONS)
def _code(codes, n, i, bits):  # type: ignore[no-untyped-def]
    """A code of a row: a byte, or half of one."""
    return codes[n, i] if bits == 8 else (codes[n, i >> 1] >> (4 * (i & 1))) & 15


@njit(**OPTIONS)
def _philox(c0, c1, c2, c3, k0, k1, out):  # type: ignore[no-untyped-def]
    """Eight halves of four words, int32, in order."""
    mask = np.uint64(0xFFFFFFFF)
    for _ in range(ROUNDS):
        first, second = c0 * np.uint64(MULTIPLIER[0]), c2 * np.uint64(MULTIPLIER[1])
        c0 = (second >> np.uint64(32)) ^ c1 ^ k0
        c2 = (first >> np.uint64(32)) ^ c3 ^ k1
        c1, c3 = second & mask, first & mask
        k0, k1 = (k0 + np.uint64(WEYL[0])) & mask, (k1 + np.uint64(WEYL[1])) & mask
    for at, word in enumerate((c0, c1, c2, c3)):
        out[2 * at] = np.int32(word & np.uint64(0xFFFF))
        out[2 * at + 1] = np.int32(word >> np.uint64(16))


@njit(inline="always", **OPTIONS)
def _shifted(significand, shift, half, stochastic):  # type: ignore[no-untyped-def]
    """`reference.formats.encode.round_shift`: to nearest even, or by 16 random bits."""
    if stochastic:
        excess = min(max(shift - 24, 0), 31)
        shift = min(shift, 24)
        return ((significand >> excess) + ((half << 8) >> (24 - shift))) >> shift
    shift = min(shift, 25)
    return (significand + ((1 << (shift - 1)) - 1) + ((significand >> shift) & 1)) >> shift


def _encoder(m: Moment) -> Callable[..., Any]:
    """code of a scaled element by a half and a row of thresholds."""
    kind, mantissa, emin, high, low, bits = m.kind, m.mantissa, m.emin, m.high, m.low, m.bits
    stochastic, nan_code, mask = m.stochastic, m.nan_code, (1 << m.bits) - 1
    fraction, drop = m.fraction, 23 - m.fraction

    @njit(inline="always", **OPTIONS)
    def encode(value, half, thresholds):  # type: ignore[no-untyped-def]
        if kind == CODEBOOK:
            code = 0
            for place in range(bits):
                step = 1 << (bits - 1 - place)
                if value > thresholds[code + step - 1]:
                    code += step
            return code
        pattern = np.int64(_bits(value))
        magnitude = pattern & 0x7FFFFFFF
        if magnitude > 0x7F800000:
            return nan_code
        if fraction:
            magnitude = ((magnitude + (half << (drop - 16))) >> drop) << drop
        exponent = max(magnitude >> 23, 1) - 127
        significand = (magnitude & 0x7FFFFF) | (0 if magnitude < 0x800000 else 0x800000)
        if kind == INTEGER:
            number = _shifted(significand, 23 - min(exponent, 14), half, stochastic)
            number = -number if pattern < 0 else number
            return min(max(number, low), high) & mask
        below = max(emin - exponent, 0)
        code = _shifted(significand, below + 23 - mantissa, half, stochastic) + (
            max(exponent - emin, 0) << mantissa
        )
        return min(code, high) | (1 << (bits - 1) if pattern < 0 else 0)

    return encode


def _storer(m: Moment, size: int) -> Callable[..., Any]:
    """Stores a block of float32 values as codes (a byte each, in place of `codes`) and gives its scale."""
    encode = _encoder(m)
    target, before, after = np.float32(m.target), np.float32(m.before), np.float32(m.after)
    power, divides, least, nan_code = m.power, m.divides, m.least, m.nan_code

    @njit(inline="always", **OPTIONS)
    def store(values, halves, thresholds, count, codes):  # type: ignore[no-untyped-def]
        largest = 0
        for j in range(count):
            largest = max(largest, np.int64(_bits(values[j])) & 0x7FFFFFFF)
        scale = _float(largest)
        if scale < before:
            scale = before
        scale = np.float32(scale / target)
        if power:
            pattern = np.int64(_bits(scale))
            # The next power of two, but for powers; below 2**-126 the floor comes anyway.
            scale = _float(min((pattern + 0x7FFFFF) & 0x7F800000, 0x7F000000))
        if scale < after:
            scale = after
        poisoned = largest >= 0x7F800000
        if poisoned:
            scale = _float(0x7FC00000)
        factor = np.float32(np.float32(1) / scale)
        for j in range(count):
            scaled = np.float32(values[j] / scale) if divides else np.float32(values[j] * factor)
            code = nan_code if poisoned else encode(scaled, halves[j], thresholds)
            codes[j] = max(code, least)
        return scale

    return store


def _kernel(rule: Rule) -> Callable[..., None]:
    """All that a kernel closes over are numbers and functions made of such."""
    size, half, g_half, rounds, master = rule.size, rule.half, rule.g_half, rule.rounds, rule.master
    first, second = rule.first, rule.second
    first_kind, second_kind, root = first.kind, second.kind, second.root
    first_bits, second_bits = first.bits, second.bits
    draws = first.stochastic or first.fraction > 0 or second.stochastic or rounds
    adam, lion = rule.kind == "adam", rule.kind == "lion"
    store_first, store_second = _storer(first, size), _storer(second, size)
    top = np.float32(np.finfo(np.float32).max)

    def kernel(p, g, m, m_scale, v, v_scale, error, numbers, tables, key, length, first, last):  # type: ignore[no-untyped-def]
        ms, vs, ps = np.empty(size, np.float32), np.empty(size, np.float32), np.empty(size, np.float32)
        codes = np.empty(size, np.int64)
        bits = np.zeros(size + TOGETHER, np.int32)
        blocks = (length + size - 1) // size
        b1, c1, b2, c2 = numbers[0], numbers[1], numbers[2], numbers[3]
        step_size, to_root, eps, keep, decay = numbers[4], numbers[5], numbers[6], numbers[7], numbers[8]
        for n in range(first, last):
            for block in range(blocks):
                begin = block * size
                count = min(size, length - begin)
                moment_b1, moment_b2, square_b2 = b1, b2, b2
                if first_kind != FLOAT32:
                    moment_b1 = np.float32(b1 * m_scale[n, block])
                    moment_b2 = np.float32(b2 * m_scale[n, block])
                if second_kind >= FLOAT:
                    scale = v_scale[n, block]
                    square_b2 = np.float32(b2 * (np.float32(scale * scale) if root else scale))
                if draws:
                    counter = (np.uint64(n * blocks + block) + key[4]) * np.uint64(size // TOGETHER)
                    for at in range(0, count, TOGETHER):
                        index = (counter + np.uint64(at // TOGETHER)) & np.uint64(0xFFFFFFFF)
                        _philox(index, np.uint64(0), key[2], key[3], key[0], key[1], bits[at : at + TOGETHER])
                for j in range(count):
                    i = begin + j
                    gradient = _float(np.int32(g[n, i]) << 16) if g_half else _float(g[n, i])
                    if master:
                        value = _float((np.int32(p[n, i]) << 16) + (np.int32(error[n, i]) << (16 - master)))
                    else:
                        value = _float(np.int32(p[n, i]) << 16) if half else _float(p[n, i])
                    moment = m[n, i] if first_kind == FLOAT32 else tables[0, 0, _code(m, n, i, first_bits)]
                    if adam:
                        gradient = _fused(decay, value, gradient)
                    if lion:
                        direction = _fused(moment, moment_b1, np.float32(c1 * gradient))
                        sign = direction
                        if direction > 0:
                            sign = np.float32(1)
                        elif direction < 0:
                            sign = np.float32(-1)
                        ms[j] = _fused(moment, moment_b2, np.float32(c2 * gradient))
                        ps[j] = _fused(value, keep, -np.float32(step_size * sign))
                        continue
                    if second_kind == FLOAT32:
                        square = v[n, i]
                    else:
                        square = tables[1, 0, _code(v, n, i, second_bits)]
                        if root:
                            square = np.float32(square * square)
                    moment = _fused(moment, moment_b1, np.float32(c1 * gradient))
                    square = _fused(square, square_b2, np.float32(c2 * np.float32(gradient * gradient)))
                    square = square if square <= top else top
                    r = np.float32(sqrt(square))
                    inverse = np.float32(np.float32(1) / _fused(r, to_root, eps))
                    ms[j] = moment
                    vs[j] = r if root else square
                    ps[j] = _fused(value, keep, -np.float32(np.float32(moment * step_size) * inverse))
                for j in range(count):
                    i = begin + j
                    if master:
                        pattern = (
                            np.int64(_bits(ps[j])) & 0xFFFFFFFF if ps[j] == ps[j] else np.int64(0x7FC00000)
                        )
                        rounded = pattern + (1 << (15 - master) if master < 16 else 0)
                        p[n, i] = np.uint16(((rounded + 0x8000) >> 16) & 0xFFFF)
                        error[n, i] = rounded >> (16 - master)
                    elif half:
                        pattern = np.int64(_bits(ps[j])) & 0xFFFFFFFF
                        if ps[j] != ps[j]:
                            p[n, i] = np.uint16(0x7FC0)
                        elif rounds:
                            p[n, i] = np.uint16((pattern + bits[j ^ 1]) >> 16)
                        else:
                            p[n, i] = np.uint16((pattern + 0x7FFF + ((pattern >> 16) & 1)) >> 16)
                    else:
                        p[n, i] = _bits(ps[j])
                if first_kind == FLOAT32:
                    for j in range(count):
                        m[n, begin + j] = ms[j]
                else:
                    m_scale[n, block] = store_first(ms, bits, tables[0, 1], count, codes)
                    _put(m, n, begin, count, codes, first_bits)
                if second_kind == FLOAT32:
                    for j in range(count):
                        v[n, begin + j] = vs[j]
                elif second_kind != ABSENT:
                    v_scale[n, block] = store_second(vs, bits, tables[1, 1], count, codes)
                    _put(v, n, begin, count, codes, second_bits)

    return kernel


@njit(inline="always", **OPTIONS)
def _put(target, n, begin, count, codes, bits):  # type: ignore[no-untyped-def]
    """Codes of a block, a byte each or two in one."""
    if bits == 8:
        for j in range(count):
            target[n, begin + j] = codes[j]
    else:
        for j in range(0, count, 2):
            upper = codes[j + 1] << 4 if j + 1 < count else 0
            target[n, (begin + j) >> 1] = codes[j] | upper


__all__ = ["Moment", "Rule", "compiled", "moment_of", "thresholds_of"]
