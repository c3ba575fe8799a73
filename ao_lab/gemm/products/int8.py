"""Kernel "int8": exact integer sums of codes; scales, zero points and the bias in float32, and one rounding."""

from __future__ import annotations

import torch

from ao_lab.gemm.operand import QuantizedWeight
from ao_lab.gemm.products.codes import activation, multiplies_codes, quantized_input, row
from ao_lab.gemm.products.fused import STORED
from fast.cpu.int8 import integer_sums
from fast.matmul.linear import linear_of_codes
from fast.matmul.weights import LONGEST_INT8, one_scale

#: Rows that cuBLAS's integer product takes at least.
FEWEST_ROWS = 17
#: What lengths of cuBLAS's integer product are multiples of.
STEP = 8


def int8(x: torch.Tensor, w: QuantizedWeight, bias: torch.Tensor | None) -> torch.Tensor:
    """x (M, K) times w (K, N) plus bias (N), in x's dtype."""
    inputs = quantized_input(x, w, activation(w))
    if multiplies_codes(x, w) and (bias is None or bias.shape == w.shape[1:]):
        return linear_of_codes(inputs, w.quantized, bias, dtype=x.dtype)
    weight = w.codes.view(torch.int8)
    sums = _integer_sums(inputs.codes.view(torch.int8), weight.t())
    if inputs.zero is not None:
        sums = sums - inputs.zero.to(torch.int32) * _sums_of_rows(weight)
    y = sums.to(torch.float32) * inputs.scale * row(w.scale)
    total: torch.Tensor = y if bias is None else y + bias.to(torch.float32)
    return total.to(x.dtype)


def _sums_of_rows(weight: torch.Tensor) -> torch.Tensor:
    """Those of the weight's codes (N, K), int32; on a CPU as a product with ones, which is quicker."""
    if weight.device.type != "cpu":
        return weight.sum(1, dtype=torch.int32)
    return _integer_sums(weight.new_ones((1, weight.shape[1])), weight.t())


def _integer_sums(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Exact sums in int32; with rows of zeros where the GPU wants more of them."""
    count = a.shape[0]
    if a.device.type == "cpu":
        if a.shape[1] != b.shape[0]:  # whose parts may fit each other
            raise ValueError(
                f"inputs of shape {tuple(a.shape)} by a weight (in, out) of {tuple(b.shape)}: inputs have "
                f"{b.shape[0]} columns"
            )
        return integer_sums(a, b)
    if a.is_cuda and count < FEWEST_ROWS:
        a = torch.nn.functional.pad(a, (0, 0, 0, FEWEST_ROWS - count))
    return torch._int_mm(a, b)[:count]


def unsupported_reason(w: QuantizedWeight, dtype: torch.dtype) -> str | None:
    """Why it does not take a weight and its inputs' scheme; None where it does."""
    scheme = w.recipe.activation
    if scheme is None or scheme.element != "int8" or w.scheme.element != "int8":
        return "both operands must be int8"
    if not (one_scale(scheme) and one_scale(w.scheme)) or w.zero is not None:
        return "each row must have one float32 scale, and the weight no zero point"
    if len(w.shape) != 2 or not w.meta.transposed:
        return STORED
    if w.shape[0] > LONGEST_INT8:
        return f"sums longer than {LONGEST_INT8} may overflow int32"
    if w.is_cuda and any(length % STEP for length in w.shape):
        return f"its lengths must be multiples of {STEP} on a GPU"
    return None


__all__ = ["int8", "unsupported_reason"]
