"""Kernel "reference": `reference.matmul` of both operands, on the host."""

from __future__ import annotations

from typing import Any

import torch

import fast
from ao_lab.gemm.operand import QuantizedWeight
from ao_lab.gemm.products.dense import loses_nan, nan_rows
from reference.matmul.linear import transposed
from reference.quantize.quantize import unpacked, with_plain_scales


def reference(x: torch.Tensor, w: QuantizedWeight, bias: torch.Tensor | None) -> torch.Tensor:
    """x times w plus bias in the recipe's accumulation, in x's dtype."""
    if torch.compiler.is_compiling() or type(x) is not torch.Tensor:
        raise ValueError("kernel 'reference' runs on the host and cannot be traced; use kernel='dequantize'")
    scheme = w.recipe.activation
    left: Any = x if scheme is None else fast.quantize(x, scheme, axis=-1, scales=w.input_scales)
    options: dict[str, Any] = {"accumulation": w.recipe.accumulation, "out_dtype": x.dtype, "bias": bias}
    y: torch.Tensor = fast.matmul(left, as_right_operand(w), **options)
    return torch.where(nan_rows(x), float("nan"), y) if loses_nan(w) else y


def as_right_operand(w: QuantizedWeight) -> Any:
    """The weight (K, N) as `reference.matmul` takes it: a `Quantized` of that shape, or dense float32 where there is none."""
    return transposed(w.quantized) if w.meta.transposed else unpacked(with_plain_scales(w.quantized))


__all__ = ["as_right_operand", "reference"]
