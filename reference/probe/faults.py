"""A bank of faulty kernels of a linear layer whose operands are quantized, and inputs that show them.

Each fault is one of those that products in low precision have had: scales of another row, a stale scale, a part of the sum
that is missing, a format's wrong maximum, an accumulator that is too short. They are for tests of tests: what cannot tell
these from a right kernel says nothing of a kernel that passes. On N(0, 1) all rows have about the same scale, and on inputs of
size 1 a missing scale is no fault, so inputs are those of a layer (or `typical_inputs`), scaled by powers of two as well.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from reference.formats.encode import decode, encode
from reference.matmul.linear import transposed
from reference.matmul.matmul import matmul
from reference.probe.estimates import F64
from reference.quantize.quantize import Quantized, dequantize, quantize
from reference.quantize.scales import choose_scales
from reference.schemes.schemes import Scheme

F32 = np.ndarray[Any, np.dtype[np.float32]]
#: Columns of K that a fault drops, rows and columns of a tile, blocks that a kernel loads scales for at once.
DROPPED, TILE, LOADED = 16, 64, 4


@dataclass(frozen=True)
class Case:
    """One call of a kernel: x (M, K) and w (N, K) float32, and the schemes of both; None: x is multiplied as it is."""

    x: F32
    w: F32
    scheme: Scheme | None
    weight_scheme: Scheme
    name: str = ""

    @property
    def sizes(self) -> tuple[int, int, int]:
        """M, N and K."""
        return len(self.x), len(self.w), int(self.x.shape[1])

    @cached_property
    def xq(self) -> Quantized:
        """The input as it is quantized; ValueError where it is not."""
        if self.scheme is None:
            raise ValueError(f"{self.name}: the input of this case is not quantized")
        return quantize(self.x, self.scheme)

    @cached_property
    def wq(self) -> Quantized:
        """The weight as it is quantized."""
        return quantize(self.w, self.weight_scheme)

    @cached_property
    def a(self) -> F64:
        """What the quantized input stands for."""
        return np.asarray(self.x, np.float64) if self.scheme is None else value(self.xq)

    @cached_property
    def b(self) -> F64:
        """What the quantized weight stands for."""
        return value(self.wq)

    @cached_property
    def exact(self) -> F64:
        """x w.T of the operands before they are quantized."""
        return np.asarray(self.x.astype(np.float64) @ self.w.astype(np.float64).T)

    @cached_property
    def right(self) -> F64:
        """The product of the quantized operands."""
        return np.asarray(self.a @ self.b.T)

    @property
    def blocks(self) -> int:
        """Scales of a row of x along K."""
        return int(self.xq.scale.shape[-1]) if self.xq.scale.ndim == 2 else 1

    @property
    def element(self) -> Scheme:
        """The input's scheme; ValueError where it has none."""
        return self.xq.scheme


def value(q: Quantized) -> F64:
    """What a quantized matrix stands for, float64."""
    return np.asarray(dequantize(q), np.float64)


