"""Numbers quantized by a compiled loop (`loops.rounding`), a pass over memory and nothing between: what activations need in
every call of a layer.

Records of symmetric floats and integers, or integers with zero points of codes, are taken, their scales a ratio (without zero
points also one of the input's dtype), a power of two, or a ratio under an outer scale over all elements: those of default
schemes and most that `for_layout` makes, under scales that are found or given. Results have the reference's bits; None stands
for what is left to the reference, NaN and infinities among it. `fast.dispatch` remembers what was prepared for a shape.

`fake_quantize` goes some rows at a time: quantized by the reference, dequantized by what is quicker. The bits
are those of `reference.fake_quantize`, which is `dequantize(quantize(x))`. Where no scale is of more than a row, rows
do not depend on each other, and what lies between stays in cache; else all rows go at once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from math import frexp, prod
from typing import Any

import numpy as np
import torch

import reference
from fast.cpu.dequantize import as_array, dequantize, numba_missing
from fast.cpu.scales import DTYPES, covered
from fast.cpu.threads import WORTH, in_parts
from fast.dispatch import PLAIN
from reference import Quantized
from reference.formats.formats import FORMATS, Format
from reference.quantize.blocks import Blocks
from reference.quantize.quantize import quantizes_by_table, scale_table
from reference.quantize.scales import floor_value
from reference.schemes.schemes import Scale, Scheme

#: Elements that are quantized at a time.
PART = 1 << 16


def fake_quantize(x: torch.Tensor, scheme: Scheme, axis: int) -> torch.Tensor | None:
    """x as its scheme represents it, in its dtype, contiguous; None where the reference has to say. Errors as there."""
    if not _takes(x, scheme, axis):
        return None
    length = x.shape[-1]
    rows = x.detach().reshape(-1, length)
    result = torch.empty(rows.shape, dtype=x.dtype, device="cpu")
    step = max(1, PART // length) if _is_of_rows(scheme) else len(rows)
    name = str(x.dtype).removeprefix("torch.")
    for first in range(0, len(rows), step):
        q = reference.quantize(rows[first : first + step], scheme)
        part = dequantize(q, name)
        result[first : first + step] = reference.dequantize(q, name) if part is None else part
    return result.view(x.shape)


def _takes(x: torch.Tensor, scheme: Scheme, axis: int) -> bool:
    """Whether x is a plain tensor whose blocks run along its last axis, in numbers that `dequantize` knows."""
    if (
        type(x) is not torch.Tensor
        or x.device.type != "cpu"
        or x.dtype not in DTYPES
        or x.dim() < 2
        or not x.numel()
    ):
        return False
    if axis % x.dim() != x.dim() - 1 or isinstance(scheme.scale.block, tuple) or scheme.scale.flat_size:
        return False
    return scheme.rounding != "stochastic" and covered(
        scheme, (x.numel() // x.shape[-1], x.shape[-1]), 1, x.dtype
    )


def _is_of_rows(scheme: Scheme) -> bool:
    """Whether rows are quantized each for itself."""
    return isinstance(scheme.scale.block, int) and scheme.outer is None


#: Elements of the smallest tensor for which a loop is compiled at once, and calls after which it is for smaller ones: to
#: compile takes a second, which a layer's few rows of inputs soon make up for.
SMALLEST, SOON = 1 << 12, 16
#: Codes of scales in e8m0 beside which nothing is subnormal or infinite.
LEAST_CODE, MOST_CODE = 32, 250
#: What stands for an array that is not read or written.
NO_SCALE, NO_ZERO = np.zeros((1, 1), np.float32), np.zeros((1, 1), np.int8)
NO_TABLE = np.zeros(1, np.float32)
#: Parts of given scales, each float32 or int8.
Given = tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]
NOT_GIVEN: Given = (None, None, None)


def values(x: torch.Tensor, scheme: Scheme) -> torch.Tensor | None:
    """x (..., K) as its scheme represents it, blocks along the last axis, in its dtype, contiguous; None where the
    loop is not for it, or might not have the reference's bits."""
    plan = plan_of(x, scheme, -1)
    return None if plan is None else plan.values(x)


