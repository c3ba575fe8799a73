"""Numbers quantized by a compiled loop (`loops.rounding`), a pass over memory and nothing between: what activations need in
every call of a layer.

Records that follow the rules of default schemes are taken: symmetric floats and integers, or integers with zero points of
codes, scales that are a ratio (without zero points also one of the input's dtype), a power of two, or a ratio under an outer
scale over all elements. Results have the
reference's bits; None stands for what is left to the reference, NaN and infinities among it.

`fake_quantize` goes by that loop, or some rows at a time: quantized by the reference, dequantized by what is quicker. The bits
are those of `reference.fake_quantize`, which is `dequantize(quantize(x))`. Where no scale is of more than a row, rows
do not depend on each other, and what lies between stays in cache; else all rows go at once.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache, partial
from math import frexp, prod
from typing import Any

import numpy as np
import torch

import reference
from fast.cpu.dequantize import as_array, dequantize, numba_missing
from fast.cpu.scales import DTYPES, covered
from fast.cpu.threads import in_parts
from reference import Quantized
from reference.formats.formats import FORMATS, Format
from reference.quantize.blocks import Blocks
from reference.quantize.quantize import quantizes_by_table, scale_table
from reference.schemes.schemes import Scale, Scheme

#: Elements that are quantized at a time.
PART = 1 << 16


def fake_quantize(x: torch.Tensor, scheme: Scheme, axis: int) -> torch.Tensor | None:
    """x as its scheme represents it, in its dtype, contiguous; None where the reference has to say. Errors as there."""
    if not _takes(x, scheme, axis):
        return None
    by_loop = values(x, scheme)
    if by_loop is not None:
        return by_loop
    return _by_parts(x, scheme)


def _by_parts(x: torch.Tensor, scheme: Scheme) -> torch.Tensor:
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


#: Elements of the smallest tensor for which a loop is compiled.
SMALLEST = 1 << 12
#: Codes of scales in e8m0 beside which nothing is subnormal or infinite.
LEAST_CODE, MOST_CODE = 32, 250


def values(x: torch.Tensor, scheme: Scheme) -> torch.Tensor | None:
    """x (..., K) as its scheme represents it, blocks along the last axis, in its dtype, contiguous; None where the
    loop is not for it, or might not have the reference's bits."""
    x = x.detach().resolve_neg()
    rule = _rule_of(x, scheme, codes=False)
    if rule is None:
        return None
    result = torch.empty(x.shape, dtype=x.dtype, device="cpu")
    return result if _run(x, scheme, rule, result, _nothing(np.float32), _nothing(np.int8)) else None


def quantized(x: torch.Tensor, scheme: Scheme, axis: int) -> Quantized | None:
    """x (..., K) quantized to signed integers of 8 bits, blocks along the last axis; None as of `values`,
    and for one scale of all."""
    plain = type(x) is torch.Tensor and x.device.type == "cpu" and x.dim() > 1
    if not plain or type(axis) is not int or axis not in (-1, x.dim() - 1):
        return None
    x = x.detach().resolve_neg()
    rule = _rule_of(x, scheme, codes=True)
    if rule is None or rule.is_tensor:
        return None
    shape, axis = tuple(x.shape), x.dim() - 1
    kept = Blocks.of(shape, scheme.scale, axis).scale_shape
    rows, blocks = prod(shape[:-1]), shape[-1] // _block_size(scheme.scale, shape[-1])
    codes = torch.empty(shape, dtype=torch.int8, device="cpu")
    result = torch.empty((rows, blocks), dtype=torch.float32, device="cpu")
    zero = torch.empty(kept, dtype=torch.int8, device="cpu") if rule.has_zero else None
    zeros = _nothing(np.int8) if zero is None else zero.numpy().reshape(rows, blocks)
    if not _run(x, scheme, rule, codes, result.numpy(), zeros):
        return None
    return Quantized(codes.view(torch.uint8), result.view(kept), None, zero, shape, axis, scheme)


def _run(x: torch.Tensor, scheme: Scheme, rule: Any, made: torch.Tensor, scale: Any, zero: Any) -> bool:
    """Write what a rule makes of x; whether it has the reference's bits."""
    from fast.cpu.loops.rounding import OUTER, TABLE, compiled, compiled_largest

    bits = as_array(_as_integers(x))
    length, rows = bits.shape[-1], prod(bits.shape[:-1])
    largest, table = np.float32(0), _nothing(np.float32, 1)
    if rule.scale == OUTER or rule.is_tensor:
        tops = np.empty(rows, bits.dtype)
        work = partial(compiled_largest(rule.half), bits.reshape(rows, length), tops)
        in_parts(work, rows, bits.size)
        largest = _number(tops.max(), rule.half)
    if rule.scale == TABLE:
        table = _scales_by_amax(scheme)
    blocks = (rows, -1, _block_size(scheme.scale, length))
    out = _as_integers(made).numpy()
    plain = np.empty(rows, np.uint8)
    kernel = partial(
        compiled(rule), bits.reshape(blocks), out.reshape(blocks), scale, zero, table, largest, plain
    )
    in_parts(kernel, rows, bits.size)
    return bool(plain.all())


def _as_integers(x: torch.Tensor) -> torch.Tensor:
    """The bits of bfloat16 or float32; codes as they are."""
    return x if x.dtype == torch.int8 else x.view(torch.int16 if x.dtype == torch.bfloat16 else torch.int32)


