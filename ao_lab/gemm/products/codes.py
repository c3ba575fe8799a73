"""Products of quantized inputs: codes and scales of an input, and which inputs `linear_of_codes` multiplies by a weight's."""

from __future__ import annotations

from typing import Any

import torch

import fast
from ao_lab.gemm.operand import QuantizedWeight
from ao_lab.gemm.products.dense import loses_nan
from ao_lab.gemm.products.device import capability
from fast.device import OLDEST
from fast.matmul.weights import codes_beat_torch, takes_codes
from fast.quantize.given_rows import quantize_rows
from reference import Quantized, Scheme

#: What products of codes write.
RESULTS = (torch.float32, torch.bfloat16, torch.float16)
#: `linear_of_codes` takes lengths that are multiples of this.
STEP = 16


def quantized_input(x: torch.Tensor, w: QuantizedWeight, scheme: Scheme) -> Quantized:
    """The input (M, K) in its scheme: static scales where the weight brings them, else found anew. Either way the scale or the
    codes of a row that holds a NaN are NaN."""
    scales = w.input_scales
    if scales is not None and loses_nan(w):
        return quantize_rows(x, scheme, scales)
    return fast.quantize(x, scheme, axis=-1, scales=scales)


def activation(w: QuantizedWeight) -> Scheme:
    """The scheme of the input; ValueError where the recipe has none."""
    scheme = w.recipe.activation
    if scheme is None:
        raise ValueError(f"{w.recipe} has no scheme for its input")
    return scheme


def row(scale: torch.Tensor) -> torch.Tensor:
    """A weight's stored scales (N, 1) as a row; one over the whole tensor as it is."""
    return scale if scale.dim() == 0 else scale.t()


def multiplies_codes(x: torch.Tensor, w: QuantizedWeight) -> bool:
    """Whether kernels "int8" and "scaled_mm" are `linear_of_codes` for these inputs."""
    if w.scheme.element == "int8":
        return _are_integer_codes(x, w)
    return _is_one_row(x, w) or _are_few_rows(x, w)


def _is_one_row(x: torch.Tensor, w: QuantizedWeight) -> bool:
    """Whether x is one row that a kernel multiplies as codes. A number of rows that a tracer leaves open is not one."""
    if not (w.is_cuda and isinstance(x.shape[0], int) and x.shape[0] == 1):
        return False
    sizes: tuple[Any, ...] = tuple(w.codes.shape)
    rows, length = sizes
    if not (isinstance(rows, int) and isinstance(length, int)):
        # Of sizes that a tracer leaves open the kernel asks one thing; the program keeps the answer.
        rows = length = STEP if length % STEP == 0 else 1
    able = capability(w.device.index or 0) >= OLDEST
    return able and takes_codes(activation(w).key, w.scheme.key, (rows, length), x.dtype)


def _are_integer_codes(x: torch.Tensor, w: QuantizedWeight) -> bool:
    """Whether `linear_of_codes` multiplies these integers: one row as `_is_one_row` says, on Hopper's tensor cores any number
    of rows, those that a tracer leaves open too. No rows at all are none."""
    if _is_one_row(x, w):
        return True
    count: Any = x.shape[0]
    none_or_one = isinstance(count, int) and count < 2
    if not w.is_cuda or none_or_one or capability(w.device.index or 0) != OLDEST:
        return False
    whole: bool = w.codes.shape[1] % STEP == 0
    return whole and x.dtype in RESULTS


def _are_few_rows(x: torch.Tensor, w: QuantizedWeight) -> bool:
    """Whether x is rows that `linear_of_codes` multiplies faster than torch; sizes that a tracer leaves open are not."""
    sizes: tuple[Any, ...] = (x.shape[0], *w.codes.shape)
    if not w.is_cuda or not all(isinstance(size, int) for size in sizes) or sizes[0] < 2:
        return False
    if capability(w.device.index or 0) != OLDEST or sizes[2] % STEP:
        return False
    return codes_beat_torch(activation(w).key, w.scheme.key, sizes[1:], sizes[0])


__all__ = ["RESULTS", "activation", "multiplies_codes", "quantized_input", "row"]