def quantized(x: torch.Tensor, scheme: Scheme, axis: int) -> Quantized | None:
    """x (..., K) quantized to signed integers of 8 bits, blocks along the last axis; None as of `values`,
    and for one scale of all."""
    plan = plan_of(x, scheme, axis, codes=True)
    return None if plan is None else plan.quantized(x)


@dataclass(frozen=True)
class Plan:
    """What the loop needs to know of tensors of a shape, dtype and scheme. kernel: that of `rule`; blocks: (rows, blocks of a
    row, size)."""

    rule: Any
    kernel: Callable[..., None]
    scheme: Scheme
    shape: tuple[int, ...]
    blocks: tuple[int, int, int]
    table: Any
    has_outer: bool

    def values(
        self, x: torch.Tensor, scale: torch.Tensor | None = None, outer: torch.Tensor | None = None,
        zero: torch.Tensor | None = None, words: None = None,
    ) -> torch.Tensor | None:  # fmt: skip
        """The numbers of a tensor under scales that are found, or given."""
        result = torch.empty(self.shape, dtype=x.dtype, device="cpu")
        scales = NO_SCALE if scale is None else _matrix(scale, self.blocks)
        zeros = NO_ZERO if zero is None else _matrix(zero, self.blocks)
        return result if self._run(x, result, scales, zeros, outer) else None

    def codes(
        self, x: torch.Tensor, scale: torch.Tensor | None = None, zero: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, Any, Any] | None:
        """The codes of a tensor, int8 in its shape, and arrays (rows, blocks) of scales and zero points, found or given."""
        codes = torch.empty(self.shape, dtype=torch.int8, device="cpu")
        scales = np.empty(self.blocks[:2], np.float32)
        zeros = np.empty(self.blocks[:2], np.int8) if self.rule.has_zero else NO_ZERO
        if scale is not None:
            scales[:] = _matrix(scale, self.blocks)
        if zero is not None:
            zeros[:] = _matrix(zero, self.blocks)
        return (codes, scales, zeros) if self._run(x, codes, scales, zeros, None) else None

    def quantized(self, x: torch.Tensor) -> Quantized | None:
        """The same as the reference has it."""
        made = self.codes(x)
        if made is None:
            return None
        codes, scale, zero = made
        axis = len(self.shape) - 1
        kept = Blocks.of(self.shape, self.scheme.scale, axis).scale_shape
        zeros = torch.from_numpy(zero).view(kept) if self.rule.has_zero else None
        scales = torch.from_numpy(scale).view(kept)
        return Quantized(codes.view(torch.uint8), scales, None, zeros, self.shape, axis, self.scheme)

    def _run(
        self, x: torch.Tensor, made: torch.Tensor, scale: Any, zero: Any, outer: torch.Tensor | None
    ) -> bool:
        """Write what the rule makes of x; whether it has the reference's bits."""
        rows, elements = self.blocks[0], x.numel()
        bits, out, whole = _bits(x), _as_integers(made).numpy(), ZERO
        if self.has_outer or (self.rule.is_tensor and not self.rule.given):
            whole = self._largest(bits, rows, elements)
        if self.has_outer:
            whole = _outer(self.scheme.outer, whole) if outer is None else np.float32(float(outer))
            if not whole >= TINY:
                return False
        plain = np.empty(rows, np.uint8)
        operands = (
            bits.reshape(self.blocks),
            out.reshape(self.blocks),
            scale,
            zero,
            self.table,
            whole,
            plain,
        )
        if elements < WORTH:
            self.kernel(*operands, 0, rows)
        else:
            in_parts(partial(self.kernel, *operands), rows, elements)
        return 0 not in plain.tobytes()

    def _largest(self, bits: Any, rows: int, elements: int) -> Any:
        """The largest magnitude."""
        from fast.cpu.loops.rounding import compiled_largest

        tops = np.empty(rows, bits.dtype)
        in_parts(partial(compiled_largest(self.rule.half), bits.reshape(rows, -1), tops), rows, elements)
        return _number(tops.max(), self.rule.half)