def _number(top: Any, half: bool) -> Any:
    """The float32 of a magnitude's bits."""
    return np.array([int(top) << 16 if half else int(top)], np.uint32).view(np.float32)[0]


def _block_size(scale: Scale, length: int) -> int:
    return length if scale.block in (-1, "tensor") else int(scale.block)  # type: ignore[arg-type]


def _rule_of(x: torch.Tensor, scheme: Scheme, *, codes: bool) -> Any:
    """What the loop is compiled for; None where it is not for this tensor."""
    if x.numel() < SMALLEST or x.dtype not in (torch.float32, torch.bfloat16) or numba_missing() is not None:
        return None
    rule = _rule(scheme, x.dtype == torch.bfloat16, codes)
    return rule if rule is not None and x.shape[-1] % _block_size(scheme.scale, x.shape[-1]) == 0 else None


@lru_cache(maxsize=256)
def _rule(scheme: Scheme, half: bool, codes: bool) -> Any:
    from fast.cpu.loops.rounding import Floats, Rounding

    element, scales = scheme.format, _scales(scheme, half)
    if scales is None or not _is_plain(scheme):
        return None
    common: dict[str, Any] = {"half": half, "codes": codes, **scales}
    if element.kind == "int" and not element.fraction_bits and "table" not in scales:
        low, high = element.integer_range
        fits = scheme.zero is None or scheme.zero.rule == "code"
        writes = not codes or (element.bits == 8 and element.signed and scheme.outer is None)
        if not fits or not writes:
            return None
        return Rounding(**common, low=low, high=high, has_zero=scheme.zero is not None)
    if codes or not _has_both_signs(element) or not _has_constants(element):
        return None
    return Rounding(**common, floats=Floats(element.mantissa_bits, element.emin, element.max))


def _has_constants(element: Format) -> bool:
    """Whether float32 has the numbers by whose sum the loop rounds: 2**(23 - mantissa bits) times the format's largest."""
    return frexp(element.max)[1] - 1 + 23 - element.mantissa_bits <= 127


def _is_plain(scheme: Scheme) -> bool:
    """Whether elements are computed and rounded as default schemes do, one scale for elements of the last axis, or for all."""
    ways = (scheme.apply, scheme.arithmetic, scheme.codes_from, scheme.rounding, scheme.overflow)
    return (
        ways == ("reciprocal", "float32", "stored", "nearest_even", "saturate")
        and scheme.dequantize == "float32"
        and scheme.negative_zero
        and scheme.smallest_exponent is None
    )


def _scales(scheme: Scheme, half: bool) -> dict[str, Any] | None:
    """How block scales are found; None where the loop does not find them so."""
    from fast.cpu.loops.rounding import OUTER, RATIO, TABLE, Floats

    scale, outer = scheme.scale, scheme.outer
    if not isinstance(scale.block, int) and scale.block != "tensor":
        return None
    if quantizes_by_table(scheme):
        return {"scale": TABLE, "target": 1.0} if outer is None and scale.block != "tensor" else None
    statistic = "absmax" if scheme.zero is None else "minmax_with_zero"
    is_short = half and scale.compute == "input"
    floor = _floor(replace(scale, compute="float32") if _may_be_short(scheme) else scale)
    if floor is None or (scale.statistic, scale.rule) != (statistic, "ratio"):
        return None
    result = {"target": scale.target, "floor": floor}
    if outer is None:
        is_tensor = scale.block == "tensor"
        good = scale.storage == "float32" and not (is_tensor and scheme.zero is not None)
        return {"scale": RATIO, "is_tensor": is_tensor, "short_scale": is_short, **result} if good else None
    storage, outer_floor = FORMATS.get(scale.storage), _floor(outer)
    good = (outer.block, outer.statistic, outer.rule) == ("tensor", "absmax_elements", "ratio")
    good = good and scheme.outer_order == "decode" and outer.storage == "float32" and scheme.zero is None
    if not good or scale.block == "tensor" or outer_floor is None or not _has_both_signs(storage):
        return None
    if storage is None or storage.specials == "ieee" or not _has_constants(storage):
        return None
    stored = Floats(storage.mantissa_bits, storage.emin, storage.max)
    outers = {"outer_target": outer.target, "outer_floor": outer_floor}
    return {"scale": OUTER, "stored": stored, **outers, **result}


def _may_be_short(scheme: Scheme) -> bool:
    """Whether scales are rounded to the input's dtype, and nothing else: of bfloat16, that has the target itself."""
    scale, target = scheme.scale, scheme.scale.target
    exact = float(torch.tensor(target, dtype=torch.bfloat16, device="cpu")) == target
    return scale.compute == "input" and scheme.zero is None and scheme.outer is None and exact


def _floor(scale: Scale) -> float | None:
    """The floor of a decoding scale that is a ratio in float32, 0 for none; None where it is found in another way."""
    if (scale.compute, scale.stored, scale.center, scale.by_reciprocal) != (
        "float32",
        "decode",
        "none",
        False,
    ):
        return None
    if scale.floor is None:
        return 0.0
    kind, value = scale.floor
    return float(value) if kind == "stored" and not isinstance(value, str) else None


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


@lru_cache(maxsize=4)
def _nothing(dtype: Any, dimensions: int = 2) -> Any:
    """What stands for an array that is not read or written."""
    return np.zeros((1,) * dimensions, dtype)


__all__ = ["fake_quantize", "quantized", "values"]
