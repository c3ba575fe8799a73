"""Kernel "scaled_mm": `torch._scaled_mm` of float8 codes, under one scale for each row or for all, and under scales of blocks.

Rows that `fast.matmul.linear.linear_of_codes` multiplies faster are left to it.
"""

from __future__ import annotations

from typing import Any

import torch

from ao_lab.gemm.operand import QuantizedWeight
from ao_lab.gemm.products.codes import RESULTS, activation, multiplies_codes, quantized_input, row
from ao_lab.gemm.products.dense import dequantized
from ao_lab.gemm.products.device import capability, cpu_scales_rows, is_host, is_unbacked
from ao_lab.gemm.products.fused import STORED
from ao_lab.gemm.products.scaled_blocks import BLOCK, CAPABILITY, blocks_product, blocks_reason, whole_steps
from fast.matmul.linear import linear_of_codes
from fast.matmul.weights import one_scale
from reference import Scheme

#: Formats that it multiplies, and torch's dtypes of them.
FLOAT8 = {"float8_e4m3fn": torch.float8_e4m3fn, "float8_e5m2": torch.float8_e5m2}
#: cuBLAS's float8 product takes lengths that are multiples of this.
STEP = 16


def scaled_mm(x: torch.Tensor, w: QuantizedWeight, bias: torch.Tensor | None) -> torch.Tensor:
    """x (M, K) times w (K, N) plus bias (N), in x's dtype."""
    rows, columns = x.shape[0], w.shape[1]
    # torch._scaled_mm takes no empty scales; sizes that a tracer leaves open are not asked.
    if (isinstance(rows, int) and rows == 0) or (isinstance(columns, int) and columns == 0):
        return dequantized(x, w, bias)
    if activation(w).scale.block == BLOCK:
        return _scaled_blocks(x, w, bias)
    inputs = quantized_input(x, w, activation(w))
    if multiplies_codes(x, w):
        return linear_of_codes(inputs, w.quantized, bias, dtype=x.dtype)
    a, b = inputs.codes.view(FLOAT8[inputs.scheme.element]), w.codes.view(FLOAT8[w.scheme.element])
    if a.device != b.device:  # On a CPU torch does not look, and returns memory that nothing was written to.
        raise ValueError(f"inputs are on {a.device}, the weight is on {b.device}; move either by .to(device)")
    scale_a, scale_b = inputs.scale, row(w.scale)
    if scale_a.dim() != scale_b.dim() or (is_host(a.device) and w.shape[1] and cpu_scales_rows()):
        # One scale in all becomes a column or row, which torch multiplies on a CPU by matrices, others element by element; of
        # 0-d, a column of one would have strides of 0.
        scale_a, scale_b = (s.reshape(1, 1) if s.dim() == 0 else s for s in (scale_a, scale_b))
        scale_a, scale_b = scale_a.expand(x.shape[0], 1), scale_b.expand(1, w.shape[1])
    scale_a, scale_b = scale_a.contiguous(), scale_b.contiguous()
    multiply = _rows_op if is_unbacked(rows) else _multiply
    y: torch.Tensor = multiply(a, b, scale_a, scale_b, bias, x.dtype)
    return y


def _multiply(
    a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor, bias: torch.Tensor | None,
    dtype: torch.dtype,
) -> torch.Tensor:  # fmt: skip
    """codes a (M, K), b (N, K) in torch's dtypes: a @ b.T plus bias (N) in dtype."""
    return torch._scaled_mm(a, b.t(), scale_a=scale_a, scale_b=scale_b, bias=bias, out_dtype=dtype)


def _multiply_rows(
    a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor, bias: torch.Tensor | None,
    dtype: torch.dtype,
) -> torch.Tensor:  # fmt: skip
    if a.shape[0] == 0:  # torch._scaled_mm takes no empty scales
        return a.new_empty((0, b.shape[0]), dtype=dtype)
    return _multiply(a, b, scale_a, scale_b, bias, dtype)


#: Of rows whose number is unbacked: torch's own operator asks, while it is traced, whether there is one row.
_rows_op = torch.library.custom_op("ao_lab::scaled_mm_rows", _multiply_rows, mutates_args=())


@_rows_op.register_fake
def _fake(
    a: torch.Tensor, b: torch.Tensor, scale_a: Any, scale_b: Any, bias: Any, dtype: torch.dtype
) -> torch.Tensor:
    return a.new_empty((a.shape[0], b.shape[0]), dtype=dtype)


def _scaled_blocks(x: torch.Tensor, w: QuantizedWeight, bias: torch.Tensor | None) -> torch.Tensor:
    padded = whole_steps(x)
    inputs = quantized_input(padded, w, activation(w))
    square = w.scheme.scale.block != BLOCK
    y = blocks_product(inputs.codes, w.codes, inputs.scale, w.scale, square, x.dtype, bias)
    return y if padded is x else y[: x.shape[0]]


def unsupported_reason(w: QuantizedWeight, dtype: torch.dtype) -> str | None:
    """Why it does not take a weight and its inputs' scheme beside inputs of a dtype; None where it does."""
    scheme = w.recipe.activation
    if scheme is None or scheme.element not in FLOAT8 or w.scheme.element not in FLOAT8:
        return "both operands must be float8_e4m3fn or float8_e5m2"
    if len(w.shape) != 2 or not w.meta.transposed:
        return STORED
    if dtype not in RESULTS:
        return f"it does not write {dtype}"
    if scheme.scale.block == BLOCK:
        return _blocks_reason(w, scheme, dtype)
    if not (one_scale(scheme) and one_scale(w.scheme)):
        return "each row must have one float32 scale for decoding"
    if w.is_cuda:
        return _gpu_reason(w, scheme, dtype)
    if -1 in (scheme.scale.block, w.scheme.scale.block) and not cpu_scales_rows():
        return f"torch {torch.__version__} takes one scale for each operand on a CPU, 2.13 one for each row"
    return None


def _blocks_reason(w: QuantizedWeight, scheme: Scheme, dtype: torch.dtype) -> str | None:
    if not w.is_cuda or capability(w.device.index or 0) != CAPABILITY:
        return "its products of blocks are for GPUs of compute capability 9.0"
    if dtype != torch.bfloat16:
        return f"of blocks it writes bfloat16, not {dtype}"
    return blocks_reason(scheme, w.scheme, (w.shape[1], w.shape[0]))


def _gpu_reason(w: QuantizedWeight, scheme: Scheme, dtype: torch.dtype) -> str | None:
    if (found := capability(w.device.index or 0)) < (8, 9):
        return f"compute capability {found[0]}.{found[1]} has no float8 product, 8.9 has"
    if any(length % STEP for length in w.shape):
        return f"its lengths must be multiples of {STEP} on a GPU"
    if scheme.element == w.scheme.element == "float8_e5m2":
        return "GPUs multiply no float8_e5m2 by float8_e5m2"
    rowwise = "tensor" not in (scheme.scale.block, w.scheme.scale.block)
    if dtype != torch.bfloat16 and (rowwise or dtype == torch.float32):
        return f"on a GPU it writes bfloat16, not {dtype}"
    return None


__all__ = ["FLOAT8", "scaled_mm", "unsupported_reason"]