#: float32's smallest normal number, and 0.
ZERO, TINY = np.float32(0), np.float32(2.0**-126)


def _outer(outer: Scale | None, largest: Any) -> Any:
    """The scale over all elements, whose largest magnitude this is."""
    floor = None if outer is None else _floor(outer, half=False)
    if outer is None or floor is None:
        raise ValueError("a record with a scale over all elements of another rule than a ratio has no loop")
    return max(np.float32(largest / np.float32(outer.target)), np.float32(floor[0]))


def _matrix(part: torch.Tensor, blocks: tuple[int, int, int]) -> Any:
    """A given part by rows and blocks, one of either where it is for all."""
    return as_array(part.reshape((1, 1) if part.numel() == 1 else blocks[:2]))


def _bits(x: torch.Tensor) -> Any:
    """The bits of a tensor without gaps, copied where there are some; of float16 those of float32, which holds it."""
    x = x.to(torch.float32) if x.dtype == torch.float16 else x
    if x.requires_grad or x.is_neg() or not x.is_contiguous() or x.data_ptr() % x.element_size():
        return as_array(_as_integers(x.detach().resolve_neg()))
    return _as_integers(x).numpy()


def _as_integers(x: torch.Tensor) -> torch.Tensor:
    """The bits of bfloat16 or float32; codes as they are."""
    return x if x.dtype == torch.int8 else x.view(torch.int16 if x.dtype == torch.bfloat16 else torch.int32)


def _number(top: Any, half: bool) -> Any:
    """The float32 of a magnitude's bits."""
    return np.array([int(top) << 16 if half else int(top)], np.uint32).view(np.float32)[0]


def _block_size(scale: Scale, length: int) -> int:
    return length if scale.block in (-1, "tensor") else int(scale.block)  # type: ignore[arg-type]