def typical_inputs(tokens: int, channels: int, seed: int = 0) -> F32:
    """Inputs (tokens, channels) as layers have them: means, few directions, sizes of tokens over two decades, channels that are
    ten times as large, a third of zeros. Synthetic; a layer's own are better (`ao_lab.Probe`)."""
    rng, fixed = np.random.default_rng(seed), np.random.default_rng([channels, 7])
    directions = fixed.standard_normal((max(channels // 8, 1), channels)) * fixed.gamma(
        1, 1, (max(channels // 8, 1), 1)
    )
    x = rng.standard_normal((tokens, len(directions))) @ directions / np.sqrt(len(directions))
    x = x + 0.5 * fixed.standard_normal(channels) + 0.1 * rng.standard_normal(x.shape)
    x[:, fixed.choice(channels, max(channels // 64, 1), replace=False)] *= 10
    rectified = fixed.random(channels) < 2 / 3
    x[:, rectified] = np.maximum(x[:, rectified], 0)
    return np.asarray(x * 10 ** rng.uniform(-1, 1, (tokens, 1)), np.float32)


def typical_weight(outputs: int, channels: int, seed: int = 0) -> F32:
    """A weight (outputs, channels) whose rows have sizes within a factor of ten."""
    rng = np.random.default_rng([seed, outputs, channels])
    sizes = 10 ** rng.uniform(-0.5, 0.5, (outputs, 1))
    return np.asarray(rng.standard_normal((outputs, channels)) * sizes / np.sqrt(channels), np.float32)


@dataclass(frozen=True)
class Fault:
    """What is wrong, in words; the kernel, which gives (M, N) float64, or None where a case's schemes cannot have it;
    whether it is about how an input is quantized."""

    says: str
    kernel: Callable[[Case], F64 | None]
    of_input: bool = True

    def outputs(self, case: Case) -> F64 | None:
        """What such a kernel gives; None where a case cannot have this fault."""
        return None if self.of_input and case.scheme is None else self.kernel(case)


def _input(case: Case, scale: Any) -> F64:
    """With other stored scales of the input."""
    return np.asarray(value(replace(case.xq, scale=np.ascontiguousarray(scale))) @ case.b.T)


def _weight(case: Case, scale: Any) -> F64:
    return np.asarray(case.a @ value(replace(case.wq, scale=np.ascontiguousarray(scale))).T)


def rows_shifted(case: Case) -> F64 | None:
    """Each row of the input by the scale of the one before."""
    scale = case.xq.scale
    return _input(case, np.roll(scale, 1, 0)) if scale.ndim == 2 and scale.shape[0] > 1 else None


def first_row(case: Case) -> F64 | None:
    """Every row by the first one's scale."""
    scale = case.xq.scale
    return (
        _input(case, np.repeat(scale[:1], len(scale), 0)) if scale.ndim == 2 and scale.shape[0] > 1 else None
    )


def columns_shifted(case: Case) -> F64 | None:
    """Each output by the weight's scale of the one before."""
    scale = case.wq.scale
    return _weight(case, np.roll(scale, 1, 0)) if scale.ndim == 2 and scale.shape[0] > 1 else None


def transposed_blocks(case: Case) -> F64 | None:
    """Scales of the input's blocks in the memory order of the transposed array."""
    scale = case.xq.scale
    if case.blocks < 2:
        return None
    return _input(case, scale.reshape(-1).reshape(scale.shape[::-1]).T)


def last_blocks(case: Case) -> F64 | None:
    """Scales are loaded by fours; blocks beyond the last whole four have those of the four before."""
    scale, whole = case.xq.scale, case.blocks // LOADED * LOADED
    if not whole or whole == case.blocks:
        return None
    return _input(
        case, np.concatenate([scale[:, :whole], scale[:, whole - LOADED : case.blocks - LOADED]], 1)
    )


def upper_bound(case: Case) -> F64:
    """Magnitudes of the input beyond 1 saturate: an upper bound of the scale that was meant for other inputs."""
    return np.asarray(value(quantize(np.clip(case.x, -1, 1), case.element)) @ case.b.T)


def stale_scale(case: Case) -> F64:
    """The input's scales of a step when it was half as large."""
    return np.asarray(
        value(quantize(case.x, case.element, scales=choose_scales(case.x / 2, case.element))) @ case.b.T
    )


def no_scale(case: Case) -> F64:
    """The input cast to its element without a scale."""
    element = case.element.format
    return np.asarray(np.asarray(decode(encode(case.x, element), element), np.float64) @ case.b.T)


def no_scales_applied(case: Case) -> F64:
    """The sums are never multiplied by the scales: quantized values alone."""
    a = case.a if case.scheme is None else unscaled(case.xq)
    return np.asarray(a @ unscaled(case.wq).T)


def input_scale_not_applied(case: Case) -> F64:
    """The sums are multiplied by the weight's scales alone."""
    return np.asarray(unscaled(case.xq) @ case.b.T)


def weight_scale_not_applied(case: Case) -> F64:
    """The sums are multiplied by the input's scales alone."""
    return np.asarray(case.a @ unscaled(case.wq).T)


def unscaled(q: Quantized) -> F64:
    """The numbers that quantized values are, without scales and zero points."""
    return np.asarray(decode(q.codes, q.scheme.format), np.float64)


def no_outer_scale(case: Case) -> F64 | None:
    """The second-level scale of the input left out."""
    outer = case.xq.outer
    return (
        None if outer is None else np.asarray(value(replace(case.xq, outer=np.ones_like(outer))) @ case.b.T)
    )


def no_zero_point(case: Case) -> F64 | None:
    """The input's zero points left out."""
    zero = case.xq.zero
    return None if zero is None else np.asarray(value(replace(case.xq, zero=np.zeros_like(zero))) @ case.b.T)


def wrong_maximum(case: Case) -> F64 | None:
    """Codes saturate at 240, the largest value of e4m3fnuz, under scales for 448."""
    if case.element.element != "float8_e4m3fn":
        return None
    largest = encode(np.asarray([240.0], np.float32), "float8_e4m3fn")[0]
    size = np.minimum(case.xq.codes & 0x7F, largest)
    codes = np.where((case.xq.codes & 0x7F) == 0x7F, case.xq.codes, (case.xq.codes & 0x80) | size)
    return np.asarray(value(replace(case.xq, codes=codes.astype(np.uint8))) @ case.b.T)


def wrong_bias(case: Case) -> F64 | None:
    """The input's codes read as e4m3fnuz, whose exponents have another bias."""
    return case.right / 2 if case.element.element == "float8_e4m3fn" else None


def truncated_cast(case: Case) -> F64:
    """The input rounded toward zero."""
    toward_zero = replace(case.element, rounding="toward_zero")
    return np.asarray(value(quantize(case.x, toward_zero)) @ case.b.T)


def dropped_tail(case: Case) -> F64:
    """The last 16 terms of each sum are missing."""
    return np.asarray(case.a[:, :-DROPPED] @ case.b[:, :-DROPPED].T)


def dropped_tile(case: Case) -> F64 | None:
    """The last 64 terms of each sum are missing."""
    return _without_last(case, TILE)


def dropped_block(case: Case) -> F64 | None:
    """The last 128 terms of each sum are missing."""
    return _without_last(case, 2 * TILE)


def _without_last(case: Case, terms: int) -> F64 | None:
    return np.asarray(case.a[:, :-terms] @ case.b[:, :-terms].T) if case.a.shape[1] > terms else None


def outputs_shifted_by_a_channel(case: Case) -> F64:
    """Each output stands in the place of the next channel's."""
    return np.roll(case.right, 1, 1)


def outputs_shifted_by_a_token(case: Case) -> F64:
    """Each output stands in the place of the next token's."""
    return np.roll(case.right, 1, 0)


def unwritten_rows(case: Case) -> F64 | None:
    """Rows of the last tile that is not whole are never written."""
    whole = len(case.x) // TILE * TILE
    if whole == len(case.x):
        return None
    y = case.right.copy()
    y[whole:] = 0
    return y


def lost_part(case: Case) -> F64:
    """One tile has lost the second half of its sums: two parts of K were added without waiting for each other."""
    y, half = case.right.copy(), case.a.shape[1] // 2
    y[:TILE, :TILE] = case.a[:TILE, :half] @ case.b[:TILE, :half].T
    return y


def short_accumulator(case: Case) -> F64 | None:
    """FP8 sums in one chain of Hopper's tensor core, 14 bits of the largest, where float32 was asked for."""
    formats = case.element.format, case.weight_scheme.format
    if case.blocks > 1 or (case.wq.scale.ndim == 2 and case.wq.scale.shape[1] > 1):
        return None  # scales that change along K end a chain after each block
    if any(one.kind != "float" or one.bits > 8 for one in formats):
        return None
    return np.asarray(matmul(case.xq, transposed(case.wq), accumulation="hopper_fp8"), np.float64)


def bfloat16_sums(case: Case) -> F64:
    """Partial sums over 64 terms are added in bfloat16."""
    y = np.zeros(case.right.shape)
    for start in range(0, case.a.shape[1], TILE):
        y = bfloat16(y + case.a[:, start : start + TILE] @ case.b[:, start : start + TILE].T)
    return y


def bfloat16(x: F64) -> F64:
    """Rounded to bfloat16."""
    return np.asarray(decode(encode(x.astype(np.float32), "bfloat16"), "bfloat16"), np.float64)


def nan_to_zero(case: Case) -> F64:
    """NaN among inputs becomes 0."""
    return np.asarray(value(quantize(np.nan_to_num(case.x), case.element)) @ case.b.T)


def powers_of_two(case: Case) -> F64:
    """Scales rounded up to powers of two: another convention, with which floats lose about as much; integers lose more."""
    records = [
        record if record is None or record.format.kind != "float" or (record.scale.rule, record.scale.storage) != ("ratio",
        "float32") else replace(record, scale=replace(record.scale, rule="ratio_pow2"))
        for record in (case.scheme, case.weight_scheme)
    ]  # fmt: skip
    a = case.a if records[0] is None else value(quantize(case.x, records[0]))
    return np.asarray(a @ value(quantize(case.w, records[1])).T) if records[1] is not None else case.right


def float32_sums(case: Case, order: Any = slice(None), parts: int = 1) -> F64:
    """NumPy's own float32 product, K in an order, in so many parts that are added."""
    a, b = (np.ascontiguousarray(one[:, order], np.float32) for one in (case.a, case.b))
    cuts = np.array_split(np.arange(a.shape[1]), parts)
    return np.asarray(
        sum((a[:, k] @ b[:, k].T for k in cuts[1:]), a[:, cuts[0]] @ b[:, cuts[0]].T), np.float64
    )


def one_by_one(case: Case) -> F64:
    """Terms are added one after the other in float32."""
    y = np.zeros(case.right.shape, np.float32)
    for k in range(case.a.shape[1]):
        y += np.outer(case.a[:, k].astype(np.float32), case.b[:, k].astype(np.float32))
    return y.astype(np.float64)


#: Right kernels, whose bits differ: sums in other orders, and another convention of scales.
RIGHT: Mapping[str, Callable[[Case], F64]] = {
    "exact sums": lambda case: case.right,
    "float32 sums": float32_sums,
    "backwards": lambda case: float32_sums(case, slice(None, None, -1)),
    "four parts of K": lambda case: float32_sums(case, parts=4),
    "blocks of 128": lambda case: float32_sums(case, parts=max(case.a.shape[1] // 128, 1)),
    "term by term": one_by_one,
    "powers of two": powers_of_two,
}
#: Those that a kernel can have whose input is not quantized.
OF_ANY = (
    columns_shifted, dropped_tail, dropped_tile, dropped_block, unwritten_rows, lost_part, bfloat16_sums, no_scales_applied,
    weight_scale_not_applied, outputs_shifted_by_a_channel, outputs_shifted_by_a_token,
)  # fmt: skip
#: Every fault by name.
FAULTS: Mapping[str, Fault] = {
    one.__name__.replace("_", " "): Fault((one.__doc__ or "").split(":")[0].rstrip("."), one, one not in OF_ANY)
    for one in (
        rows_shifted, first_row, columns_shifted, transposed_blocks, last_blocks, upper_bound, stale_scale, no_scale,
        no_scales_applied, input_scale_not_applied, weight_scale_not_applied, no_outer_scale, no_zero_point, wrong_maximum,
        wrong_bias, truncated_cast, dropped_tail, dropped_tile, dropped_block, unwritten_rows, lost_part, short_accumulator,
        bfloat16_sums, nan_to_zero, outputs_shifted_by_a_channel, outputs_shifted_by_a_token,
    )
}  # fmt: skip

__all__ = ["FAULTS", "RIGHT", "Case", "Fault", "typical_inputs", "typical_weight"]
