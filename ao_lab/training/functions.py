"""The functions of `fast` that training steps call, in eager and in compiled backward passes.

A tracer follows the backward of an `autograd.Function` with gradients whose layout it does not know, and `fast` asks for that
before anything else. So traced calls go to the operators at once; their operands are dense, as `TrainingLinear` made them.
"""

from __future__ import annotations

from typing import Any

import torch

import fast
from fast.formats.ops import DECODE, ENCODE
from fast.kernels.launch.cache import settings
from fast.quantize.ops import CHOOSE_SCALES, DEQUANTIZE, QUANTIZE, operands_of
from reference import Quantized, Scales, Scheme


def quantize(x: torch.Tensor, scheme: Scheme, *, scales: Any = None, random_bits: Any = None) -> Quantized:
    """`fast.quantize` along the last axis."""
    if not torch.compiler.is_compiling():
        return fast.quantize(x, scheme, scales=scales, random_bits=random_bits)
    q: Quantized = QUANTIZE.operator(scheme, (-1, False, False), operands_of(x, scales, random_bits))
    return q


def quantize_both(
    x: torch.Tensor, scheme: Scheme, *, random_bits: tuple[Any, Any] | None = None
) -> tuple[Quantized, Quantized]:
    """`fast.quantize_both`: along rows, and of the transposed matrix along its rows."""
    if not torch.compiler.is_compiling():
        return fast.quantize_both(x, scheme, random_bits=random_bits)
    rows, columns = (None, None) if random_bits is None else random_bits
    return quantize(x, scheme, random_bits=rows), quantize(x.t().contiguous(), scheme, random_bits=columns)


def dequantize(q: Quantized, dtype: torch.dtype) -> torch.Tensor:
    """`fast.dequantize`."""
    if not torch.compiler.is_compiling():
        return fast.dequantize(q, dtype)
    y: torch.Tensor = DEQUANTIZE.operator(
        q.scheme, (dtype, *settings(q)), (q.codes, q.scale, q.outer, q.zero)
    )
    return y


def choose_scales(x: torch.Tensor, scheme: Scheme) -> Scales:
    """`fast.choose_scales` along the last axis."""
    if not torch.compiler.is_compiling():
        return fast.choose_scales(x, scheme)
    scales: Scales = CHOOSE_SCALES.operator(scheme, (-1,), (x,))
    return scales


def rounded(x: torch.Tensor, fmt: str) -> torch.Tensor:
    """float32 values of x's codes in a format: `fast.decode` of `fast.encode`."""
    if not torch.compiler.is_compiling():
        return fast.decode(fast.encode(x, fmt), fmt)
    codes = ENCODE.operator(fmt, ("nearest_even", "saturate"), (x, None))
    values: torch.Tensor = DECODE.operator(fmt, (), (codes,))
    return values


__all__ = ["choose_scales", "dequantize", "quantize", "quantize_both", "rounded"]