def plan_of(
    x: torch.Tensor, scheme: Scheme, axis: int, *, codes: bool = False, given: Given = NOT_GIVEN
) -> Plan | None:
    """What the loop needs for tensors like x, whose numbers or codes (not under one scale of all) are wanted, under scales that
    are found or given; None where it is not for them."""
    reads = x.dtype in LOOPED or (x.dtype == torch.float16 and codes and _is_of_float32(scheme))
    plain = type(x) in PLAIN and x.device.type == "cpu" and x.dim() > 1 and reads
    if not plain or not x.numel() or type(axis) is not int or axis % x.dim() != x.dim() - 1:
        return None
    half, length = x.dtype == torch.bfloat16, x.shape[-1]
    rule = None if numba_missing() is not None else _rule(scheme, half, codes)
    rule = rule if given == NOT_GIVEN or rule is None else _given_rule(rule, scheme, given, codes)
    if (
        rule is None
        or (codes and rule.is_tensor)
        or length % (size := _block_size(scheme.scale, length))
        or not _is_worth(rule, x.numel())
        or (
            codes
            and given[0] is not None
            and given[0].shape != Blocks.of(x.shape, scheme.scale, -1).scale_shape
        )
    ):
        return None
    from fast.cpu.loops.rounding import OUTER, TABLE, compiled

    table = _scales_by_amax(scheme) if rule.scale == TABLE else NO_TABLE
    shape = tuple(x.shape)
    blocks = (prod(shape[:-1]), length // size, size)
    return Plan(rule, compiled(rule), scheme, shape, blocks, table, rule.scale == OUTER)


#: Dtypes that the loop reads.
LOOPED = (torch.float32, torch.bfloat16)


def _is_of_float32(scheme: Scheme) -> bool:
    """Whether codes and scales of an input are those of the same numbers in float32."""
    floors = [record.floor for record in (scheme.scale, scheme.outer) if record is not None]
    fixed = all(floor is None or not isinstance(floor[1], str) for floor in floors)
    return fixed and (scheme.arithmetic, scheme.scale.compute) == ("float32", "float32")


#: How often a rule was asked for tensors that are smaller than `SMALLEST`.
ASKED: Counter[Any] = Counter()


def _is_worth(rule: Any, elements: int) -> bool:
    """Whether a loop is compiled for so many elements, or is there."""
    if elements >= SMALLEST:
        ASKED[rule] = SOON
    ASKED[rule] += 1
    return ASKED[rule] > SOON


def _given_rule(rule: Any, scheme: Scheme, given: Given, codes: bool) -> Any:
    """The rule under given scales; None where the loop is not for them."""
    scale, outer, zero = given
    if outer is not None:
        good = scale is None and zero is None and scheme.outer is not None and outer.dtype == torch.float32
        return rule if good and outer.numel() == 1 and not codes else None
    if scale is None or scheme.outer is not None or scale.dtype != torch.float32 or scheme.scale.power_of_two:
        return None
    if (zero is not None) != rule.has_zero or (zero is not None and zero.dtype != torch.int8):
        return None
    is_one = scheme.scale.block == "tensor" or scale.numel() == 1
    if not is_one or (scheme.dequantize == "target" and not codes):
        return None
    # Only records that make a NaN's block NaN raise given scales to their floor.
    return replace(rule, given=True, is_tensor=False, floor=rule.floor if scheme.nan == "block" else 0.0)


@lru_cache(maxsize=256)
def _rule(scheme: Scheme, half: bool, codes: bool) -> Any:
    from fast.cpu.loops.rounding import Floats, Rounding

    element, scales = scheme.format, _scales(scheme, half)
    if scales is None or not _is_plain(scheme, half, scales):
        return None
    common: dict[str, Any] = {"half": half, "codes": codes, **_steps(scheme, half), **scales}
    if element.kind == "int" and not element.fraction_bits:
        low, high = element.integer_range
        fits = scheme.zero is None or scheme.zero.rule == "code"
        writes = not codes or (element.bits == 8 and element.signed and scheme.outer is None)
        if not fits or not writes:
            return None
        return Rounding(**common, low=low, high=high, has_zero=scheme.zero is not None)
    if codes or not _has_both_signs(element) or not _has_constants(element):
        return None
    floats = Floats(element.mantissa_bits, element.emin, element.max)
    return Rounding(**common, positive=not scheme.negative_zero, floats=floats)


def _steps(scheme: Scheme, half: bool) -> dict[str, Any]:
    """How elements are computed; of powers of two every way is exact."""
    if scheme.scale.power_of_two:
        return {}
    return {"divides": scheme.apply == "divide", "short": half and scheme.arithmetic == "input"}


def _has_constants(element: Format) -> bool:
    """Whether float32 has the numbers by whose sum the loop rounds: 2**(23 - mantissa bits) times the format's largest."""
    return frexp(element.max)[1] - 1 + 23 - element.mantissa_bits <= 127


def _is_plain(scheme: Scheme, half: bool, scales: dict[str, Any]) -> bool:
    """Whether elements are computed and rounded in a way that the loop has, one scale for elements of the last axis, or for
    all. Where every step of dequantizing rounds to the input's dtype, that has the scale already."""
    known = scheme.apply in ("reciprocal", "divide") and scheme.arithmetic in ("float32", "input")
    if scheme.outer is not None:
        known = (scheme.apply, scheme.arithmetic, scheme.dequantize) == ("reciprocal", "float32", "float32")
    exact = scheme.dequantize != "target" or not half or scales.get("short_scale", False)
    ways = (scheme.codes_from, scheme.rounding, scheme.overflow, scheme.smallest_exponent)
    return known and exact and ways == ("stored", "nearest_even", "saturate", None)


def _scales(scheme: Scheme, half: bool) -> dict[str, Any] | None:
    """How block scales are found; None where the loop does not find them so."""
    from fast.cpu.loops.rounding import OUTER, RATIO, TABLE, Floats

    scale, outer = scheme.scale, scheme.outer
    if (not isinstance(scale.block, int) and scale.block != "tensor") or scale.flat_size:
        return None
    if quantizes_by_table(scheme):
        return {"scale": TABLE, "target": 1.0} if outer is None and scale.block != "tensor" else None
    statistic = "absmax" if scheme.zero is None else "minmax_with_zero"
    is_short = half and scale.compute == "input"
    floor = _floor(scale, half)
    if floor is None or (scale.statistic, scale.rule) != (statistic, "ratio"):
        return None
    result = {"target": scale.target, "floor": floor[0], "floors_zero": floor[1]}
    if outer is None:
        is_tensor = scale.block == "tensor"
        good = scale.storage == "float32" and not (scheme.zero is not None and (is_tensor or floor[1]))
        good = good and (not is_short or _is_short_target(scale.target))
        return {"scale": RATIO, "is_tensor": is_tensor, "short_scale": is_short, **result} if good else None
    storage, outer_floor = FORMATS.get(scale.storage), _floor(outer, half)
    good = (outer.block, outer.statistic, outer.rule) == ("tensor", "absmax_elements", "ratio")
    good = good and scheme.outer_order == "decode" and outer.storage == "float32" and scheme.zero is None
    kinds = [record.floor is None or record.floor[0] == "stored" for record in (scale, outer)]
    if not good or not all(kinds) or "input" in (scale.compute, outer.compute):
        return None
    if scale.block == "tensor" or outer_floor is None or not _has_both_signs(storage):
        return None
    if storage is None or storage.specials == "ieee" or not _has_constants(storage):
        return None
    return {"scale": OUTER, "stored": Floats(storage.mantissa_bits, storage.emin, storage.max), **result}


def _is_short_target(target: float) -> bool:
    """Whether bfloat16 has a scale's target, which is rounded as all steps are."""
    return float(torch.tensor(target, dtype=torch.bfloat16, device="cpu")) == target


def _floor(scale: Scale, half: bool) -> tuple[float, bool] | None:
    """The floor of a decoding scale that is a ratio, 0 for none, and whether it stands for a scale of 0 alone; None where the
    scale is found in another way. In float32 a scale is stored as it is: "scale" is "stored"."""
    plain = (scale.stored, scale.center, scale.by_reciprocal) == ("decode", "none", False)
    if not plain or scale.compute not in ("float32", "input"):
        return None
    if scale.floor is None:
        return 0.0, False
    kind, value = scale.floor
    if kind not in ("stored", "scale", "zero"):
        return None
    return floor_value(value, "bfloat16" if half else "float32"), kind == "zero"


def _has_both_signs(fmt: Format | None) -> bool:
    """Whether it is a float format in which every number, zero too, has its negative."""
    return fmt is not None and fmt.kind == "float" and bool(fmt.sign_mask) and fmt.has_negative_zero


@lru_cache(maxsize=16)
def _scales_by_amax(scheme: Scheme) -> Any:
    """Scales of e8m0 by amax rounded to odd in bfloat16, float32 (2**15,): 0 where the reference has to say, 1 for amax 0."""
    codes = scale_table(scheme).astype(np.int32)
    good = (codes >= LEAST_CODE) & (codes <= MOST_CODE)
    scales = np.where(good, codes << 23, 0).astype(np.int32).view(np.float32)
    scales[0] = 1.0
    return scales


__all__ = ["NOT_GIVEN", "Plan", "fake_quantize", "plan_of", "quantized", "values"]
